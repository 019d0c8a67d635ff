"""bf16: the upper half of each fp32, rounded to nearest, ties to even; 2 bytes each.

A finite value never becomes infinite: what would round past the largest bf16 becomes that largest one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from potluck.codecs.elementwise import Bytes, Elementwise, Shape, Values, numel_of, refuse_not_finite, spans

_sign = np.uint16(0x8000)
_largest = np.uint16(0x7F7F)  # the largest finite bf16; 0x7F80 is infinity


class Bf16(Elementwise):
    name = "bf16"

    def buffer_sizes(self, shape: Shape) -> tuple[int, ...]:
        return (2 * numel_of(shape),)

    def encode(self, values: Values, shape: Shape) -> tuple[npt.NDArray[np.generic], ...]:
        halves = np.empty(len(values), np.uint16)
        for low, high in spans(len(values)):
            if not np.isfinite(values[low:high]).all():
                raise refuse_not_finite(self.name)
            bits = values[low:high].view(np.uint32)
            nearest_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            rounded = ((bits + nearest_even) >> np.uint32(16)).astype(np.uint16)
            halves[low:high] = np.minimum(rounded & ~_sign, _largest) | (rounded & _sign)
        return (halves,)

    def decode(self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values) -> None:
        bits = out.view(np.uint32)
        bits[:] = buffers[0].view(np.uint16)[start : start + len(out)]
        np.left_shift(bits, np.uint32(16), out=bits)
