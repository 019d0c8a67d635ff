"""The `[aggregation]` section of a recipe: which rule, and its parameters."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Rule = Literal[
    "mean",
    "trimmed_mean",
    "median",
    "krum",
    "multi_krum",
    "geometric_median",
    "centered_clipping",
    "norm_clipping",
]


class AggregationConfig(BaseModel):
    """How the updates of a round become one. All rules but `mean` bear some updates that are wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: Rule = Field(
        default="mean",
        description="`trimmed_mean`, `median` and `krum` count every update alike, the others by its tokens",
    )
    trim_fraction: float = Field(
        default=0.1, gt=0, lt=0.5, description="`trimmed_mean`: share of values left out at either end, rounded up"
    )
    max_faulty: int = Field(
        default=1, ge=0, description="`krum`, `multi_krum`: f, updates that may be wrong; 2 f + 3 must come"
    )
    num_kept: int = Field(
        default=0, ge=0, description="`multi_krum`: updates kept, at most n - f - 2 of n; 0 for that many"
    )
    iterations: int = Field(
        default=0, ge=0, le=1000,
        description="`geometric_median`, `centered_clipping`: steps, none of which reads the updates; 0 for 8 and 3",
    )  # fmt: skip
    smoothing: float = Field(
        default=1e-6, gt=0, allow_inf_nan=False, description="`geometric_median`: distances below this count as this"
    )
    clip_radius: float = Field(
        default=0.0,
        ge=0,
        description="`centered_clipping`: distance from the centre that is kept; 0 for the median one",
    )

    def num_needed(self, num_updates: int) -> int:
        """How many of so many updates the rule must have: fewer are refused, or come out as they are."""
        match self.rule:
            case "mean":
                return 1
            case "krum" | "multi_krum":
                return 2 * self.max_faulty + 3
            case "trimmed_mean":
                return 2 * self.num_trimmed(num_updates) + 1
            case "centered_clipping" if self.clip_radius:
                return 1
            case _:
                return 3

    @property
    def refuses_fewer(self) -> bool:
        """Whether the rule fails where fewer come than it must have."""
        return self.rule in ("krum", "multi_krum", "trimmed_mean")

    def fails_with(self, num_updates: int) -> bool:
        """Whether these are fewer than the rule must have."""
        return self.refuses_fewer and num_updates < self.num_needed(num_updates)

    def num_trimmed(self, num_updates: int) -> int:
        """`trimmed_mean`: values left out at either end."""
        return math.ceil(self.trim_fraction * num_updates - 1e-9)  # 0.1 * 30 is a little above 3

    @property
    def starts_from_previous(self) -> bool:
        """Whether the rule makes use of the aggregate before."""
        return self.rule == "centered_clipping"
