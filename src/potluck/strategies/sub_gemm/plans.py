"""Plans of a run's products: for all that a step asks for together, since they share the memory of the devices.

A step asks for what the one before asked for. Until that is known, a product is planned when it comes, and its weight
is kept if there is still memory for it. The fleet that plans were made for stands until a step begins with other
devices, or speeds that have drifted; within a step only if many devices have come or gone, since a new plan has other
shards and what devices hold would be worth nothing. Who comes back with less memory is another device. Steps wait while
plans are made, so for speeds alone that is done only where the last time was little of the time since.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from potluck.planner.tiles.choose import cheapest
from potluck.planner.tiles.device import Head, TileDevice
from potluck.planner.tiles.plan import Plan
from potluck.planner.tiles.product import Options
from potluck.planner.tiles.product import Product as PlannedProduct
from potluck.planner.tiles.step import Use, plan_step
from potluck.planner.tiles.verify import kept_bytes
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm.deal import Sizes
from potluck.strategies.sub_gemm.product import Product, ProductKind
from potluck.strategies.sub_gemm.times import TileTimes
from potluck.types.ids import WorkerId

wire_sizes = {"fp32": Sizes(down=4, up=4), "bf16": Sizes(down=2, up=2), "int8": Sizes(down=1, up=2, held=5)}
drift_tolerance = 0.1
"""A plan is made anew at a step whose devices are faster or slower than it took them to be by more."""
most_planning_share = 0.05
"""Of the time since plans were made last, for making them anew with other speeds."""
changed_share, changed_share_keeping = 0.02, 0.25
"""Of the devices that may come and go within a step before plans are made anew, without and with kept weights."""


class _Key(NamedTuple):
    """Products that have a plan in common. Where one has a weight, it is that one's."""

    shape: tuple[int, int, int]
    kind: ProductKind
    weight: str


class Plans:
    """`options` but for the number of micro-batches, which is that of a product not asked for before."""

    def __init__(self, options: Options, *, wire: str, times: TileTimes) -> None:
        self._options, self._wire, self._times = options, wire, times
        self.fleet: dict[WorkerId, TileDevice] = {}  # that the plans are for
        self.num_made = 0
        self._known: dict[_Key, int] = {}  # how often a step asks for each
        self._asked: Counter[_Key] = Counter()  # in this step
        self._plans: dict[_Key, Plan] = {}
        self._apart: dict[tuple[tuple[int, int, int], ProductKind, bool], Plan] = {}  # without a weight of their own
        self._took_s, self._made_at = 0.0, -math.inf  # to plan for the fleet, the last time
        self._kept = np.zeros(0)  # bytes of weights, by device of the fleet

    def begin_step(self, here: Sequence[WorkerInfo], head: Head, now: Callable[[], float]) -> None:
        grown = {key: max(count, self._known.get(key, 0)) for key, count in self._asked.items()}
        is_known = all(self._known.get(key) == count for key, count in grown.items())
        self._known |= grown
        self._asked.clear()
        has_changed, begun_at = bool(self._others(here)), now()
        if not has_changed and self._took_s <= most_planning_share * (begun_at - self._made_at):
            has_changed = self._times.drift(self.fleet, here) > drift_tolerance
        if has_changed or not is_known:
            self._plan_for(here, head)
            self._made_at = now()
            self._took_s = self._made_at - begun_at

    def of(self, product: Product, here: Sequence[WorkerInfo], head: Head) -> Plan:
        """ValueError for devices whose numbers are none."""
        share = changed_share_keeping if self._kept.any() else changed_share
        if len(self._others(here)) > share * max(len(here), len(self.fleet)):
            self._plan_for(here, head)
        key = _Key(product.shape, product.kind, product.b.name.removesuffix(".T") if product.b.is_weight else "")
        self._asked[key] += 1
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._first_come(key, product.b.is_weight, head)
        return plan

    def _others(self, here: Sequence[WorkerInfo]) -> set[WorkerId]:
        """Who has come or gone since plans were made, or has come back with too little memory for them."""
        planned = self.fleet
        have = {w.id: w.profile.usable_memory_bytes or math.inf for w in here}
        least = 1 - drift_tolerance
        small = {id for id, memory in have.items() if id in planned and memory < least * planned[id].memory_bytes}
        return (have.keys() ^ planned.keys()) | small

    def kept_bytes(self) -> Mapping[WorkerId, float]:
        """Of each device, weights of all plans so far."""
        return dict(zip(self.fleet, self._kept.tolist(), strict=True))

    def _first_come(self, key: _Key, has_weight: bool, head: Head) -> Plan:
        plan = self._plan_apart(key, has_weight, head, may_keep=has_weight)
        own = kept_bytes(plan)
        room = np.array([d.memory_bytes for d in self.fleet.values()]) * self._options.room_share
        if (own > 0).any() and (self._kept + own > room).any():
            return self._plan_apart(key, has_weight, head, may_keep=False)
        self._kept = self._kept + own
        return plan

    def _plan_apart(self, key: _Key, has_weight: bool, head: Head, *, may_keep: bool) -> Plan:
        place = (key.shape, key.kind, may_keep)
        if place not in self._apart:
            product = planned(key.shape, key.kind, has_weight=has_weight, wire=self._wire)
            options = self._options if may_keep else replace(self._options, kept_part=0.0)
            self._apart[place] = cheapest(product, list(self.fleet.values()), head, options)
            self.num_made += 1
        return self._apart[place]

    def _plan_for(self, here: Sequence[WorkerInfo], head: Head) -> None:
        self.fleet = {worker.id: self._times.device(worker) for worker in here}
        self._plans.clear()
        self._apart.clear()
        self._kept = np.zeros(len(self.fleet))
        keys: dict[Use, list[_Key]] = {}
        for key, count in self._known.items():
            product = planned(key.shape, key.kind, has_weight=bool(key.weight), wire=self._wire)
            keys.setdefault(Use(product, count), []).append(key)
        if not keys:
            return
        step = plan_step({use: len(own) for use, own in keys.items()}, list(self.fleet.values()), head, self._options)
        for each in step.planned:
            own, keys[each.use] = keys[each.use][: each.count], keys[each.use][each.count :]
            self._plans |= dict.fromkeys(own, each.plan)
        self._kept = step.kept_bytes()
        self.num_made += len(step.planned)


def planned(shape: tuple[int, int, int], kind: ProductKind, *, has_weight: bool, wire: str) -> PlannedProduct:
    """A product as the planner has it, for which every one without a weight is one as a weight gradient is."""
    (m, n, q), sizes = shape, wire_sizes[wire]
    known = kind if has_weight and kind != "attention" else "weight_gradient"
    return PlannedProduct(m=m, n=n, q=q, kind=known, down_bytes=sizes.down, up_bytes=sizes.up, held_bytes=sizes.held)
