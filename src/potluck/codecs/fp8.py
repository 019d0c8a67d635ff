"""fp8 e4m3 by row: 4 bits of exponent and 3 of mantissa of x / s with s = max |x| / 448; 25 % of fp32 and its scales.

A row is the last dimension. Buffers: the scales, fp32 [rows], then codes [numel], which are 1.mmm * 2^(e-7), or
0.mmm * 2^-6 where e = 0. Micikevicius et al. 2022, arXiv:2209.05433; the codes 0x7F and 0xFF are NaN and never sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from potluck.codecs.elementwise import (
    Buffer,
    Rounded,
    Shape,
    Values,
    as_bits,
    kernels,
    largest_scale,
    numel_of,
)


class Fp8(Rounded):
    kind = "fp8"

    def block(self, shape: Shape) -> int:
        return max(1, shape[-1]) if shape else 1

    def buffer_types(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        numel = numel_of(shape)
        return (("float32", numel // self.block(shape)), ("uint8", numel))

    def encode_slice(self, values: Values, buffers: Sequence[Buffer], start: int, shape: Shape, key: int) -> bool:
        row, stop = self.block(shape), start + len(values)
        scales, codes = buffers[0][start // row : stop // row], buffers[1][start:stop]
        return bool(
            kernels().encode_fp8(
                values, as_bits(values), codes, scales, row, largest_scale(448), np.uint64(key), start,
                self.is_stochastic,
            )
        )  # fmt: skip

    def parts(self, buffers: Sequence[Buffer], first: int, last: int) -> tuple[Buffer, Buffer]:
        return buffers[1], buffers[0][first:last, np.newaxis]
