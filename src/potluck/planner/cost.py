"""One cost model for every method: how long a piece of work takes on a device, bytes on a link, and the energy.

    compute:  t = a FLOPs + b bytes + c                       per device and class of operation, a, b, c >= 0
    after each executed piece:  a, b <- (a, b) (observed / predicted)^0.3
    link:     t = rtt + bytes codec_ratio sharing / rate + bytes / codec_speed
    energy:   sum of power x time over the phases compute, send, receive, wait

The sum is the pessimistic reading of a roofline (Williams et al. 2009), whose max it contains as bounds:
max <= sum <= 2 max. All functions are pure; what was measured comes in as values (types/profile.py), and what really
happened goes back in through `Calibration`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations

import numpy as np

from potluck.planner.flops import Work
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile, Speeds

correction_power = 0.3
largest_correction = 1e3
"""Of one observation: times come from workers, which may say anything."""
history_length = 16


# Compute


@dataclass(frozen=True, kw_only=True)
class OpCost:
    """t = a FLOPs + b bytes + c for each call."""

    s_per_flop: float = 0.0
    s_per_byte: float = 0.0
    s_per_call: float = 0.0

    def seconds(self, *, flops: float = 0.0, num_bytes: float = 0.0, num_calls: int = 1) -> float:
        return self.s_per_flop * flops + self.s_per_byte * num_bytes + self.s_per_call * num_calls


def correction(*, observed_s: float, predicted_s: float) -> float:
    """(observed / predicted)^0.3: an outlier moves the model little, a lasting change in about five pieces."""
    if not (0 < observed_s < math.inf and 0 < predicted_s < math.inf):
        return 1.0
    ratio = min(max(observed_s / predicted_s, 1 / largest_correction), largest_correction)
    return ratio**correction_power


@dataclass(frozen=True, kw_only=True)
class OpSample:
    """A piece of work of one class that took `seconds` on one device."""

    seconds: float
    flops: float = 0.0
    num_bytes: float = 0.0


def fit(samples: Sequence[OpSample]) -> OpCost:
    """Non-negative least squares of the relative error: sum of ((a F + b B + c - t) / t)^2, with a, b, c >= 0.

    The optimum is the plain least-squares solution on the unknowns that are not zero, and there are only eight such
    sets to try. Between equal fits the one with fewer unknowns is taken. ValueError without a sample.
    """
    used = [s for s in samples if 0 < s.seconds < math.inf]
    if not used:
        raise ValueError("a fit needs a sample that took time")
    times = np.array([s.seconds for s in used])
    rows = np.array([[s.flops, s.num_bytes, 1.0] for s in used]) / times[:, np.newaxis]
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    rows = rows / scale
    best, best_error = np.zeros(3), float(len(used))
    for size in (1, 2, 3):
        for columns in map(list, combinations(range(3), size)):
            found = np.linalg.lstsq(rows[:, columns], np.ones(len(used)), rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(np.square(rows[:, columns] @ found - 1.0).sum())
            if error < best_error - 1e-12:
                best, best_error = np.zeros(3), error
                best[columns] = found
    a, b, c = (float(x) for x in best / scale)
    return OpCost(s_per_flop=a, s_per_byte=b, s_per_call=c)


@dataclass(frozen=True, kw_only=True)
class DeviceCost:
    """What one device takes for each class of operation."""

    gemm: OpCost
    attention: OpCost
    elementwise: OpCost
    optimizer: OpCost

    def step_s(self, work: Work) -> float:
        """One inner step, one class after the other: nothing overlaps."""
        return (
            self.gemm.seconds(flops=work.gemm_flops, num_calls=work.num_gemms)
            + self.attention.seconds(flops=work.attention_flops)
            + self.elementwise.seconds(num_bytes=work.elementwise_bytes)
            + self.optimizer.seconds(num_bytes=work.optimizer_bytes)
        )


@lru_cache(maxsize=1 << 14)  # a fit takes a millisecond, and a profile changes with every new rate of its link
def device_cost(speeds: Speeds, precision: str = "fp32") -> DeviceCost | None:
    """The cost model that measured figures give; None where no product was measured.

    `precision` is a run's: with bf16-mixed products are those of bf16, where it was measured.
    """
    dtypes = ("bf16", "fp32") if precision == "bf16-mixed" else ("fp32",)
    found = ([g for g in speeds.gemm if g.dtype == dtype] for dtype in dtypes)
    measured = next((gemms for gemms in found if gemms), [])
    if not measured:
        return None
    flops = [2.0 * g.dim**3 for g in measured]
    gemm = fit([OpSample(seconds=g.s_per_flop * f, flops=f) for g, f in zip(measured, flops, strict=True)])
    return DeviceCost(
        gemm=gemm,
        attention=OpCost(s_per_flop=speeds.attention_s_per_flop or gemm.s_per_flop),
        elementwise=OpCost(s_per_byte=_inverse(speeds.elementwise_bytes_per_s)),
        optimizer=OpCost(s_per_byte=_inverse(speeds.optimizer_bytes_per_s)),
    )


def nearest(profile: DeviceProfile, known: Iterable[DeviceProfile]) -> DeviceProfile | None:
    """The measured device that is most like an unmeasured one: kind, then model, then threads and memory."""

    def distance(other: DeviceProfile) -> tuple[bool, bool, float]:
        return (
            _kind(profile) != _kind(other),
            profile.device_name != other.device_name,
            _log_ratio(profile.num_threads, other.num_threads)
            + _log_ratio(profile.total_memory_bytes, other.total_memory_bytes),
        )

    measured = [other for other in known if other.speeds.gemm]
    return min(measured, key=distance, default=None)


def starting_cost(profile: DeviceProfile, known: Iterable[DeviceProfile], precision: str = "fp32") -> DeviceCost | None:
    """The device's own figures, else those of the nearest known one until it has some of its own."""
    own = device_cost(profile.speeds, precision)
    if own is not None:
        return own
    other = nearest(profile, known)
    return device_cost(other.speeds, precision) if other else None


