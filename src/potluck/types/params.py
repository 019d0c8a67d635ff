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

from potluck.types.errors import Refused

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

    def part(self, numbers: Sequence[int]) -> Layout:
        """Some of the tensors, by their places in this layout, one after another; all of them where none is named.

        Refused where there is no such place, as for `ranges`.
        """
        if not numbers or list(numbers) == list(range(len(self.tensors))):
            return self
        return Layout.of([(tensor.name, tensor.shape) for tensor in self._at(numbers)])

    def ranges(self, numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Where the elements of `part(numbers)` are in the whole vector, in the part's order: [start, stop) each."""
        found: list[tuple[int, int]] = []
        for tensor in self._at(numbers):
            if found and found[-1][1] == tensor.offset:
                found[-1] = (found[-1][0], tensor.stop)
            else:
                found.append((tensor.offset, tensor.stop))
        return tuple(found)

    def _at(self, numbers: Sequence[int]) -> Sequence[TensorSpec]:
        """Places may come from a network, and one that counts from the end would be another name for a tensor."""
        num = len(self.tensors)
        if odd := [i for i in numbers if not isinstance(i, int) or not 0 <= i < num]:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Refused(f"tensor {str(odd[0])[:50]} of a layout of {num} is asked for; name 0 to {num - 1}")
        return [self.tensors[i] for i in numbers] if numbers else self.tensors

    def numbers_of(self, names: Sequence[str]) -> tuple[int, ...]:
        """The places of the tensors with these names. KeyError for a name that this layout does not have."""
        if len(names) == len(self.tensors) and all(t.name == n for t, n in zip(self.tensors, names, strict=True)):
            return ()
        return tuple(self._numbers[name] for name in names)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {tensor.name: i for i, tensor in enumerate(self.tensors)}

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
    """`numel` fp32 values of a file: a contiguous slice of a flat vector.

    They are all that the file holds, unless `file_numel` says how many there are: then those from `start` on.
    """

    name: str
    numel: int
    start: int = 0
    file_numel: int = 0

    @property
    def in_file(self) -> int:
        """Values that the whole file holds."""
        return self.file_numel or self.numel

    def slice(self, start: int, stop: int) -> Fragment:
        """Its elements [start, stop)."""
        if (start, stop) == (0, self.numel):
            return self
        return Fragment(self.name, stop - start, self.start + start, self.in_file)

    def to_json(self) -> list[object]:
        return [self.name, self.numel, self.start, self.file_numel] if self.file_numel else [self.name, self.numel]

    @staticmethod
    def from_json(value: Sequence[object]) -> Fragment:
        name, *numbers = value
        return Fragment(str(name), *(int(str(n)) for n in numbers))


@dataclass(frozen=True)
class Params:
    """A handle to a flat fp32 vector, cut into fragments. Values live in files, never in the handle."""

    fragments: tuple[Fragment, ...]

    @property
    def numel(self) -> int:
        return sum(f.numel for f in self.fragments)

    def part(self, ranges: Sequence[tuple[int, int]]) -> Params:
        """The vector of the elements in these ranges [start, stop), one range after another: no value is copied."""
        return Params(_joined([piece for start, stop in ranges for piece in self._pieces(start, stop)]))

    def with_part(self, ranges: Sequence[tuple[int, int]], part: Params) -> Params:
        """This vector with the elements in these ranges taken from `part`, which has them one after another."""
        assert part.numel == sum(stop - start for start, stop in ranges), f"{part.numel} elements are not these ranges"
        pieces: list[tuple[int, list[Fragment]]] = []
        offset = 0
        for start, stop in ranges:
            pieces.append((start, part._pieces(offset, offset + stop - start)))
            offset += stop - start
        at, found = 0, list[Fragment]()
        for (start, new), (_, stop) in sorted(zip(pieces, ranges, strict=True), key=lambda pair: pair[0][0]):
            found += [*self._pieces(at, start), *new]
            at = stop
        return Params(_joined([*found, *self._pieces(at, self.numel)]))

    def _pieces(self, start: int, stop: int) -> list[Fragment]:
        found: list[Fragment] = []
        at = 0
        for fragment in self.fragments:
            low, high = max(start, at), min(stop, at + fragment.numel)
            if low < high:
                found.append(fragment.slice(low - at, high - at))
            at += fragment.numel
        return found


@dataclass(frozen=True)
class Part:
    """A vector of some of the model's tensors: those at these places of the layout, or all where none is named."""

    params: Params
    tensors: tuple[int, ...]


@dataclass(frozen=True)
class Tensors:
    """A vector of tensors that are none of the model's, with a layout of their own."""

    params: Params
    layout: Layout


def _joined(pieces: Sequence[Fragment]) -> tuple[Fragment, ...]:
    """The same elements, with neighbours in one file made one."""
    found: list[Fragment] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and last.name == piece.name and last.start + last.numel == piece.start:
            numel = last.numel + piece.numel
            whole = last.start == 0 and numel == last.in_file
            found[-1] = Fragment(last.name, numel) if whole else Fragment(last.name, numel, last.start, last.in_file)
        else:
            found.append(piece)
    return tuple(found)
