"""A lossless stage after any codec: zstd over the byte planes of its buffers. How small it gets depends on the values.

One buffer: the compressed bytes of each segment, u32 little-endian, then the segments in order. A segment is 256 KiB of
one buffer of the codec before (the last one less), the bytes of its items regrouped so that all first bytes come first.
A segment that does not get smaller is kept as it is. So any slice decodes from the segments it is in, and nobody can
send what unpacks to more than the shape says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from potluck.codecs import threads
from potluck.codecs.elementwise import Buffer, Bytes, Shape, TensorCodec, Values, as_bytes, numel_of, spans
from potluck.types.errors import CorruptError

segment_bytes = 1 << 18
piece_numel = 1 << 22
"""Elements unpacked at once."""
level = 1


class Lossless(TensorCodec):
    is_sized = False

    def __init__(self, before: TensorCodec) -> None:
        self._before = before
        self.name = f"{before.name}+zstd"
        self.roles = before.roles
        self.is_elementwise = before.is_elementwise

    def buffer_types(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        sizes = self._before.buffer_sizes(shape)
        return (("uint8", 4 * _num_segments(sizes) + sum(sizes)),)

    def encode(
        self, values: Values, shape: Shape, *, seed: int = 0, out: Sequence[Buffer] | None = None
    ) -> tuple[Buffer, ...]:
        return self._pack(self._before.encode(values, shape, seed=seed))

    def encode_residual(
        self, values: Values, shape: Shape, *, seed: int = 0, out: Sequence[Buffer] | None = None
    ) -> tuple[Buffer, ...]:
        return self._pack(self._before.encode_residual(values, shape, seed=seed))

    def decode(self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values) -> None:
        for low, high in spans(len(out), piece_numel):
            unpacked = self._unpack(buffers[0], shape, start + low, start + high)
            self._before.decode(unpacked, shape, start + low, out[low:high])

    def accumulate(self, buffers: Sequence[Bytes], shape: Shape, start: int, into: Values, weight: float) -> None:
        for low, high in spans(len(into), piece_numel):
            unpacked = self._unpack(buffers[0], shape, start + low, start + high)
            self._before.accumulate(unpacked, shape, start + low, into[low:high], weight)

    def sum_squares(self, buffers: Sequence[Bytes], shape: Shape, start: int = 0, stop: int | None = None) -> float:
        total, end = 0.0, numel_of(shape) if stop is None else stop
        for low in range(start, end, piece_numel):
            high = min(low + piece_numel, end)
            total += self._before.sum_squares(self._unpack(buffers[0], shape, low, high), shape, low, high)
        return total

    def _pack(self, buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
        import zstandard

        parts = [
            (as_bytes(b)[low:high], b.dtype.itemsize) for b in buffers for low, high in spans(b.nbytes, segment_bytes)
        ]

        def work(low: int, high: int) -> bytes:
            part, width = parts[low]
            planes = np.ascontiguousarray(part.reshape(-1, width).T)
            packed = zstandard.ZstdCompressor(level=level, write_content_size=True).compress(planes.data)
            return packed if len(packed) < len(part) else part.tobytes()

        packed = threads.spread(work, len(parts), 1, numel_each=segment_bytes // 4)
        table = np.array([len(p) for p in packed], "<u4").tobytes()
        return (np.frombuffer(table + b"".join(packed), np.uint8),)

    def _unpack(self, buffer: Bytes, shape: Shape, start: int, stop: int) -> list[Bytes]:
        """The buffers of the codec before, of which only what [start, stop) needs is filled in."""
        types = self._before.buffer_types(shape)
        sizes = self._before.buffer_sizes(shape)
        num = _num_segments(sizes)
        if len(buffer) < 4 * num:
            raise CorruptError(f"a tensor in {self.name} has {len(buffer)} bytes and {4 * num} are the least")
        lengths = buffer[: 4 * num].copy().view("<u4").astype(np.int64)
        places = 4 * num + np.concatenate(([0], np.cumsum(lengths)))
        if places[-1] != len(buffer):
            raise CorruptError(f"a tensor in {self.name} has {len(buffer)} bytes and describes {places[-1]}")
        whole = [np.empty(size, np.uint8) for size in sizes]
        wanted: list[tuple[Bytes, Bytes, int]] = []
        number = 0
        ranges = self._before.byte_ranges(shape, start, stop)
        for filled, (dtype, _), (first, last) in zip(whole, types, ranges, strict=True):
            for low, high in spans(len(filled), segment_bytes):
                if low < last and first < high:
                    source = buffer[places[number] : places[number + 1]]
                    wanted.append((source, filled[low:high], np.dtype(dtype).itemsize))
                number += 1
        threads.spread(lambda low, high: self._fill(*wanted[low]), len(wanted), 1, numel_each=segment_bytes // 4)
        return whole

    def _fill(self, source: Bytes, out: Bytes, width: int) -> None:
        import zstandard

        if len(source) == len(out):
            out[:] = source
            return
        data = source.tobytes() if len(source) < len(out) else b""
        try:
            if zstandard.get_frame_parameters(data).content_size != len(out):
                raise CorruptError(f"a tensor in {self.name} does not unpack to {len(out)} bytes")
            planes = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CorruptError(f"a tensor in {self.name} does not unpack: {error}") from error
        out.reshape(-1, width)[:] = np.frombuffer(planes, np.uint8).reshape(width, -1).T


def _num_segments(sizes: Sequence[int]) -> int:
    return sum(-(-size // segment_bytes) for size in sizes)
