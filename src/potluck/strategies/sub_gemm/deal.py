"""Who gets a tile whose device was lost, or is late: those who would be done with it first, in parts if that is sooner.

Lane i is free at f_i and takes c_i + x v_i for the share x of a tile, cut across its longer side: c_i holds what does
not shrink with the share (round trip, the operand of the shorter side). Over the p lanes that would be done first with
all of it, shares that end together at T are

    x_i = (T - f_i - c_i) / v_i        T = (1 + sum (f_i + c_i) / v_i) / sum 1 / v_i

p doubles as long as T falls by a twentieth of what is left to wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from potluck.strategies.sub_gemm.assembly import Box
from potluck.strategies.sub_gemm.lane import Lane

most_lanes = 32
least_side = 32
least_gain = 0.05
least_part = 0.02
most_pieces = 4096
"""A device whose memory would need a tile cut into more is of no use to it."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of one element of an operand on the way down, of a result on the way up, and of either in memory."""

    down: float = 4.0
    up: float = 4.0
    held: float = 4.0

    def down_bytes(self, box: Box) -> float:
        """Of both operands."""
        return sum(box.shape) * box.depth * self.down

    def up_bytes(self, box: Box) -> float:
        rows, cols = box.shape
        return rows * cols * self.up

    def memory_bytes(self, box: Box) -> int:
        """Operands and result."""
        rows, cols = box.shape
        return math.ceil((rows + cols) * box.depth * self.held) + math.ceil(rows * cols * self.held)

    def fit(self, box: Box, memory_bytes: float) -> list[Box]:
        """In as few parts as halving makes that each fit; [] where that would be absurd."""
        parts = [box]
        while parts and max(map(self.memory_bytes, parts)) > memory_bytes:
            halved = [part.halves() for part in parts]
            parts = [half for halves in halved for half in halves]
            if not all(halved) or len(parts) > most_pieces:
                return []
        return parts


def cut(box: Box, shares: Sequence[tuple[Lane, float]]) -> list[tuple[Lane, Box]]:
    """What each gets of it. The last ones get nothing where it is too short for so many."""
    boxes = box.shares([share for _, share in shares], least_side=least_side)
    return [(lane, part) for (lane, _), part in zip(shares, boxes, strict=False)]


class Candidates:
    """Lanes as columns, [num_lanes] each, for many tiles to be dealt to at one time."""

    def __init__(self, lanes: Sequence[Lane], sizes: Sizes, now: float) -> None:
        self._sizes, self._now = sizes, now
        self._least_bytes = sizes.memory_bytes(Box(0, 1, 0, 1, 0, 1))
        self.lanes = [lane for lane in lanes if lane.device.memory_bytes >= self._least_bytes]
        self._places = {lane: i for i, lane in enumerate(self.lanes)}
        rows = [
            (d.down_bytes_per_s, d.up_bytes_per_s, d.s_per_flop, d.s_per_tile + d.rtt_s, lane.free_at)
            for lane in self.lanes
            for d in (lane.device,)
        ]
        self._down, self._up, self._s_per_flop, self._fixed_s, free_at = np.array(rows).reshape(-1, 5).T
        self._free_at = np.maximum(free_at, now)

    def shares(self, box: Box, without: set[Lane]) -> tuple[list[tuple[Lane, float]], float]:
        """Who gets which share of a box, and when they are done: no one and inf if there is nobody."""
        rows, cols = box.shape
        long, short = max(rows, cols), min(rows, cols)
        per_row = box.depth * self._sizes.down
        start = self._free_at + self._fixed_s + short * per_row / self._down
        whole = long * per_row / self._down + 2.0 * box.volume * self._s_per_flop + self._sizes.up_bytes(box) / self._up
        ends = start + np.maximum(whole, 1e-12)
        ends[[self._places[lane] for lane in without if lane in self._places]] = np.inf
        num = min(most_lanes, int(np.isfinite(ends).sum()))
        if not num:
            return [], math.inf
        order = np.argpartition(ends, num - 1)[:num]
        order = order[np.argsort(ends[order], kind="stable")]
        best, end = [(int(order[0]), 1.0)], float(ends[order[0]])
        p = 2
        while p <= num and long >= p * least_side:
            first = order[:p]
            inverse = 1.0 / np.maximum(whole[first], 1e-12)
            together = float((1.0 + (start[first] * inverse).sum()) / inverse.sum())
            parts = (together - start[first]) * inverse
            if parts.min() < least_part or together - self._now > (1 - least_gain) * (end - self._now):
                break
            best, end = list(zip(first.tolist(), parts.tolist(), strict=True)), together
            p *= 2
        return [(self.lanes[i], share) for i, share in best], end

    def placed(self, lane: Lane) -> None:
        """A lane was given something."""
        self._free_at[self._places[lane]] = max(lane.free_at, self._now)
