"""The rules on whole vectors in fp64, written from the papers and apart from the package: x is [n, numel]."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


def mean(x: Matrix, w: Matrix) -> Matrix:
    return np.average(x, axis=0, weights=w)


def median(x: Matrix, w: Matrix) -> Matrix:
    return np.median(x, axis=0)


def trimmed_mean(x: Matrix, w: Matrix, k: int) -> Matrix:
    return np.sort(x, axis=0)[k : len(x) - k].mean(axis=0)


def krum_order(x: Matrix, f: int) -> list[int]:
    scores: list[float] = []
    for i in range(len(x)):
        others = sorted(float(((x[i] - x[j]) ** 2).sum()) for j in range(len(x)) if j != i)
        scores.append(sum(others[: len(x) - f - 2]))
    return sorted(range(len(x)), key=lambda i: scores[i])


def geometric_median(x: Matrix, w: Matrix, iterations: int, smoothing: float) -> Matrix:
    among = np.linalg.norm(x[:, np.newaxis] - x, axis=2)
    base = np.median(among, axis=1).argmin()
    radius = 3 * np.median(among[base])
    drawn = [min(1.0, radius / d) * (each - x[base]) if d else 0 * each for d, each in zip(among[base], x, strict=True)]
    v = x[base] + np.average(drawn, axis=0, weights=w)
    for _ in range(iterations):
        v = np.average(x, axis=0, weights=w / np.maximum(np.linalg.norm(x - v, axis=1), smoothing))
    return v


def centered_clipping(x: Matrix, w: Matrix, start: Matrix, iterations: int, radius: float) -> Matrix:
    v = start
    for _ in range(iterations):
        distance = np.linalg.norm(x - v, axis=1)
        tau = radius or np.median(distance)
        factor = np.array([min(1.0, tau / d) if d else 1.0 for d in distance])
        v = v + ((w / w.sum() * factor)[:, np.newaxis] * (x - v)).sum(axis=0)
    return v


def norm_clipping(x: Matrix, w: Matrix) -> Matrix:
    norm = np.linalg.norm(x, axis=1)
    factor = np.array([min(1.0, np.median(norm) / n) if n else 1.0 for n in norm])
    return mean(x * factor[:, np.newaxis], w)


def zero_one_inputs(n: int) -> Sequence[tuple[int, ...]]:
    """What a network must sort to sort everything (the 0-1 principle)."""
    return list(itertools.product((0, 1), repeat=n))
