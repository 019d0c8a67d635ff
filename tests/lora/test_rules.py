"""Each rule against its formula in fp64, the exact ones against the dense mean of the workers' changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lora import dense
from lora.dense import adapter, change, mean_change, wide

from potluck.lora.factors import Factors, scale_for
from potluck.lora.fed_ex import fed_ex
from potluck.lora.fed_it import fed_it
from potluck.lora.flex_lora import flex_lora
from potluck.lora.flora import flora
from potluck.lora.het_lora import het_lora
from potluck.lora.ro_lora import moving
from potluck.types.errors import InvalidUpdate

Updates = dense.Updates
Rule = Callable[[Updates], Any]


def of_a(updates: Updates) -> list[tuple[float, torch.Tensor]]:
    return [(w, x.a) for w, x in updates]


def of_b(updates: Updates) -> list[tuple[float, torch.Tensor]]:
    return [(w, x.b) for w, x in updates]


def close(got: Any, expected: dense.Matrix, updates: Updates, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * dense.size(updates))


# The exact ones.
@given(round_=dense.rounds())
def test_flora_is_the_mean_change(round_: Updates) -> None:
    stack = flora(round_)
    assert (stack.rank, stack.scale) == (sum(x.rank for _, x in round_), 1.0)
    close(change(stack), mean_change(round_), round_)
    base = torch.zeros(stack.shape)
    stack.add_to(base)
    close(base, mean_change(round_), round_)


@given(round_=dense.rounds(equal=True))
def test_fed_ex_is_the_mean_change(round_: Updates) -> None:
    got = fed_ex(round_)
    assert got.residual.rank == sum(x.rank for _, x in round_) and got.residual.scale == 1.0
    close(change(got.mean) + change(got.residual), mean_change(round_), round_)
    in_slices = torch.cat([rows for _, rows in got.residual.slices()])
    close(in_slices, mean_change(round_) - change(got.mean), round_)


def test_fed_ex_residual_of_adapters_that_are_nearly_equal() -> None:
    """The difference of two products would be rounding only: 1e-4 in A and in B make 1e-8 of the product."""
    x = adapter(30, 20, 4)
    near = [adapter(30, 20, 4, seed=i) for i in (1, 2)]
    round_ = [(1.0, Factors(x.a + 1e-4 * y.a, x.b + 1e-4 * y.b, 1.0)) for y in near]
    expected = mean_change(round_) - dense.mean([x.b for _, x in round_], [1, 1]) @ dense.mean(
        [x.a for _, x in round_], [1, 1]
    )
    error = np.linalg.norm(change(fed_ex(round_).residual) - expected) / np.linalg.norm(expected)
    assert error < 2e-3  # what rounding x + 1e-4 y to fp32 costs


def test_ro_lora_begins_with_b() -> None:
    assert [moving(number) for number in (1, 2, 3, 4)] == ["b", "a", "b", "a"]


# The others.
@given(round_=dense.rounds(equal=True))
def test_fed_it_is_the_mean_of_each_factor(round_: Updates) -> None:
    got, weights = fed_it(round_), [w for w, _ in round_]
    np.testing.assert_allclose(got.a, dense.mean([x.a for _, x in round_], weights), rtol=0, atol=5e-6)
    np.testing.assert_allclose(got.b, dense.mean([x.b for _, x in round_], weights), rtol=0, atol=5e-6)
    assert got.scale == round_[0][1].scale


def test_fed_it_is_not_the_mean_change() -> None:
    round_ = [(1.0, adapter(6, 5, 2, seed=i)) for i in (0, 1)]
    assert np.linalg.norm(change(fed_it(round_)) - mean_change(round_)) > 0.1 * np.linalg.norm(mean_change(round_))


@settings(max_examples=100)
@given(round_=dense.rounds(max_side=12), scale=st.floats(0.1, 10))
def test_flex_lora_gives_each_receiver_the_best_of_its_rank(round_: Updates, scale: float) -> None:
    ranks = [x.rank for _, x in round_]
    best, whole = flex_lora(round_, max_rank=max(ranks)), mean_change(round_)
    s = np.linalg.svd(whole, compute_uv=False)
    for rank in ranks:
        received = best.resized(rank, scale=scale)
        assert (received.rank, received.scale) == (rank, scale)
        error = np.linalg.norm(whole - change(received))
        assert error == pytest.approx(np.linalg.norm(s[rank:]), rel=1e-5, abs=2e-6 * dense.size(round_))


def test_flex_lora_of_more_ranks_than_the_layer_has() -> None:
    round_ = [(1.0 + i, adapter(12, 8, 4, seed=i)) for i in range(50)]
    best, whole = flex_lora(round_, max_rank=8), mean_change(round_)
    close(change(best), whole, round_)


def test_flex_lora_of_one_worker_is_that_worker() -> None:
    x = adapter(12, 8, 3, scale=scale_for(16, 3, rank_stabilised=True))
    close(change(flex_lora([(7.0, x)], max_rank=3).resized(3, scale=x.scale)), change(x), [(7.0, x)])


@given(round_=dense.rounds(), scale=st.floats(0.1, 10))
def test_het_lora_averages_padded_factors_by_their_products_norm(round_: Updates, scale: float) -> None:
    ranks, norms = [x.rank for _, x in round_], [np.linalg.norm(change(x)) for _, x in round_]
    assume(min(norms) > 1e-6)
    a = np.average([dense.padded(wide(x.a), max(ranks), 0) for _, x in round_], axis=0, weights=norms)
    b = np.average([dense.padded(x.scale * wide(x.b), max(ranks), 1) for _, x in round_], axis=0, weights=norms)
    got = het_lora(round_)
    assert got.scale == 1.0
    np.testing.assert_allclose(got.a, a, rtol=0, atol=5e-6)
    np.testing.assert_allclose(got.b, b, rtol=0, atol=5e-6 * max(1.0, *(x.scale for _, x in round_)))
    for rank in ranks:
        received = got.resized(rank, scale=scale)
        close(change(received), b[:, :rank] @ a[:rank], round_, 1e-5)


def test_het_lora_of_adapters_without_change_goes_by_the_weights() -> None:
    a = [torch.full((rank, 3), float(rank)) for rank in (1, 2)]
    round_ = [(w, Factors(x, torch.zeros(4, len(x)), 1.0)) for w, x in zip((3.0, 1.0), a, strict=True)]
    got = het_lora(round_)
    np.testing.assert_allclose(got.a, [[1.25] * 3, [0.5] * 3], rtol=1e-6)
    counts = (1.0, Factors(torch.ones(1, 3), torch.ones(4, 1), 2.0))
    np.testing.assert_allclose(het_lora([*round_, counts]).delta(), counts[1].delta())


# What they have in common.
def scaled(updates: Updates, factor: float) -> Updates:
    return [(w, Factors(x.a, x.b, x.scale * factor)) for w, x in updates]


def merged(rule: str, updates: Updates) -> torch.Tensor:
    """The layer's change after the rule, dense."""
    held = updates[0][1]
    match rule:
        case "fed_it":
            return fed_it(updates).delta()
        case "flora":
            return flora(updates).delta()
        case "flex_lora":
            return flex_lora(updates, max_rank=held.rank).delta()
        case "het_lora":
            return het_lora(updates).delta()
        case _:
            return fed_ex(updates).mean.delta() + fed_ex(updates).residual.delta()


