"""From a plane and a fleet to rectangles in whole numbers that tile it, no gap and no overlap.

A few devices are placed by slicing (slices.py), many by strips (strips.py) in both directions and two orders of the
devices. What counts is the time of the slowest rectangle.
"""

from __future__ import annotations

import numpy as np

from potluck.planner.tiles.device import Floats, Ints
from potluck.planner.tiles.plane import Demand
from potluck.planner.tiles.slices import sliced
from potluck.planner.tiles.strips import best_strips, whole_rectangles

most_sliced = 32
"""Devices that are placed by slicing: it takes the cube of their number."""
least_stripped = 12
"""So few are placed by slicing alone, if that finds anything: strips are hardly ever better."""
_num_rounds = 3
_first_slack = 1.004
_enough = 0.993
"""Of a plane, covered: strips that do so in a time are about the best for the time in which they cover all."""


def tile_plane(demand: Demand, start_s: float) -> Ints | None:
    """Rectangles (device, row0, row1, col0, col1), [num_tiles, 5], of which each device has one at most.

    `start_s` is about the time that the areas of all devices together would take. None where no tiling was found,
    because memory or the whole numbers of a small plane leave none.
    """
    found = sliced(demand, start_s) if len(demand) <= most_sliced else None
    tilings = [found] if found is not None and demand_fits(demand, found) else []
    if len(demand) > least_stripped or not tilings:
        found = stripped(demand, start_s)
        tilings += [found] if found is not None and demand_fits(demand, found) else []
    return min(tilings, key=lambda tiling: slowest_s(demand, tiling), default=None)


def demand_fits(demand: Demand, tiles: Ints) -> bool:
    """Whether every device has the memory for its rectangle."""
    return demand.take(tiles[:, 0]).fits(*sides(tiles))


def stripped(demand: Demand, start_s: float) -> Ints | None:
    """By strips along the rows or the columns, for each order of the devices: whichever ends first."""
    orders = _orders(demand, start_s)
    tried = [_strips_across(demand, order, start_s) for order in orders]
    turned = demand.transposed()
    tried += [
        tiles[:, [0, 3, 4, 1, 2]] for order in orders if (tiles := _strips_across(turned, order, start_s)) is not None
    ]
    return min((t for t in tried if t is not None), key=lambda tiles: slowest_s(demand, tiles), default=None)


def _strips_across(demand: Demand, order: Ints, start_s: float) -> Ints | None:
    """Strips for the least T found in a few rounds."""
    seconds = start_s * _first_slack
    strips, columns = best_strips(demand, order, seconds)
    for _ in range(_num_rounds):
        covered = columns / demand.plane.cols
        if _enough <= covered <= 1 / _enough:
            break
        seconds *= max(covered, 0.25) ** -0.75
        strips, columns = best_strips(demand, order, seconds)
    if not len(strips.starts):
        return None
    return whole_rectangles(demand, strips, seconds)


def slowest_s(demand: Demand, tiles: Ints) -> float:
    """Seconds of the slowest rectangle."""
    return float(tile_seconds(demand, tiles).max())


def tile_seconds(demand: Demand, tiles: Ints) -> Floats:
    """Seconds of each rectangle. [num_tiles]"""
    return demand.take(tiles[:, 0]).seconds(*sides(tiles))


def sides(tiles: Ints) -> tuple[Floats, Floats]:
    """Rows and columns of each. [num_tiles]"""
    return (tiles[:, 2] - tiles[:, 1]).astype(np.float64), (tiles[:, 4] - tiles[:, 3]).astype(np.float64)


def _orders(demand: Demand, seconds: float) -> list[Ints]:
    """Devices from the strongest on: by the sides that their downlinks allow, and by the areas of their best shapes."""
    sides = demand.rates.down * np.maximum(seconds - demand.rates.fixed_s, 0.0)
    widths = np.geomspace(1.0, demand.plane.cols, 24)[:, np.newaxis]
    areas = (widths * demand.heights(widths, seconds)).max(axis=0)
    return [np.argsort(-sides, kind="stable"), np.argsort(-areas, kind="stable")]
