"""The geometric median: the point with the least weighted sum of distances to the updates.

    v <- sum_i b_i x_i / sum_i b_i      b_i = p_i / max(nu, |x_i - v|), from v = sum_i p_i x_i

Smoothed Weiszfeld steps, of RFA: Pillutla et al. 2019, arXiv:1912.13445, Algorithm 2. Bears wrong updates of less than
half the weight. Two passes, whatever the number of steps: distances, sum.
"""

from __future__ import annotations

import numpy as np

from potluck.aggregation.aggregation import Aggregation
from potluck.aggregation.distances import squared_distances, squared_distances_to
from potluck.aggregation.report import Report

default_iterations = 8


def geometric_median(given: Aggregation) -> Report:
    config, shares = given.config, np.array(given.shares)
    among = squared_distances(given)
    centre = shares
    for _ in range(config.iterations or default_iterations):
        nearness = shares / np.maximum(np.sqrt(squared_distances_to(centre, among)), config.smoothing)
        centre = nearness / nearness.sum()
    given.write_sum([float(share) for share in centre])
    counts = centre / shares
    return Report(rule="geometric_median", factors=tuple(float(f) for f in counts / counts.max()), num_passes=2.0)
