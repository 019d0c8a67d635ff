"""1 bit: the sign of each value times the mean |x| of its block of 4096; 3.15 % of fp32.

Seide et al. 2014 with one magnitude for both signs; of use with error feedback only. Buffers: the means, fp32 [blocks],
then a bit for each value, set where it is below 0, eight to a byte, the earliest lowest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from potluck.codecs.elementwise import Buffer, Dense, Role, Shape, Values, changes, kernels, num_blocks, numel_of

block = 4096


class OneBit(Dense):
    name = kind = "1bit"
    per = 8
    roles: frozenset[Role] = changes

    def block(self, shape: Shape) -> int:
        return block

    def buffer_types(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        numel = numel_of(shape)
        return (("float32", num_blocks(numel, block)), ("uint8", -(-numel // 8)))

    def encode_slice(self, values: Values, buffers: Sequence[Buffer], start: int, shape: Shape, key: int) -> bool:
        stop = start + len(values)
        scales = buffers[0][start // block : num_blocks(stop, block)]
        return bool(kernels().encode_1bit(values, buffers[1][start // 8 : -(-stop // 8)], scales, block))

    def parts(self, buffers: Sequence[Buffer], first: int, last: int) -> tuple[Buffer, Buffer]:
        return buffers[1], buffers[0][first:last, np.newaxis]
