"""What an adapter is, which ones are refused, and its product made whole, in slices and not at all."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora import dense
from lora.dense import adapter, change, wide

from potluck.lora import factors as factors_module
from potluck.lora.factors import Factors, scale_for
from potluck.types.errors import InvalidUpdate


def test_scale_is_alpha_over_rank_or_over_its_root() -> None:
    assert scale_for(16, 8) == 2.0
    assert scale_for(16, 64, rank_stabilised=True) == 2.0


@given(round_=dense.rounds())
def test_delta_is_the_scaled_product(round_: dense.Updates) -> None:
    for _, x in round_:
        assert x.delta().dtype == torch.float32 and x.delta().shape == x.shape
        np.testing.assert_allclose(x.delta(), change(x), rtol=0, atol=1e-6 * dense.size([(1.0, x)]))


def test_factors_keep_no_graph() -> None:
    a, b = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4, 2))
    assert not Factors(a, b, 1.0).delta().requires_grad


ones = torch.ones


@pytest.mark.parametrize(
    ("a", "b", "scale", "sentence"),
    [
        (ones(2, 3), ones(4, 5), 1.0, r"A of an adapter is \[2, 3\] and B \[4, 5\], so their ranks are 2 and 5"),
        (ones(3, 2), ones(2, 4), 1.0, r"so their ranks are 3 and 4"),
        (ones(0, 3), ones(4, 0), 1.0, r"A of an adapter has the shape \[0, 3\] and must be a matrix of rank 1 or more"),
        (ones(2, 3), ones(0, 2), 1.0, r"B of an adapter has the shape \[0, 2\]"),
        (ones(2), ones(4, 2), 1.0, r"A of an adapter has the shape \[2\]"),
        (ones(2, 3).int(), ones(4, 2), 1.0, r"A of an adapter is torch.int32; send fp32, bf16 or fp16"),
        (ones(2, 3), ones(4, 2).double(), 1.0, r"B of an adapter is torch.float64"),
        (ones(2, 3), ones(4, 2) * math.nan, 1.0, r"B of an adapter has 8 of 8 values that are NaN or infinite"),
        (ones(2, 3) * -math.inf, ones(4, 2), 1.0, r"A of an adapter has 6 of 6 values .*; lower strategy.inner.lr"),
        (ones(2, 3), ones(4, 2), 0.0, r"the scale of an adapter is 0.0 and must be finite and above 0"),
        (ones(2, 3), ones(4, 2), -1.0, r"the scale of an adapter is -1.0"),
        (ones(2, 3), ones(4, 2), math.nan, r"the scale of an adapter is nan"),
        (ones(2, 3), ones(4, 2), math.inf, r"the scale of an adapter is inf"),
    ],
)
def test_what_is_no_adapter_is_refused(a: torch.Tensor, b: torch.Tensor, scale: float, sentence: str) -> None:
    with pytest.raises(InvalidUpdate, match=sentence):
        Factors(a, b, scale)


@pytest.mark.parametrize("numel", [1, 7, 20, 1000])
def test_slices_are_the_rows_of_the_product(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    monkeypatch.setattr(factors_module, "slice_numel", numel)
    x = adapter(11, 5, 3, scale=0.25, dtype=torch.bfloat16)
    slices = list(x.slices())
    assert [start for start, _ in slices] == list(range(0, 11, max(1, numel // 5)))
    assert all(rows.numel() <= max(numel, 5) for _, rows in slices)
    np.testing.assert_allclose(torch.cat([rows for _, rows in slices]), change(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("numel", [5, 13, 1000])
def test_merging_adds_the_scaled_product(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    """The bug of a public code base: s left out where an adapter is merged into the base."""
    monkeypatch.setattr(factors_module, "slice_numel", numel)
    x, base = adapter(11, 5, 3, scale=0.25), torch.full((11, 5), 2.0)
    x.add_to(base)
    np.testing.assert_allclose(base, 2 + change(x), rtol=0, atol=1e-6)


def test_merging_needs_a_weight_of_its_shape() -> None:
    with pytest.raises(InvalidUpdate, match=r"an adapter is for a weight \[4, 3\] and the layer's is \[3, 4\]"):
        adapter(4, 3, 2).add_to(torch.zeros(3, 4))


@given(round_=dense.rounds())
def test_norm_is_that_of_the_product(round_: dense.Updates) -> None:
    for _, x in round_:
        assert x.norm() == pytest.approx(np.linalg.norm(change(x)), rel=1e-12, abs=1e-13 * dense.size([(1.0, x)]))


def test_norm_of_large_factors_that_cancel() -> None:
    """Through B^T B and A A^T it would be lost to rounding: sqrt(eps) of the factors' size."""
    x = Factors(torch.tensor([[1.0, 0.0], [1.0, 2.0**-20]]), torch.tensor([[2.0**10, -(2.0**10)], [0, 0]]), 1.0)
    assert x.norm() == pytest.approx(2.0**-10, rel=1e-5)


def test_norm_of_no_change_is_zero() -> None:
    assert Factors(torch.randn(2, 3), torch.zeros(4, 2), 1.0).norm() == 0.0


@given(round_=dense.rounds(), rank=st.integers(1, 8), scale=st.floats(0.1, 10))
def test_resized_keeps_the_first_components_for_another_scale(round_: dense.Updates, rank: int, scale: float) -> None:
    _, x = round_[0]
    got = x.resized(rank, scale=scale)
    assert (got.rank, got.shape, got.scale) == (rank, x.shape, scale)
    expected = x.scale * wide(x.b)[:, :rank] @ wide(x.a)[:rank]
    np.testing.assert_allclose(change(got), expected, rtol=0, atol=1e-6 * dense.size([(1.0, x)]))
    assert not got.a[x.rank :].any() and not got.b[:, x.rank :].any()


@settings(max_examples=20)
@given(dtype=st.sampled_from(dense.TYPES), scale=st.floats(0.1, 10))
def test_resizing_to_what_it_is_changes_no_bit(dtype: torch.dtype, scale: float) -> None:
    x = adapter(5, 4, 3, scale=scale, dtype=dtype)
    got = x.resized(3, scale=scale)
    assert torch.equal(got.a, x.a.float()) and torch.equal(got.b, x.b.float())


def test_what_overflows_is_refused() -> None:
    with pytest.raises(InvalidUpdate, match="B of an adapter has 8 of 8 values that are NaN or infinite"):
        Factors(ones(2, 3), ones(4, 2) * 1e38, 1e4).resized(2, scale=1.0)
