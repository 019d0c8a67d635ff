"""A matrix put together from boxes that tile it, each taken once, sums over K in the order of K.

    C[r, c] = sum over the boxes that hold (r, c), k0 ascending, of their values there

Boxes come in any order. One whose elements are summed up to its k0 is added at once, and any other waits: so the
result depends on the boxes and their values only, bit for bit, not on when which came. How far each element has got is
kept for each cell of the grid that the boxes' edges make, so a box that was there already, in whole or in part, is
found out, and the matrix is whole when every cell has reached the end of K.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from potluck.planner.tiles.verify import tiling_fault

short_side = 64
"""Tiles with shorter sides move more than they compute: sums are split before that."""


class Box(NamedTuple):
    """C[row0:row1, col0:col1] over k0 <= k < k1."""

    row0: int
    row1: int
    col0: int
    col1: int
    k0: int
    k1: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.row1 - self.row0, self.col1 - self.col0

    @property
    def depth(self) -> int:
        return self.k1 - self.k0

    @property
    def volume(self) -> int:
        rows, cols = self.shape
        return rows * cols * self.depth

    def shares(self, weights: Sequence[float], *, least_side: int = 1) -> list[Box]:
        """Cut across its longer side in proportion to `weights`, each part at least `least_side` long if it can be."""
        start, end = (self.row0, self.row1) if self.shape[0] >= self.shape[1] else (self.col0, self.col1)
        side = end - start
        least = max(1, min(least_side, side // len(weights)))
        edges, passed, total = [start], 0.0, sum(weights)
        for position, weight in enumerate(weights[:-1], 1):
            passed += weight
            edge = start + round(side * passed / total)
            edges.append(min(max(edge, edges[-1] + least), end - least * (len(weights) - position)))
        edges.append(end)
        by_rows = self.shape[0] >= self.shape[1]
        spans = [(x, y) for x, y in pairwise(edges) if x < y]
        return [self._replace(row0=x, row1=y) if by_rows else self._replace(col0=x, col1=y) for x, y in spans]

    def halves(self) -> list[Box]:
        """Two parts of about one size: across the longer side, or of the sum where sides are short."""
        middle = (self.k0 + self.k1) // 2
        if self.depth > 1 and max(self.shape) <= short_side:
            return [self._replace(k1=middle), self._replace(k0=middle)]
        return self.shares((1.0, 1.0)) if max(self.shape) > 1 else []


class Assembly:
    """The values of `whole`, fp32. `put` may be called by several threads. ValueError for boxes that do not tile it."""

    def __init__(self, whole: Box, boxes: Iterable[Box], *, device: torch.device) -> None:
        self.whole = whole
        edges = np.array(list(boxes), dtype=np.int64).reshape(-1, 6)
        if fault := tiling_fault(edges, whole):
            raise ValueError(f"{len(edges)} boxes do not tile {tuple(whole)}: {fault}")
        self._rows: list[int] = np.unique(edges[:, :2]).tolist()
        self._cols: list[int] = np.unique(edges[:, 2:4]).tolist()
        self._reached = np.full((len(self._rows) - 1, len(self._cols) - 1), whole.k0, dtype=np.int64)
        self._early: dict[tuple[int, int], list[tuple[Box, Tensor]]] = {}  # by a cell that each of them waits for
        self._left = whole.volume
        self._values = torch.empty(whole.shape, device=device)
        self._lock = Lock()

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    @property
    def values(self) -> Tensor:
        """fp32 [rows, cols], complete."""
        assert self.is_complete and (self._reached == self.whole.k1).all(), "a matrix with missing parts"
        return self._values

    def put(self, box: Box, values: Tensor) -> None:
        """Take in one box. ValueError if any of it was there before."""
        with self._lock:
            taken = [(box, values)]
            while taken:
                box, values = taken.pop()
                behind = self._behind(box)
                if behind is None:
                    taken += self._add(box, values)
                else:
                    self._early.setdefault(behind, []).append((box, values))

    def _cells(self, box: Box) -> tuple[slice, slice]:
        """Of the grid. A box from elsewhere, with edges that are none of the grid's, would show as taken twice."""
        return (
            slice(bisect_left(self._rows, box.row0), bisect_left(self._rows, box.row1)),
            slice(bisect_left(self._cols, box.col0), bisect_left(self._cols, box.col1)),
        )

    def _behind(self, box: Box) -> tuple[int, int] | None:
        """A cell of the box whose sum is not up to its k0 yet, None if all are."""
        rows, cols = self._cells(box)
        reached = self._reached[rows, cols]
        if (reached > box.k0).any():
            raise ValueError(f"{tuple(box)} of {tuple(self.whole)} was there before")
        behind = reached.argmin()
        row, col = divmod(int(behind), reached.shape[1])
        return None if reached[row, col] == box.k0 else (rows.start + row, cols.start + col)

    def _add(self, box: Box, values: Tensor) -> list[tuple[Box, Tensor]]:
        """Those that had waited for this one, and may be due now."""
        top, left = self.whole.row0, self.whole.col0
        place = self._values[box.row0 - top : box.row1 - top, box.col0 - left : box.col1 - left]
        if box.k0 == self.whole.k0:
            place.copy_(values)
        else:
            place.add_(values)
        rows, cols = self._cells(box)
        self._reached[rows, cols] = box.k1
        self._left -= box.volume
        if not self._early:
            return []
        cells = ((i, j) for i in range(rows.start, rows.stop) for j in range(cols.start, cols.stop))
        return [each for cell in cells for each in self._early.pop(cell, ())]
