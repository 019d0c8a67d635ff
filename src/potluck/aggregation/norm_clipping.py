"""Every update is scaled down to the median norm, then the weighted mean.

    y = sum_i p_i x_i min(1, M / |x_i|)      M = median_i |x_i|

Bounds what one update can do, not where it points: cheap, and of use with any number of updates. Sun et al. 2019,
arXiv:1911.07963, with a given bound instead of the median. Two passes: norms, sum.
"""

from __future__ import annotations

import statistics

from potluck.aggregation.aggregation import Aggregation
from potluck.aggregation.report import Report


def norm_clipping(given: Aggregation) -> Report:
    norms = given.spool.norms()
    bound = statistics.median(norms)
    factors = tuple(bound / norm if norm > bound else 1.0 for norm in norms)
    given.write_sum([share * factor for share, factor in zip(given.shares, factors, strict=True)])
    return Report(rule="norm_clipping", factors=factors, num_passes=2.0)
