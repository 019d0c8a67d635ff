"""Where the adapters of a model are in its layout: by layer, the tensors of A, of B, and of what was merged.

    LAYER.lora_A.BLOCK.weight [components, inputs]      LAYER.lora_B.BLOCK.weight [outputs, components]
    LAYER.base_layer.merged   [outputs, inputs]

A factor is one tensor, or several blocks of components where workers have unequal ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from potluck.lora.factors import Factors
from potluck.types.errors import ModelError
from potluck.types.params import Layout
from potluck.types.vector import Vector

A_MARK, B_MARK, MERGED_MARK = ".lora_A.", ".lora_B.", ".base_layer.merged"
Factor = Literal["a", "b"]


@dataclass(frozen=True)
class AdaptedLayer:
    """Places in the layout: of the blocks of A and of B, in the order of components, and of what was merged."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    ranks: tuple[int, ...]  # components up to the end of each block
    merged: int | None = None

    def blocks(self, rank: int) -> int:
        """How many of the blocks an adapter of that rank has."""
        return bisect_right(self.ranks, rank)

    def factors(self, tensors: Mapping[int, Tensor], rank: int = 0) -> tuple[Tensor, Tensor]:
        """A and B, of that rank or whole, from the layout's tensors by their places."""
        num = self.blocks(rank) if rank else len(self.ranks)
        a, b = [tensors[i] for i in self.a[:num]], [tensors[i] for i in self.b[:num]]
        return (a[0], b[0]) if num == 1 else (torch.cat(a), torch.cat(b, dim=1))


def adapted_layers(layout: Layout) -> dict[str, AdaptedLayer]:
    """By the layers' plain names. ModelError where an A has no B."""
    numbers = {tensor.name: i for i, tensor in enumerate(layout)}
    found: dict[str, list[int]] = {}
    for name, i in numbers.items():
        if A_MARK in name:
            if name.replace(A_MARK, B_MARK) not in numbers:
                raise ModelError(f"the run's layout has {name[:200]} and no B to it; check the coordinator's version")
            found.setdefault(name.partition(A_MARK)[0], []).append(i)
    return {
        layer: AdaptedLayer(
            a=tuple(a),
            b=tuple(numbers[layout.tensors[i].name.replace(A_MARK, B_MARK)] for i in a),
            ranks=tuple(accumulate(layout.tensors[i].shape[0] for i in a)),
            merged=numbers.get(layer + MERGED_MARK),
        )
        for layer, a in found.items()
    }


def part_of(layers: Iterable[AdaptedLayer], factors: Iterable[Factor], rank: int) -> tuple[int, ...]:
    """The tensors, by their places, of these factors of all layers, up to a rank."""
    chosen = [getattr(layer, factor)[: layer.blocks(rank)] for layer in layers for factor in factors]
    return tuple(sorted(i for places in chosen for i in places))


def merged_part(layers: Iterable[AdaptedLayer]) -> tuple[int, ...]:
    """What was merged; () where nothing is."""
    return tuple(sorted(layer.merged for layer in layers if layer.merged is not None))


def factors_in(vector: Vector, layout: Layout, layer: AdaptedLayer) -> dict[int, Tensor]:
    """The tensors of a layer's A and B by their places, of a whole vector."""
    return {
        i: vector.read(spec.offset, spec.stop).view(spec.shape)
        for i in (*layer.a, *layer.b) for spec in [layout.tensors[i]]
    }  # fmt: skip


def placed(layer: AdaptedLayer, adapter: Factors) -> dict[int, Vector]:
    """The factors of the highest rank, in their blocks, by place."""
    found: dict[int, Vector] = {}
    for a, b, (low, high) in zip(layer.a, layer.b, pairwise((0, *layer.ranks)), strict=True):
        found[a] = Vector.of(adapter.a[low:high].reshape(-1))
        found[b] = Vector.of(adapter.b[:, low:high].reshape(-1))
    return found
