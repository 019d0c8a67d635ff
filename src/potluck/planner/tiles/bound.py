"""How fast a fleet could be if rectangles fitted together without waste, and which of its devices are worth using.

    area_i(T) = min((L_i / 2)^2, UL_i T' / b, T' / (2 n s_per_flop_i))       L_i = DL_i T' / (n b),  T' = T - fixed_i
    bound     = the least T with sum_i area_i(T) >= m q

with sides of at most m and q: where L_i / 2 exceeds the shorter side, it is that side times the rest. It bounds any
plan without inner split and kept weights, whatever overlaps, and however much memory there is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from potluck.planner.tiles.device import Floats, Head, Ints, Rates
from potluck.planner.tiles.plane import Demand, Plane
from potluck.planner.tiles.product import Product

_num_bisections = 60
_num_widths = 24
_precision = 1e-4
_first_step, _next_step = 4.0, 1.1
"""Factors by which T is searched for, without and with an idea of where it is."""
_side_margin = 1.005
"""Rectangles in whole numbers are a little less even than the areas that they were planned with."""
_even_area = 2e-3
"""Shapes of a device's rectangle that are as large as its largest but for this share: the one with the fewest bytes."""
_longest_s = 1e12


def largest_areas(product: Product, rates: Rates, seconds: float) -> Floats:
    """area_i(T) of the module's docstring, in elements of C."""
    left_s = np.maximum(seconds - rates.fixed_s, 0.0)
    short, long = sorted((product.m, product.q))
    sides = left_s * rates.down / (product.n * product.down_bytes)
    area = np.where(sides / 2 <= short, (sides / 2) ** 2, short * np.minimum(sides - short, long))
    with np.errstate(divide="ignore", invalid="ignore"):
        work = left_s / (2.0 * product.n * rates.s_per_flop)
    return np.fmin(np.minimum(area, left_s * rates.up / product.up_bytes), work)


def lower_bound_s(product: Product, rates: Rates, *, most_devices: int | None = None) -> float:
    """The bound of the module's docstring; with `most_devices`, on plans that use no more of them."""
    total = float(product.m * product.q)
    most = min(most_devices or len(rates), len(rates))

    def suffices(seconds: float) -> bool:
        areas = largest_areas(product, rates, seconds)
        if most < len(areas):
            areas = np.partition(areas, len(areas) - most)[-most:]
        return bool(areas.sum() >= total)

    high = 1.0
    while not suffices(high):
        high *= 2.0
    low = 0.0 if high == 1.0 else high / 2
    for _ in range(_num_bisections):
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
        if high - low <= 1e-9 * high:
            break
    return high


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The devices to plan with, the strongest first, and about when they could be done."""

    chosen: Ints
    seconds: float
    down_bytes: Floats  # of each one's largest rectangle, in the shape with the fewest


def select(
    demand: Demand,
    head: Head,
    *,
    num_copies: int = 1,
    least_side: int = 1,
    share: float = 1.0,
    precision: float = _precision,
    near_s: float | None = None,
) -> Selection | None:
    """The least T in which the strongest devices cover the plane `num_copies` times; None where none ever do.

    Counts what the strongest alone need, since every further device costs the coordinator's link and the head's checks
    more: bytes go with the sum of the sides, which is least where few large rectangles cover the plane. And devices
    end with the one that would make the mean side of a tile less than `least_side`. T is found to `precision` of it,
    sooner where `near_s` is about right. `share`: the devices are a sample of so many, which cover as much.
    """
    widths = np.geomspace(1.0, demand.plane.cols, _num_widths)[:, np.newaxis]
    total = share * num_copies * demand.plane.rows * demand.plane.cols

    every = np.arange(len(demand))

    def attempt(seconds: float) -> Selection | None:
        heights = demand.heights(widths, seconds)
        areas = heights * widths
        sides = demand.plane.down_bytes(heights, widths)
        best = np.where(areas >= (1 - _even_area) * areas.max(axis=0), sides, np.inf).argmin(axis=0)
        cols, rows, areas = widths[best, 0], heights[best, every], areas[best, every]
        order = np.argsort(-areas, kind="stable")
        reached = np.cumsum(areas[order])
        count = int(np.searchsorted(reached, total * (1 - 1e-9))) + 1
        if count > len(order):
            return None
        chosen = order[:count]
        if count > max(1.0, total / least_side**2) or np.sqrt(areas[chosen]).mean() < min(
            _side_margin * least_side, demand.plane.rows, demand.plane.cols
        ):
            return None
        rows, cols = rows[chosen], cols[chosen]
        if shared_times(demand.plane, head, rows, cols).most_s > share * seconds:
            return None
        return Selection(chosen=chosen, seconds=seconds, down_bytes=demand.plane.down_bytes(rows, cols))

    low, high, step = 0.0, near_s or 1.0, _next_step if near_s else _first_step
    while (found := attempt(high)) is None:
        low, high = high, high * step
        if high > _longest_s:
            return None
    while high - low > precision * high:
        middle = (low + high) / 2 if low else high / step
        tried = attempt(middle)
        if tried is None:
            low = middle
        else:
            high, found = middle, tried
    return found


@dataclass(frozen=True)
class SharedTimes:
    """What the coordinator's link and the head's checks and sums take for a plan, and the bytes of all devices."""

    down_bytes: float
    up_bytes: float
    egress_s: float
    ingress_s: float
    head_s: float
    check_flops: float

    @property
    def most_s(self) -> float:
        return max(self.egress_s, self.ingress_s, self.head_s)


def shared_times(plane: Plane, head: Head, rows: Floats, cols: Floats, *, added_elements: float = 0.0) -> SharedTimes:
    """Of rectangles `rows` x `cols`, whose results have `added_elements` that are added to others."""
    check_flops = head.num_check_vectors * float(
        plane.check_side * (rows + cols).sum() + plane.check_area * (rows * cols).sum()
    )
    down_bytes, up_bytes = float(plane.down_bytes(rows, cols).sum()), float(plane.up_bytes(rows, cols).sum())
    return SharedTimes(
        down_bytes=down_bytes,
        up_bytes=up_bytes,
        egress_s=down_bytes / head.egress_bytes_per_s,
        ingress_s=up_bytes / head.ingress_bytes_per_s,
        head_s=head.check_s_per_flop * check_flops + head.add_s_per_element * added_elements,
        check_flops=check_flops,
    )
