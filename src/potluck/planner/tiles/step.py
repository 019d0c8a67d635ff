"""All products of an optimizer step, whose tiles and kept weights share each device's memory.

A device that keeps weights over the micro-batches has less memory for tiles, of every product, and what one weight
takes is missing for the others. So a step is planned twice: without kept weights and all memory for tiles, and with
`kept_share` of it for weights, and the quicker one is taken. In the second, with R_i that share on device i,

    each kept weight may take  R_i / N                   rectangles that keep more have no place
    kept are x_s <= c_s of the c_s weights of shape s    those that save the most seconds first
    sum_s x_s k_si <= R_i                                k_si: bytes that i keeps of one, as its rectangle has them

and N is tried from one weight alone to all of them: more weights in narrower columns, or fewer that save more each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from potluck.planner.tiles.choose import cheapest, estimated_gain_s, keeping
from potluck.planner.tiles.device import Floats, Head, TileDevice
from potluck.planner.tiles.plan import Plan
from potluck.planner.tiles.product import Options, Product
from potluck.planner.tiles.verify import faults, kept_bytes
from potluck.types.ids import WorkerId

_growth = 4
"""From one number of weights that share the memory to the next that is tried."""
_as_good = 0.98
"""More weights are kept where that saves nearly as much: each that is kept saves bytes too."""
_rounding = 1e-9


class Use(NamedTuple):
    """A product that a step asks for so many times, with one weight where it has one."""

    product: Product
    num_uses: int


@dataclass(frozen=True)
class Planned:
    """`count` uses of one plan, each with a weight of its own."""

    use: Use
    plan: Plan
    count: int

    @property
    def seconds(self) -> float:
        return self.count * self.plan.step_s

    @property
    def num_bytes(self) -> float:
        return self.count * self.plan.step_bytes


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One product after the other. Bytes, FLOPs and seconds are of a whole optimizer step."""

    planned: tuple[Planned, ...]
    num_devices: int

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.planned)

    @property
    def num_bytes(self) -> float:
        return sum(each.num_bytes for each in self.planned)

    @property
    def down_bytes(self) -> float:
        """Of all devices."""
        return sum(
            count * (plan.first_down_bytes + (use.num_uses - 1) * plan.later_down_bytes)
            for use, plan, count in self._each()
        )

    @property
    def up_bytes(self) -> float:
        return sum(count * use.num_uses * plan.up_bytes for use, plan, count in self._each())

    @property
    def egress_bytes_per_s(self) -> float:
        return self.down_bytes / self.seconds

    @property
    def ingress_bytes_per_s(self) -> float:
        return self.up_bytes / self.seconds

    @property
    def flops(self) -> float:
        return sum(count * use.num_uses * use.product.flops for use, _, count in self._each())

    @property
    def check_flops(self) -> float:
        """Of the head, to check every tile."""
        return sum(count * use.num_uses * plan.check_flops for use, plan, count in self._each())

    @property
    def num_devices_used(self) -> int:
        """By the product that uses most."""
        return max(len(each.plan.loads) for each in self.planned)

    @property
    def kept_share(self) -> float:
        """Of all uses with a weight that is asked for again, those that keep it."""
        uses = [each for each in self.planned if _asks_again(each.use)]
        kept = sum(each.count for each in uses if each.plan.keeps_weights)
        return kept / sum(each.count for each in uses) if uses else 0.0

    @property
    def bindings(self) -> Mapping[str, float]:
        """The share of the time that each resource binds: the coordinator's link, the head, or most of the devices."""
        shares: Counter[str] = Counter()
        seconds = self.seconds
        for each in self.planned:
            shares[each.plan.binds] += each.seconds / seconds  # pyright: ignore[reportArgumentType]
        return dict(shares)

    def compute_s(self) -> Mapping[WorkerId, float]:
        """Of each device that computes."""
        found: Counter[WorkerId] = Counter()
        for use, plan, count in self._each():
            for id, load in plan.loads.items():
                found[id] += count * use.num_uses * load.compute_s  # pyright: ignore[reportArgumentType]
        return found

    def kept_bytes(self) -> Floats:
        """Of each device, weights of all products together. [num_devices]"""
        return sum((each.count * kept_bytes(each.plan) for each in self.planned), np.zeros(self.num_devices))

    def _each(self) -> list[tuple[Use, Plan, int]]:
        return [(each.use, each.plan, each.count) for each in self.planned]


