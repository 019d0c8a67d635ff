"""Multipliers that need no fleet: products in real tiles, and a record of what was asked."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from potluck.codecs.factors import sent_as
from potluck.strategies.sub_gemm.checks import check_tile
from potluck.strategies.sub_gemm.product import Product
from potluck.strategies.sub_gemm.tile import multiply


@dataclass
class TiledMultiplier:
    """Cuts each product into 2 x 3 tiles, the inner side into 2, multiplies them as devices do, and checks each."""

    wire: str = "fp32"
    checks: bool = False
    products: list[Product] = field(default_factory=list[Product])
    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # of every name, when it was first used

    def __call__(self, product: Product) -> Tensor:
        self.products.append(product)
        for matrix in (product.a, product.b):
            if matrix.name:
                seen = self.values.setdefault(matrix.name, matrix.values.detach().clone())
                assert torch.equal(seen, matrix.values), f"{matrix.name} is two things"
        a, b = product.a.values, product.b.values
        m, n, q = product.shape
        result = torch.zeros(m, q)
        generator = torch.Generator().manual_seed(1)
        for rows in torch.arange(m).tensor_split(2):
            for columns in torch.arange(q).tensor_split(3):
                for inner in torch.arange(n).tensor_split(2):
                    if not (len(rows) and len(columns) and len(inner)):
                        continue
                    r, c, k = (slice(int(x[0]), int(x[-1]) + 1) for x in (rows, columns, inner))
                    x, y = sent_as(a[r, k], self.wire), sent_as(b[k, c], self.wire)
                    tile = multiply(x, y, wire=self.wire)
                    if self.checks:
                        check_tile(x, y, tile, wire=self.wire, generator=generator)
                    result[r, c] += tile.float()
        return result

    def kinds(self, layer: str) -> list[str]:
        return [product.kind for product in self.products if product.layer == layer]
