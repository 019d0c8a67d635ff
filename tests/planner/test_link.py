"""A link's rates from transfers of known rate, with what real ones do to them."""

from __future__ import annotations

import random

import pytest

from potluck.planner.link import LinkMeter, Transfer, differ, fit_link, window
from potluck.types.profile import LinkRates


def transfer(num_bytes: int, seconds: float) -> Transfer:
    return Transfer(num_bytes=num_bytes, seconds=seconds)


def test_two_sizes_tell_rate_and_round_trip() -> None:
    # 0.2 s + 1 MB / (1 MB/s) and 0.2 s + 4 MB / (1 MB/s)
    fit = fit_link([transfer(1_000_000, 1.2), transfer(4_000_000, 4.2)])
    assert fit is not None
    assert fit.bytes_per_s == pytest.approx(1e6)
    assert fit.rtt_s == pytest.approx(0.2)


def test_small_transfers_that_are_all_round_trip_do_not_make_the_link_slow() -> None:
    small = [transfer(500, 0.3 + 0.01 * i) for i in range(10)]  # 1.7 kB/s by division
    fit = fit_link([*small, transfer(10_000_000, 10.35)])
    assert fit is not None
    assert fit.bytes_per_s == pytest.approx(1e6, rel=0.01)


def test_one_size_needs_the_round_trip_from_elsewhere() -> None:
    same = [transfer(1_000_000, 1.25)] * 3
    alone, told = fit_link(same), fit_link(same, rtt_s=0.25)
    assert alone is not None and told is not None
    assert alone.bytes_per_s == pytest.approx(800_000)
    assert (told.bytes_per_s, told.rtt_s) == pytest.approx((1e6, 0.25))


def test_a_stall_does_not_move_the_rate() -> None:
    seen = [transfer(n * 1_000_000, 0.1 + n / 2) for n in (1, 2, 3, 4, 5, 6, 7)] + [transfer(4_000_000, 60.0)]
    fit = fit_link(seen)
    assert fit is not None
    assert fit.bytes_per_s == pytest.approx(2e6, rel=0.05)


def test_noise_of_ten_percent_leaves_the_rate_within_ten() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        seen = [
            transfer(n, (0.08 + n / 5e5) * chance.uniform(0.9, 1.1))
            for n in (chance.randrange(1_000, 8_000_000) for _ in range(window))
        ]
        fit = fit_link(seen)
        assert fit is not None
        assert fit.bytes_per_s == pytest.approx(5e5, rel=0.1)


def test_at_least_a_tenth_of_a_large_transfer_is_its_bytes() -> None:
    # As many seconds for twice the bytes: the slope is 0, and no link is infinitely fast.
    fit = fit_link([transfer(1_000, 1.0), transfer(2_000, 1.0)], rtt_s=5.0)
    assert fit is not None
    assert fit.bytes_per_s == pytest.approx(2_000 / 0.1)


@pytest.mark.parametrize("nothing", [[], [transfer(0, 1.0)], [transfer(5, 0.0)], [transfer(5, float("inf"))]])
def test_without_a_transfer_that_took_time_nothing_is_known(nothing: list[Transfer]) -> None:
    assert fit_link(nothing) is None


def test_up_and_down_are_kept_apart_and_follow_the_link() -> None:
    meter = LinkMeter()
    assert meter.rates == LinkRates()
    meter.answered(0.3)
    meter.answered(0.1)
    meter.sent(1_000_000, 2.1)
    meter.received(10_000_000, 1.1)
    assert meter.rates.rtt_s == pytest.approx(0.1)
    assert meter.rates.up_bytes_per_s == pytest.approx(5e5)
    assert meter.rates.down_bytes_per_s == pytest.approx(1e7)
    for _ in range(window // 2 + 1):  # the link became four times slower
        meter.sent(1_000_000, 8.1)
    assert meter.rates.up_bytes_per_s == pytest.approx(1.25e5)
    assert meter.rates.down_bytes_per_s == pytest.approx(1e7)


def test_small_changes_are_no_news() -> None:
    known = LinkRates(up_bytes_per_s=100.0, down_bytes_per_s=1000.0)
    assert not differ(known, known)
    assert not differ(known, LinkRates(up_bytes_per_s=104.0, down_bytes_per_s=960.0))
    assert differ(known, LinkRates(up_bytes_per_s=106.0, down_bytes_per_s=1000.0))
    assert differ(LinkRates(), known)
