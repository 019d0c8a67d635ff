"""What codecs have in common whose values each stand for themselves: any slice decodes without the rest."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from potluck.types.errors import InvalidUpdate

Values = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Shape = tuple[int, ...]

slice_numel = 1 << 16
"""Elements worked on at once: 256 KiB of fp32, which stays in a core's second-level cache."""


class Elementwise(ABC):
    """A codec of which an element is decoded from its own bits and those of its block."""

    name: str

    @abstractmethod
    def buffer_sizes(self, shape: Shape) -> tuple[int, ...]:
        """Bytes of each buffer that `encode` gives for a tensor of this shape: a function of the shape alone."""

    @abstractmethod
    def encode(self, values: Values, shape: Shape) -> tuple[npt.NDArray[np.generic], ...]:
        """The buffers for `values`, fp32 [numel]. InvalidUpdate if one of them is NaN or infinite."""

    @abstractmethod
    def decode(self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values) -> None:
        """Fill `out` with the elements from `start` on."""

    def accumulate(self, buffers: Sequence[Bytes], shape: Shape, start: int, into: Values, weight: float) -> None:
        """`into += weight * decoded[start:start + len(into)]` in fp32: each product is rounded, then each sum."""
        scratch = np.empty(min(slice_numel, len(into)), np.float32)
        factor = np.float32(weight)
        for low, high in spans(len(into)):
            part = scratch[: high - low]
            self.decode(buffers, shape, start + low, part)
            with np.errstate(over="ignore", invalid="ignore"):  # a sum that overflows is found where it is used
                if factor != 1:
                    np.multiply(part, factor, out=part)
                np.add(into[low:high], part, out=into[low:high])

    def estimate_bytes(self, numel: int) -> int:
        """Bytes for `numel` elements, without headers and padding."""
        return sum(self.buffer_sizes((numel,)))


def spans(numel: int, size: int = slice_numel) -> Iterator[tuple[int, int]]:
    """[0, numel) cut into parts of at most `size`."""
    for low in range(0, numel, size):
        yield low, min(low + size, numel)


def numel_of(shape: Shape) -> int:
    return math.prod(shape)


def refuse_not_finite(codec: str) -> InvalidUpdate:
    return InvalidUpdate(
        f"holds NaN or infinity, which {codec} does not send; lower the learning rate or look for a broken batch"
    )
