"""bf16: the upper half of each fp32, 2 bytes each, rounded to nearest, ties to even, or at random.

A finite value never becomes infinite: what would round past the largest bf16 becomes that largest one.
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
    no_tables,
    numel_of,
)


class Bf16(Rounded):
    kind = "bf16"

    def buffer_types(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        return (("uint16", numel_of(shape)),)

    def together(self, shape: Shape) -> int:
        return 1

    def encode_slice(self, values: Values, buffers: Sequence[Buffer], start: int, shape: Shape, key: int) -> bool:
        codes = buffers[0][start : start + len(values)]
        return bool(kernels().encode_bf16(as_bits(values), codes, np.uint64(key), start, self.is_stochastic))

    def parts(self, buffers: Sequence[Buffer], first: int, last: int) -> tuple[Buffer, Buffer]:
        return buffers[0], no_tables