RULES = ("fed_it", "flora", "flex_lora", "het_lora", "fed_ex")


def three(dtype: torch.dtype = torch.float32) -> Updates:
    return [(float(i + 1), adapter(9, 7, 3, seed=i, scale=0.5, dtype=dtype)) for i in range(3)]


@pytest.mark.parametrize("rule", RULES)
def test_every_worker_counts(rule: str) -> None:
    """The bug of a public code base: the workers after the first are dropped."""
    whole, round_ = merged(rule, three()), three()
    for i in range(1, 3):
        changed = [*round_]
        changed[i] = (round_[i][0], adapter(9, 7, 3, seed=100 + i, scale=0.5))
        assert (merged(rule, changed) - whole).norm() > 0.05 * whole.norm()
        if rule != "het_lora":  # that goes by norms
            changed[i] = (10 * round_[i][0], round_[i][1])
            assert (merged(rule, changed) - whole).norm() > 0.05 * whole.norm()


@pytest.mark.parametrize("rule", RULES)
def test_the_change_goes_with_the_scale(rule: str) -> None:
    torch.testing.assert_close(merged(rule, scaled(three(), 4.0)), 4 * merged(rule, three()))


@pytest.mark.parametrize("rule", RULES)
def test_only_the_ratio_of_weights_counts(rule: str) -> None:
    for factor in (1e-300, 5e307):  # the sum of the latter is beyond fp64
        round_ = [(w * factor, x) for w, x in three()]
        torch.testing.assert_close(merged(rule, round_), merged(rule, three()))


