"""Model parameters as values: a layout (what is where in the flat model) and handles to fragments.

The flat model is one fp32 vector: every trainable tensor in the order of its layout, row-major, without gaps.
A `Params` names files that hold contiguous slices of such a vector. It is a value: two handles are equal if they
name the same fragments, and holding one costs no memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

type_bytes = 4  # the flat model is fp32


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of the flat model: its name, its shape and where it starts, in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Layout:
    """The order, names and shapes of a model's trainable tensors in its flat vector."""

    tensors: tuple[TensorSpec, ...]

    @staticmethod
    def of(shapes: Sequence[tuple[str, Sequence[int]]]) -> Layout:
        """A layout that places `(name, shape)` pairs one after another."""
        specs: list[TensorSpec] = []
        offset = 0
        for name, shape in shapes:
            spec = TensorSpec(name=name, shape=tuple(int(n) for n in shape), offset=offset)
            specs.append(spec)
            offset = spec.stop
        return Layout(tuple(specs))

    @cached_property
    def numel(self) -> int:
        return self.tensors[-1].stop if self.tensors else 0

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[TensorSpec, int, int]]:
        """The tensors with elements in [start, stop), each with where the common part starts and stops."""
        first = max(0, bisect_right(self.tensors, start, key=lambda t: t.offset) - 1)
        for tensor in islice(self.tensors, first, None):
            if tensor.offset >= stop:
                return
            low, high = max(start, tensor.offset), min(stop, tensor.stop)
            if low < high:
                yield tensor, low, high

    def to_json(self) -> list[list[object]]:
        return [[t.name, list(t.shape)] for t in self.tensors]

    @staticmethod
    def from_json(value: Sequence[Sequence[object]]) -> Layout:
        shapes: list[tuple[str, list[int]]] = []
        for name, shape in value:
            assert isinstance(name, str) and isinstance(shape, list)
            shapes.append((name, [int(n) for n in shape]))
        return Layout.of(shapes)


@dataclass(frozen=True)
class Fragment:
    """A file that holds `numel` fp32 values: a contiguous slice of a flat vector."""

    name: str
    numel: int


@dataclass(frozen=True)
class Params:
    """A handle to a flat fp32 vector, cut into fragments. Values live in files, never in the handle."""

    fragments: tuple[Fragment, ...]

    @property
    def numel(self) -> int:
        return sum(f.numel for f in self.fragments)
