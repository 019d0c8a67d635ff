"""Squared distances between all updates, in one pass, and what they say of any point between the updates.

    D_ij = |x_i - x_j|^2
    G_jk = (D_mj + D_mk - D_jk) / 2                             (x_j - x_m) . (x_k - x_m), at most sqrt(D_mj D_mk)
    |x_i - v|^2 = G_ii - 2 sum_j b_j G_ij + sum_jk b_j b_k G_jk for v = sum_j b_j x_j with sum_j b_j = 1

So a rule that moves a centre about among the updates needs no pass for its steps. Differences are squared one by one in
fp64 rather than taken from inner products, where one huge update would drown the distances between all others; for the
same reason m is the point that is nearest to most, and what rounding makes of G is cut to what can be.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from potluck.aggregation.aggregation import Aggregation
from potluck.aggregation.spool import Reader, Values

Matrix = npt.NDArray[np.float64]

cache_bytes = 512 << 10
"""Of differences worked on at once, in a core's own cache."""


def squared_distances(given: Aggregation, *, with_previous: bool = False) -> Matrix:
    """D, fp64 [n, n]; with row 0 for the previous aggregate, or for zero where there is none, [n + 1, n + 1].

    Costs n^2 / 2 differences for each coordinate.
    """
    num_before = int(with_previous)
    num_rows = len(given.spool) + num_before
    columns = max(64, cache_bytes // (8 * num_rows))
    total = np.zeros((num_rows, num_rows))

    def work(reader: Reader, start: int, stop: int, _: Values) -> Matrix:
        rows = reader.rows(start, stop, num_before=num_before)
        if with_previous and given.previous is not None:
            rows[0] = given.store.read_slice(given.previous, start, stop).numpy()
        found = np.zeros_like(total)
        scratch = np.empty((num_rows, columns))
        for first in range(0, stop - start, columns):
            part = rows[:, first : first + columns].astype(np.float64)
            for i in range(num_rows - 1):
                difference = np.subtract(part[i + 1 :], part[i], out=scratch[i + 1 :, : part.shape[1]])
                found[i, i + 1 :] += np.square(difference, out=difference).sum(axis=1)
        return found

    def add(_: Values, found: Matrix) -> None:
        np.add(total, found, out=total)

    given.spool.walk(given.spool.rows_numel(num_rows), work, add, fills=False)
    return total + total.T


def nearest_to_most(among: Matrix) -> int:
    """The point with the least median distance to all: a right one, as long as most are."""
    return int(np.median(among, axis=1).argmin())


def squared_distances_to(centre: npt.NDArray[np.float64], among: Matrix) -> npt.NDArray[np.float64]:
    """|x_i - v|^2 for v = sum_j centre_j x_j, fp64 [n]."""
    from_base = among[nearest_to_most(among)]
    most = np.sqrt(np.outer(from_base, from_base))
    products = np.clip((from_base[:, np.newaxis] + from_base - among) / 2, -most, most)
    to_each = products @ centre
    return np.maximum(from_base - 2 * to_each + centre @ to_each, 0.0)
