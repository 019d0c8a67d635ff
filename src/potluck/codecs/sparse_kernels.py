"""The loops of top-k: selecting within chunks, 12-bit positions, and spreading kept values out again.

A chunk has 4096 elements, the last one of a tensor perhaps fewer. With `width` w and `stride` s, element i of the chunk
that starts at b is at b + (i // w) * s + i % w of the tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from potluck.codecs.kernels import kernel

chunk_numel = 4096


@kernel
def _threshold(magnitudes: Any, counts: Any, num: int, k: int) -> Any:
    """The k-th largest of `magnitudes[:num]`, by 11, 10 and 10 bits, and how many above it there are."""
    prefix, above = np.int64(0), 0
    for shift, bits in ((20, 11), (10, 10), (0, 10)):
        counts[:] = 0
        for i in range(num):
            if shift == 20 or magnitudes[i] >> (shift + bits) == prefix:
                counts[(magnitudes[i] >> shift) & ((1 << bits) - 1)] += 1
        digit = (1 << bits) - 1
        while above + counts[digit] < k:
            above += counts[digit]
            digit -= 1
        prefix = (prefix << bits) | digit
    return prefix, above


@kernel
def select(
    values: Any, bits: Any, first: int, last: int, k: int, per_row: int, span: int, width: int, stride: int,
    positions: Any, kept: Any,
) -> bool:  # fmt: skip
    """The k largest of each chunk from `first` to `last`, those of equal size by place. Whether all are finite."""
    magnitudes = np.empty(chunk_numel, np.int32)
    counts = np.empty(2048, np.int32)
    numel = values.shape[0]
    for chunk in range(first, last):
        base = (chunk // per_row) * span + (chunk % per_row) * width
        num = min(chunk_numel, numel - chunk * chunk_numel)
        for row in range((num + width - 1) // width):
            for i in range(min(width, num - row * width)):
                magnitudes[row * width + i] = bits[base + row * stride + i] & np.int32(0x7FFFFFFF)
        wanted = (k * num + chunk_numel - 1) // chunk_numel
        limit, above = _threshold(magnitudes, counts, num, wanted)
        num_equal = wanted - above
        to = chunk * k
        for i in range(num):
            if magnitudes[i] >= limit:
                if magnitudes[i] >= np.int32(0x7F800000):
                    return False
                if magnitudes[i] == limit:
                    if num_equal == 0:
                        continue
                    num_equal -= 1
                positions[to] = i
                kept[to] = values[base + (i // width) * stride + i % width]
                to += 1
    return True


@kernel
def pack(positions: Any, packed: Any) -> None:
    """Two positions to three bytes, the earlier one in the lower bits."""
    for j in range(positions.shape[0] // 2):
        both = np.int64(positions[2 * j]) | (np.int64(positions[2 * j + 1]) << 12)
        packed[3 * j] = np.uint8(both & 255)
        packed[3 * j + 1] = np.uint8((both >> 8) & 255)
        packed[3 * j + 2] = np.uint8(both >> 16)
    if positions.shape[0] % 2:
        last = np.int64(positions[positions.shape[0] - 1])
        packed[packed.shape[0] - 2] = np.uint8(last & 255)
        packed[packed.shape[0] - 1] = np.uint8(last >> 8)


@kernel
def unpack(packed: Any, number: int) -> Any:
    byte = number // 2 * 3
    if number % 2:
        return (np.int64(packed[byte + 1]) >> 4) | (np.int64(packed[byte + 2]) << 4)
    return np.int64(packed[byte]) | ((np.int64(packed[byte + 1]) & 15) << 8)


@kernel
def scatter(
    packed: Any, kept: Any, first: int, last: int, k: int, numel: int, per_row: int, span: int, width: int,
    stride: int, start: int, weight: Any, adds: bool, out: Any,
) -> bool:  # fmt: skip
    """Put those kept of chunks `first` to `last` that are in [start, start + len(out)) into `out`, or add them.

    Whether the positions of each chunk ascend and are inside it; nothing is written where one is not.
    """
    for chunk in range(first, last):
        base = (chunk // per_row) * span + (chunk % per_row) * width - start
        num = min(chunk_numel, numel - chunk * chunk_numel)
        before = np.int64(-1)
        for j in range((k * num + chunk_numel - 1) // chunk_numel):
            number = chunk * k + j
            i = unpack(packed, number)
            if i <= before or i >= num:
                return False
            before = i
            to = base + (i // width) * stride + i % width
            if to >= 0 and to < out.shape[0]:
                value = kept[number - first * k]
                if adds:
                    out[to] += weight * value
                else:
                    out[to] = value
    return True
