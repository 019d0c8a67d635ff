"""fp32: the values as they are, 4 bytes each, little-endian."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from potluck.codecs.elementwise import Bytes, Elementwise, Shape, Values, numel_of, refuse_not_finite, spans


class Fp32(Elementwise):
    name = "fp32"

    def buffer_sizes(self, shape: Shape) -> tuple[int, ...]:
        return (4 * numel_of(shape),)

    def encode(self, values: Values, shape: Shape) -> tuple[npt.NDArray[np.generic], ...]:
        for low, high in spans(len(values)):
            if not np.isfinite(values[low:high]).all():
                raise refuse_not_finite(self.name)
        return (values,)

    def decode(self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values) -> None:
        out[:] = buffers[0].view(np.float32)[start : start + len(out)]
