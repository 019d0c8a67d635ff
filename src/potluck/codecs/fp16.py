"""fp16: x / s rounded to 11 bits, with one power of two s for a tensor, so that nothing overflows; 2 bytes each.

    s = 2^(e - 14) with 2^e <= max |x| < 2^(e+1), and 2^-102 at least

So scaling is exact, and no product of a half and s is a denormal fp32. Buffers: s, fp32 [1], then halves [numel].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from potluck.codecs import threads
from potluck.codecs.elementwise import (
    Buffer,
    Dense,
    Shape,
    Values,
    as_bits,
    kernels,
    numel_of,
    slice_numel,
)

_largest_scale = 2.0**113


class Fp16(Dense):
    name = kind = "fp16"

    def buffer_types(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        return (("float32", 1), ("uint16", numel_of(shape)))

    def prepare(self, values: Values, buffers: Sequence[Buffer], shape: Shape) -> bool:
        largest = kernels().largest_bits
        bits = as_bits(values)
        found = threads.spread(lambda low, high: int(largest(bits[low:high])), len(values), slice_numel)
        most = np.array([max(found, default=0)], np.int32).view(np.float32)[0]
        if not np.isfinite(most):
            return False
        exponent = math.frexp(float(most))[1] - 1
        buffers[0][0] = np.float32(2.0 ** max(exponent - 14, -102)) if most else np.float32(1)
        return True

    def encode_slice(self, values: Values, buffers: Sequence[Buffer], start: int, shape: Shape, key: int) -> bool:
        scale = buffers[0][0]
        most = 0x7800 if scale < _largest_scale else 0x77FF  # 2^15 times that scale would be infinite
        kernels().encode_fp16(values, buffers[1][start : start + len(values)], scale, most)
        return True

    def parts(self, buffers: Sequence[Buffer], first: int, last: int) -> tuple[Buffer, Buffer]:
        return buffers[1], buffers[0].reshape(1, 1)
