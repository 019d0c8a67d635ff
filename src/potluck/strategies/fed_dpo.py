"""Federated DPO: adapters learn from pairs of answers, of which one was preferred, and are joined as in `fed_lora`.

The loss is that of direct preference optimisation (models/preference.py), with the frozen base as its reference. Where
a rule merges adapters into the base, the reference stays what it was: what was merged is part of the policy.

The losses that a run tells are of pairs: log 2 where the policy is the reference.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, Field, model_validator

from potluck.strategies.fed_lora import FedLoRA, FedLoRAConfig, FedLoRAState
from potluck.strategies.run import RunFacts
from potluck.types.errors import RecipeError


class FedDPOConfig(FedLoRAConfig):
    beta: float = Field(default=0.1, gt=0, description="how far answers may go from those of the base: less with more")

    @model_validator(mode="after")
    def _of_pairs(self) -> FedDPOConfig:
        if self.privacy is not None:
            raise ValueError("`privacy` is of single records and fed_dpo learns from pairs; remove it, or use fed_lora")
        return self


class FedDPO(FedLoRA):
    Config: ClassVar[type[BaseModel]] = FedDPOConfig
    takes_pairs = True

    def __init__(self, config: FedDPOConfig) -> None:
        super().__init__(config)
        self.beta = config.beta

    def init(self, run: RunFacts) -> FedLoRAState:
        if run.rows_per_record != 2:
            raise RecipeError(
                'strategy fed_dpo learns from pairs of answers, which the data are not; set data.format = "preference"'
            )
        return super().init(run)
