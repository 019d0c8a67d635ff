"""2 bits: which of four bins a value is in, and the mean of each bin's members; 6.35 % of fp32.

    bins of width 3 sigma over [mean - 6 sigma, mean + 6 sigma], values beyond clipped to it, for each block of 4096

The statistical quantiser that SparseLoCo (2025) puts after top-k. The two inner bins hold all but 0.3 % of normal
values, so that it is nearly their sign with a mean for each. Buffers: the means, fp32 [blocks, 4], 0 for a bin without
members, then the bins, four to a byte, the earliest in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from potluck.codecs.elementwise import Buffer, Dense, Role, Shape, Values, changes, kernels, num_blocks, numel_of

block = 4096
num_sigmas = 6.0


class TwoBit(Dense):
    name = kind = "2bit"
    per = 4
    roles: frozenset[Role] = changes

    def block(self, shape: Shape) -> int:
        return block

    def buffer_types(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        numel = numel_of(shape)
        return (("float32", 4 * num_blocks(numel, block)), ("uint8", -(-numel // 4)))

    def encode_slice(self, values: Values, buffers: Sequence[Buffer], start: int, shape: Shape, key: int) -> bool:
        stop = start + len(values)
        tables = buffers[0].reshape(-1, 4)[start // block : num_blocks(stop, block)]
        codes = buffers[1][start // 4 : -(-stop // 4)]
        return bool(kernels().encode_2bit(values, codes, tables, block, np.float64(num_sigmas)))

    def parts(self, buffers: Sequence[Buffer], first: int, last: int) -> tuple[Buffer, Buffer]:
        return buffers[1], buffers[0].reshape(-1, 4)[first:last]
