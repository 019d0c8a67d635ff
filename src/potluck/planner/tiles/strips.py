"""A plane in strips: each as wide as the plane's rows are many, cut across among a few devices of about one kind.

For a time T, let the devices stand in the order of their strength. A strip of width w that begins with device i takes
as many of the next ones as reach over all rows, sum_l H_l(w, T) >= rows, and dynamic programming over i and a grid of
widths finds the strips whose widths add up to most:

    best(i) = max over w of  w + best(next(i, w))

T is feasible when best(0) >= cols. With the strips fixed, T, the widths and the heights are then made as small as
whole numbers allow. Strips are Beaumont et al.'s columns (PERI-SUM, 2001); they minimise the sum of half-perimeters for
areas that are given, and this the time itself, whatever binds each device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from potluck.planner.tiles.device import Floats, Ints
from potluck.planner.tiles.plane import Demand
from potluck.planner.tiles.strip_kernels import widest_cover

_num_widths = 96
_slack = 1e-9
_rough_rows = 1e-8
"""Of a plane's rows: sums over a strip's devices that are run on round differently."""
_rough = 1e-4
"""Of all columns: as exactly as the best strips need to be known while they are looked for."""
_most_growth = 1.5
_num_balancings = 6


@dataclass(frozen=True, kw_only=True)
class Strips:
    """Strip s is cut among devices `order[starts[s]:ends[s]]`."""

    order: Ints
    starts: Ints
    ends: Ints


def best_strips(demand: Demand, order: Ints, seconds: float) -> tuple[Strips, float]:
    """The strips of the module's docstring for T = `seconds`, and the columns that they cover."""
    ordered = demand.take(order)
    num, rows, cols = len(order), demand.plane.rows, demand.plane.cols
    widths = _width_grid(ordered, seconds)
    heights = ordered.heights(widths[:, np.newaxis], seconds)
    best, choice = np.empty(num + 1), np.empty(num, dtype=np.int64)
    following = np.empty((num, len(widths)), dtype=np.int64)
    widest_cover(np.ascontiguousarray(heights), widths, rows * (1 - _rough_rows), best, choice, following)
    starts: list[int] = []
    ends: list[int] = []
    i = 0
    while i < num and best[i] > 0:
        if choice[i] < 0:
            i += 1
            continue
        starts.append(i)
        i = int(following[i, choice[i]])
        ends.append(i)
    strips = Strips(order=order, starts=np.array(starts, dtype=np.int64), ends=np.array(ends, dtype=np.int64))
    if not starts:
        return strips, 0.0
    return strips, float(_Group(demand, strips).widths(seconds, _rough * cols).sum())


def _width_grid(demand: Demand, seconds: float) -> Floats:
    """Widths worth trying: from narrow for the weakest device to the widest that the strongest can take a row of."""
    coarse = np.geomspace(1.0, demand.plane.cols, 48)
    areas = coarse[:, np.newaxis] * demand.heights(coarse[:, np.newaxis], seconds)
    useful = coarse[areas.argmax(axis=0)][areas.max(axis=0) > 0]
    if not len(useful):
        return coarse
    low = max(1.0, 0.4 * float(np.percentile(useful, 2)))
    high = float(coarse[np.nonzero(areas.max(axis=1) > 0)[0][-1]])
    return np.geomspace(min(low, high / 2), high, _num_widths)


