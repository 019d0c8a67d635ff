"""The cheapest way to do a matrix product with a fleet: alternatives are estimated, the best laid out, and one picked.

    plain           every device one rectangle of C, all of n
    inner split     n in J parts, each part's m x q tiled by devices of its own; the head adds J partial sums
    kept weights    devices keep their columns of B over the micro-batches of an optimizer step
    native          the head alone

For a tile of side s and depth k of the inner split, s^3 = 2 (m n q / N) UL / DL balances both directions of the link;
here J is found by trying. A plan with kept weights is laid out for the mean of its micro-batches, so that its columns
are wider, and priced by the first and the later ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from potluck.planner.tiles.bound import Selection, lower_bound_s, select, shared_times
from potluck.planner.tiles.device import Floats, Head, Ints, Rates, TileDevice, rates_of
from potluck.planner.tiles.plan import Plan
from potluck.planner.tiles.plane import Demand, Plane
from potluck.planner.tiles.pricing import Part, loads_of, price, tiles_of
from potluck.planner.tiles.product import Options, Product
from potluck.planner.tiles.tiling import most_sliced, sides, slowest_s, tile_plane
from potluck.planner.tiles.verify import verify

_most_inner_parts = 512
_most_rounds = 64
"""Rectangles that one device does one after the other, where its memory allows none large enough."""
_least_inner = 64
"""Columns of A below which the inner dimension is not split further."""
_most_stretch = 1.25
"""Bytes of a rectangle by those of its best shape, where a device's own link would allow more."""
_most_stretch_shared = 1.05
"""The same where bytes or sides cost the coordinator's link or the head any time."""
_rough, _precise = 0.01, 5e-4
"""Of an estimate, before and after it is known which are worth a look."""
_most_sampled = 1024
"""Of larger fleets that many devices stand for all in the first estimate."""
_most_guessed = 256
"""The same where only the gain of kept weights is to be known."""
_worth_a_look = 1.2
"""Alternatives whose estimate is within this factor of the best are laid out and priced."""


@dataclass(frozen=True, kw_only=True)
class _Way:
    """An alternative, its estimate for a micro-batch, and the devices that it would use."""

    num_inner_parts: int
    kept_for: float  # micro-batches over which it spreads a weight's bytes; 0 where none is kept
    seconds: float
    selection: Selection

    @property
    def keeps_weights(self) -> bool:
        return self.kept_for > 0


def cheapest(
    product: Product, devices: Sequence[TileDevice], head: Head | None = None, options: Options | None = None
) -> Plan:
    """The plan with the shortest optimizer step. ValueError for devices whose numbers are none."""
    head, options = head or Head(), options or Options()
    if not devices:
        return native(product, devices, head, options, "there is no device")
    rates = _rates(devices, options)
    plans: list[Plan] = []
    num_rounds = 1
    while not plans and num_rounds <= _most_rounds:
        layer = _Layer(product, devices, rates, head, options, num_rounds)
        plans = [plan for way in layer.ways() if (plan := layer.lay_out(way)) is not None]
        num_rounds *= 4
    if not plans:
        return native(product, devices, head, options, "no device has the memory for a tile of it")
    best = pick(plans, next((plan for plan in plans if plan.method == "plain"), None))
    native_s = product.flops * head.s_per_flop
    if native_s <= best.step_s / options.num_micro_batches:
        reason = f"the head takes {native_s:.3g} s and devices {best.step_s / options.num_micro_batches:.3g} s"
        return native(product, devices, head, options, reason)
    verify(best)
    return replace(best, reason=compared(plans, best))


def keeping(product: Product, devices: Sequence[TileDevice], head: Head, options: Options) -> Plan | None:
    """The quickest plan that keeps the weight; None where no device has the memory for its part of it."""
    layer = _Layer(product, devices, _rates(devices, options), head, options, 1)
    plans = [plan for way in layer.ways(only_kept=True) if (plan := layer.lay_out(way)) is not None]
    if not plans:
        return None
    best = pick(plans, None)
    verify(best)
    return replace(best, reason=compared(plans, best))


