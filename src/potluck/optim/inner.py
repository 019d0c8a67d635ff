"""The inner optimizer's settings and schedule, shared by the recipe, the strategies and the workers."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class InnerConfig(BaseModel):
    """What every worker does at each inner step. Set on the coordinator only; workers receive it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    optimizer: Literal["adamw", "sgd", "muon", "adafactor"] = Field(
        default="adamw",
        description="adamw; plain sgd without momentum; muon for hidden matrices with adamw for the rest; adafactor, "
        "whose state takes next to no memory",
    )
    lr: float = Field(default=4e-4, gt=0, description="peak learning rate")
    warmup: float = Field(
        default=0.05, ge=0, lt=1, description="share of the run in which the rate rises linearly from 0"
    )
    schedule: Literal["cosine", "constant"] = Field(default="cosine", description="what the rate does after warm-up")
    min_lr_fraction: float = Field(default=0.1, ge=0, le=1, description="where the cosine ends, as a share of lr")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled decay of tensors with two or more dimensions")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="AdamW's averaging coefficients; the second is adafactor's too"
    )
    eps: float = Field(default=1e-8, ge=1e-30, le=1, description="AdamW's and adafactor's epsilon")
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="`muon`: its averaging coefficient")
    weights: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="how workers hold parameters and gradients; with bf16, for `adafactor`, in half the memory, steps "
        "are rounded at random and the coordinator alone has fp32",
    )
    checkpoint_activations: bool = Field(
        default=False, description="keep one vector of each layer and compute the rest again: less memory, 4/3 the work"
    )
    clip: float = Field(default=1.0, ge=0, description="largest gradient norm; 0 turns clipping off")
    batch_size: int = Field(default=8, ge=1, le=1 << 15, description="sequences in a micro-batch of one worker")
    accumulation: int = Field(default=1, ge=1, le=1 << 15, description="micro-batches in one inner step")

    @model_validator(mode="after")
    def _go_together(self) -> InnerConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`betas` are {self.betas} and must be at least 0 and below 1")
        if self.weights == "bf16" and self.optimizer != "adafactor":
            raise ValueError(
                f'`weights` "bf16" needs steps that are rounded at random, which {self.optimizer} does not '
                'take; use optimizer = "adafactor" or weights = "fp32"'
            )
        return self

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.accumulation


def learning_rate(config: InnerConfig, progress: float) -> float:
    """The rate at `progress` in [0, 1] of the run: linear warm-up, then cosine to lr * min_lr_fraction.

    A function of the run's committed progress and not of a worker's own steps, so that a joiner does not start over.
    """
    p = min(max(progress, 0.0), 1.0)
    if p < config.warmup:
        return config.lr * p / config.warmup
    if config.schedule == "constant":
        return config.lr
    span = 1.0 - config.warmup
    cosine = 0.5 * (1.0 + math.cos(math.pi * (p - config.warmup) / span))
    return config.lr * (config.min_lr_fraction + (1.0 - config.min_lr_fraction) * cosine)
