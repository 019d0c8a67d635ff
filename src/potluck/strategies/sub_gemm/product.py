"""One matrix product of a training step, as the head has it: C[m, q] = A[m, n] B[n, q]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

ProductKind = Literal["forward", "input_gradient", "weight_gradient", "attention"]


@dataclass(frozen=True, eq=False)
class Matrix:
    """A factor: a two-dimensional view, of any strides, on memory that does not change while it is multiplied.

    Two matrices of one name have the same values in one optimizer step: shards of them may be kept. The transposed
    view of a named matrix is named too: NAME.T.
    """

    values: Tensor  # fp32 or bf16 [rows, columns]
    name: str = ""  # "transformer.h.3.mlp.c_fc.weight", or that of an activation; "" for one that is used once
    is_weight: bool = False  # the same over all micro-batches of a step

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", self.values.detach())  # autograd has no part in what becomes of it

    @property
    def T(self) -> Matrix:
        """The same memory, rows as columns."""
        turned = self.name[:-2] if self.name.endswith(".T") else self.name and f"{self.name}.T"
        return Matrix(self.values.T, turned, self.is_weight)


@dataclass(frozen=True, eq=False)
class Product:
    """Both factors of C = A B. `layer` names the module, so that identical calls share a plan and a log line."""

    a: Matrix  # [m, n]
    b: Matrix  # [n, q]
    kind: ProductKind
    layer: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(m, n, q)."""
        (m, n), (_, q) = self.a.values.shape, self.b.values.shape
        return m, n, q


class Multiplier(Protocol):
    def __call__(self, product: Product) -> Tensor:
        """C, fp32 [m, q]. Blocks until all of it is there and checked; RoundFailed if that cannot be."""
        ...
