"""Tiles of one product as pieces for devices: which part of which factor, under which name, and what it takes.

A shard is cut from a factor as it is stored: "w.T" and "w" have the same shards, and a piece says what its device is to
transpose. A shard's name holds its range, so that it is the same one in every micro-batch of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from potluck.planner.tiles.device import Head, TileDevice
from potluck.strategies.bag import Operand, Piece
from potluck.strategies.sub_gemm.assembly import Box
from potluck.strategies.sub_gemm.deal import Sizes
from potluck.strategies.sub_gemm.lane import Need
from potluck.strategies.sub_gemm.product import Matrix, Product
from potluck.strategies.sub_gemm.times import Stages, stages
from potluck.types.errors import InvalidUpdate
from potluck.types.untrusted import printable

TASK = "sub_gemm.tile"

Holds = Callable[[str], bool]
"""Whether a device has a shard of that name, so that it need not be sent."""
Check = Callable[[Tensor, Tensor, Tensor, torch.Generator], None]
"""check(a, b, c, generator): InvalidUpdate if c is not a b, for a and b as the device got them."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What all products of a run have in common."""

    wire: str
    sizes: Sizes
    check: Check
    received: Callable[[Tensor], Tensor]  # what a device gets of an operand, after the wire's rounding
    head: Head = field(default_factory=Head)  # one whose s_per_flop is inf never computes a tile
    most_failures: int = 4  # of one tile


class _Factor:
    def __init__(self, matrix: Matrix) -> None:
        self.is_transposed = matrix.name.endswith(".T")
        self._name = matrix.name.removesuffix(".T")
        self._stored = matrix.values.T if self.is_transposed else matrix.values

    def name(self, rows: tuple[int, ...], cols: tuple[int, ...]) -> str:
        if not self._name:
            return ""
        first, second = (cols, rows) if self.is_transposed else (rows, cols)
        return f"{self._name}[{first[0]}:{first[1]},{second[0]}:{second[1]}]"

    def shard(self, rows: tuple[int, ...], cols: tuple[int, ...]) -> Operand:
        first, second = (cols, rows) if self.is_transposed else (rows, cols)
        return Operand(self._stored[slice(*first), slice(*second)], self.name(rows, cols))


def title(product: Product) -> str:
    """For people."""
    m, n, q = product.shape
    return f"{product.kind.replace('_', ' ')} {m} x {n} x {q} of {product.layer or 'a layer'}"


class Pieces:
    """The pieces of one product. `stretch`: what devices together wait for the coordinator's link, as a factor."""

    def __init__(self, product: Product, terms: Terms, stretch: float) -> None:
        self.name = title(product)
        self._product, self._terms, self._stretch = product, terms, stretch
        self._a, self._b = _Factor(product.a), _Factor(product.b)
        self._needs: dict[Box, Need] = {}

    def piece(self, box: Box) -> Piece:
        return Piece(
            task=TASK,
            operands={"a": self._a.shard(box[:2], box[4:]), "b": self._b.shard(box[4:], box[2:4])},
            arguments={
                "wire": self._terms.wire,
                "is_a_transposed": self._a.is_transposed,
                "is_b_transposed": self._b.is_transposed,
            },
            wire=self._terms.wire,
            memory_bytes=self._terms.sizes.memory_bytes(box),
            label=f"{self.name} [{box.row0}:{box.row1}, {box.col0}:{box.col1}]",
        )

    def need(self, box: Box) -> Need:
        """What a device needs of memory for a tile, under the names of its shards."""
        found = self._needs.get(box)
        if found is None:
            (rows, cols), held = box.shape, self._terms.sizes.held
            a, b = self._a.name(box[:2], box[4:]), self._b.name(box[4:], box[2:4])
            found = self._needs[box] = Need(
                shards={
                    a or f"{box}a": math.ceil(rows * box.depth * held),
                    b or f"{box}b": math.ceil(cols * box.depth * held),
                },
                result_bytes=math.ceil(rows * cols * held),
            )
        return found

    def down_bytes(self, box: Box, holds: Holds) -> float:
        """Of the operands that a device does not hold."""
        sent = sum(num_bytes for name, num_bytes in self.need(box).shards.items() if not holds(name))
        return sent * self._terms.sizes.down / self._terms.sizes.held

    def stages(self, device: TileDevice, box: Box, holds: Holds) -> Stages:
        down_bytes, up_bytes = self.down_bytes(box, holds), self._terms.sizes.up_bytes(box)
        return stages(device, box, down_bytes=down_bytes, up_bytes=up_bytes, stretch=self._stretch)

    def checked(self, piece: Piece, reply: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """The values of a reply. InvalidUpdate if they are not the product of the piece's operands."""
        if set(reply) != {"c"}:
            names = printable(", ".join(sorted(reply)[:4]), 100)
            raise InvalidUpdate(f"a tile came back as {names} and must be one tensor, c")
        a, b = (self._terms.received(piece.operands[name].values) for name in ("a", "b"))
        self._terms.check(
            a.T if self._a.is_transposed else a, b.T if self._b.is_transposed else b, reply["c"], generator
        )
        return reply["c"]

    def native(self, box: Box) -> Tensor:
        """A tile on the head, fp32."""
        rows, inner, cols = slice(*box[:2]), slice(*box[4:]), slice(*box[2:4])
        return self._product.a.values[rows, inner].float() @ self._product.b.values[inner, cols].float()
