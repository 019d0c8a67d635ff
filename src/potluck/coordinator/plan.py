"""What a run is: everything that is the same each time it is started, with the sections of its recipe."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from potluck.aggregation.config import AggregationConfig
from potluck.codecs.policy import CodecRule
from potluck.coordinator.divergence import DivergenceConfig
from potluck.coordinator.transfer import TransferConfig
from potluck.fleet.config import FleetConfig
from potluck.planner.compression import CompressionConfig
from potluck.strategies.run import Budget, RunFacts, RunSpec
from potluck.strategies.strategy import Strategy
from potluck.types.ids import Digest
from potluck.types.params import Layout, Params
from potluck.types.vector import Vector


class CheckpointConfig(BaseModel):
    """The `[checkpoint]` section of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every_rounds: int = Field(
        default=10, ge=1, description="rounds between checkpoints; the last round is always saved"
    )
    keep: int = Field(default=2, ge=1, description="how many checkpoints are kept")
    durability: Literal["process", "power"] = Field(
        default="process",
        description="what a committed round survives: the death of the process, or a power cut (an fsync each round)",
    )


class ValidationConfig(BaseModel):
    """The `[validation]` section of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every_rounds: int = Field(
        default=5, ge=0, description="rounds between validations; 0 for only the first and the last"
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run as it was prepared from a recipe: everything that is the same each time the run is started."""

    spec: RunSpec
    strategy: Strategy
    layout: Layout
    initial: Callable[[], Vector | Tensor]  # makes the first parameters, fp32 [layout.numel]; blocks
    budget: Budget
    fleet: FleetConfig
    checkpoint: CheckpointConfig
    validation: ValidationConfig
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    up_codec: str = "fp32"
    down_codec: str = "fp32"
    up_rules: tuple[CodecRule, ...] = ()
    down_rules: tuple[CodecRule, ...] = ()
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    open_objects: Collection[Digest] = ()  # what any member may fetch: the tokenizer

    def facts(self, *, initial: Params, zeros: Params) -> RunFacts:
        """What the strategy is told. Both handles are of `layout.numel` elements."""
        return RunFacts(
            seed=self.spec.seed,
            layout=self.layout,
            model_config=self.spec.model_config_json,
            precision=self.spec.precision,
            rows_per_record=self.spec.rows_per_record,
            initial=initial,
            zeros=zeros,
            seq_len=self.spec.seq_len,
            inner=self.spec.inner,
            budget=self.budget,
            up_codec=self.up_codec,
            down_codec=self.down_codec,
            up_rules=self.up_rules,
            down_rules=self.down_rules,
            compression=self.compression,
            aggregation=self.aggregation,
            min_workers=self.fleet.min_workers,
            balances=self.fleet.balance != "none",
            adapter=self.spec.adapter,
        )