class _Group:
    """The devices of given strips, those of one strip one after the other."""

    def __init__(self, demand: Demand, strips: Strips) -> None:
        sizes = strips.ends - strips.starts
        self.firsts = np.cumsum(sizes) - sizes
        self.strip_of = np.repeat(np.arange(len(sizes)), sizes)
        places = np.arange(int(sizes.sum())) - np.repeat(self.firsts - strips.starts, sizes)
        self.devices = strips.order[places]
        self.demand = demand.take(self.devices)
        self.rows, self.cols = demand.plane.rows, demand.plane.cols

    def heights(self, widths: Floats, seconds: float) -> Floats:
        return self.demand.heights(widths[self.strip_of], seconds)

    def sums(self, heights: Floats) -> Floats:
        return np.add.reduceat(heights, self.firsts)

    def widths(self, seconds: float, precision: float = 1e-3) -> Floats:
        """The widest each strip can be within `seconds`, to `precision` columns."""
        low = np.zeros(len(self.firsts))
        step = float(self.cols)
        enough = self.sums(self.heights(low + step, seconds)) >= self.rows * (1 - _slack)
        low[enough] = step
        while step > precision:
            step /= 2
            tried = np.minimum(low + step, self.cols)
            low = np.where(self.sums(self.heights(tried, seconds)) >= self.rows * (1 - _slack), tried, low)
        return low

    def whole_widths(self, seconds: float) -> Floats:
        """The same in whole columns, with heights in whole rows."""
        widths = np.floor(self.widths(seconds, 0.05) + _slack)
        for _ in range(4):
            short = self.sums(np.floor(self.heights(np.maximum(widths, 1.0), seconds) + _slack)) < self.rows
            if not short.any():
                break
            widths = np.where(short, np.maximum(widths - np.maximum(1.0, np.floor(widths * 0.004)), 0.0), widths)
        short = self.sums(np.floor(self.heights(np.maximum(widths, 1.0), seconds) + _slack)) < self.rows
        return np.where(short, 0.0, widths)


def whole_rectangles(demand: Demand, strips: Strips, seconds: float) -> Ints | None:
    """Rectangles (device, row0, row1, col0, col1) that tile the plane. [num_tiles, 5]

    `seconds` is where the search starts; None where whole numbers need more than half as long again.
    """
    group = _Group(demand, strips)
    start_s = _balanced_s(group, seconds)
    end_s = start_s and _least_s(lambda s: float(group.whole_widths(s).sum()) >= group.cols, start_s, 2e-4)
    return None if end_s is None else _placed(group, group.whole_widths(end_s), end_s)


def _placed(group: _Group, widths: Floats, seconds: float) -> Ints:
    """Strips of about `widths` beside each other, each cut in proportion to what its devices can do in `seconds`."""
    widths = _trimmed(widths, group.cols)
    heights = group.heights(np.maximum(widths, 1.0), seconds)
    found: list[Ints] = []
    col = 0
    bounds = np.append(group.firsts, len(group.devices))
    for s, width in enumerate(widths.astype(np.int64)):
        if not width:
            continue
        part = slice(int(bounds[s]), int(bounds[s + 1]))
        rows = _trimmed(np.floor(heights[part] + _slack), group.rows).astype(np.int64)
        ends = np.cumsum(rows)
        columns = (group.devices[part], ends - rows, ends, np.full(len(rows), col), np.full(len(rows), col + width))
        found.append(np.stack(columns, axis=1)[rows > 0])
        col += int(width)
    return np.concatenate(found)


def _trimmed(sizes: Floats, total: int) -> Floats:
    """Whole `sizes` of at least `total` together, made smaller in proportion until they are exactly that."""
    exact = sizes * (total / sizes.sum())
    scaled = np.floor(exact)
    missing = int(total - scaled.sum())
    scaled[np.argsort(scaled - exact, kind="stable")[:missing]] += 1
    return scaled


def _balanced_s(group: _Group, seconds: float) -> float | None:
    """About when the strips, in real numbers, cover the plane: by regula falsi on log T."""
    precision = _rough * group.cols / len(group.firsts)
    for _ in range(_num_balancings):
        covered = float(group.widths(seconds, precision).sum()) / group.cols
        if covered <= 0:
            return None
        if abs(covered - 1.0) < 3e-4:
            break
        later = float(group.widths(seconds * 1.01, precision).sum()) / group.cols
        slope = np.log(later / covered) / np.log(1.01) if later > covered else 1.0
        seconds *= float(np.clip(covered ** (-1.0 / np.clip(slope, 0.3, 4.0)), 0.5, 1.5))
    return seconds


def _least_s(suffices: Callable[[float], bool], start_s: float, precision: float) -> float | None:
    """The least time that suffices, from `start_s` on."""
    low, high = start_s * (1 - 2e-4), start_s
    step = 1e-3
    while not suffices(high):
        low, high = high, high * (1 + step)
        step *= 2
        if high > _most_growth * start_s:
            return None
    while high - low > precision * high:
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high
