"""The weighted mean.

    y = sum_i p_i x_i      p_i = w_i / sum_j w_j

p_i is computed in fp64 and rounded once, so the mean of equal updates of equal weight is that update where the weights
divide evenly. One pass, each element by itself: so it can be computed within whatever reads it. One wrong update moves
it anywhere.
"""

from __future__ import annotations

from potluck.aggregation.aggregation import Aggregation
from potluck.aggregation.report import Report


def mean(given: Aggregation) -> Report:
    given.write_sum(given.shares)
    return mean_report(len(given.shares))


def mean_report(num_updates: int) -> Report:
    """Every update counts whole."""
    return Report(rule="mean", factors=(1.0,) * num_updates, num_passes=1.0)