def plan_step(
    uses: Mapping[Use, int], devices: Sequence[TileDevice], head: Head | None = None, options: Options | None = None
) -> StepPlan:
    """`uses` of as many weights each; `options` but for the number of micro-batches. ValueError as `cheapest`."""
    head, options = head or Head(), options or Options()
    bare = replace(options, may_keep_weights=False)
    plain = {use: cheapest(use.product, devices, head, _for(use, bare)) for use in uses}
    without = StepPlan(
        planned=tuple(Planned(use, plain[use], count) for use, count in uses.items()), num_devices=len(devices)
    )
    again = {use: count for use, count in uses.items() if _asks_again(use)}
    if not (options.may_keep_weights and options.kept_share and devices and again):
        return without
    rest = {use: _beside_kept(plan, devices, head, _for(use, options)) for use, plan in plain.items()}
    if not all(plan.tiles for plan in rest.values()) and all(plan.tiles for plan in plain.values()):
        return without  # what is left for tiles is too little
    kept = _kept(again, rest, devices, head, options)
    found: list[Planned] = []
    for use, count in uses.items():
        most = kept.get(use, Planned(use, rest[use], 0))
        found += [each for each in (most, Planned(use, rest[use], count - most.count)) if each.count]
    with_ = StepPlan(planned=tuple(found), num_devices=len(devices))
    key = (with_.num_bytes, with_.seconds), (without.num_bytes, without.seconds)
    is_quicker = with_.seconds <= (1 - options.least_gain) * without.seconds
    return with_ if is_quicker or (with_.seconds <= without.seconds and key[0] < key[1]) else without


def _beside_kept(plan: Plan, devices: Sequence[TileDevice], head: Head, options: Options) -> Plan:
    """Nothing of its own is kept, and others' weights leave less memory: the same plan if that is enough for it."""
    nothing = replace(options, kept_part=0.0)
    same = replace(plan, options=nothing)
    return same if not faults(same) else cheapest(plan.product, devices, head, nothing)


def _asks_again(use: Use) -> bool:
    return use.product.has_weight and use.num_uses > 1


def _for(use: Use, options: Options) -> Options:
    return replace(options, num_micro_batches=use.num_uses)


def _kept(
    again: Mapping[Use, int],
    rest: Mapping[Use, Plan],
    devices: Sequence[TileDevice],
    head: Head,
    options: Options,
) -> dict[Use, Planned]:
    """The weights that are kept, as many of each use as have room after those that save more."""
    num, gains = _shared_out(again, devices, head, options)
    room = np.array([device.memory_bytes for device in devices]) * options.room_share
    left, found = room, dict[Use, Planned]()
    for use in sorted(gains, key=lambda use: gains[use], reverse=True):
        if (left < room / num / 2).any():
            break
        plan = keeping(use.product, devices, head, replace(_for(use, options), kept_part=1.0 / num))
        if plan is None or (rest[use].step_s, rest[use].step_bytes) < (plan.step_s, plan.step_bytes):
            continue
        own = kept_bytes(plan)
        most = float(((left[own > 0] + _rounding * room[own > 0]) / own[own > 0]).min())
        count = again[use] if math.isinf(most) else min(again[use], math.floor(most))
        found[use] = Planned(use, plan, count)
        left = left - count * own
    return found


def _shared_out(
    again: Mapping[Use, int], devices: Sequence[TileDevice], head: Head, options: Options
) -> tuple[int, Mapping[Use, float]]:
    """N, and what each kept weight then saves, by estimates: the largest N that is about the best."""
    total = sum(again.values())
    tried = {total}
    if not all(math.isinf(device.memory_bytes) for device in devices):
        tried |= {_growth**power for power in range(total.bit_length()) if _growth**power < total}
    gains: dict[int, dict[Use, float]] = {}
    saved: dict[int, float] = {}
    for num in tried:
        part = replace(options, kept_part=1.0 / num)
        own = gains[num] = {use: estimated_gain_s(use.product, devices, head, _for(use, part)) for use in again}
        left, saved[num] = num, 0.0
        for gain_s, count in sorted(((own[use], again[use]) for use in again), reverse=True):
            saved[num] += gain_s * min(count, left)
            left -= min(count, left)
    best = max(num for num in tried if saved[num] >= _as_good * max(saved.values()))
    return best, gains[best]
