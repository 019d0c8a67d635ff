"""From a device's rectangle to the tiles that it gets one after the other.

Tiles of one device share the operand of the rectangle's shorter side, the panel, which is sent once and held; the other
is streamed in strips. So the bytes are those of the rectangle whatever the number of tiles, and

    memory = panel + tiles in flight x (strip + result)         at most half the memory each

which a device with little memory meets by smaller tiles rather than by a smaller rectangle.
"""

from __future__ import annotations

import numpy as np

from potluck.planner.tiles.device import Floats, Ints
from potluck.planner.tiles.plane import Demand

_least_strip = 32
"""Rows or columns below which a rectangle is not cut any more for the sake of overlap."""


def successive_tiles(demand: Demand, rectangles: Ints, num_tiles: int) -> tuple[Ints, Ints]:
    """Tiles (device, row0, row1, col0, col1), [num, 5], and their places in their devices' sequences, [num, 2]:
    which of how many. `rectangles` are such rows too, one for each device.
    """
    own = demand.take(rectangles[:, 0])
    plane = demand.plane
    rows = (rectangles[:, 2] - rectangles[:, 1]).astype(np.float64)
    cols = (rectangles[:, 4] - rectangles[:, 3]).astype(np.float64)
    by_cols = _least_count(cols, plane.held_col + plane.held_area * rows, own.window_bytes)
    by_rows = _least_count(rows, plane.held_row + plane.held_area * cols, own.window_bytes)
    by_cols = np.where(plane.held_row * rows <= own.panel_bytes * (1 + 1e-9), by_cols, np.inf)
    by_rows = np.where(plane.held_col * cols <= own.panel_bytes * (1 + 1e-9), by_rows, np.inf)
    match plane.strips:
        case "rows":
            cuts_cols = np.zeros(len(rows), dtype=np.bool_)
        case "cols":
            cuts_cols = np.ones(len(rows), dtype=np.bool_)
        case "either":
            prefers_cols = plane.held_col * cols >= plane.held_row * rows
            cuts_cols = np.isinf(by_rows) | (prefers_cols & np.isfinite(by_cols))
    least = np.where(cuts_cols, by_cols, by_rows)
    length = np.where(cuts_cols, cols, rows)
    wanted = np.clip(length // _least_strip, 1, max(num_tiles, 1))
    counts = np.minimum(np.where(np.isfinite(least), np.maximum(least, wanted), wanted), length).astype(np.int64)
    of = np.repeat(np.arange(len(rectangles)), counts)
    number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    whole, cuts = rectangles[of], cuts_cols[of]
    begin = np.where(cuts, whole[:, 3], whole[:, 1])
    length = length.astype(np.int64)[of]
    lows, highs = begin + number * length // counts[of], begin + (number + 1) * length // counts[of]
    tiles = np.stack(
        (
            whole[:, 0],
            np.where(cuts, whole[:, 1], lows),
            np.where(cuts, whole[:, 2], highs),
            np.where(cuts, lows, whole[:, 3]),
            np.where(cuts, highs, whole[:, 4]),
        ),
        axis=1,
    )
    return tiles, np.stack((number, counts[of]), axis=1)


def _least_count(sides: Floats, strip_bytes: Floats, window_bytes: Floats) -> Floats:
    """Strips of one side into which a rectangle must be cut; inf where one row or column is too much."""
    with np.errstate(divide="ignore", invalid="ignore"):
        strips = np.floor(window_bytes / strip_bytes + 1e-9)
        return np.where(strips >= 1, np.ceil(sides / np.minimum(strips, sides)), np.inf)
