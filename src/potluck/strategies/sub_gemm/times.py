"""How long tiles take on each device: the cost model, corrected by every tile that comes back.

    r_i <- r_i (observed / predicted)^(0.3 s_i / max s)      r: seconds per byte down, FLOP and byte up; s_i: its share

The resource that a tile mostly waits for takes all of a correction, and the others the less the less they are in it:
so products of different shape tell a slow link from a slow processor. Corrections outlive a product and a step; they
start anew for a direction whose measured rate has changed, since that has it in it already.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from potluck.planner.cost import DeviceCost, OpCost, correction, device_cost, starting_cost
from potluck.planner.tiles.device import TileDevice, tile_device
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm.assembly import Box
from potluck.types.back_off import BackOff
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile, LinkRates

few_samples = 6
least_share, spread_factor = 0.25, 4.0
"""Slack is that share of a prediction, or so many of its usual errors: `planner/deadline.py`."""
_window = 16
least_change = 0.1
"""A rate that is measured to be another by less is the same one."""
_bound = 1e6
_unmeasured = DeviceCost(gemm=OpCost(s_per_flop=1e-10), attention=OpCost(), elementwise=OpCost(), optimizer=OpCost())
"""Of a fleet in which no product was ever measured: 10 GFLOP/s, until tiles have come back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Seconds of one tile on one device, one stage after the other."""

    down_s: float
    work_s: float
    up_s: float
    rtt_s: float

    @property
    def total_s(self) -> float:
        return self.rtt_s + self.down_s + self.work_s + self.up_s

    @property
    def longest_s(self) -> float:
        return max(self.down_s, self.work_s, self.up_s)


def stages(device: TileDevice, box: Box, *, down_bytes: float, up_bytes: float, stretch: float = 1.0) -> Stages:
    """Of a tile whose operands take `down_bytes` on the way down, all of them, and its result `up_bytes` up.

    `stretch` is what the devices together wait for the coordinator's link, as a factor.
    """
    return Stages(
        down_s=stretch * down_bytes / device.down_bytes_per_s,
        work_s=2.0 * box.volume * device.s_per_flop + device.s_per_tile,
        up_s=stretch * up_bytes / device.up_bytes_per_s,
        rtt_s=device.rtt_s,
    )


@dataclass
class _Record:
    down: float = 1.0  # factors on seconds
    work: float = 1.0
    up: float = 1.0
    ratios: tuple[float, ...] = ()  # observed / predicted of the last tiles


class TileTimes:
    """What is known of each worker's speed at tiles. Not safe to use from two threads at once."""

    def __init__(self, *, precision: str = "fp32", num_in_flight: int = 2) -> None:
        self._precision, self._num_in_flight = precision, num_in_flight
        self._profiles: dict[WorkerId, DeviceProfile] = {}
        self._plain: dict[WorkerId, TileDevice] = {}  # as measured
        self._records: dict[WorkerId, _Record] = {}
        self._known: dict[str, list[float]] = {f.name: [] for f in fields(LinkRates)}  # of all links, sorted
        self._stand_ins: dict[WorkerId, dict[str, float]] = {}  # of what is not known of a link
        self._silences: dict[WorkerId, tuple[float, float]] = {}  # until when, and how long the last one was
        self._lateness: dict[WorkerId, BackOff] = {}  # which an answer does not make up for
        self.news: list[tuple[WorkerId, str]] = []  # for people: who is left alone for being late again and again

    def device(self, worker: WorkerInfo) -> TileDevice:
        """The device as it is planned with: what it reported, else what the nearest one did, corrected."""
        record = self._records.get(worker.id)
        if self._profiles.get(worker.id) != worker.profile or self._should_take_usual(worker.id, record):
            self._meet(worker)
        return self._corrected(worker.id)

    def _corrected(self, worker: WorkerId) -> TileDevice:
        plain, record = self._plain[worker], self._records.get(worker)
        if record is None:
            return plain
        return replace(
            plain,
            down_bytes_per_s=plain.down_bytes_per_s / record.down,
            up_bytes_per_s=plain.up_bytes_per_s / record.up,
            s_per_flop=plain.s_per_flop * record.work,
            s_per_tile=plain.s_per_tile * record.work,
        )

    def _meet(self, worker: WorkerInfo) -> None:
        cost = device_cost(worker.profile.speeds, self._precision)
        if cost is None:
            known = [p for id, p in self._profiles.items() if id != worker.id]
            cost = starting_cost(worker.profile, known, self._precision) or _unmeasured
        self._note_link(self._profiles.get(worker.id), worker.profile)
        self._profiles[worker.id] = worker.profile
        profile = self._with_usual_link(worker)
        now = tile_device(worker.id, profile, cost, num_in_flight=self._num_in_flight)
        before, record = self._plain.get(worker.id), self._records.get(worker.id)
        if before and record:  # what a correction was learnt with stands until it is measured to be something else
            if _is_close(before.down_bytes_per_s, now.down_bytes_per_s):
                now = replace(now, down_bytes_per_s=before.down_bytes_per_s)
            else:
                record.down = 1.0
            if _is_close(before.up_bytes_per_s, now.up_bytes_per_s):
                now = replace(now, up_bytes_per_s=before.up_bytes_per_s)
            else:
                record.up = 1.0
            if _is_close(before.s_per_flop, now.s_per_flop):
                now = replace(now, s_per_flop=before.s_per_flop, s_per_tile=before.s_per_tile)
            else:
                record.work = 1.0
        self._plain[worker.id] = now

    def _note_link(self, before: DeviceProfile | None, now: DeviceProfile) -> None:
        for name, rates in self._known.items():
            if before is not None and (rate := getattr(before.link, name)):
                del rates[bisect_left(rates, rate)]
            if rate := getattr(now.link, name):
                insort(rates, rate)

    def _usual(self, link: LinkRates) -> dict[str, float]:
        """The fleet's median of what is not known of a link."""
        return {
            name: rates[len(rates) // 2] for name, rates in self._known.items() if rates and not getattr(link, name)
        }

    def _with_usual_link(self, worker: WorkerInfo) -> DeviceProfile:
        """Where nothing is known of its link, the fleet's median: it is to get work, and so be measured."""
        usual = self._stand_ins[worker.id] = self._usual(worker.profile.link)
        return replace(worker.profile, link=replace(worker.profile.link, **usual)) if usual else worker.profile

    def _should_take_usual(self, worker: WorkerId, record: _Record | None) -> bool:
        """Others were measured since it was met, and its own tiles have not shown enough yet."""
        if record is not None and len(record.ratios) >= few_samples:
            return False
        taken = self._stand_ins[worker]
        return any(
            not _is_close(taken.get(n, 0.0), rate) for n, rate in self._usual(self._profiles[worker].link).items()
        )

    def observe(
        self, worker: WorkerId, tile: Stages, *, predicted_s: float, observed_s: float, by: TileDevice | None = None
    ) -> None:  # fmt: skip
        """A tile of these stages came back after so long. What is no positive time changes nothing.

        `by` is the device as it was predicted with: hundreds of tiles may have corrected it since, and what they did
        is not to be done again.
        """
        if not (0 < observed_s < math.inf and 0 < predicted_s < math.inf and tile.longest_s > 0):
            return
        if by is not None and worker in self._plain:
            now = _with_rates_of(self._corrected(worker), by, tile)
            predicted_s, tile = predicted_s * now.longest_s / tile.longest_s, now
        record = self._records.setdefault(worker, _Record())
        factor = correction(observed_s=observed_s, predicted_s=predicted_s)
        record.down = _bounded(record.down * factor ** (tile.down_s / tile.longest_s))
        record.work = _bounded(record.work * factor ** (tile.work_s / tile.longest_s))
        record.up = _bounded(record.up * factor ** (tile.up_s / tile.longest_s))
        record.ratios = (*record.ratios, observed_s / predicted_s)[-_window:]

    def fell_silent(self, worker: WorkerId, waited_s: float, now: float) -> None:
        """A tile of it is late. Each time, without an answer in between, it is left alone for longer; after a few
        times with answers in between too."""
        length_s = min(max(waited_s, 2 * self._silences.get(worker, (0.0, 0.0))[1]), BackOff.longest_s)
        self._silences[worker] = (now + length_s, length_s)
        lateness = self._lateness.setdefault(worker, BackOff(num_forgiven=3))
        if length_s := lateness.fault(now, least_s=waited_s):
            times = lateness.num_faults
            self.news.append((worker, f"{worker} kept tiles back {times} times and gets none for {length_s:.3g} s"))

    def answered(self, worker: WorkerId, *, in_time: bool = True) -> None:
        self._silences.pop(worker, None)
        if in_time and (lateness := self._lateness.get(worker)) is not None:
            lateness.good()

    def silent_until(self, worker: WorkerId) -> float:
        lateness = self._lateness.get(worker)
        return max(self._silences.get(worker, (0.0, 0.0))[0], lateness.until if lateness is not None else 0.0)

    def is_silent(self, worker: WorkerId, now: float) -> bool:
        return now < self.silent_until(worker)

    def slack_share(self, worker: WorkerId) -> float:
        """Of a prediction: how much longer a tile may take before somebody else is given it too."""
        record = self._records.get(worker)
        if record is None or len(record.ratios) < few_samples:
            return 1.0
        centre = statistics.median(record.ratios)
        spread = statistics.median(abs(r - centre) for r in record.ratios)
        return min(1.0, max(least_share, centre - 1.0 + spread_factor * spread))

    def drift(self, planned: Mapping[WorkerId, TileDevice], here: Sequence[WorkerInfo]) -> float:
        """The largest change of a figure since it was planned with, as a factor - 1; inf where others are here."""
        if {w.id for w in here} != set(planned):
            return math.inf
        most = 1.0
        for worker in here:
            old, new = planned[worker.id], self.device(worker)
            pairs = (
                (old.down_bytes_per_s, new.down_bytes_per_s),
                (old.up_bytes_per_s, new.up_bytes_per_s),
                (old.s_per_flop, new.s_per_flop),
                (old.memory_bytes, new.memory_bytes),
            )
            most = max([most, *(max(x, y) / min(x, y) for x, y in pairs if x != y and min(x, y) > 0)])
        return most - 1.0


def _with_rates_of(now: TileDevice, then: TileDevice, tile: Stages) -> Stages:
    """What was predicted of a tile `then`, as it is predicted now."""
    return replace(
        tile,
        down_s=tile.down_s * _factor(then.down_bytes_per_s, now.down_bytes_per_s),
        work_s=tile.work_s * _factor(now.s_per_flop, then.s_per_flop),
        up_s=tile.up_s * _factor(then.up_bytes_per_s, now.up_bytes_per_s),
    )


def _factor(over: float, under: float) -> float:
    """1 where one of them is not known."""
    return over / under if 0 < over < math.inf and 0 < under < math.inf else 1.0


def _is_close(old: float, new: float) -> bool:
    return abs(new - old) <= least_change * max(old, new)


def _bounded(scale: float) -> float:
    return min(max(scale, 1 / _bound), _bound)
