"""What the command line asks of a worker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from potluck.worker.terms import Condition


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """The terms on which this machine is given to a run."""

    link: str  # a join line, `@FILE` or a file that holds one
    state_dir: Path  # identity, downloads and local state; one process at a time
    name: str = ""  # wished id
    data: tuple[Path, ...] = ()  # private text, or the root of this machine's copies of listed files
    device: str = "auto"
    num_threads: int = 0  # for compute on the CPU; 0 for all cores
    allow_strategies: tuple[Path, ...] = ()
    policy: Path | None = None  # a file of its owner: worker/policy.py
    max_memory_bytes: int = 0  # 0 for no limit
    share_dir: Path | None = None  # where workers of this machine share downloads; None for each its own
    base_share_dir: Path | None = None  # the same for the frozen model below adapters; None for `share_dir`
    hours: tuple[int, int] | None = None  # local hours of the day in which it works: from, to
    only_when: tuple[Condition, ...] = ()  # and only while all of these hold
    max_upload_bytes_per_s: float = 0.0  # 0 for no limit


class Leaving(Protocol):
    """A worker at work."""

    def leave(self) -> None: ...
