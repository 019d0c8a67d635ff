"""The geometric median: the point with the least weighted sum of distances to the updates.

    v <- sum_i b_i x_i / sum_i b_i      b_i = p_i / max(nu, |x_i - v|)
    v0 = x_m + sum_i p_i (x_i - x_m) min(1, 3 M / |x_i - x_m|)    m nearest to most, M the median distance to it

Smoothed Weiszfeld steps, of RFA: Pillutla et al. 2019, arXiv:1912.13445, Algorithm 2. There v0 is the mean, from which
a few steps do not come back when one update is huge; here it is the mean as long as no update is far off. Bears wrong
updates of less than half the weight. Two passes, whatever the number of steps: distances, sum.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from potluck.aggregation.aggregation import Aggregation
from potluck.aggregation.distances import Matrix, nearest_to_most, squared_distances, squared_distances_to
from potluck.aggregation.report import Report

default_iterations = 8
reach = 3.0
"""Of the start, in median distances."""


def geometric_median(given: Aggregation) -> Report:
    config, shares = given.config, np.array(given.shares)
    among = squared_distances(given)
    centre = _start(shares, among)
    for _ in range(config.iterations or default_iterations):
        nearness = shares / np.maximum(np.sqrt(squared_distances_to(centre, among)), config.smoothing)
        centre = nearness / nearness.sum()
    given.write_sum([float(share) for share in centre])
    counts = centre / shares
    return Report(rule="geometric_median", factors=tuple(float(f) for f in counts / counts.max()), num_passes=2.0)


def _start(shares: npt.NDArray[np.float64], among: Matrix) -> npt.NDArray[np.float64]:
    """The mean of the updates, those that are far from most of them drawn near."""
    base = nearest_to_most(among)
    distances = np.sqrt(among[base])
    radius = reach * np.median(distances)
    centre = shares * np.divide(radius, distances, out=np.ones_like(shares), where=distances > radius)
    centre[base] += 1.0 - centre.sum()
    return centre
