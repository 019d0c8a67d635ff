"""int8 by block: q = round(x / s) with s = max |x| / 127 over each block of 4096; 25.03 % of fp32.

Buffers: the scales, fp32 [blocks], then q, int8 [numel]. The error is at most s/2. A block whose largest value is
below 127 times the smallest normal fp32 (1.5e-36) counts as zero, so that no machine's treatment of denormal numbers
shows in the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from potluck.codecs.elementwise import (
    Bytes,
    Elementwise,
    Shape,
    Values,
    numel_of,
    refuse_not_finite,
    slice_numel,
    spans,
)

block = 4096
_levels = np.float32(127)
_smallest_scale = np.finfo(np.float32).tiny
_largest_scale = np.nextafter(np.finfo(np.float32).max / _levels, np.float32(0))  # 127 times it is still finite


class Int8(Elementwise):
    name = "int8"

    def buffer_sizes(self, shape: Shape) -> tuple[int, ...]:
        numel = numel_of(shape)
        return (4 * _num_blocks(numel), numel)

    def encode(self, values: Values, shape: Shape) -> tuple[npt.NDArray[np.generic], ...]:
        numel = len(values)
        scales = np.zeros(_num_blocks(numel), np.float32)
        quantised = np.zeros(numel, np.int8)
        whole = numel // block * block
        parts = [*spans(whole, slice_numel), *([(whole, numel)] if whole < numel else [])]
        for low, high in parts:
            rows = values[low:high].reshape(-1, min(block, high - low))
            largest = np.abs(rows).max(axis=1)
            if not np.isfinite(largest).all():  # a NaN anywhere makes the maximum one
                raise refuse_not_finite(self.name)
            scale = np.minimum(largest / _levels, _largest_scale)
            scale[scale < _smallest_scale] = 0
            divisor = np.where(scale > 0, scale, np.float32(np.inf))[:, np.newaxis]
            levels = np.clip(np.rint(rows / divisor), -_levels, _levels)
            quantised[low:high] = levels.astype(np.int8).reshape(-1)
            scales[low // block : low // block + len(scale)] = scale
        return scales, quantised

    def decode(self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values) -> None:
        scales, quantised = buffers[0].view(np.float32), buffers[1].view(np.int8)
        stop = start + len(out)
        first = start // block
        by_element = np.repeat(scales[first : _num_blocks(stop)], block)[start - first * block :][: len(out)]
        with np.errstate(over="ignore", invalid="ignore"):  # of scales that came from elsewhere; checked by the reader
            np.multiply(quantised[start:stop], by_element, out=out)


def _num_blocks(numel: int) -> int:
    return -(-numel // block)
