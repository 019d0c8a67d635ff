"""What is fixed for a whole run: `RunSpec` (every worker gets it) and `RunFacts` (a strategy is built with it)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from potluck.optim.inner import InnerConfig
from potluck.types.params import Layout, Params


class RunSpec(BaseModel):
    """What a worker needs to know of a run; sent as JSON in Welcome and believed only after it has been checked."""

    model_config = ConfigDict(extra="ignore", frozen=True)  # a later minor version may add fields

    run_id: str
    name: str
    seed: int
    strategy: str
    strategy_digest: str = ""  # of the user's own file, "" for a shipped strategy
    model_config_json: dict[str, Any]  # a transformers configuration
    layout: list[Any]
    seq_len: int
    precision: Literal["fp32", "bf16-mixed"] = "fp32"
    inner: InnerConfig
    data_access: Literal["shared", "private", "listed"]
    data_options: dict[str, Any] = {}  # how private and listed files are read: data/config.py
    tokenizer_object: str = ""  # digest; private and listed text needs it
    heartbeat_s: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When a run is done: exactly one of the three is set."""

    tokens: int = 0
    rounds: int = 0
    hours: float = 0.0

    def progress(self, *, tokens: int, rounds: int, seconds: float) -> float:
        """How far the run is, in [0, 1]."""
        if self.tokens:
            return min(tokens / self.tokens, 1.0)
        if self.rounds:
            return min(rounds / self.rounds, 1.0)
        return min(seconds / (self.hours * 3600.0), 1.0)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a strategy may know of its run. Everything here is the same on every replay."""

    seed: int
    layout: Layout
    initial: Params
    zeros: Params  # a vector of zeros of the model's size
    seq_len: int
    inner: InnerConfig
    budget: Budget
    up_codec: str
    down_codec: str

    def rng(self, round: int, attempt: int) -> random.Random:
        """Chance for one attempt at one round."""
        return random.Random(f"{self.seed}/{round}/{attempt}")
