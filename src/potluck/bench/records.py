"""What long benches have found so far, a line for each run in a file, so that one that was interrupted goes on.

A line is the run's settings and its result. Lines that are none, as the last one after a power cut, do not count.
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
from potluck.types.errors import ResourceError

Settings = Mapping[str, Any]
"""Of one run, as JSON values: what it says must be all that its result depends on."""


class Job(Protocol):
    """One run to be done."""

    @property
    def settings(self) -> Settings: ...


J = TypeVar("J", bound=Job)


class Records:
    """Results by settings. Without a file they are kept for this process alone."""

    def __init__(self, path: Path | None, *, told: Callable[[str], None] = lambda _: None) -> None:
        """ResourceError where the file cannot be read and written. `told` hears of a result that it does not take."""
        self._path, self._told = path, told
        self._found: dict[str, Trained] = {}
        self._is_whole = True  # whether the file's last line has its end
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()  # to find that out after the first run would cost it
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ResourceError(f"{path} cannot keep runs ({error.strerror}); give another file to --record") from error
        self._is_whole = text.endswith("\n") or not text
        for line in text.splitlines():
            self._read(line)

    def _read(self, line: str) -> None:
        try:
            value: dict[str, Any] = json.loads(line)
            self._found[_key(value["settings"])] = _trained(value["result"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return

    def get(self, settings: Settings) -> Trained | None:
        """Without its parameters, which are not kept."""
        return self._found.get(_key(settings))

    def add(self, settings: Settings, result: Trained) -> None:
        self._found[_key(settings)] = result
        if self._path is None:
            return
        kept = {name: value for name, value in asdict(result).items() if name != "params"}
        line = json.dumps({"settings": settings, "result": kept}) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line if self._is_whole else f"\n{line}")
        except OSError as error:  # the other runs go on: it is there when they end
            self._is_whole = False
            self._told(f"{self._path} does not take a run that is done ({error.strerror}); free some space")
        else:
            self._is_whole = True

    def completed(
        self, pool: Executor, run: Callable[[J], Trained], jobs: Sequence[J], *, told: Callable[[J, Trained], None],
        before: Callable[[], None] = lambda: None,
    ) -> dict[J, Trained]:  # fmt: skip
        """The results of all jobs, in their order: what is not kept is done in the pool, and `told` hears of it.

        `before` makes what jobs need, if any is to be done.
        """
        done = {job: trained for job in jobs if (trained := self.get(job.settings)) is not None}
        missing = [job for job in jobs if job not in done]
        if missing:
            before()
        running = {pool.submit(run, job): job for job in missing}
        for future in as_completed(running):
            job, trained = running[future], future.result()
            told(job, trained)
            self.add(job.settings, trained)
            done[job] = trained
        return {job: done[job] for job in jobs}


def _trained(value: Any) -> Trained:
    """A result that was read. ValueError, KeyError, TypeError or AttributeError where it is none."""
    result: dict[str, Any] = dict(value)
    curve = tuple(Point(**_numbers(point)) for point in result.pop("curve"))
    return Trained(params=torch.empty(0), curve=curve, **_numbers(result))


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, no number")
    return dict(values)


def _key(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True)
