"""What codecs have in common, and the dense ones: those that keep a code for each element.

    decode: x_i = level(code_i, t)      t: what block i // block has in common, such as a scale

So any slice decodes without the rest, and slices that start at a block encode without the rest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from potluck.codecs import threads
from potluck.types.errors import InvalidUpdate

Values = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Buffer = npt.NDArray[Any]
Lanes = npt.NDArray[np.float64]
Shape = tuple[int, ...]
Role = Literal["parameter", "update", "gradient", "activation"]
Rounding = Literal["nearest", "stochastic"]

any_role: frozenset[Role] = frozenset(("parameter", "update", "gradient", "activation"))
changes: frozenset[Role] = frozenset(("update", "gradient"))

slice_numel = 1 << 16
"""Elements worked on at once: 256 KiB of fp32, which stays in a core's second-level cache."""

piece_numel = 1 << 18
"""Elements of a large tensor that are in memory at once while it is encoded: with 1 MiB of fp32 each, what they are
computed from lies in a core's cache and in memory that the process keeps, which larger ones ask the system for anew."""

task_numel = 1 << 19
"""Elements that a thread takes at a time, where that needs no scratch memory."""


no_tables: Values = np.ones((1, 1), np.float32)
"""For codecs whose codes say all."""


class TensorCodec(ABC):
    """A codec by the types of its buffers and how to fill and read them."""

    name: str
    roles: frozenset[Role] = any_role
    is_elementwise: bool = True
    is_sized: bool = True

    @abstractmethod
    def buffer_types(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        """NumPy dtype and number of items of each buffer: a function of the shape alone, and an upper bound if not
        `is_sized`."""

    @abstractmethod
    def encode(
        self, values: Values, shape: Shape, *, seed: int = 0, out: Sequence[Buffer] | None = None
    ) -> tuple[Buffer, ...]:
        """The buffers for `values`, fp32 [numel]. InvalidUpdate if one of them is NaN or infinite.

        `seed` is what random choices are a function of, besides the element's place. `out` is memory that may be used
        for the result: buffers of `buffer_types`, whose pages then need not be fetched again for each tensor.
        """

    @abstractmethod
    def decode(self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values) -> None:
        """Fill `out` with the elements from `start` on. CorruptError if the buffers cannot be the codec's."""

    def accumulate(self, buffers: Sequence[Bytes], shape: Shape, start: int, into: Values, weight: float) -> None:
        """`into += weight * decoded[start:start + len(into)]` in fp32: each product is rounded, then each sum."""

        def work(low: int, high: int) -> None:
            scratch = np.empty(high - low, np.float32)
            self.decode_slice(buffers, shape, start + low, scratch)
            kernels().add(scratch, np.float32(weight), into[low:high])

        threads.spread(work, len(into), slice_numel)

    def byte_ranges(self, shape: Shape, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """The bytes of each buffer that decoding [start, stop) may read."""
        return tuple((0, size) for size in self.buffer_sizes(shape))

    def encode_residual(
        self, values: Values, shape: Shape, *, seed: int = 0, out: Sequence[Buffer] | None = None
    ) -> tuple[Buffer, ...]:
        """`encode`, which leaves `values - decoded` in `values`; after InvalidUpdate they may be anything."""
        buffers = self.encode(values, shape, seed=seed, out=out)
        self.accumulate([as_bytes(b) for b in buffers], shape, 0, values, -1.0)
        return buffers

    def sum_squares(self, buffers: Sequence[Bytes], shape: Shape, start: int = 0, stop: int | None = None) -> float:
        """The sum of the squares of [start, stop) in fp64; infinite if a value is not finite. Raises as `decode`."""
        end = numel_of(shape) if stop is None else stop

        def work(low: int, high: int) -> float:
            lanes = np.zeros(kernels().num_lanes)
            self._add_squares(buffers, shape, start + low, start + high, lanes)
            return math.fsum(lanes) if np.isfinite(lanes).all() else math.inf

        return math.fsum(threads.spread(work, end - start, task_numel))

    def _add_squares(self, buffers: Sequence[Bytes], shape: Shape, start: int, stop: int, lanes: Lanes) -> None:
        scratch = np.empty(min(slice_numel, stop - start), np.float32)
        for low, high in spans(stop - start):
            part = scratch[: high - low]
            self.decode_slice(buffers, shape, start + low, part)
            kernels().sum_squares(part, lanes)

    def decode_slice(self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values) -> None:
        """`decode` of a small slice, on this thread."""
        self.decode(buffers, shape, start, out)

    def encode_from(
        self, read: Callable[[int, int], Values], shape: Shape, *, seed: int = 0, out: Sequence[Buffer] | None = None,
        residual: Values | None = None,
    ) -> Iterator[Iterable[Buffer]]:  # fmt: skip
        """The buffers one after the other, each in pieces, for values that `read(start, stop)` gives.

        `residual`, fp32 [numel], receives the values minus what a reader decodes.
        """
        values = read(0, numel_of(shape))
        if residual is None:
            buffers = self.encode(values, shape, seed=seed, out=out)
        else:
            residual[:] = values
            buffers = self.encode_residual(residual, shape, seed=seed, out=out)
        return ((buffer,) for buffer in buffers)

    def allocate(self, shape: Shape) -> list[Buffer]:
        return [np.empty(count, dtype) for dtype, count in self.buffer_types(shape)]

    def buffer_sizes(self, shape: Shape) -> tuple[int, ...]:
        """Bytes of each buffer that `encode` gives for a tensor of this shape; the most of them if not `is_sized`."""
        return tuple(np.dtype(dtype).itemsize * count for dtype, count in self.buffer_types(shape))

    def estimate_bytes(self, numel: int) -> int:
        """Bytes for `numel` elements, without headers and padding."""
        return sum(self.buffer_sizes((numel,)))


class Dense(TensorCodec):
    """A codec of which an element is decoded from its own bits and those of its block."""

    kind: ClassVar[str]
    """`decode_KIND`, `add_KIND` and `squares_KIND` of `kernels` are its loops."""
    per: ClassVar[int] = 1
    """Elements in one item of the codes."""

    def block(self, shape: Shape) -> int:
        """Elements that share a scale."""
        return max(1, numel_of(shape))

    def together(self, shape: Shape) -> int:
        """Elements that must be there at once to encode one of them."""
        return self.block(shape)

    @abstractmethod
    def encode_slice(self, values: Values, buffers: Sequence[Buffer], start: int, shape: Shape, key: int) -> bool:
        """Fill in what `values`, those from `start` on, a block's start, have in `buffers`. Whether all are finite."""

    @abstractmethod
    def parts(self, buffers: Sequence[Buffer], first: int, last: int) -> tuple[Buffer, Buffer]:
        """The codes of the whole tensor, and the tables [last - first, n] of blocks `first` to `last`."""

    def prepare(self, values: Values, buffers: Sequence[Buffer], shape: Shape) -> bool:
        """What must be known of the whole tensor before its first slice. Whether all values are finite."""
        return True

    def encode_from(
        self, read: Callable[[int, int], Values], shape: Shape, *, seed: int = 0, out: Sequence[Buffer] | None = None,
        residual: Values | None = None,
    ) -> Iterator[Iterable[Buffer]]:  # fmt: skip
        if type(self).prepare is not Dense.prepare:
            return super().encode_from(read, shape, seed=seed, out=out, residual=residual)
        buffers = tuple(self.allocate(shape) if out is None else out)
        for low, high in spans(numel_of(shape), whole_blocks(piece_numel, self.together(shape))):
            values = read(low, high)
            if residual is not None:
                residual[low:high] = values
                values = residual[low:high]
            self._encode_part(values, buffers, shape, low, seed, leave_residual=residual is not None)
        return ((buffer,) for buffer in buffers)

    def encode(
        self, values: Values, shape: Shape, *, seed: int = 0, out: Sequence[Buffer] | None = None
    ) -> tuple[Buffer, ...]:
        return self._encode(values, shape, seed, out, leave_residual=False)

    def encode_residual(
        self, values: Values, shape: Shape, *, seed: int = 0, out: Sequence[Buffer] | None = None
    ) -> tuple[Buffer, ...]:
        return self._encode(values, shape, seed, out, leave_residual=True)

    def _encode(
        self, values: Values, shape: Shape, seed: int, out: Sequence[Buffer] | None, *, leave_residual: bool
    ) -> tuple[Buffer, ...]:
        buffers = tuple(self.allocate(shape) if out is None else out)
        if not self.prepare(frozen(values), buffers, shape):
            raise refuse_not_finite(self.name)
        self._encode_part(values, buffers, shape, 0, seed, leave_residual=leave_residual)
        return buffers

    def _encode_part(
        self, values: Values, buffers: Sequence[Buffer], shape: Shape, start: int, seed: int, *, leave_residual: bool
    ) -> None:
        """Fill in what `values`, those from `start` on, a block's start, have in `buffers`."""
        seen = frozen(values)
        key = noise_key(seed)

        def work(low: int, high: int) -> bool:
            is_finite = self.encode_slice(seen[low:high], buffers, start + low, shape, key)
            if is_finite and leave_residual:
                self._fold("add", buffers, shape, start + low, values[low:high], -1.0)
            return is_finite

        size = whole_blocks(slice_numel if leave_residual else task_numel, self.block(shape))
        if not all(threads.spread(work, len(values), size)):
            raise refuse_not_finite(self.name)

    def decode(self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values) -> None:
        self._spread("decode", buffers, shape, start, out, 1.0)

    def accumulate(self, buffers: Sequence[Bytes], shape: Shape, start: int, into: Values, weight: float) -> None:
        self._spread("add", buffers, shape, start, into, weight)

    def _add_squares(self, buffers: Sequence[Bytes], shape: Shape, start: int, stop: int, lanes: Lanes) -> None:
        block = self.block(shape)
        codes, tables = self.parts(self._typed(buffers, shape), start // block, -(-stop // block))
        loop: Callable[..., None] = getattr(kernels(), f"squares_{self.kind}")
        loop(frozen(codes), frozen(tables), block, start, stop, lanes)

    def decode_slice(self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values) -> None:
        self._fold("decode", self._typed(buffers, shape), shape, start, out, 1.0)

    def byte_ranges(self, shape: Shape, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        *tables, (codes, count) = self.buffer_types(shape)
        item, block, numel = np.dtype(codes).itemsize, self.block(shape), numel_of(shape)
        ranges: list[tuple[int, int]] = []
        for dtype, num in tables:
            row = np.dtype(dtype).itemsize * num // max(1, -(-numel // block))
            ranges.append((start // block * row, -(-stop // block) * row))
        return (*ranges, (start // self.per * item, min(-(-stop // self.per), count) * item))

    def _typed(self, buffers: Sequence[Bytes], shape: Shape) -> list[Buffer]:
        return [b.view(dtype) for b, (dtype, _) in zip(buffers, self.buffer_types(shape), strict=True)]

    def _spread(self, how: str, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values, weight: float) -> None:
        typed = self._typed(buffers, shape)
        threads.spread(
            lambda low, high: self._fold(how, typed, shape, start + low, out[low:high], weight), len(out), task_numel
        )

    def _fold(self, how: str, buffers: Sequence[Buffer], shape: Shape, start: int, out: Values, weight: float) -> None:
        if len(out):
            block = self.block(shape)
            codes, tables = self.parts(buffers, start // block, -(-(start + len(out)) // block))
            loop: Callable[..., None] = getattr(kernels(), f"{how}_{self.kind}")
            loop(frozen(codes), frozen(tables), block, start, np.float32(weight), out)


class Rounded(Dense):
    """A dense codec that rounds to the nearest level, or at random to one of the two beside the value."""

    def __init__(self, rounding: Rounding = "nearest") -> None:
        self.is_stochastic = rounding == "stochastic"
        self.name = f"{self.kind}(stochastic)" if self.is_stochastic else self.kind


def kernels() -> Any:
    """The compiled loops. They import numba, which whoever only names a codec does not need."""
    from potluck.codecs import kernels

    return kernels


def whole_blocks(numel: int, block: int) -> int:
    """The multiple of `block` that is at or below `numel`, and one at least."""
    return max(1, numel // block) * block


def frozen(array: Buffer) -> Buffer:
    """A view that cannot be written to, so that kernels are compiled for one kind of input only."""
    view = array.view()
    view.flags.writeable = False
    return view


def as_bytes(buffer: Buffer) -> Bytes:
    return buffer.reshape(-1).view(np.uint8)


def spans(numel: int, size: int = slice_numel) -> Iterator[tuple[int, int]]:
    """[0, numel) cut into parts of at most `size`."""
    for low in range(0, numel, size):
        yield low, min(low + size, numel)


def as_bits(values: Values) -> npt.NDArray[np.int32]:
    return frozen(values).view(np.int32)


def largest_scale(levels: int) -> np.float32:
    """The largest scale of which `levels` times is still finite."""
    return np.nextafter(np.finfo(np.float32).max / np.float32(levels), np.float32(0))


def num_blocks(numel: int, block: int) -> int:
    return -(-numel // block)


def numel_of(shape: Shape) -> int:
    return math.prod(shape)


def noise_key(seed: int, stream: int = 0) -> int:
    """The 64 bits that random rounding starts from: SplitMix64's mixing of seed and stream."""
    mask = (1 << 64) - 1
    mixed = (seed + 0x9E3779B97F4A7C15 * (stream + 1)) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)


def refuse_not_finite(codec: str) -> InvalidUpdate:
    return InvalidUpdate(
        f"holds NaN or infinity, which {codec} does not send; lower the learning rate or look for a broken batch"
    )
