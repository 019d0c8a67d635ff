"""For each coordinate the mean of its values from rank `low` to before rank `high`: trimmed means and medians.

Values are put in order by Batcher's odd-even merge sort (Knuth, The Art of Computer Programming 3, 5.2.2, algorithm M),
a fixed sequence of minima and maxima of whole rows, from which what the wanted ranks do not need is left out. Their
mean is taken in fp64 in the order of values: the result does not depend on the order of updates at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from potluck.aggregation.aggregation import Aggregation
from potluck.aggregation.spool import Reader, Values

cache_bytes = 512 << 10
"""Of rows worked on at once, in a core's own cache."""


class Comparator(NamedTuple):
    """Row `low` becomes the minimum of both rows and row `high` the maximum, where anyone wants them."""

    low: int
    high: int
    wants_low: bool
    wants_high: bool


def write_mean_of_ranks(given: Aggregation, low: int, high: int) -> None:
    """One pass."""
    network = comparators(len(given.spool), low, high)
    columns = max(1024, cache_bytes // (4 * len(given.spool)))

    def work(reader: Reader, start: int, stop: int, out: Values) -> None:
        rows = reader.rows(start, stop)
        for first in range(0, len(out), columns):
            _mean_of_ranks(rows[:, first : first + columns], network, low, high, given.factor, out[first:][:columns])

    given.spool.walk(given.spool.rows_numel(len(given.spool)), work, lambda out, _: given.write(out))


def _mean_of_ranks(values: Values, network: list[Comparator], low: int, high: int, factor: float, out: Values) -> None:
    rows, spare = list(values), np.empty_like(values[0])
    for i, j, wants_low, wants_high in network:
        if wants_low:
            np.minimum(rows[i], rows[j], out=spare)
        if wants_high:
            np.maximum(rows[i], rows[j], out=rows[j])
        if wants_low:
            rows[i], spare = spare, rows[i]
    total = rows[low].astype(np.float64)
    for row in rows[low + 1 : high]:
        total += row
    total *= factor / (high - low)
    with np.errstate(over="ignore"):  # found where it is written
        out[:] = total


def comparators(num_rows: int, low: int, high: int) -> list[Comparator]:
    """What brings the values of ranks [low, high) into their rows."""
    wanted = set(range(low, high))
    kept: list[Comparator] = []
    for i, j in reversed(list(_merge_sort(num_rows))):
        if i in wanted or j in wanted:
            kept.append(Comparator(i, j, i in wanted, j in wanted))
            wanted |= {i, j}
    return kept[::-1]


def _merge_sort(num_rows: int) -> Iterator[tuple[int, int]]:
    largest = 1 << max(num_rows - 1, 0).bit_length() >> 1
    p = largest
    while p:
        q, r, distance = largest, 0, p
        while distance:
            for i in range(num_rows - distance):
                if i & p == r:
                    yield i, i + distance
            distance, q, r = q - p, q >> 1, p
        p >>= 1
