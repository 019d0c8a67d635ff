"""The adapter of one layer: two thin matrices whose scaled product is added to the layer's weight.

    W = W0 + s B A      A [r, k], B [d, r], W [d, k] as `torch.nn.Linear` holds it
    s = alpha / r       alpha / sqrt(r) with rank stabilisation

Hu et al. 2021, arXiv:2106.09685; rank stabilisation: Kalajdzievski 2023, arXiv:2312.03732. s belongs to each adapter:
those of one alpha and unequal ranks have unequal s, so every rule here reads it from the adapter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from potluck.types.errors import InvalidUpdate

slice_numel = 1 << 18
"""Elements of a product that are in memory at once where it is made in slices: 1 MiB."""

_types = (torch.float32, torch.bfloat16, torch.float16)


def drawn(a: Tensor, generator: torch.Generator) -> Tensor:
    """Fill A as PEFT begins it: Kaiming uniform, a = sqrt 5."""
    return nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)


def scale_for(alpha: float, rank: int, *, rank_stabilised: bool = False) -> float:
    """s, as PEFT sets it from `lora_alpha`, `r` and `use_rslora`."""
    return alpha / math.sqrt(rank) if rank_stabilised else alpha / rank


@dataclass(frozen=True, eq=False, slots=True)
class Factors:
    """A [rank, k], B [d, rank] and s. Whatever is computed from them is fp32.

    InvalidUpdate unless both are finite matrices in fp32, bf16 or fp16 of one rank and s is finite and above 0.
    """

    a: Tensor
    b: Tensor
    scale: float

    def __post_init__(self) -> None:
        require_matrix("A", self.a)
        require_matrix("B", self.b)
        if self.a.shape[0] != self.b.shape[1]:
            raise InvalidUpdate(
                f"A of an adapter is {list(self.a.shape)} and B {list(self.b.shape)}, so their ranks are "
                f"{self.a.shape[0]} and {self.b.shape[1]} and must be the same; send both factors of one adapter"
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise InvalidUpdate(
                f"the scale of an adapter is {self.scale} and must be finite and above 0; send alpha / rank"
            )
        object.__setattr__(self, "a", self.a.detach())
        object.__setattr__(self, "b", self.b.detach())

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(d, k) of the layer's weight."""
        return self.b.shape[0], self.a.shape[1]

    def delta(self) -> Tensor:
        """s B A, fp32 [d, k]."""
        return (self.b.float() @ self.a.float()).mul_(self.scale)

    def slices(self) -> Iterator[tuple[int, Tensor]]:
        """s B A as `(first row, fp32 [rows, k])`, some rows at a time."""
        a, num_rows = self.a.float(), max(1, slice_numel // self.shape[1])
        for start in range(0, self.shape[0], num_rows):
            yield start, (self.b[start : start + num_rows].float() @ a).mul_(self.scale)

    def add_to(self, delta: Tensor) -> None:
        """Add s B A to an fp32 [d, k], without a second matrix of that size. InvalidUpdate if it has another shape."""
        assert delta.dtype == torch.float32, f"mass is merged into fp32 and this is {delta.dtype}"
        if delta.shape != self.shape:
            raise InvalidUpdate(
                f"an adapter is for a weight {list(self.shape)} and the layer's is {list(delta.shape)}; "
                "send the adapters of this run's model"
            )
        for start, rows in self.slices():
            delta[start : start + len(rows)] += rows

    def norm(self) -> float:
        """||s B A||_F, in fp64 through the triangles of two QR decompositions, r x r: O((d + k) r^2)."""
        left = torch.linalg.qr(self.b.double(), mode="r").R
        right = torch.linalg.qr(self.a.double().T, mode="r").R
        return self.scale * float(torch.linalg.matrix_norm(left @ right.T))

    def resized(self, rank: int, *, scale: float) -> Factors:
        """The first `rank` components, fp32, for a receiver of that scale; zeros where there are fewer.

        B takes the ratio of the scales, so that the product stays what it was unless components are cut.
        """
        (d, k), kept = self.shape, min(rank, self.rank)
        a = torch.zeros(rank, k, device=self.a.device)
        b = torch.zeros(d, rank, device=self.b.device)
        a[:kept] = self.a[:kept]
        b[:, :kept] = self.b[:, :kept]
        return Factors(a, b.mul_(self.scale / scale), scale)


def require_matrix(name: str, matrix: Tensor) -> None:
    """InvalidUpdate unless it is a matrix with elements, all finite, in fp32, bf16 or fp16."""
    if matrix.dim() != 2 or not matrix.numel():
        raise InvalidUpdate(
            f"{name} of an adapter has the shape {list(matrix.shape)} and must be a matrix of rank 1 or more"
        )
    if matrix.dtype not in _types:
        raise InvalidUpdate(f"{name} of an adapter is {matrix.dtype}; send fp32, bf16 or fp16")
    num_bad = matrix.numel() - int(torch.isfinite(matrix).sum())
    if num_bad:
        raise InvalidUpdate(
            f"{name} of an adapter has {num_bad} of {matrix.numel()} values that are NaN or infinite and none may be; "
            "lower strategy.inner.lr"
        )
