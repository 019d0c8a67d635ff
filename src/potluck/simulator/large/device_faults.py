"""What happens to the devices of a simulated fleet: scripted, or drawn from a seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from potluck.simulator.fleets import Device, machines
from potluck.types.ids import WorkerId

FaultKind = Literal["crash", "silence", "slow", "return"]
mean_absence_s = 600.0
slowest_factor = 10.0


@dataclass(frozen=True, kw_only=True)
class DeviceFault:
    """What happens to one device. Its disk always stays.

    - `crash`: its process ends, and its streams with it
    - `silence`: it stops without a word, as for a lost link or a lid that is shut; missed heartbeats show it
    - `slow`: everything it computes takes `factor` times as long from then on; inf for one that hangs
    - `return`: it is switched on again
    """

    at_s: float
    device: WorkerId
    kind: FaultKind
    factor: float = 1.0


def draw_faults(devices: Sequence[Device], *, seed: int, per_hour: float) -> Iterator[DeviceFault]:
    """Endless, in the order of time: each device dies, falls silent or slows down so many times an hour of being well,
    and as often as its class says besides.

    It is well again after ten minutes on average (exponentially distributed, as the time between faults).
    """
    chance = random.Random(f"{seed}/faults")
    own = {device.name: device.faults_per_hour for device in devices}
    drawn = [(machine.id, (per_hour + own[machine.device]) / 3600.0) for machine in machines(devices, seed=seed)]
    ids, rates = [id for id, _ in drawn], [rate for _, rate in drawn]
    due = [(chance.expovariate(rate), number, False) for number, rate in enumerate(rates) if rate]
    heapq.heapify(due)
    kinds: tuple[FaultKind, ...] = ("crash", "silence", "slow")
    while due:
        at_s, number, is_ill = heapq.heappop(due)
        if is_ill:
            yield DeviceFault(at_s=at_s, device=ids[number], kind="return")
            wait_s = chance.expovariate(rates[number])
        else:
            factor = slowest_factor ** chance.random()
            yield DeviceFault(at_s=at_s, device=ids[number], kind=chance.choice(kinds), factor=factor)
            wait_s = chance.expovariate(1 / mean_absence_s)
        heapq.heappush(due, (at_s + wait_s, number, not is_ill))
