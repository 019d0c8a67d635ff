"""A matrix product that is to be computed in tiles, and on what terms.

    C[m, q] = A[m, n] B[n, q]          2 m n q FLOPs

With T tokens of one micro-batch, a linear layer from d to f features has three of them:

    forward           Y[T, f]  = X[T, d]  W[d, f]         m, n, q = T, d, f
    input gradient    dX[T, d] = dY[T, f] W'[f, d]        m, n, q = T, f, d
    weight gradient   dW[d, f] = X'[d, T] dY[T, f]        m, n, q = d, T, f

Xue et al. 2025, arXiv:2512.22142.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "input_gradient", "weight_gradient"]


@dataclass(frozen=True, kw_only=True)
class Product:
    """C[m, q] = A[m, n] B[n, q]. B is a weight in `forward` and `input_gradient`, and nothing is one otherwise."""

    m: int
    n: int
    q: int
    kind: Pass = "forward"
    down_bytes: float = 4.0  # on the wire, for each element of A and B
    up_bytes: float = 4.0  # and of C
    held_bytes: float = 4.0  # in a device's memory, for each element of all three

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.q) < 1:
            raise ValueError(f"a product has sides of 1 or more, and this is {self.m} x {self.n} x {self.q}")
        if not all(0 < size <= 16 for size in (self.down_bytes, self.up_bytes, self.held_bytes)):
            sizes = f"{self.down_bytes}, {self.up_bytes} and {self.held_bytes}"
            raise ValueError(f"elements of {sizes} bytes cannot be planned with; above 0 and up to 16 can")

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.q

    @property
    def has_weight(self) -> bool:
        return self.kind != "weight_gradient"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a plan may do, and what it assumes."""

    num_micro_batches: int = 1
    """Products of this shape with the same weight in one optimizer step: what is kept of it is sent once."""
    may_keep_weights: bool = True
    may_split_inner: bool = True
    kept_share: float = 0.5
    """Of each device's memory, for all weights that it keeps over a step; the rest is for tiles of any product."""
    kept_part: float = 1.0
    """Of that, what this product may take. 0 where it keeps nothing and others do."""
    num_tiles: int = 4
    """Tiles into which a device's part is cut, so that transfers and work overlap; 0 assumes that they do fully."""
    least_side: int = 64
    """Of a tile, on average: no more devices are used than that leaves room for."""
    least_gain: float = 0.05
    """An alternative to the plain plan that saves less than this share of its time is not taken."""

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1 or self.num_tiles < 0 or self.least_side < 1:
            raise ValueError("num_micro_batches and least_side are 1 or more, and num_tiles 0 or more")
        if not (0 <= self.kept_share < 1 and 0 <= self.kept_part <= 1):
            raise ValueError(f"shares of memory are from 0 to 1, and these {self.kept_share:g} and {self.kept_part:g}")

    @property
    def room_share(self) -> float:
        """Of each device's memory, for weights that are kept by any product."""
        return self.kept_share if self.may_keep_weights else 0.0
