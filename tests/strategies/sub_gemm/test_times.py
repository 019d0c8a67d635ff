"""Times of tiles: stages by hand, corrections of the resource that binds, slack, silences, drift."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from potluck.planner.tiles.device import TileDevice
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.sub_gemm.assembly import Box
from potluck.strategies.sub_gemm.times import Stages, TileTimes, stages
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile, GemmSpeed, LinkRates, Speeds

anna = WorkerId("anna")
speeds = Speeds(gemm=(GemmSpeed(dtype="fp32", dim=512, s_per_flop=1e-9),))
link = LinkRates(up_bytes_per_s=1e6, down_bytes_per_s=4e6, rtt_s=0.02)
info = WorkerInfo(id=anna, profile=DeviceProfile(device="cpu", speeds=speeds, link=link))


def tile(down: float, work: float, up: float) -> Stages:
    return Stages(down_s=down, work_s=work, up_s=up, rtt_s=0.0)


def test_stages_by_hand() -> None:
    device = TileDevice(id=anna, down_bytes_per_s=1e6, up_bytes_per_s=2e5, s_per_flop=1e-8, s_per_tile=0.01, rtt_s=0.03)
    found = stages(device, Box(0, 100, 0, 50, 0, 200), down_bytes=1.2e5, up_bytes=2e4, stretch=2.0)
    assert found == Stages(down_s=0.24, work_s=2e6 * 1e-8 + 0.01, up_s=0.2, rtt_s=0.03)
    assert found.total_s == pytest.approx(0.5) and found.longest_s == 0.24


def test_the_resource_that_binds_takes_the_correction() -> None:
    times = TileTimes()
    before = times.device(info)
    times.observe(anna, tile(0.0, 1.0, 0.1), predicted_s=1.0, observed_s=2.0)
    after = times.device(info)
    assert after.s_per_flop / before.s_per_flop == pytest.approx(2**0.3)
    assert before.up_bytes_per_s / after.up_bytes_per_s == pytest.approx(2**0.03)
    assert after.down_bytes_per_s == before.down_bytes_per_s == 4e6


def test_many_tiles_that_were_predicted_alike_correct_it_once() -> None:
    """A device with little memory gets hundreds of tiles of one product, all predicted as it began."""
    times = TileTimes()
    began = times.device(info)
    for _ in range(500):
        times.observe(anna, tile(0.1, 1.0, 0.1), predicted_s=1.0, observed_s=3.0, by=began)
    assert times.device(info).s_per_flop / began.s_per_flop == pytest.approx(3.0, rel=1e-3)


def test_a_link_without_a_known_limit_is_corrected_by_nothing() -> None:
    times = TileTimes()
    endless = replace(times.device(info), down_bytes_per_s=math.inf, up_bytes_per_s=math.inf)
    times.observe(anna, tile(0.0, 1.0, 0.0), predicted_s=1.0, observed_s=1.0, by=endless)
    assert times.device(info) == times.device(replace(info)) and times.device(info).s_per_flop == 1e-9


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_times_that_are_none_change_nothing(seconds: float) -> None:
    times = TileTimes()
    before = times.device(info)
    times.observe(anna, tile(1.0, 1.0, 1.0), predicted_s=1.0, observed_s=seconds)
    times.observe(anna, tile(1.0, 1.0, 1.0), predicted_s=seconds, observed_s=1.0)
    assert times.device(info) == before


def test_a_new_rate_of_a_link_takes_the_place_of_what_was_learnt_of_it() -> None:
    times = TileTimes()
    times.device(info)
    times.observe(anna, tile(1.0, 1.0, 1.0), predicted_s=1.0, observed_s=3.0)
    again = replace(info, profile=replace(info.profile, link=replace(link, down_bytes_per_s=1e6)))
    found = times.device(again)
    assert found.down_bytes_per_s == 1e6
    assert found.up_bytes_per_s == pytest.approx(1e6 / 3**0.3)
    assert found.s_per_flop == pytest.approx(1e-9 * 3**0.3)


def test_who_was_never_measured_is_as_the_one_that_is_most_like_it() -> None:
    times = TileTimes()
    other = WorkerInfo(id=WorkerId("bert"), profile=DeviceProfile(device="cpu"))
    assert times.device(other).s_per_flop == 1e-10
    times.device(info)
    assert times.device(replace(other, id=WorkerId("carl"))).s_per_flop == pytest.approx(1e-9)


def test_slack_is_wide_at_first_and_then_as_wide_as_the_usual_errors() -> None:
    times = TileTimes()
    assert times.slack_share(anna) == 1.0
    for _ in range(5):
        times.observe(anna, tile(1.0, 0.0, 0.0), predicted_s=1.0, observed_s=1.0)
    assert times.slack_share(anna) == 1.0
    times.observe(anna, tile(1.0, 0.0, 0.0), predicted_s=1.0, observed_s=1.0)
    assert times.slack_share(anna) == 0.25
    for observed_s in (1.1, 0.9, 1.1, 0.9, 1.1, 0.9, 1.1, 0.9, 1.1, 0.9, 1.1, 0.9, 1.1, 0.9, 1.1, 0.9):
        times.observe(anna, tile(1.0, 0.0, 0.0), predicted_s=1.0, observed_s=observed_s)
    assert times.slack_share(anna) == pytest.approx(0.4)  # four times the usual error


def test_silences_grow_until_there_is_an_answer() -> None:
    times = TileTimes()
    assert not times.is_silent(anna, 0.0)
    times.fell_silent(anna, 0.5, 10.0)
    assert times.is_silent(anna, 10.4) and not times.is_silent(anna, 10.5)
    times.fell_silent(anna, 0.6, 12.0)
    assert times.is_silent(anna, 12.9) and not times.is_silent(anna, 13.0)
    times.answered(anna)
    assert not times.is_silent(anna, 12.0)


def test_drift_is_the_largest_change() -> None:
    times = TileTimes()
    planned = {anna: times.device(info)}
    assert times.drift(planned, (info,)) == 0.0
    assert times.drift(planned, ()) == math.inf
    times.observe(anna, tile(1.0, 0.5, 0.0), predicted_s=1.0, observed_s=0.5)
    assert times.drift(planned, (info,)) == pytest.approx(2**0.3 - 1)


def unmeasured(name: str) -> WorkerInfo:
    return WorkerInfo(id=WorkerId(name), profile=DeviceProfile(device="cpu", speeds=speeds))


def test_a_link_that_is_not_known_is_as_the_fleets_whenever_the_others_are_measured() -> None:
    """Not as a fixed guess, beside which a fleet on one machine is so quick that a joiner never gets a tile."""
    times, joiner = TileTimes(), unmeasured("new")
    guessed = times.device(joiner)
    for name, rate in (("a", 1e9), ("b", 3e9), ("c", 2e9)):
        link = LinkRates(up_bytes_per_s=rate, down_bytes_per_s=2 * rate, rtt_s=1e-4)
        times.device(WorkerInfo(id=WorkerId(name), profile=replace(joiner.profile, link=link)))
    found = times.device(joiner)
    assert guessed.down_bytes_per_s == 6.25e6
    assert (found.up_bytes_per_s, found.down_bytes_per_s, found.rtt_s) == (2e9, 4e9, 1e-4)
    changed = LinkRates(up_bytes_per_s=5e9, down_bytes_per_s=1e10, rtt_s=1e-4)
    times.device(WorkerInfo(id=WorkerId("a"), profile=replace(joiner.profile, link=changed)))
    assert times.device(joiner).up_bytes_per_s == 3e9


def test_what_a_joiners_own_tiles_have_shown_is_not_given_up_for_what_others_have() -> None:
    times, joiner = TileTimes(), unmeasured("new")
    times.device(joiner)
    for _ in range(6):
        times.observe(joiner.id, tile(1.0, 0.0, 0.0), predicted_s=1.0, observed_s=2.0)
    shown = times.device(joiner)
    times.device(info)
    assert times.device(joiner) == shown and shown.down_bytes_per_s == pytest.approx(6.25e6 / 2**1.8)
