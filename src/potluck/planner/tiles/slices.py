"""A plane for a few devices, cut in two again and again.

For a time T let W(S, h) be the most columns of h rows that the devices S can cover, and H(S, w) the most rows of w
columns. One device has those of plane.py; devices in their order of strength, cut anywhere into A and B, have

    W(S, h) = max over (A, B) of  W(A, h) + W(B, h)   side by side,  or the inverse of H,
    H(S, w) = max over (A, B) of  H(A, w) + H(B, w)   one above the other,  or the inverse of W.

T is feasible when W(all, rows) >= cols. The cuts found are then moved until all devices end together, and rounded.
Only neighbours in the order are ever put together, which makes it the cube of their number instead of its exponential.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import numpy as np

from potluck.planner.tiles.device import Floats, Ints
from potluck.planner.tiles.plane import Demand

_num_points = 96
_thin = 1e-6
"""Of a row: what is no wider is nothing."""
_num_halvings = 9
_most_reordered = 12
"""Among so few devices it matters much who is whose neighbour."""
_num_weighings = 40
_weighing_power = 0.7


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Of devices first..last: the first `size` of them left of or above the others, with `share` of the length."""

    is_side_by_side: bool
    size: int
    share: float


class _Cover:
    """W and H of every run of neighbours for one T. [length][first, point]"""

    def __init__(self, demand: Demand, seconds: float) -> None:
        plane, num = demand.plane, len(demand)
        self.rows = np.geomspace(max(plane.rows / 1000, 0.5), plane.rows, _num_points)
        self.cols = np.geomspace(max(plane.cols / 1000, 0.5), plane.cols, _num_points)
        turned = demand.transposed()
        self.widths: list[Floats] = [turned.heights(self.rows[:, np.newaxis], seconds).T]
        self.heights: list[Floats] = [demand.heights(self.cols[:, np.newaxis], seconds).T]
        for length in range(2, num + 1):
            count = num - length + 1
            beside, above = self._joined(self.widths, length), self._joined(self.heights, length)
            widths, heights = beside.copy(), above.copy()
            for first in range(count):
                widths[first] = np.maximum(widths[first], _inverse(self.cols, above[first], self.rows))
                heights[first] = np.maximum(heights[first], _inverse(self.rows, beside[first], self.cols))
            self.widths.append(widths)
            self.heights.append(heights)

    @staticmethod
    def _joined(single: list[Floats], length: int) -> Floats:
        count = len(single[0]) - length + 1
        sums = [single[a - 1][:count] + single[length - a - 1][a : a + count] for a in range(1, length)]
        return np.maximum.reduce(sums)

    def width(self, first: int, length: int, rows: float) -> float:
        return float(np.interp(rows, self.rows, self.widths[length - 1][first]))

    def height(self, first: int, length: int, cols: float) -> float:
        return float(np.interp(cols, self.cols, self.heights[length - 1][first]))


def _inverse(x: Floats, y: Floats, wanted: Floats) -> Floats:
    """The largest x at which y, which falls with x, is still `wanted`; 0 where it never is."""
    return np.interp(wanted, y[::-1], x[::-1], left=x[-1], right=0.0)


def sliced(demand: Demand, start_s: float) -> Ints | None:
    """Rectangles (device, row0, row1, col0, col1) that tile the plane, [num_tiles, 5]; None where none were found."""
    order = np.argsort(-demand.rates.down, kind="stable")
    num, plane = len(demand), demand.plane
    seconds = start_s * 1.01
    cover = _Cover(demand.take(order), seconds)
    while cover.width(0, num, plane.rows) < plane.cols:
        seconds *= 1.1
        if seconds > 8 * start_s:
            return None
        cover = _Cover(demand.take(order), seconds)
    if num <= _most_reordered:
        covers = [(candidate, _Cover(demand.take(candidate), seconds)) for candidate in _near(order)]
        order, cover = max(covers, key=lambda pair: pair[1].width(0, num, plane.rows))
    ordered = demand.take(order)
    low, high = start_s * 0.99, seconds
    for _ in range(_num_halvings):
        middle = (low + high) / 2
        tried = _Cover(ordered, middle)
        if tried.width(0, num, plane.rows) >= plane.cols:
            high, cover = middle, tried
        else:
            low = middle
    cuts: dict[tuple[int, int], _Cut] = {}
    _choose(cover, cuts, 0, num, float(plane.rows), float(plane.cols))
    areas = _even(ordered, cuts)
    boxes = np.zeros((num, 4))
    _place(cuts, areas, boxes, 0, num, (0.0, float(plane.rows), 0.0, float(plane.cols)), whole=True)
    tiles = np.concatenate((order[:, np.newaxis], boxes.astype(np.int64)), axis=1)
    return tiles[(tiles[:, 2] > tiles[:, 1]) & (tiles[:, 4] > tiles[:, 3])]


