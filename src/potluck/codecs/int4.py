"""int4 by block: q = round(x / s), -7 to 7, with s = max |x| / 7 over each block of 64, rounded up to bf16; 13.3 % of
fp32.

Buffers: the scales, bf16 [blocks], then q + 8, two to a byte, the earlier one in the lower half. Since s is rounded up,
|x / s| <= 7 and the error is at most s/2, or s where rounding is at random; but 7 s stays finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from potluck.codecs.elementwise import (
    Buffer,
    Role,
    Rounded,
    Shape,
    Values,
    any_role,
    as_bits,
    kernels,
    largest_scale,
    num_blocks,
    numel_of,
)

block = 64
_most = int(largest_scale(7).view(np.uint32)) >> 16


class Int4(Rounded):
    kind = "int4"
    per = 2
    roles: frozenset[Role] = any_role - {"parameter"}

    def block(self, shape: Shape) -> int:
        return block

    def buffer_types(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        numel = numel_of(shape)
        return (("uint16", num_blocks(numel, block)), ("uint8", -(-numel // 2)))

    def encode_slice(self, values: Values, buffers: Sequence[Buffer], start: int, shape: Shape, key: int) -> bool:
        stop = start + len(values)
        scales = buffers[0][start // block : num_blocks(stop, block)]
        codes = buffers[1][start // 2 : -(-stop // 2)]
        return bool(
            kernels().encode_int4(
                values, as_bits(values), codes, scales, block, _most, np.uint64(key), start, self.is_stochastic
            )
        )

    def parts(self, buffers: Sequence[Buffer], first: int, last: int) -> tuple[Buffer, Buffer]:
        scales = (buffers[0][first:last].astype(np.uint32) << np.uint32(16)).view(np.float32)
        return buffers[1], scales[:, np.newaxis]
