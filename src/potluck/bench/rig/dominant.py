"""A tighter lower bound for a few devices of which one is far stronger than the others.

Let the strongest get a rectangle of h rows and w columns. Any other shares no cell with it, so it has at most m - h
rows or at most q - w columns, and

    m q <= h w + sum_i max(area_i with at most m - h rows, area_i with at most q - w columns)    for some h + w <= L

which bound.py's squares ignore. All h and w are tried in cells of a grid, each at its most favourable corner, so that
it stays a bound.
"""

from __future__ import annotations

import numpy as np

from potluck.planner.tiles.bound import largest_areas, lower_bound_s
from potluck.planner.tiles.device import Floats, Rates
from potluck.planner.tiles.product import Product

_num_cells = 200
_num_bisections = 14
_most_growth = 1.5


def dominant_bound_s(product: Product, rates: Rates) -> float:
    """At least `bound.lower_bound_s`, and at most half as much again. For tens of devices, not for thousands."""
    low = lower_bound_s(product, rates)
    high = _most_growth * low
    if _suffices(product, rates, low):
        return low
    for _ in range(_num_bisections):
        middle = (low + high) / 2
        low, high = (low, middle) if _suffices(product, rates, middle) else (middle, high)
    return low


def _suffices(product: Product, rates: Rates, seconds: float) -> bool:
    """Whether the inequality holds anywhere."""
    m, q = product.m, product.q
    left_s = np.maximum(seconds - rates.fixed_s, 0.0)
    perimeters = left_s * rates.down / (product.n * product.down_bytes)
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.fmin(left_s * rates.up / product.up_bytes, left_s / (2.0 * product.n * rates.s_per_flop))
    first = int(np.argmax(largest_areas(product, rates, seconds)))
    others = np.arange(len(rates)) != first

    def limited(short: Floats, long: int) -> Floats:
        """The largest areas of the others with one side of at most `short`. [devices, cells]"""
        half = perimeters[others, np.newaxis]
        side = np.minimum(half / 2, short)
        return np.fmin(side * np.clip(half - side, 0.0, long), most[others, np.newaxis])

    rows = np.linspace(0.0, m, _num_cells + 1)
    beside = limited(m - rows[:-1], q)
    for cell in range(_num_cells):
        widest = min(float(q), float(perimeters[first]) - rows[cell])
        if widest < 0:
            break
        cols = np.linspace(0.0, widest, _num_cells + 1)
        own = np.minimum(rows[cell + 1] * cols[1:], most[first])
        rest = np.maximum(beside[:, cell : cell + 1], limited(q - cols[:-1], m)).sum(axis=0)
        if (own + rest).max() >= m * q:
            return True
    return False
