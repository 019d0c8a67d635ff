"""Low rank: a matrix M [m, n] as P Q^T with P [m, r] orthonormal; r (m + n) numbers for m n.

    Q0 random from the seed;  twice: P = orthonormalise(M Q), Q = M^T P

Vogels et al. 2019, arXiv:1905.13727, Algorithm 1, which instead goes on from the last step's Q with one iteration; a
codec has no memory, so it does two. Tensors that are no matrices, or would not get smaller, go as fp32. Meant for
updates with error feedback, and never for parameters. Buffers: P^T, fp32 [r, m], then Q^T, fp32 [r, n].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from potluck.codecs import threads
from potluck.codecs.elementwise import (
    Buffer,
    Bytes,
    Role,
    Shape,
    TensorCodec,
    Values,
    as_bits,
    changes,
    frozen,
    kernels,
    noise_key,
    refuse_not_finite,
    slice_numel,
)
from potluck.codecs.fp32 import Fp32

num_iterations = 2


class LowRank(TensorCodec):
    roles: frozenset[Role] = changes
    is_elementwise = False

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._whole = Fp32()
        self.name = f"powersgd({rank})"

    def pays(self, shape: Shape) -> bool:
        return len(shape) == 2 and self._rank * (shape[0] + shape[1]) < shape[0] * shape[1]

    def buffer_types(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        if not self.pays(shape):
            return self._whole.buffer_types(shape)
        return tuple(("float32", self._rank * length) for length in shape)

    def encode(
        self, values: Values, shape: Shape, *, seed: int = 0, out: Sequence[Buffer] | None = None
    ) -> tuple[Buffer, ...]:
        if not self.pays(shape):
            return self._whole.encode(values, shape)
        largest = kernels().largest_bits
        bits = as_bits(values)
        found = threads.spread(lambda low, high: int(largest(bits[low:high])), len(values), slice_numel)
        most = float(np.array([max(found)], np.int32).view(np.float32)[0])
        if not math.isfinite(most):
            raise refuse_not_finite(self.name)
        buffers = tuple(self.allocate(shape) if out is None else out)
        left, right = (b.reshape(self._rank, -1) for b in buffers)
        if most < 2.0**-100:  # as good as zero, and squares would be denormal
            left[:], right[:] = 0, 0
            return buffers
        scale = 2.0 ** min(math.frexp(most)[1], 126)
        self._factor(frozen(values).reshape(shape), np.float32(1 / scale), left, right, noise_key(seed))
        limit = np.finfo(np.float32).max / (2 * self._rank)  # so that what is decoded is finite
        right[:] = np.clip(right.astype(np.float64) * scale, -limit, limit)
        return buffers

    def _factor(self, matrix: Values, inverse: np.float32, left: Values, right: Values, key: int) -> None:
        loops = _loops()
        rows, cols = matrix.shape
        loops.start_at_random(right, np.uint64(key))
        for _ in range(num_iterations):
            threads.spread(
                lambda low, high: loops.multiply_rows(matrix, inverse, right, low, high, left), rows,
                max(1, slice_numel // cols), numel_each=cols,
            )  # fmt: skip
            loops.orthonormalise(left)
            threads.spread(
                lambda low, high: loops.multiply_columns(matrix, inverse, left, low, high, right), cols,
                max(64, cols // 8), numel_each=rows,
            )  # fmt: skip

    def encode_residual(
        self, values: Values, shape: Shape, *, seed: int = 0, out: Sequence[Buffer] | None = None
    ) -> tuple[Buffer, ...]:
        if not self.pays(shape):
            return self._whole.encode_residual(values, shape)
        return super().encode_residual(values, shape, seed=seed, out=out)

    def decode(self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values) -> None:
        if not self.pays(shape):
            return self._whole.decode(buffers, shape, start, out)
        threads.spread(
            lambda low, high: self.decode_slice(buffers, shape, start + low, out[low:high]), len(out), slice_numel
        )
        return None

    def decode_slice(self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values) -> None:
        if not self.pays(shape):
            return self._whole.decode_slice(buffers, shape, start, out)
        left, right = (frozen(b).view(np.float32).reshape(self._rank, -1) for b in buffers)
        _loops().multiply_slice(left, right, start, out)
        return None


def _loops() -> Any:
    from potluck.codecs import low_rank_kernels

    return low_rank_kernels