def _near(order: Ints) -> list[Ints]:
    """The order and some near it: the first three in every order, and each other pair of neighbours the other way."""
    first = [np.concatenate((order[list(front)], order[3:])) for front in permutations(range(min(3, len(order))))]
    swaps = [np.concatenate((order[:i], order[i : i + 2][::-1], order[i + 2 :])) for i in range(2, len(order) - 1)]
    return first + swaps


def _choose(
    cover: _Cover, cuts: dict[tuple[int, int], _Cut], first: int, length: int, rows: float, cols: float
) -> None:
    """The cuts of a rectangle for devices first, ..., first + length - 1: each time the one that leaves most room."""
    if length == 1:
        return
    rows, cols = max(rows, _thin), max(cols, _thin)
    room, best = -1.0, _Cut(is_side_by_side=True, size=1, share=0.5)
    for size in range(1, length):
        rest = (first + size, length - size)
        sides = (
            (cover.width(first, size, rows), cover.width(*rest, rows), cols),
            (cover.height(first, size, cols), cover.height(*rest, cols), rows),
        )
        for is_above, (one, other, wanted) in enumerate(sides):
            if (one + other) / wanted > room:
                room = (one + other) / wanted
                best = _Cut(is_side_by_side=not is_above, size=size, share=one / max(one + other, _thin))
    cuts[first, length] = best
    rest, left = (first + best.size, length - best.size), 1 - best.share
    if best.is_side_by_side:
        _choose(cover, cuts, first, best.size, rows, cols * best.share)
        _choose(cover, cuts, *rest, rows, cols * left)
    else:
        _choose(cover, cuts, first, best.size, rows * best.share, cols)
        _choose(cover, cuts, *rest, rows * left, cols)


def _even(demand: Demand, cuts: dict[tuple[int, int], _Cut]) -> Floats:
    """Areas with which, cut so, all devices end at about the same time: those of the slowest shrink, step by step."""
    num, plane = len(demand), demand.plane
    whole = (0.0, float(plane.rows), 0.0, float(plane.cols))
    boxes = np.zeros((num, 4))
    _place(cuts, None, boxes, 0, num, whole)
    areas = best = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])
    best_s = np.inf
    for _ in range(_num_weighings):
        _place(cuts, areas, boxes, 0, num, whole)
        seconds = demand.seconds(boxes[:, 1] - boxes[:, 0], boxes[:, 3] - boxes[:, 2])
        if seconds.max() < best_s:
            best, best_s = areas, float(seconds.max())
        areas = areas * (seconds.max() / np.maximum(seconds, 0.5 * seconds.max())) ** _weighing_power
        areas = areas * (plane.rows * plane.cols / areas.sum())
    return best


def _place(
    cuts: dict[tuple[int, int], _Cut],
    areas: Floats | None,
    boxes: Floats,
    first: int,
    length: int,
    box: tuple[float, float, float, float],
    *,
    whole: bool = False,
) -> None:
    """Boxes (row0, row1, col0, col1) by areas, or else the cuts' own shares; at whole numbers if `whole`."""
    if length == 1:
        boxes[first] = box
        return
    cut = cuts[first, length]
    middle = first + cut.size
    total = 0.0 if areas is None else float(areas[first : first + length].sum())
    share = cut.share if areas is None or not total else float(areas[first:middle].sum()) / total
    row0, row1, col0, col1 = box
    if cut.is_side_by_side:
        at = col0 + share * (col1 - col0)
        at = round(at) if whole else at
        one, other = (row0, row1, col0, at), (row0, row1, at, col1)
    else:
        at = row0 + share * (row1 - row0)
        at = round(at) if whole else at
        one, other = (row0, at, col0, col1), (at, row1, col0, col1)
    _place(cuts, areas, boxes, first, cut.size, one, whole=whole)
    _place(cuts, areas, boxes, middle, length - cut.size, other, whole=whole)
