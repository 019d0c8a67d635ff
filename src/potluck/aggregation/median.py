"""The median of each coordinate; of an even number of values the mean of the two in the middle.

    y_c = median(x_1c, ..., x_nc)

Yin et al. 2018, arXiv:1803.01498, Definition 1. Every update counts alike: weights are not used. One pass.
"""

from __future__ import annotations

from potluck.aggregation.aggregation import Aggregation
from potluck.aggregation.ordered import write_mean_of_ranks
from potluck.aggregation.report import Report


def median(given: Aggregation) -> Report:
    n = len(given.spool)
    k = (n - 1) // 2
    write_mean_of_ranks(given, k, n - k)
    return Report(rule="median", factors=(1.0,) * n, num_trimmed=k, num_passes=1.0)
