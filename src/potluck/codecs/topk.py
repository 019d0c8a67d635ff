"""Top-k by chunk: of each 4096 values the k largest, with their positions of 12 bits; the rest counts as zero.

    topk(1.5625%): k = 64; with 2-bit values (64 * 14) / (4096 * 32) of fp32, which is 1/146

A chunk is 64 x 64 of a matrix whose dimensions allow it, else 4096 values in a row; the last one of n < 4096 keeps
ceil(k n / 4096). The chunks are those of SparseLoCo (2025). Of values of equal size the
earlier is kept. Buffers: positions in their chunk, ascending, two to three bytes; then the kept values in a codec of
their own, which sees them as one vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from potluck.codecs import threads
from potluck.codecs.elementwise import (
    Buffer,
    Bytes,
    Role,
    Shape,
    TensorCodec,
    Values,
    as_bits,
    changes,
    frozen,
    numel_of,
    refuse_not_finite,
    slice_numel,
    whole_blocks,
)
from potluck.types.errors import CorruptError

chunk_numel = 4096
_side = 64
_widest = 1 << 16
"""Wider matrices are cut in a row: a slice of them would have too many chunks to look through."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Where the chunks of a tensor are: `per_row` of them side by side in `span` elements; see `sparse_kernels`."""

    numel: int
    per_row: int
    span: int
    width: int
    stride: int

    @staticmethod
    def of(shape: Shape) -> Chunks:
        numel = numel_of(shape)
        if numel and len(shape) == 2 and not shape[0] % _side and not shape[1] % _side and shape[1] <= _widest:
            return Chunks(numel, shape[1] // _side, _side * shape[1], _side, shape[1])
        return Chunks(numel, 1, chunk_numel, chunk_numel, chunk_numel)

    @property
    def num(self) -> int:
        return -(-self.numel // chunk_numel)

    def num_kept(self, k: int) -> int:
        whole, rest = divmod(self.numel, chunk_numel)
        return whole * k + -(-k * rest // chunk_numel)

    def overlapping(self, start: int, stop: int) -> tuple[int, int]:
        return start // self.span * self.per_row, min(self.num, -(-stop // self.span) * self.per_row)


class TopK(TensorCodec):
    roles: frozenset[Role] = changes

    def __init__(self, k: int, values: TensorCodec) -> None:
        """Keep `k` of 4096, 1 <= k <= 4096, and encode what is kept by `values`."""
        self._k, self._values = k, values
        percent = f"{k * 100 / chunk_numel:.12f}".rstrip("0").rstrip(".")
        self.name = f"topk({percent}%)" + (f"+{values.name}" if values.name != "fp32" else "")

    def buffer_types(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        num = Chunks.of(shape).num_kept(self._k)
        return (("uint8", -(-3 * num // 2)), *self._values.buffer_types((num,)))

    def encode(
        self, values: Values, shape: Shape, *, seed: int = 0, out: Sequence[Buffer] | None = None
    ) -> tuple[Buffer, ...]:
        loops = _loops()
        chunks, buffers = Chunks.of(shape), self.allocate(shape) if out is None else out
        num = chunks.num_kept(self._k)
        positions, kept = np.empty(num, np.uint16), np.empty(num, np.float32)
        seen, bits = frozen(values), as_bits(values)

        def work(first: int, last: int) -> bool:
            where = (self._k, chunks.per_row, chunks.span, chunks.width, chunks.stride)
            return bool(loops.select(seen, bits, first, last, *where, positions, kept))

        if not all(threads.spread(work, chunks.num, 16, numel_each=chunk_numel)):
            raise refuse_not_finite(self.name)
        loops.pack(positions, buffers[0])
        return (buffers[0], *self._values.encode(kept, (num,), seed=seed, out=buffers[1:]))

    def decode(self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values) -> None:
        self._spread(buffers, shape, start, out, 1.0, adds=False)

    def accumulate(self, buffers: Sequence[Bytes], shape: Shape, start: int, into: Values, weight: float) -> None:
        """As of any codec, but elements that were not kept are left alone: a negative zero there stays one."""
        self._spread(buffers, shape, start, into, weight, adds=True)

    def decode_slice(self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values) -> None:
        self._scatter(buffers, shape, start, out, 1.0, adds=False)

    def byte_ranges(self, shape: Shape, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        chunks = Chunks.of(shape)
        num = chunks.num_kept(self._k)
        first, last = chunks.overlapping(start, stop)
        low, high = first * self._k, min(num, last * self._k)
        return ((low // 2 * 3, -(-3 * high // 2)), *self._values.byte_ranges((num,), low, high))

    def _spread(
        self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values, weight: float, *, adds: bool
    ) -> None:
        def work(low: int, high: int) -> None:
            self._scatter(buffers, shape, start + low, out[low:high], weight, adds=adds)

        threads.spread(work, len(out), max(slice_numel, whole_blocks(slice_numel, Chunks.of(shape).span)))

    def _scatter(
        self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values, weight: float, *, adds: bool
    ) -> None:
        chunks = Chunks.of(shape)
        num = chunks.num_kept(self._k)
        first, last = chunks.overlapping(start, start + len(out))
        low = first * self._k
        kept = np.empty(max(0, min(num, last * self._k) - low), np.float32)
        self._values.decode_slice(buffers[1:], (num,), low, kept)
        if not adds:
            out[:] = 0
        is_right = _loops().scatter(
            frozen(buffers[0]), kept, first, last, self._k, chunks.numel, chunks.per_row, chunks.span, chunks.width,
            chunks.stride, start, np.float32(weight), adds, out,
        )  # fmt: skip
        if not is_right:
            raise CorruptError(f"a tensor in {self.name} keeps positions that do not ascend inside their chunk")


def _loops() -> Any:
    from potluck.codecs import sparse_kernels

    return sparse_kernels
