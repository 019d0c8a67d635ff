"""The machines of a simulated fleet: classes of devices with ranges, and single ones drawn from them by a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

from potluck.transport.memory import Link
from potluck.types.ids import WorkerId

Range = tuple[float, float]
"""Least and most. Drawn evenly on a logarithmic scale: half of the machines are below the geometric mean."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A class of machines. Rates in bytes a second, power in watts, `flops` what training reaches each second."""

    name: str
    count: int = 1
    flops: Range
    memory_bytes: Range = (8e9, 8e9)
    up_bytes_per_s: Range = (math.inf, math.inf)
    down_bytes_per_s: Range = (math.inf, math.inf)
    rtt_s: Range = (0.0, 0.0)
    duty: Range = (1.0, 1.0)  # share of its time in which it computes for the run
    idle_w: Range = (0.0, 0.0)
    busy_w: Range = (0.0, 0.0)
    faults_per_hour: float = 0.0  # of each machine, besides those that a simulation gives to all


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine of a class. Units as in `Device`."""

    id: WorkerId
    device: str  # the name of its class
    flops: float
    memory_bytes: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    rtt_s: float
    duty: float
    idle_w: float
    busy_w: float

    @property
    def link(self) -> Link:
        return Link(up_bytes_per_s=self.up_bytes_per_s, down_bytes_per_s=self.down_bytes_per_s, rtt_s=self.rtt_s)


_drawn = tuple(f.name for f in fields(Machine) if f.name not in ("id", "device"))


def machines(devices: Sequence[Device], *, seed: int) -> list[Machine]:
    """Every machine of a fleet. The same seed gives the same ones, and a class does not change with the others."""
    made: list[Machine] = []
    for device in devices:
        chance = random.Random(f"{seed}/{device.name}")
        width = len(str(device.count))
        for number in range(1, device.count + 1):
            values = {name: _between(getattr(device, name), chance) for name in _drawn}
            made.append(Machine(id=WorkerId(f"{device.name}-{number:0{width}d}"), device=device.name, **values))
    return made


def _between(range: Range, chance: random.Random) -> float:
    least, most = range
    share = chance.random()  # also where there is nothing to draw, so that one range does not change the next
    if least >= most:
        return least
    if least <= 0 or math.isinf(most):
        return least + share * (most - least) if math.isfinite(most) else most
    return least * (most / least) ** share
