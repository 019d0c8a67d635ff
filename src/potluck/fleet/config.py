"""The `[fleet]` section of a recipe."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class FleetConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    min_workers: int = Field(default=1, ge=1, description="a round starts when this many workers are here")
    heartbeat_s: float = Field(
        default=2.0, gt=0, le=3600, description="seconds between signs of life; a worker is gone after 3 missed"
    )
    reconnect_s: float = Field(
        default=6.0, gt=0, description="seconds a worker may be away before its work is given up"
    )
    no_progress_s: float = Field(
        default=300.0, gt=0, description="seconds without a step or a byte before work is given up"
    )
    balance: Literal["none", "time"] = Field(
        default="none",
        description="`time`: faster workers get more steps or sequences in a round and slower ones fewer, so that all "
        "finish together, from 1 to 4 times the mean; nobody counts as more than 8 times as fast as the median; late "
        "steps are not waited for",
    )
    deadlines: bool = Field(
        default=True, description="give up on work that takes far longer than the worker's past predicts"
    )
    quarantine_after: int = Field(
        default=3, ge=1, description="refused results or failed tasks in a row after which a worker is quarantined"
    )
    quarantine_s: float = Field(
        default=600.0,
        gt=0,
        description="seconds of a worker's first quarantine; each next one is twice as long",
    )
    max_update_norm: float = Field(
        default=0.0, ge=0, description="largest L2 norm of an update; 0 for no limit below 1e18"
    )
    snapshot_every_steps: int = Field(
        default=0,
        ge=0,
        description="a worker keeps what it has done of a task at least every so many steps; 0 for whenever it costs "
        "at most 2 % of the time",
    )
    max_discarded_rounds: int = Field(
        default=5, ge=1, description="the run stops after this many discarded rounds in a row"
    )
