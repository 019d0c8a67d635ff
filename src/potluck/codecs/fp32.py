"""fp32: the values as they are, 4 bytes each, little-endian."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from potluck.codecs import threads
from potluck.codecs.elementwise import (
    Buffer,
    Dense,
    Shape,
    Values,
    as_bits,
    kernels,
    no_tables,
    numel_of,
    piece_numel,
    refuse_not_finite,
    slice_numel,
    spans,
)


class Fp32(Dense):
    name = kind = "fp32"

    def buffer_types(self, shape: Shape) -> tuple[tuple[str, int], ...]:
        return (("float32", numel_of(shape)),)

    def encode(
        self, values: Values, shape: Shape, *, seed: int = 0, out: Sequence[Buffer] | None = None
    ) -> tuple[Buffer, ...]:
        """The values themselves, not a copy."""
        is_finite = threads.spread(lambda low, high: is_all_finite(values[low:high]), len(values), slice_numel)
        if not all(is_finite):
            raise refuse_not_finite(self.name)
        return (values,)

    def encode_from(
        self, read: Callable[[int, int], Values], shape: Shape, *, seed: int = 0, out: Sequence[Buffer] | None = None,
        residual: Values | None = None,
    ) -> Iterator[Iterable[Buffer]]:  # fmt: skip
        def pieces() -> Iterator[Buffer]:
            for low, high in spans(numel_of(shape), piece_numel):
                (piece,) = self.encode(read(low, high), (high - low,))
                yield piece
                if residual is not None:  # which may be what was read
                    residual[low:high] = 0

        yield pieces()

    def encode_residual(
        self, values: Values, shape: Shape, *, seed: int = 0, out: Sequence[Buffer] | None = None
    ) -> tuple[Buffer, ...]:
        buffers = self.encode(values.copy(), shape)
        values[:] = 0
        return buffers

    def encode_slice(self, values: Values, buffers: Sequence[Buffer], start: int, shape: Shape, key: int) -> bool:
        buffers[0][start : start + len(values)] = values
        return is_all_finite(values)

    def parts(self, buffers: Sequence[Buffer], first: int, last: int) -> tuple[Buffer, Buffer]:
        return buffers[0], no_tables


def is_all_finite(values: Values) -> bool:
    return bool(kernels().largest_bits(as_bits(values)) < np.int32(0x7F800000))
