"""Krum: the update that is nearest to its neighbours. Multi-Krum: the weighted mean of the m best.

    score_i = sum of |x_i - x_j|^2 over the n - f - 2 updates nearest to x_i
    y = x_i with the least score;      y = sum of p_i x_i / sum of p_i over the m least scores, m <= n - f - 2

For up to f wrong updates of n >= 2 f + 3. Blanchard et al. 2017, arXiv:1703.02757. Of equal scores the update that
comes first wins. Krum does not use weights. Passes: one for distances, and the share of the updates that are kept.
"""

from __future__ import annotations

import math

import numpy as np

from potluck.aggregation.aggregation import Aggregation
from potluck.aggregation.distances import squared_distances
from potluck.aggregation.report import Report


def krum(given: Aggregation) -> Report:
    (best,) = _best(given, 1)
    given.write_sum([float(i == best) for i in range(len(given.spool))])
    return _report("krum", given, {best})


def multi_krum(given: Aggregation) -> Report:
    kept = set(_best(given, given.config.num_kept))
    total = math.fsum(given.shares[i] for i in kept)
    given.write_sum([share / total if i in kept else 0.0 for i, share in enumerate(given.shares)])
    return _report("multi_krum", given, kept)


def _best(given: Aggregation, num_wanted: int) -> list[int]:
    """The updates of least score, at most n - f - 2; 0 for that many."""
    n, f = len(given.spool), given.config.max_faulty
    fewer = f"aggregation.max_faulty to {(n - 3) // 2}, " if n >= 3 else ""
    given.require(given.config.num_needed(n), f"{given.config.rule} with aggregation.max_faulty = {f}", instead=fewer)
    distances = squared_distances(given)
    np.fill_diagonal(distances, -1.0)  # itself comes first, and is left out
    scores = np.sort(distances, axis=1)[:, 1 : n - f - 1].sum(axis=1)
    return [int(i) for i in np.argsort(scores, kind="stable")[: min(num_wanted or n, n - f - 2)]]


def _report(rule: str, given: Aggregation, kept: set[int]) -> Report:
    n = len(given.spool)
    return Report(rule=rule, factors=tuple(float(i in kept) for i in range(n)), num_passes=1 + len(kept) / n)
