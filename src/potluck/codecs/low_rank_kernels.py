"""The loops of low rank: products with tall and thin matrices, and Gram-Schmidt.

Each sum goes in one fixed order, so that the factors are the same on any number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from potluck.codecs.kernels import chance, kernel

_lanes = 16


@kernel
def start_at_random(factor: Any, key: Any) -> None:
    for k in range(factor.shape[0]):
        for j in range(factor.shape[1]):
            factor[k, j] = np.float32(2) * chance(key, k * factor.shape[1] + j) - np.float32(1)


@kernel
def multiply_rows(matrix: Any, inverse: Any, right: Any, first: int, last: int, left: Any) -> None:
    """left[k, i] = sum_j (inverse * matrix[i, j]) right[k, j] for rows `first` to `last`, in 16 partial sums."""
    lanes = np.empty(_lanes, np.float32)
    cols = matrix.shape[1]
    whole = cols // _lanes * _lanes
    for i in range(first, last):
        for k in range(right.shape[0]):
            lanes[:] = np.float32(0)
            for j in range(0, whole, _lanes):
                for lane in range(_lanes):
                    lanes[lane] += matrix[i, j + lane] * inverse * right[k, j + lane]
            total = np.float32(0)
            for lane in range(_lanes):
                total += lanes[lane]
            for j in range(whole, cols):
                total += matrix[i, j] * inverse * right[k, j]
            left[k, i] = total


@kernel
def multiply_columns(matrix: Any, inverse: Any, left: Any, first: int, last: int, right: Any) -> None:
    """right[k, j] = sum_i left[k, i] (inverse * matrix[i, j]) for columns `first` to `last`."""
    right[:, first:last] = np.float32(0)
    for i in range(matrix.shape[0]):
        for k in range(left.shape[0]):
            factor = left[k, i]
            for j in range(first, last):
                right[k, j] += matrix[i, j] * inverse * factor


@kernel
def orthonormalise(rows: Any) -> None:
    """Modified Gram-Schmidt over the rows, in fp64. A row that depends on those before it becomes zero."""
    for k in range(rows.shape[0]):
        before = 0.0
        for i in range(rows.shape[1]):
            before += np.float64(rows[k, i]) * np.float64(rows[k, i])
        for other in range(k):
            product = 0.0
            for i in range(rows.shape[1]):
                product += np.float64(rows[k, i]) * np.float64(rows[other, i])
            for i in range(rows.shape[1]):
                rows[k, i] = np.float32(np.float64(rows[k, i]) - product * np.float64(rows[other, i]))
        after = 0.0
        for i in range(rows.shape[1]):
            after += np.float64(rows[k, i]) * np.float64(rows[k, i])
        depends = after <= 1e-10 * before or after == 0.0
        factor = 0.0 if depends else 1.0 / np.sqrt(after)
        for i in range(rows.shape[1]):
            rows[k, i] = np.float32(np.float64(rows[k, i]) * factor)


@kernel
def multiply_slice(left: Any, right: Any, start: int, out: Any) -> None:
    """out[e - start] = sum_k left[k, e // cols] right[k, e % cols], in order of k."""
    cols = right.shape[1]
    stop = start + out.shape[0]
    for row in range(start // cols, (stop + cols - 1) // cols):
        low, high = max(start, row * cols), min(stop, (row + 1) * cols)
        for k in range(right.shape[0]):
            factor = left[k, row]
            for e in range(low, high):
                product = factor * right[k, e - row * cols]
                out[e - start] = product if k == 0 else out[e - start] + product
