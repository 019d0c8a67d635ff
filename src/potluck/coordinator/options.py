"""What the command line asks of a coordinator, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from potluck.coordinator.owners import OwnerResult
from potluck.coordinator.recipe import Recipe

default_port = 7443


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """How to host a run; all operational, nothing that changes what is trained."""

    recipe: Recipe
    run_dir: Path
    cache_dir: Path  # prepared data, shared between runs
    address: str = ""  # NAME:PORT that other machines dial; "" for this machine only, on loopback
    port: int = 0  # to listen on where it is not the one of `address`; it and the next


@dataclass(frozen=True, kw_only=True)
class Listening:
    """A run that can be joined, looked at and stopped, from the event loop."""

    join_line: str
    status: Callable[[], dict[str, Any]]
    stop: Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class WorkerResult:
    id: str
    tokens: int
    bytes_up: int
    bytes_down: int
    owner: OwnerResult = field(default_factory=OwnerResult)  # on its own held-out text


RESULT_FILE = "result.json"
"""In the run's folder: the `RunResult` of the process that ended last, until the run goes on."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended. `to_json()` is what `run`, `host` and `demo` print with --json."""

    run_id: str
    strategy: str
    model_dir: str
    rounds: int
    tokens: int
    seconds: float  # in rounds
    initial_val_loss: float | None
    final_val_loss: float | None
    workers: tuple[WorkerResult, ...]
    num_parameters: int
    run_dir: str
    stopped: str = ""  # why the run ended before its budget; "" if it did not

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "workers": [asdict(worker) for worker in self.workers]}
