"""The best adapter for a change of weights, against dense SVD in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora import dense
from lora.dense import adapter, change, wide

from potluck.lora.factors import Factors
from potluck.lora.svd import left_out, principal
from potluck.types.errors import InvalidUpdate


def refactored(change: Factors | torch.Tensor, rank: int, *, scale: float) -> tuple[Factors, float]:
    best, s = principal(change, rank)
    return best.resized(rank, scale=scale), left_out(s, rank)


def tail(matrix: dense.Matrix, rank: int) -> float:
    return float(np.linalg.norm(np.linalg.svd(matrix, compute_uv=False)[rank:]))


@settings(max_examples=100)
@given(round_=dense.rounds(max_side=12), rank=st.integers(1, 14), is_dense=st.booleans())
def test_no_adapter_of_its_rank_is_nearer(round_: dense.Updates, rank: int, is_dense: bool) -> None:
    """Eckart-Young: the distance is the norm of the singular values cut off. Thin, dense, and ranks above both."""
    _, x = round_[0]
    given_change = x.delta() if is_dense else x
    best, s = principal(given_change, rank)
    whole, size = wide(given_change) if isinstance(given_change, torch.Tensor) else change(x), dense.size(round_[:1])
    assert (best.rank, best.shape, best.scale) == (rank, x.shape, 1.0)
    assert np.linalg.norm(whole - change(best)) == pytest.approx(tail(whole, rank), rel=1e-6, abs=1e-6 * size)
    expected = np.linalg.svd(whole, compute_uv=False)
    found = np.pad(s.numpy(), (0, max(0, len(expected) - len(s))))[: len(expected)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * size)


@settings(max_examples=50)
@given(round_=dense.rounds(max_side=12), rank=st.integers(1, 14))
def test_components_are_orthogonal_in_order_and_of_fixed_sign(round_: dense.Updates, rank: int) -> None:
    _, x = round_[0]
    best, s = principal(x, rank)
    usable = min(rank, *x.shape)
    a, b = wide(best.a), wide(best.b)
    np.testing.assert_allclose(a[:usable] @ a[:usable].T, np.eye(usable), rtol=0, atol=1e-6)
    assert not a[usable:].any() and not b[:, usable:].any()
    squared, size = np.zeros((rank, rank)), dense.size(round_[:1])
    np.fill_diagonal(squared[:usable, :usable], s[:usable].numpy() ** 2)
    np.testing.assert_allclose(b.T @ b, squared, rtol=0, atol=1e-6 * size**2)
    assert all(np.diff(s) <= 0)
    for column in b.T:
        assert column[np.abs(column).argmax()] >= 0


def test_thin_route_on_a_layer_of_some_size() -> None:
    """1e-7 of the norm is what rounding the factors to fp32 costs."""
    x = adapter(300, 200, 40, scale=0.5, dtype=torch.bfloat16)
    best, s = principal(x, 16)
    u, expected, vh = np.linalg.svd(change(x))
    np.testing.assert_allclose(s, expected[:40], rtol=1e-12)
    error = np.linalg.norm(change(best) - (u[:, :16] * expected[:16]) @ vh[:16]) / np.linalg.norm(expected)
    assert error < 2e-7


def test_thin_and_dense_routes_find_the_same() -> None:
    x = adapter(30, 20, 6)
    thin, dense_too = principal(x, 4)[0], principal(x.delta(), 4)[0]
    np.testing.assert_allclose(thin.a, dense_too.a, atol=1e-5)
    np.testing.assert_allclose(thin.b, dense_too.b, atol=1e-4)


def test_signs_do_not_depend_on_how_the_factors_were_signed() -> None:
    x = adapter(30, 20, 3)
    flips = torch.tensor([1.0, -1.0, -1.0])
    other = principal(Factors(x.a * flips[:, None], x.b * flips, 1.0), 3)[0]
    first = principal(x, 3)[0]
    np.testing.assert_allclose(first.a, other.a, atol=1e-6)
    np.testing.assert_allclose(first.b, other.b, atol=1e-5)


def test_the_same_bits_each_time() -> None:
    first, again = principal(adapter(30, 20, 6), 8)[0], principal(adapter(30, 20, 6), 8)[0]
    assert torch.equal(first.a, again.a) and torch.equal(first.b, again.b)


def test_lower_ranks_are_the_first_components() -> None:
    x = adapter(30, 20, 6)
    high, low = principal(x, 5)[0], principal(x, 2)[0]
    assert torch.equal(high.a[:2], low.a) and torch.equal(high.b[:, :2], low.b)


@pytest.mark.parametrize("rank", [6, 15, 20])
def test_components_beyond_the_rank_of_the_change_can_be_trained(rank: int) -> None:
    """Their B is zero, so that nothing changes, and their A is not, so that B has a gradient."""
    best, _ = principal(adapter(30, 20, 3), rank)
    assert best.b[:, 3:].abs().max() < 1e-5
    np.testing.assert_allclose(best.a.norm(dim=1), np.ones(rank), atol=1e-6)


def test_no_change_at_all() -> None:
    best, error = refactored(Factors(torch.randn(2, 7), torch.zeros(9, 2), 1.0), 3, scale=2.0)
    assert error == 0.0 and not best.b.any() and best.a.abs().sum(1).min() > 0


@settings(max_examples=50)
@given(round_=dense.rounds(max_side=12), rank=st.integers(1, 14), scale=st.floats(0.1, 10), is_dense=st.booleans())
def test_refactoring_says_its_error(round_: dense.Updates, rank: int, scale: float, is_dense: bool) -> None:
    _, x = round_[0]
    got, error = refactored(x.delta() if is_dense else x, rank, scale=scale)
    whole = change(x)
    assert (got.rank, got.scale) == (rank, scale)
    measured = np.linalg.norm(whole - change(got)) / np.linalg.norm(whole)
    assert error == pytest.approx(measured, abs=2e-6 * dense.size(round_[:1]) / np.linalg.norm(whole))


def test_factors_come_out_the_right_way_round() -> None:
    """The bug of a public code base: SVD factors transposed, which only a layer that is not square shows."""
    best, error = refactored(torch.outer(torch.arange(1.0, 6.0), torch.tensor([3.0, 4.0])), 1, scale=0.5)
    assert error < 1e-12
    np.testing.assert_allclose(best.a, [[0.6, 0.8]], rtol=1e-6)
    np.testing.assert_allclose(best.b, 10 * np.arange(1, 6)[:, np.newaxis], rtol=1e-6)


@pytest.mark.parametrize("bad", [torch.full((3, 4), math.nan), torch.zeros(3), torch.zeros(0, 4)])
def test_what_is_no_change_is_refused(bad: torch.Tensor) -> None:
    with pytest.raises(InvalidUpdate, match="the change of an adapter"):
        principal(bad, 2)
