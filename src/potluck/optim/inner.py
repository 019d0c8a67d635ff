"""The inner optimizer's settings and schedule, shared by the recipe, the strategies and the workers."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class InnerConfig(BaseModel):
    """What every worker does at each inner step. Set on the coordinator only; workers receive it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    optimizer: Literal["adamw", "sgd"] = Field(default="adamw", description="adamw, or plain sgd without momentum")
    lr: float = Field(default=4e-4, gt=0, description="peak learning rate")
    warmup: float = Field(
        default=0.05, ge=0, lt=1, description="share of the run in which the rate rises linearly from 0"
    )
    schedule: Literal["cosine", "constant"] = Field(default="cosine", description="what the rate does after warm-up")
    min_lr_fraction: float = Field(default=0.1, ge=0, le=1, description="where the cosine ends, as a share of lr")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled decay of tensors with two or more dimensions")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="AdamW's averaging coefficients")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon")
    clip: float = Field(default=1.0, ge=0, description="largest gradient norm; 0 turns clipping off")
    batch_size: int = Field(default=8, ge=1, description="sequences in a micro-batch of one worker")
    accumulation: int = Field(default=1, ge=1, description="micro-batches in one inner step")

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
