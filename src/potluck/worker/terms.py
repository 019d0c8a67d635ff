"""The owner's terms: when a worker may work. Hours of the day, a machine that is idle or plugged in, and no pause.

    STATE/paused    there while the owner has paused the worker (`potluck pause`, `potluck resume`)

What ends the terms comes with how long the lease at hand is worth keeping: a machine that someone touched may be idle
again in a moment, the hours of the day will not be back that soon.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

from potluck.types.errors import PotluckError

Condition = Literal["idle", "plugged-in"]
conditions: tuple[Condition, ...] = get_args(Condition)

patience_s = 20.0
"""How long a lease is kept by a worker that does not work on it: less than a coordinator takes for being stuck."""
quiet_s, quiet_share = 60.0, 0.15
"""A machine becomes idle once others used less than that share of its processors for so long."""
busy_s, most_busy_share = 10.0, 0.25
"""It is idle no more once others used more than that for so long."""
touched_s = 120.0
"""Nor is it so soon after someone typed into a terminal of it."""


@dataclass(frozen=True)
class Stop:
    """Why the worker may not work now, and for how long its lease is kept all the same."""

    reason: str
    keep_s: float


class Surroundings(Protocol):
    """What the system tells of the machine."""

    def on_battery(self) -> bool:
        """False also where it does not tell."""
        ...

    def busy_share(self) -> float:
        """Of all processors' time since the last call, what others than this process used."""
        ...

    def untouched_s(self) -> float:
        """Since somebody typed into a terminal; infinite where it does not tell."""
        ...


class Terms:
    """Asked again and again; what it heard of the machine is remembered."""

    def __init__(
        self, folder: Path, surroundings: Surroundings, *, hours: tuple[int, int] | None = None,
        only_when: Sequence[Condition] = (),
    ) -> None:  # fmt: skip
        self._folder, self._surroundings = folder, surroundings
        self._hours, self._only_when = hours, only_when
        self._idleness = Idleness()

    def stop(self, *, now: float, wall: float) -> Stop | None:
        """None while the worker may work. `now`: monotonic seconds; `wall`: seconds since 1970."""
        busy = ""
        if "idle" in self._only_when:  # also while something else stops it
            busy = self._idleness.observe(now, self._surroundings.busy_share(), self._surroundings.untouched_s())
        if is_paused(self._folder):
            return Stop("it is paused until `potluck resume`", patience_s)
        if self._hours is not None and (wait_s := seconds_until_open(self._hours, wall)) > 0:
            start, stop = self._hours
            return Stop(f"outside the hours {start}-{stop}; waiting {wait_s / 3600:.1f} h", 0.0)
        if "plugged-in" in self._only_when and self._surroundings.on_battery():
            return Stop("this machine runs on its battery", patience_s)
        return Stop(busy, patience_s) if busy else None


class Idleness:
    """Whether a machine has nothing else to do. It takes longer to become idle than to become busy."""

    def __init__(self) -> None:
        self._shares: deque[tuple[float, float]] = deque()  # when, and what others used since the one before
        self._is_idle = False
        self._since = -math.inf  # when the machine was first looked at, or again after it slept

    def observe(self, now: float, busy_share: float, untouched_s: float) -> str:
        """Why it is not idle, "" if it is. `busy_share` is since the last call."""
        if not self._shares or now - self._shares[-1][0] > busy_s:  # nothing is known of the time before
            self._since, self._is_idle = now, False
            self._shares.clear()
        self._shares.append((now, busy_share))
        while self._shares[0][0] <= now - quiet_s:
            self._shares.popleft()
        if untouched_s < touched_s:
            self._is_idle = False
            return f"someone used a terminal of this machine {untouched_s:.0f} s ago"
        lately = self._mean(now - busy_s)
        most = max(lately, self._mean(now - quiet_s))
        if self._is_idle:
            self._is_idle = lately <= most_busy_share
        else:
            self._is_idle = now - self._since >= quiet_s and most < quiet_share
        if self._is_idle:
            return ""
        if now - self._since < quiet_s:
            return "it is not known yet whether this machine is idle"
        return f"others use {most:.0%} of this machine's processors"

    def _mean(self, after: float) -> float:
        recent = [share for at, share in self._shares if at > after]
        return sum(recent) / len(recent)


# Pausing: by a file, which needs no terminal, no process id, and holds over a restart


def is_paused(folder: Path) -> bool:
    return (folder / _pause_mark).exists()


def pause(folder: Path) -> None:
    """The worker of that state folder stops, or does not begin. PotluckError where no worker ever used it."""
    _require_worker(folder)
    (folder / _pause_mark).touch()


def resume(folder: Path) -> None:
    _require_worker(folder)
    (folder / _pause_mark).unlink(missing_ok=True)


_pause_mark = "paused"


def _require_worker(folder: Path) -> None:
    if not (folder / "identity").is_dir():
        raise PotluckError(f"no worker has joined with the state folder {folder}; give the one it has with --state")


# Hours


def seconds_until_open(hours: tuple[int, int], now: float) -> float:
    """How long until the owner's hours begin; 0 within them. `hours` is (from, to) of the local day."""
    return 0.0 if _is_open(hours, now) else _seconds_to_hour(hours[0], now)


def duty(hours: tuple[int, int] | None) -> float:
    """The share of the day that the owner's hours leave to the run."""
    return 1.0 if hours is None else ((hours[1] - hours[0]) % 24 or 24) / 24


def _is_open(hours: tuple[int, int], now: float) -> bool:
    start, stop = hours[0] % 24, hours[1] % 24
    hour = time.localtime(now).tm_hour
    return start == stop or (start <= hour < stop if start < stop else hour >= start or hour < stop)


def _seconds_to_hour(hour: int, now: float) -> float:
    local = time.localtime(now)
    passed_s = local.tm_hour * 3600 + local.tm_min * 60 + local.tm_sec
    return float((hour * 3600 - passed_s) % 86400 or 86400)
