"""Centred clipping: from the previous aggregate, move by the mean of the updates' differences, each cut to a radius.

    v <- v + sum_i p_i (x_i - v) min(1, tau / |x_i - v|)      from v = the previous aggregate, or 0

Karimireddy et al. 2021, arXiv:2012.10333, Algorithm 2. Without a given tau it is the median of the |x_i - v| at each
step. Two passes, whatever the number of steps: distances, sum.
"""

from __future__ import annotations

import numpy as np

from potluck.aggregation.aggregation import Aggregation
from potluck.aggregation.distances import squared_distances, squared_distances_to
from potluck.aggregation.report import Report

default_iterations = 3


def centered_clipping(given: Aggregation) -> Report:
    config, shares = given.config, np.array(given.shares)
    among = squared_distances(given, with_previous=True)
    centre = np.zeros(len(shares) + 1)  # of the previous aggregate and the updates
    centre[0] = 1.0
    factors = np.ones_like(shares)
    for _ in range(config.iterations or default_iterations):
        distances = np.sqrt(squared_distances_to(centre, among))[1:]
        radius = config.clip_radius or float(np.median(distances))
        factors = np.divide(radius, distances, out=np.ones_like(shares), where=distances > radius)
        steps = shares * factors
        centre *= 1 - steps.sum()
        centre[1:] += steps
    given.write_sum([float(share) for share in centre[1:]], of_previous=float(centre[0]))
    return Report(rule="centered_clipping", factors=tuple(float(f) for f in factors), num_passes=2.0)
