"""Wrong tiles are refused and honest ones are not. `potluck bench lies` asks the same of more of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from potluck.bench.lies import FACTORS, LIES, ORDERS, WIRES, honest_tile, is_refused, wrong_tile
from potluck.strategies.sub_gemm.checks import check_tile
from potluck.types.errors import InvalidUpdate, NotFinite


def chance(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("wire", WIRES)
def test_honest_tiles_are_accepted_whatever_their_factors_and_order_of_sums(wire: str) -> None:
    generator = chance()
    for factors in FACTORS:
        for order in ORDERS:
            for shape in ((1, 1, 1), (3, 700, 5), (90, 64, 50), (130, 300, 70)):
                a, b, c = honest_tile(wire, generator, factors=factors, order=order, shape=shape)
                check_tile(a, b, c, wire=wire, generator=generator)


@pytest.mark.parametrize("n", [128, 1024, 4096])
def test_honest_sums_that_grow_before_they_cancel_are_accepted(n: int) -> None:
    """Half of the terms are positive, then half negative: met in the first steps of a real run."""
    generator = chance(5)
    signs = torch.cat([torch.ones(n // 2), -torch.ones(n // 2)])
    a = signs * (1 + 1e-3 * torch.randn(100, n, generator=generator))
    b = torch.rand(n, 80, generator=generator)
    check_tile(a, b, a @ b, wire="fp32", generator=generator)
    wrong = a @ b
    wrong[3, 5] += 1e-3 * wrong.square().mean().sqrt()
    with pytest.raises(InvalidUpdate, match="is not the product of its factors"):
        check_tile(a, b, wrong, wire="fp32", generator=generator)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("wire", WIRES)
def test_errors_of_the_least_size_are_refused(wire: str, lie: str) -> None:
    generator = chance(2)
    assert all(is_refused(*wrong_tile(lie, wire, generator), wire, generator) for _ in range(25))


@pytest.mark.parametrize("wire", WIRES)
def test_an_error_in_a_row_that_hides_it_is_found_by_multiplying_the_row_again(wire: str) -> None:
    generator = chance(3)
    a, b = torch.randn(200, 100, generator=generator), torch.randn(100, 2000, generator=generator)
    a[7] *= 20
    a, b, c = a.bfloat16().float(), b.bfloat16().float(), (a.bfloat16().double() @ b.bfloat16().double())
    if wire != "fp32":
        c = c.bfloat16().double()
    lie = (1e-3 if wire == "fp32" else 0.5) * float(c.square().mean().sqrt())
    place = int((c[7].abs() - 20).abs().argmin())
    for sign in (1.0, -1.0):
        wrong = c.clone()
        wrong[7, place] += sign * lie
        wrong = wrong.to(torch.float32 if wire == "fp32" else torch.bfloat16)
        with pytest.raises(InvalidUpdate, match=r"is off by 0\.(00|[45])"):
            check_tile(a, b, wrong, wire=wire, generator=generator)


def test_long_sums_are_checked_in_short_spans_rather_than_multiplied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = chance(9)
    a = torch.randn(256, 60_000, generator=generator) * torch.exp(0.5 * torch.randn(256, 1, generator=generator))
    b = torch.randn(60_000, 256, generator=generator)
    c = a @ b
    done = check_tile(a, b, c, wire="fp32", generator=generator)
    product = 2 * a.numel() * 256
    assert done.num_rows_again <= 8 and done.flops < 0.4 * product  # of which 8 % a span, for a tile so small
    wrong = c.clone()
    wrong[3, 200] += 1e-3 * c.square().mean().sqrt()
    assert is_refused(a, b, wrong, "fp32", generator)
    monkeypatch.setattr("potluck.strategies.sub_gemm.checks.least_columns", 1024)
    whole = check_tile(a, b, c, wire="fp32", generator=generator)
    assert whole.num_rows_again > 3 * done.num_rows_again and whole.flops < 0.4 * product
    narrow = check_tile(a[:, :100], b[:100, :20], a[:, :100] @ b[:100, :20], wire="fp32", generator=generator)
    assert (narrow.num_rows_again, narrow.flops) == (256, 4 * 256 * 100 * 20)


def test_tf32_is_not_fp32() -> None:
    generator = chance(4)
    for shape in ((100, 500, 80), (30, 64, 30)):
        a, b, _ = honest_tile("fp32", generator, factors="normal", shape=shape)
        low = [((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for x in (a, b)]
        assert is_refused(a, b, low[0] @ low[1], "fp32", generator)


@pytest.mark.parametrize("wire", WIRES)
def test_another_tile_is_refused(wire: str) -> None:
    generator = chance(5)
    for shape in ((5, 6, 7), (100, 60, 90)):
        a, b, c = honest_tile(wire, generator, factors="normal", shape=shape)
        for wrong in (torch.zeros_like(c), c.flip(0), c * 2, c * 3e38, torch.ones_like(c) * 3e38, -c):
            assert is_refused(a, b, wrong, wire, generator)
        assert is_refused(torch.zeros_like(a), b, c, wire, generator)


def test_views_are_checked_like_copies() -> None:
    generator = chance(6)
    a, b, c = honest_tile("fp32", generator, factors="both", shape=(60, 200, 300))
    views = (x.T.contiguous().T for x in (a, b, c))
    check_tile(*views, wire="fp32", generator=generator)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (torch.zeros(4, 5), r"came back as float32 \[4, 5\] and must be float32 \[4, 6\]"),
        (torch.zeros(4, 6, dtype=torch.bfloat16), "came back as bfloat16"),
        (torch.zeros(4, 6, dtype=torch.float64), "came back as float64"),
        (torch.full((4, 6), torch.nan), "holds nan and its factors allow no more than"),
        (torch.full((4, 6), -torch.inf), "holds inf and its factors allow no more than"),
        (torch.full((4, 6), 1e30), "holds 1e.30 and its factors allow no more than"),
    ],
)
def test_replies_that_are_no_tile_are_refused(wrong: Tensor, match: str) -> None:
    a, b, _ = honest_tile("fp32", chance(7), factors="normal", shape=(4, 5, 6))
    with pytest.raises(InvalidUpdate, match=match):
        check_tile(a, b, wrong, wire="fp32", generator=chance())


def test_factors_that_are_not_finite_are_the_heads_own_fault() -> None:
    with pytest.raises(NotFinite, match="a factor of a product holds NaN or infinity"):
        check_tile(torch.full((2, 2), torch.inf), torch.ones(2, 2), torch.ones(2, 2), wire="fp32", generator=chance())
    large = torch.full((2, 2), 1e20)
    with pytest.raises(NotFinite, match="may overflow"):
        check_tile(large, large, large @ large, wire="fp32", generator=chance())
    check_tile(large, large * 0.01, large @ (large * 0.01), wire="fp32", generator=chance())


@pytest.mark.parametrize("wire", WIRES)
def test_a_device_without_denormal_numbers_is_honest(wire: str) -> None:
    generator = chance(8)
    for shape in ((6, 50, 7), (90, 300, 60)):
        a, b, c = honest_tile(wire, generator, factors="denormal", shape=shape)
        check_tile(a, b, torch.zeros_like(c), wire=wire, generator=generator)
        a, b, c = honest_tile(wire, generator, factors="normal", shape=shape)
        a[0] *= 1e-39
        c[0] = 0
        check_tile(a, b, c, wire=wire, generator=generator)
