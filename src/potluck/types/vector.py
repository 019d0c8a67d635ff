"""Flat fp32 vectors of a model's size that need not be in memory: read slice by slice.

A task's `theta` lies in a mapped file, `replica.params()` is the model itself, and `theta - replica.params()` is not
computed before the slices of it are encoded one after another: so a device holds the model once, not four times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

slice_numel = 1 << 18


class Vector:
    """`read(start, stop)` gives elements as fp32 [stop - start] on the CPU, not to be written to."""

    def __init__(self, numel: int, read: Callable[[int, int], Tensor]) -> None:
        self.numel, self.read = numel, read

    @staticmethod
    def of(tensor: Tensor | Vector) -> Vector:
        """A view of a tensor, fp32 [numel], on any device."""
        if isinstance(tensor, Vector):
            return tensor
        flat = tensor.detach()
        return Vector(flat.numel(), lambda start, stop: flat[start:stop].to("cpu", torch.float32))

    def slices(self) -> Iterator[tuple[int, Tensor]]:
        """`(start, elements)` in order."""
        for start in range(0, self.numel, slice_numel):
            yield start, self.read(start, min(start + slice_numel, self.numel))

    def tensor(self) -> Tensor:
        """All of it, in memory of its own."""
        whole = torch.empty(self.numel, dtype=torch.float32)
        for start, part in self.slices():
            whole[start : start + len(part)] = part
        return whole

    def part(self, ranges: Sequence[tuple[int, int]]) -> Vector:
        """The elements in these ranges [start, stop), one range after another."""
        if len(ranges) == 1 and ranges[0] == (0, self.numel):
            return self

        def read(start: int, stop: int) -> Tensor:
            found: list[Tensor] = []
            at = 0
            for low, high in ranges:
                first, last = max(start - at, 0), min(stop - at, high - low)
                if first < last:
                    found.append(self.read(low + first, low + last))
                at += high - low
            return found[0] if len(found) == 1 else torch.cat(found)

        return Vector(sum(high - low for low, high in ranges), read)

    @staticmethod
    def joined(numel: int, parts: Sequence[tuple[Sequence[tuple[int, int]], Vector]]) -> Vector:
        """A vector whose elements in each of these ranges are those of its part, one after another; 0 elsewhere.

        Where ranges overlap, those of a later part count.
        """
        pieces = [
            (low, high, vector, offset)
            for ranges, vector in parts
            for (low, high), offset in zip(ranges, _offsets(ranges), strict=True)
        ]

        def read(start: int, stop: int) -> Tensor:
            found = torch.zeros(stop - start)
            for low, high, vector, offset in pieces:
                first, last = max(start, low), min(stop, high)
                if first < last:
                    found[first - start : last - start] = vector.read(offset + first - low, offset + last - low)
            return found

        return Vector(numel, read)

    def __add__(self, other: Vector | Tensor) -> Vector:
        return self._with(other, torch.add)

    def __sub__(self, other: Vector | Tensor) -> Vector:
        """The difference, computed when it is read: before either of the two changes."""
        return self._with(other, torch.sub)

    def __mul__(self, factor: float) -> Vector:
        return Vector(self.numel, lambda start, stop: self.read(start, stop) * factor)

    __rmul__ = __mul__

    def _with(self, other: Vector | Tensor, operation: Callable[[Tensor, Tensor], Tensor]) -> Vector:
        second = Vector.of(other)
        if second.numel != self.numel:
            raise ValueError(f"vectors of {self.numel} and {second.numel} elements do not go together")
        return Vector(self.numel, lambda start, stop: operation(self.read(start, stop), second.read(start, stop)))


def _offsets(ranges: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Where each begins when they lie one after another."""
    return accumulate((high - low for low, high in ranges[:-1]), initial=0) if ranges else iter(())
