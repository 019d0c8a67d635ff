"""What is merged into a layer, read in pieces."""

from __future__ import annotations

import pytest
import torch
from lora.dense import adapter

from potluck.lora.factors import Factors
from potluck.lora.merged import with_products
from potluck.types.errors import UnusableUpdates
from potluck.types.vector import Vector


@pytest.mark.parametrize("size", [1, 5, 7, 11, 63])
def test_any_piece_is_that_of_the_sum(size: int) -> None:
    before, x = torch.randn(9, 7, generator=torch.Generator().manual_seed(3)), adapter(9, 7, 2, scale=0.5)
    merged = with_products(Vector.of(before.reshape(-1)), x)
    pieces = [merged.read(start, min(start + size, 63)) for start in range(0, 63, size)]
    torch.testing.assert_close(torch.cat(pieces).view(9, 7), before + x.delta())
    assert torch.equal(Vector.of(before.reshape(-1)).tensor(), before.reshape(-1))


def test_finite_factors_whose_product_is_not_are_no_change() -> None:
    huge = Factors(torch.full((1, 7), 1e30), torch.full((9, 1), 1e30), 1.0)
    with pytest.raises(UnusableUpdates, match=r"is not finite; lower strategy\.inner\.lr"):
        with_products(Vector.of(torch.zeros(63)), huge).tensor()