def _rates(devices: Sequence[TileDevice], options: Options) -> Rates:
    return rates_of(devices, num_tiles=options.num_tiles, room_share=options.room_share, kept_part=options.kept_part)


def estimated_gain_s(product: Product, devices: Sequence[TileDevice], head: Head, options: Options) -> float:
    """About what a weight that is kept saves in an optimizer step, the inner dimension not split; 0 where it cannot."""
    return _Layer(product, devices, _rates(devices, options), head, options, 1).gain_s()


def compared(plans: Sequence[Plan], best: Plan) -> str:
    """Each method's time for an optimizer step, in a few words."""
    times: dict[str, float] = {}
    for plan in sorted(plans, key=lambda plan: -plan.step_s):
        times[plan.method] = plan.step_s
    others = [f"{method} {seconds:.3g} s" for method, seconds in times.items() if method != best.method]
    return ", ".join([f"{best.method} {best.step_s:.3g} s a step", *others])


def pick(plans: Sequence[Plan], plain: Plan | None) -> Plan:
    """The fastest, if it saves a worthwhile share of the plain plan's time; else the one with the fewest bytes of those
    that take no longer than the plain one.
    """
    least_s = min(plan.step_s for plan in plans)
    limit_s = least_s
    if plain is not None and least_s > (1 - plain.options.least_gain) * plain.step_s:
        limit_s = plain.step_s
    return min((plan for plan in plans if plan.step_s <= limit_s), key=lambda plan: (plan.step_bytes, plan.step_s))


def native(product: Product, devices: Sequence[TileDevice], head: Head, options: Options, reason: str) -> Plan:
    """The head does it alone."""
    native_s = product.flops * head.s_per_flop
    return Plan(
        product=product,
        options=options,
        devices=tuple(devices),
        tiles=(),
        loads={},
        num_inner_parts=1,
        keeps_weights=False,
        first_s=native_s,
        later_s=native_s,
        lower_bound_s=native_s,
        first_down_bytes=0.0,
        later_down_bytes=0.0,
        up_bytes=0.0,
        egress_s=0.0,
        ingress_s=0.0,
        head_s=native_s,
        check_flops=0.0,
        reason=reason,
    )


def product_plane(product: Product, *, inner: int, keeps: bool = False, kept_for: float = 1.0) -> Plane:
    """The plane of C for `inner` of n. `keeps`: columns of B stay, as they were sent; their bytes count as those of one
    of `kept_for`.
    """
    return Plane(
        rows=product.m,
        cols=product.q,
        down_row=inner * product.down_bytes,
        down_col=inner * product.down_bytes / kept_for,
        up_area=product.up_bytes,
        flops_area=2.0 * inner,
        held_row=inner * product.held_bytes,
        held_col=inner * product.held_bytes,
        held_area=product.held_bytes,
        kept_col=inner * product.down_bytes if keeps else 0.0,
        check_side=2.0 * inner,
        check_area=2.0,
    )


