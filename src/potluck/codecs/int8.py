"""int8 by block: q = round(x (1 / s)) with s = max |x| / 127 over each block of 4096; 25.03 % of fp32.

Buffers: the scales, fp32 [blocks], then q, int8 [numel]. The error is at most s/2 (and s/65536, as 1/s is rounded), or
s where rounding is at random. A block whose largest value is below 127 times the smallest normal fp32 (1.5e-36) counts
as zero, so that no machine's treatment of denormal numbers shows in the bytes.
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
    num_blocks,
    numel_of,
)

block = 4096


class Int8(Rounded):
    kind = "int8"

    def block(self, shape: Shape) -> int:
        return block

    def buffer_types(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        numel = numel_of(shape)
        return (("float32", num_blocks(numel, block)), ("int8", numel))

    def encode_slice(self, values: Values, buffers: Sequence[Buffer], start: int, shape: Shape, key: int) -> bool:
        stop = start + len(values)
        scales = buffers[0][start // block : num_blocks(stop, block)]
        inputs = (values, as_bits(values), buffers[1][start:stop], scales, block, largest_scale(127))
        if self.is_stochastic:
            return bool(kernels().encode_int8_noisy(*inputs, np.uint64(key), start))
        return bool(kernels().encode_int8(*inputs))

    def parts(self, buffers: Sequence[Buffer], first: int, last: int) -> tuple[Buffer, Buffer]:
        return buffers[1], buffers[0][first:last, np.newaxis]
