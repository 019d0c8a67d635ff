"""How much work each worker gets in a round, so that all finish together.

    minimise max_i (f_i + n_i s_i)      over whole n_i with sum_i n_i = N and 1 <= n_i <= 4 N / W

f_i are worker i's seconds of a round that do not grow with its work (transfers), s_i its seconds for a unit of work, W
the number of workers. The common end is bisected, each n_i rounded down, and what is left given one by one to whoever
would end first with it, which is optimal for such finish times. DyLU (Liu et al. 2024, arXiv:2401.09135) sets
n_i = N s_min / s_i instead, which knows no links and makes rounds smaller the slower the slowest worker is.

Paces are what workers say: one that says it is far faster than the others would get the work of all. So nobody is taken
to be more than `most_ahead` times as fast as the median.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from potluck.planner.cost import device_cost
from potluck.planner.flops import Work, adamw_passes
from potluck.types.ids import WorkerId
from potluck.types.params import type_bytes
from potluck.types.profile import DeviceProfile, LinkRates

largest_share = 4
"""A worker gets at most so many times the mean: replicas that run on alone for longer drift apart."""
most_ahead = 8
"""No worker counts as more times as fast as the median one."""
least_gain = 0.05
"""A plan that makes the round shorter by less is not worth unequal work: every worker gets the same."""
num_recent = 3
"""Last observations whose median is a worker's pace: one that stands out says nothing, a lasting change soon counts."""
_num_bisections = 100
least_s, most_s = 1e-9, 1e9
"""No unit of work takes less or more: times come from workers, which may say anything."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """A worker's speed: seconds for a unit of work, and seconds of a round that do not grow with it."""

    unit_s: float
    fixed_s: float = 0.0

    @staticmethod
    def bounded(unit_s: float, fixed_s: float) -> Pace:
        """Of numbers that come from workers."""
        return Pace(unit_s=min(max(unit_s, least_s), most_s), fixed_s=min(max(fixed_s, 0.0), most_s))

    def of_units(self, num_units: int) -> Pace:
        """The same worker where so many units count as one."""
        return Pace(unit_s=self.unit_s * num_units, fixed_s=self.fixed_s)

    def finish_s(self, num_units: int) -> float:
        return self.fixed_s + num_units * self.unit_s


def fastest_s(unit_s: Collection[float]) -> float:
    """Seconds that the fastest of these workers takes for a unit of work, as far as it is believed; inf for none."""
    return max(min(unit_s), statistics.median(unit_s) / most_ahead) if unit_s else math.inf


def balanced(paces: Mapping[WorkerId, Pace | None], *, mean_units: int) -> dict[WorkerId, int]:
    """Units of work for each worker: `mean_units` on average, and exactly that for all where nothing else pays.

    Whose pace is None, not known yet, counts as the median of the others.
    """
    workers = sorted(paces)
    equal = dict.fromkeys(workers, mean_units)
    known = [pace for worker in workers if (pace := paces[worker]) is not None]
    if not known or mean_units < 2:
        return equal
    middle = Pace(
        unit_s=statistics.median(p.unit_s for p in known), fixed_s=statistics.median(p.fixed_s for p in known)
    )
    least = fastest_s([p.unit_s for p in known])
    filled = [replace(p, unit_s=max(p.unit_s, least)) for p in (paces[worker] or middle for worker in workers)]
    counts = _fastest(filled, mean_units)
    longest_s = max(pace.finish_s(count) for pace, count in zip(filled, counts, strict=True))
    if longest_s > (1 - least_gain) * max(pace.finish_s(mean_units) for pace in filled):
        return equal
    return dict(zip(workers, counts, strict=True))


def _fastest(paces: Sequence[Pace], mean_units: int) -> list[int]:
    """The n_i of the module's docstring."""
    total, most = mean_units * len(paces), largest_share * mean_units

    def by(end_s: float) -> list[int]:
        """What each has done by then, at least 1."""
        return [min(max(math.floor((end_s - p.fixed_s) / p.unit_s), 1), most) for p in paces]

    low, high = 0.0, max(pace.finish_s(most) for pace in paces)
    for _ in range(_num_bisections):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(by(middle)) <= total else (low, middle)
    counts = by(low)
    ends = [(p.finish_s(n + 1), i) for i, (p, n) in enumerate(zip(paces, counts, strict=True)) if n < most]
    heapq.heapify(ends)
    for _ in range(total - sum(counts)):
        _, first = heapq.heappop(ends)
        counts[first] += 1
        if counts[first] < most:
            heapq.heappush(ends, (paces[first].finish_s(counts[first] + 1), first))
    return counts


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of a worker: its profile, and what a unit of work took it the last few times."""

    profile: DeviceProfile
    unit_s: Sequence[float] = ()


def paces(
    workers: Mapping[WorkerId, Measured], work: Work, *, up_bytes: float, down_bytes: float
) -> dict[WorkerId, Pace]:
    """The pace of each worker that anything is known of. `work` is that of a unit, the bytes are those of a round.

    A newcomer's is what the cost model says of its profile, corrected by the median of what those who have worked
    took of what the model says of them.
    """
    found: dict[WorkerId, float] = {}
    modelled = {worker: seconds for worker, known in workers.items() if (seconds := _model_s(known.profile, work))}
    for worker, known in workers.items():
        if taken := [s for s in known.unit_s if least_s <= s <= most_s]:
            found[worker] = statistics.median(taken)
    ratios = [seconds / modelled[worker] for worker, seconds in found.items() if worker in modelled]
    correction = statistics.median(ratios) if ratios else 1.0
    if ratios or not found:  # a model that nothing ties to the clock says how newcomers compare, not with the others
        found |= {worker: seconds * correction for worker, seconds in modelled.items() if worker not in found}
    return {
        worker: Pace.bounded(seconds, transfers_s(workers[worker].profile.link, up_bytes, down_bytes))
        for worker, seconds in found.items()
    }


def transfers_s(link: LinkRates, up_bytes: float, down_bytes: float) -> float:
    """One version down and one update up, as far as the link is known."""
    ways = ((up_bytes, link.up_bytes_per_s), (down_bytes, link.down_bytes_per_s))
    return 2 * link.rtt_s + sum(num_bytes / rate for num_bytes, rate in ways if rate > 0)


def sequence_work(num_params: int, seq_len: int, sequences_per_step: int) -> Work:
    """About the work of one training sequence: 6 FLOPs a parameter and token, and its part of the optimizer's step."""
    return Work(
        gemm_flops=6.0 * num_params * seq_len,
        attention_flops=0.0,
        elementwise_bytes=0.0,
        optimizer_bytes=adamw_passes * type_bytes * num_params / sequences_per_step,
        num_gemms=0,
    )


def _model_s(profile: DeviceProfile, work: Work) -> float:
    """By the cost model; 0 where the device was not measured."""
    cost = device_cost(profile.speeds)
    return cost.step_s(work) if cost is not None else 0.0
