"""The mean of each coordinate without its largest and smallest values.

    y_c = mean of the values of ranks k+1 ... n-k of x_1c ... x_nc      k = ceil(beta n)

Yin et al. 2018, arXiv:1803.01498, Definition 2. Every update counts alike: weights are not used. One pass.
"""

from __future__ import annotations

from potluck.aggregation.aggregation import Aggregation
from potluck.aggregation.ordered import write_mean_of_ranks
from potluck.aggregation.report import Report


def trimmed_mean(given: Aggregation) -> Report:
    n, fraction = len(given.spool), given.config.trim_fraction
    k = given.config.num_trimmed(n)
    given.require(given.config.num_needed(n), f"trimmed_mean with aggregation.trim_fraction = {fraction:g}")
    write_mean_of_ranks(given, k, n - k)
    return Report(rule="trimmed_mean", factors=(1.0,) * n, num_trimmed=k, num_passes=1.0)