@pytest.mark.parametrize("rule", RULES)
def test_one_worker_is_its_own_mean(rule: str) -> None:
    torch.testing.assert_close(merged(rule, three()[:1]), three()[0][1].delta())


@pytest.mark.parametrize("rule", RULES)
def test_the_same_bits_each_time_and_the_inputs_untouched(rule: str) -> None:
    round_ = three(torch.bfloat16)
    assert torch.equal(merged(rule, round_), merged(rule, three(torch.bfloat16)))
    for (_, x), (_, y) in zip(round_, three(torch.bfloat16), strict=True):
        assert torch.equal(x.a, y.a) and torch.equal(x.b, y.b)


@pytest.mark.parametrize("rule", RULES)
def test_bf16_is_summed_in_fp32(rule: str) -> None:
    """As many small values as would be lost beside a large one in bf16."""
    one = Factors(torch.ones(1, 3), torch.ones(2, 1), 1.0)
    round_ = [(1.0, one)] * 500
    narrow = [(w, Factors(x.a.bfloat16(), x.b.bfloat16(), 1.0)) for w, x in round_]
    torch.testing.assert_close(merged(rule, narrow), one.delta(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_weights_must_be_finite_and_above_zero(rule: str, weight: float) -> None:
    round_ = [*three()[:2], (weight, three()[2][1])]
    with pytest.raises(InvalidUpdate, match=f"adapter 3 of 3 has the weight {weight}, which must be finite and above"):
        merged(rule, round_)


@pytest.mark.parametrize("rule", [fed_it, flora, het_lora, fed_ex])
def test_there_must_be_an_adapter(rule: Rule) -> None:
    with pytest.raises(InvalidUpdate, match="there is no adapter to combine"):
        rule([])


@pytest.mark.parametrize("rule", ["fed_it", "fed_ex"])
def test_means_of_factors_need_one_rank(rule: str) -> None:
    round_ = [*three()[:2], (1.0, adapter(9, 7, 2, scale=0.5))]
    with pytest.raises(InvalidUpdate, match=r"of adapter 3 of 3 is \[.*\] and \[.*\] is needed for a mean; give all"):
        merged(rule, round_)


@pytest.mark.parametrize("rule", ["fed_it", "fed_ex"])
def test_means_of_factors_need_one_scale(rule: str) -> None:
    round_ = [*three()[:2], (1.0, adapter(9, 7, 3, scale=0.25))]
    with pytest.raises(InvalidUpdate, match=r"adapter 3 of 3 has the scale 0.25 and the first 0.5"):
        merged(rule, round_)


@pytest.mark.parametrize("rule", ["flora", "flex_lora", "het_lora"])
def test_stacks_need_one_layer(rule: str) -> None:
    round_ = [*three()[:2], (1.0, adapter(7, 9, 3))]
    with pytest.raises(InvalidUpdate, match=r"adapter 3 of 3 is for a weight \[7, 9\] and the first for \[9, 7\]"):
        merged(rule, round_)
