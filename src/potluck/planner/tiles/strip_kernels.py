"""The loop of strips.py: dynamic programming over where a strip starts, for every width in a grid."""

from __future__ import annotations

from typing import Any

from potluck.codecs.kernels import kernel


@kernel
def widest_cover(heights: Any, widths: Any, rows: float, best: Any, choice: Any, following: Any) -> None:
    """Fill best [num + 1], the most columns that devices i, i + 1, ... cover, choice [num], the place of the width of
    the strip that starts at i, -1 where none does, and following [num, widths], the device after that strip.

    heights: rows that each device can take of each width. [widths, num]
    """
    num = heights.shape[1]
    for k in range(heights.shape[0]):
        end, reached = 0, 0.0
        for i in range(num):
            while end < num and reached < rows:
                reached += heights[k, end]
                end += 1
            following[i, k] = end if reached >= rows else num + 1
            reached -= heights[k, i]
    best[num] = 0.0
    for i in range(num - 1, -1, -1):
        best[i], choice[i] = best[i + 1], -1
        for k in range(heights.shape[0]):
            after = following[i, k]
            if after <= num and widths[k] + best[after] > best[i]:
                best[i], choice[i] = widths[k] + best[after], k