def _kind(profile: DeviceProfile) -> str:
    return profile.device.partition(":")[0]


def _log_ratio(x: float, y: float) -> float:
    return abs(math.log(max(x, 1) / max(y, 1)))


def _inverse(rate: float) -> float:
    return 1.0 / rate if rate > 0 else 0.0


# Links


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """What a codec makes of fp32 bytes. `bytes_per_s` of fp32 going in (or coming out); 0 for no time at all."""

    ratio: float = 1.0
    bytes_per_s: float = 0.0


plain = Encoding()


def transfer_s(
    num_bytes: float, *, rate_bytes_per_s: float, rtt_s: float = 0.0, encoding: Encoding = plain, num_sharing: int = 1
) -> float:
    """Seconds for fp32 values of `num_bytes` over a link that `num_sharing` such transfers share. inf at rate 0."""
    if rate_bytes_per_s <= 0:
        return math.inf
    travel_s = num_bytes * encoding.ratio * num_sharing / rate_bytes_per_s
    return rtt_s + travel_s + num_bytes * _inverse(encoding.bytes_per_s)


# Energy


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Seconds that a device spends in each phase of a round."""

    compute_s: float = 0.0
    send_s: float = 0.0
    receive_s: float = 0.0
    wait_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.send_s + self.receive_s + self.wait_s


def energy_j(phases: Phases, speeds: Speeds) -> float | None:
    """Power under load while it computes, idle power otherwise; None where the machine does not tell its power."""
    if not speeds.load_w:
        return None
    return speeds.load_w * phases.compute_s + speeds.idle_w * (phases.total_s - phases.compute_s)


# What happened


@dataclass
class _Record:
    scale: float = 1.0
    ratios: list[float] = field(default_factory=list[float])


class Calibration:
    """What predictions were worth, for each worker and kind of task, and how they are corrected by it."""

    def __init__(self) -> None:
        self._records: dict[tuple[WorkerId, str], _Record] = {}

    def predict_s(self, worker: WorkerId, kind: str, model_s: float) -> float:
        """What the cost model says, corrected by what this worker took before."""
        record = self._records.get((worker, kind))
        return model_s * record.scale if record else model_s

    def observe(self, worker: WorkerId, kind: str, *, predicted_s: float, observed_s: float) -> float:
        """Take in how long a piece of work really took; predicted / observed, 0 where that says nothing.

        `predicted_s` is what `predict_s` gave before it began.
        """
        if not (0 < observed_s < math.inf and 0 < predicted_s < math.inf):
            return 0.0
        record = self._records.setdefault((worker, kind), _Record())
        scale = record.scale * correction(observed_s=observed_s, predicted_s=predicted_s)
        record.scale = min(max(scale, 1e-9), 1e9)
        ratio = predicted_s / observed_s
        record.ratios.append(ratio)
        del record.ratios[:-history_length]
        return ratio

    def predicted_over_observed(self) -> Mapping[str, float]:
        """The metric: the median over the last pieces of work of all workers, for each kind of task."""
        kinds = sorted({kind for _, kind in self._records})
        return {kind: statistics.median(self._ratios(kind)) for kind in kinds}

    def _ratios(self, kind: str) -> list[float]:
        return [ratio for (_, k), record in self._records.items() if k == kind for ratio in record.ratios]

    def forget(self, worker: WorkerId) -> None:
        """It left for good, or is another machine now."""
        for key in [key for key in self._records if key[0] == worker]:
            del self._records[key]