def sample(rates: Rates, most: int) -> Rates:
    """Evenly from the fastest downlink to the slowest, at most about `most` devices."""
    stride = -(-len(rates) // most)
    if stride == 1:
        return rates
    return rates.take(np.argsort(-rates.down, kind="stable")[stride // 2 :: stride])


class _Layer:
    """A product before a fleet, of which each device does up to `num_rounds` rectangles one after the other."""

    def __init__(
        self,
        product: Product,
        devices: Sequence[TileDevice],
        rates: Rates,
        head: Head,
        options: Options,
        num_rounds: int,
    ) -> None:
        self.product, self.devices, self.num_rounds = product, devices, num_rounds
        self.rates = rates.in_turns(num_rounds)
        self.sample = sample(self.rates, _most_sampled)
        self.lower_bound_s = lower_bound_s(product, rates)
        self.may_keep = product.has_weight and options.num_micro_batches > 1 and bool((self.rates.kept > 0).any())
        self.head, self.options = head, options

    def ways(self, *, only_kept: bool = False) -> list[_Way]:
        """Plain, and the most promising of each other kind."""
        spreads = [] if only_kept else [0.0]
        num = self.options.num_micro_batches
        if self.may_keep:
            spreads += [1.0, math.sqrt(num), float(num)]
        found = [way for spread in spreads for way in self._splits(spread)]
        kinds: dict[tuple[bool, float], _Way] = {}
        for way in found:
            kind = (way.num_inner_parts > 1, way.kept_for)
            if kind not in kinds or way.seconds < kinds[kind].seconds:
                kinds[kind] = way
        best_s = min((way.seconds for way in found), default=0.0)
        looked_at = [way for kind, way in kinds.items() if way.seconds <= _worth_a_look * best_s or not kind[0]]
        finer = [self._estimate(way.num_inner_parts, way.kept_for, self.rates, near_s=way.seconds) for way in looked_at]
        return [way for way in finer if way is not None]

    def gain_s(self) -> float:
        """See `estimated_gain_s`."""
        num = self.options.num_micro_batches
        few = sample(self.rates, _most_guessed)
        plain, kept = (self._estimate(1, spread, few, precision=_rough, near_s=None) for spread in (0.0, float(num)))
        return num * max(0.0, plain.seconds - kept.seconds) if plain and kept else 0.0

    def _splits(self, kept_for: float) -> list[_Way]:
        """For more and more parts of n, as long as that helps."""
        found: list[_Way] = []
        near_s: float | None = None
        parts, num_worse, least_s = 1, 0, np.inf
        most = min(_most_inner_parts, len(self.rates), max(1, self.product.n // _least_inner))
        while parts <= (most if self.options.may_split_inner else 1) and num_worse < 2:
            way = self._estimate(parts, kept_for, self.sample, precision=_rough, near_s=near_s)
            if way is not None:
                near_s = way.seconds
                num_worse = num_worse + 1 if way.seconds >= least_s else 0
                least_s = min(least_s, way.seconds)
                found.append(way)
            parts = max(parts + 1, round(parts * 1.4))
        return found

    def _estimate(
        self, parts: int, kept_for: float, rates: Rates, *, near_s: float | None, precision: float = _precise
    ) -> _Way | None:
        demand = self._demand(rates, inner=-(-self.product.n // parts), kept_for=kept_for)
        found = select(
            demand,
            self.head,
            num_copies=parts,
            least_side=self.options.least_side,
            share=len(rates) / len(self.rates),
            precision=precision,
            near_s=near_s,
        )
        if found is None:
            return None
        added_s = self.head.add_s_per_element * (parts - 1) * self.product.m * self.product.q
        return _Way(num_inner_parts=parts, kept_for=kept_for, seconds=max(found.seconds, added_s), selection=found)

    def _demand(self, rates: Rates, *, inner: int, kept_for: float) -> Demand:
        """`kept_for` as in `_Way`."""
        plane = product_plane(self.product, inner=inner, keeps=kept_for > 0, kept_for=max(kept_for, 1.0))
        return Demand(plane, rates, serial=1.0 / self.options.num_tiles if self.options.num_tiles else 0.0)

    def lay_out(self, way: _Way) -> Plan | None:
        """The plan of an alternative; None where its devices do not tile it."""
        parts = self._parts(way)
        if not parts:
            return None
        num_tiles = self.options.num_tiles
        added = float((way.num_inner_parts - 1) * self.product.m * self.product.q)
        first = price(parts, self.head, num_tiles, added_elements=added)
        later = first
        if way.keeps_weights:
            held = [part.later() for part in parts]
            later = price(held, self.head, num_tiles, added_elements=added)
        return Plan(
            product=self.product,
            options=self.options,
            devices=tuple(self.devices),
            tiles=tiles_of(parts, self.devices, num_tiles, self.num_rounds),
            loads=loads_of(parts, self.devices, first.seconds, self.num_rounds),
            num_inner_parts=way.num_inner_parts,
            keeps_weights=way.keeps_weights,
            first_s=first.most_s,
            later_s=later.most_s,
            lower_bound_s=self.lower_bound_s,
            first_down_bytes=first.shared.down_bytes,
            later_down_bytes=later.shared.down_bytes,
            up_bytes=first.shared.up_bytes,
            egress_s=first.shared.egress_s,
            ingress_s=first.shared.ingress_s,
            head_s=first.shared.head_s,
            check_flops=first.shared.check_flops,
            reason="",
        )

    def _parts(self, way: _Way) -> list[Part]:
        """Each part of n with its rectangles; none where one is not tiled.

        Devices are dealt to and fro, the strongest first, so that parts are about equally strong; n is then shared so
        that they end together.
        """
        count = way.num_inner_parts
        chosen, down_bytes = way.selection.chosen, way.selection.down_bytes
        turn = np.arange(len(chosen)) % (2 * count)
        hands = np.where(turn < count, turn, 2 * count - 1 - turn)
        groups: list[tuple[Ints, Ints]] = []
        for hand in range(count):
            members = chosen[hands == hand]
            demand = self._demand(self.rates.take(members), inner=-(-self.product.n // count), kept_for=way.kept_for)
            rectangles = self._tiled(demand, way, down_bytes[hands == hand])
            if rectangles is None:
                return []
            groups.append((members, rectangles))
        parts = self._with_depths(way, groups, self._depths(way, groups))
        if not all(part.demand.take(part.rectangles[:, 0]).fits(part.rows, part.cols) for part in parts):
            equal = np.full(count, self.product.n // count) + (np.arange(count) < self.product.n % count)
            parts = self._with_depths(way, groups, equal)
        return parts

    def _tiled(self, demand: Demand, way: _Way, down_bytes: Floats) -> Ints | None:
        """Rectangles for a part of n, of which `down_bytes` would be the fewest for each device.

        A few devices fit together in shapes far from those, so for them bounding bytes may cost more than it saves.
        """
        free = tile_plane(demand, way.seconds) if len(demand) <= most_sliced else None
        if free is not None and not self.head.counts_sides:
            return free
        stretch = _most_stretch_shared if self.head.counts_sides else _most_stretch
        demand.most_down_bytes = stretch * down_bytes
        bound = tile_plane(demand, way.seconds)
        if free is None or bound is None:
            return bound if free is None else free

        def end_s(rectangles: Ints) -> float:
            shared = shared_times(demand.plane, self.head, *sides(rectangles))
            return max(slowest_s(demand, rectangles), way.num_inner_parts * shared.most_s)

        return min(free, bound, key=end_s)

    def _with_depths(self, way: _Way, groups: Sequence[tuple[Ints, Ints]], depths: Ints) -> list[Part]:
        starts = np.cumsum(depths) - depths
        return [
            Part(
                demand=self._demand(self.rates.take(members), inner=int(depth), kept_for=min(way.kept_for, 1.0)),
                members=members,
                rectangles=rectangles,
                k0=int(start),
                k1=int(start + depth),
            )
            for (members, rectangles), start, depth in zip(groups, starts, depths, strict=True)
        ]

    def _depths(self, way: _Way, groups: Sequence[tuple[Ints, Ints]]) -> Ints:
        """How much of n each part gets, so that all end together."""
        num = self.product.n
        depths = np.full(len(groups), num / len(groups))
        for _ in range(8 if len(groups) > 1 else 0):
            times = np.array([
                slowest_s(self._demand(self.rates.take(members), inner=max(1, round(depth)),
                                       kept_for=way.kept_for), rectangles)
                for depth, (members, rectangles) in zip(depths, groups, strict=True)
            ])  # fmt: skip
            depths = depths * np.clip(times.mean() / times, 0.5, 2.0)
            depths = np.maximum(depths * (num / depths.sum()), 1.0)
        return whole_depths(depths, num)


def whole_depths(depths: Floats, num: int) -> Ints:
    """Whole numbers of 1 or more near `depths`, `num` together."""
    whole = np.maximum(np.floor(depths), 1).astype(np.int64)
    missing = num - int(whole.sum())
    if missing < 0:
        whole[np.argmax(whole)] += missing
    else:
        whole[np.argsort(whole - depths, kind="stable")[:missing]] += 1
    return whole
