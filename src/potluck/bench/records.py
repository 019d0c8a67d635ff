"""What long benches have found so far, a line for each run in a file, so that one that was interrupted goes on.

A line is the run's settings and its result. Lines that cannot be read, as the last one after a power cut, do not count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from potluck.bench.convergence import Point, Trained

Settings = Mapping[str, Any]
"""Of one run, as JSON values: what it says must be all that its result depends on."""


class Job(Protocol):
    """One run to be done."""

    @property
    def settings(self) -> Settings: ...


J = TypeVar("J", bound=Job)


class Records:
    """Results by settings. Without a file they are kept for this process alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, Trained] = {}
        self._is_whole = True  # whether the file's last line has its end
        if path is not None and path.is_file():
            text = path.read_text(encoding="utf-8")
            self._is_whole = text.endswith("\n") or not text
            for line in text.splitlines():
                self._read(line)

    def _read(self, line: str) -> None:
        try:
            value: dict[str, Any] = json.loads(line)
            result = dict(value["result"])
            curve = tuple(Point(**point) for point in result.pop("curve"))
            found = Trained(params=torch.empty(0), curve=curve, **result)
        except (ValueError, KeyError, TypeError):
            return
        self._found[_key(value["settings"])] = found

    def get(self, settings: Settings) -> Trained | None:
        """Without its parameters, which are not kept."""
        return self._found.get(_key(settings))

    def add(self, settings: Settings, result: Trained) -> None:
        self._found[_key(settings)] = result
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in asdict(result).items() if name != "params"}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(("" if self._is_whole else "\n") + json.dumps({"settings": settings, "result": kept}) + "\n")
        self._is_whole = True

    def completed(
        self, pool: Executor, run: Callable[[J], Trained], jobs: Sequence[J], *, told: Callable[[J, Trained], None]
    ) -> dict[J, Trained]:
        """The results of all jobs, in their order: what is not kept is done in the pool, and `told` hears of it."""
        done = {job: trained for job in jobs if (trained := self.get(job.settings)) is not None}
        running = {pool.submit(run, job): job for job in jobs if job not in done}
        for future in as_completed(running):
            job, trained = running[future], future.result()
            told(job, trained)
            self.add(job.settings, trained)
            done[job] = trained
        return {job: done[job] for job in jobs}


def _key(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True)
