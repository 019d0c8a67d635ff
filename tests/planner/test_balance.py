"""The plan of a round's work against its bounds, against brute force, and from what is known of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.planner.balance import (
    Measured,
    Pace,
    balanced,
    fastest_s,
    largest_share,
    least_gain,
    most_ahead,
    paces,
    sequence_work,
    transfers_s,
)
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile, GemmSpeed, LinkRates, Speeds


def fleet(*each: Pace | None) -> dict[WorkerId, Pace | None]:
    return {WorkerId(f"w{i:03}"): pace for i, pace in enumerate(each)}


def longest_s(of: dict[WorkerId, Pace | None], plan: dict[WorkerId, int]) -> float:
    return max(pace.finish_s(plan[worker]) for worker, pace in of.items() if pace is not None)


times = st.floats(1e-3, 1e3)
some_pace = st.builds(Pace, unit_s=times, fixed_s=st.one_of(st.just(0.0), times))


def believed(each: Sequence[Pace]) -> list[Pace]:
    """As a plan takes these paces to be."""
    least = fastest_s([pace.unit_s for pace in each])
    return [replace(pace, unit_s=max(pace.unit_s, least)) for pace in each]


@given(st.lists(some_pace, min_size=1, max_size=30), st.integers(1, 200))
@settings(max_examples=300, deadline=None)
def test_a_plan_shares_all_the_work_within_its_bounds_and_ends_together(each: list[Pace], mean: int) -> None:
    said, of = fleet(*each), fleet(*believed(each))
    plan = balanced(said, mean_units=mean)
    assert plan == balanced(dict(reversed(said.items())), mean_units=mean)
    assert sum(plan.values()) == mean * len(of)
    assert all(1 <= units <= largest_share * mean for units in plan.values())
    equal = dict.fromkeys(of, mean)
    if plan == equal:
        return
    assert longest_s(of, plan) <= (1 - least_gain) * longest_s(of, equal)
    for worker, pace in of.items():
        assert pace is not None
        if plan[worker] == largest_share * mean:
            continue
        for other, others in of.items():  # one more unit here would end no earlier than whoever ends last
            assert others is not None
            if plan[other] > 1:
                assert others.finish_s(plan[other]) <= pace.finish_s(plan[worker] + 1) * (1 + 1e-9)


@given(st.lists(some_pace, min_size=2, max_size=3), st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_no_other_plan_ends_earlier(each: list[Pace], mean: int) -> None:
    plan = balanced(fleet(*each), mean_units=mean)
    of = fleet(*believed(each))
    ways = product(range(1, largest_share * mean + 1), repeat=len(each))
    best_s = min(longest_s(of, dict(zip(of, way, strict=True))) for way in ways if sum(way) == mean * len(each))
    gain = 1 - best_s / longest_s(of, dict.fromkeys(of, mean))
    if gain > least_gain + 1e-9:
        assert longest_s(of, plan) == pytest.approx(best_s)
    else:
        assert set(plan.values()) == {mean}


def test_speeds_of_1_2_and_8() -> None:
    assert list(balanced(fleet(*(Pace(unit_s=s) for s in (1.0, 2.0, 8.0))), mean_units=26).values()) == [48, 24, 6]


@pytest.mark.parametrize(
    ("unit_s", "expected"),
    [((4.0, 4.0, 2.0, 1.0), 1.0), ((1.0, 8.0, 8.0), 1.0), ((1e-3, 8.0, 8.0), 1.0), ((1e-3, 8.0), 0.5), ((3.0,), 3.0)],
)
def test_nobody_counts_as_more_than_eight_times_as_fast_as_the_median(
    unit_s: tuple[float, ...], expected: float
) -> None:
    assert most_ahead == 8
    assert fastest_s(unit_s) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("num_honest", "least_share"), [(1, 0.11), (2, 0.29), (3, 0.35), (9, 0.5)])
def test_one_that_says_it_is_far_faster_leaves_work_to_the_others(num_honest: int, least_share: float) -> None:
    liar, honest = Pace(unit_s=1e-6), [Pace(unit_s=2.0)] * num_honest
    first, *others = balanced(fleet(liar, *honest), mean_units=100).values()
    assert first + sum(others) == 100 * (1 + num_honest)
    assert min(others) >= 100 * least_share
    assert balanced(fleet(liar, *honest), mean_units=100) == balanced(fleet(Pace(unit_s=1e-9), *honest), mean_units=100)


@pytest.mark.parametrize("speeds", [(), (None, None), (1.0, 1.0), (1.0, 1.03), (2.0, None, 2.0)])
def test_where_nothing_is_gained_all_get_the_same(speeds: tuple[float | None, ...]) -> None:
    plan = balanced(fleet(*(Pace(unit_s=s) if s else None for s in speeds)), mean_units=7)
    assert list(plan.values()) == [7] * len(speeds)


def test_who_is_not_known_counts_as_the_median() -> None:
    of = fleet(Pace(unit_s=1.0), None, Pace(unit_s=2.0), Pace(unit_s=4.0))
    plan = list(balanced(of, mean_units=40).values())
    assert abs(plan[1] - plan[2]) <= 1 and plan[0] > 1.9 * plan[2] > 3.6 * plan[3]


def test_a_slow_link_gets_less_work() -> None:
    plan = list(balanced(fleet(Pace(unit_s=1.0, fixed_s=50.0), Pace(unit_s=1.0)), mean_units=50).values())
    assert plan == [25, 75]


def gpu(s_per_flop: float, link: LinkRates | None = None) -> DeviceProfile:
    speeds = Speeds(gemm=(GemmSpeed(dtype="fp32", dim=1024, s_per_flop=s_per_flop),))
    return DeviceProfile(device="cuda:0", speeds=speeds, link=link or LinkRates())


work = sequence_work(1000, 10, 4)


def seconds(of: dict[str, Measured]) -> dict[str, float]:
    found = paces({WorkerId(name): known for name, known in of.items()}, work, up_bytes=100, down_bytes=200)
    return {name: pace.unit_s for name, pace in found.items()}


def test_of_what_was_measured_one_time_that_stands_out_does_not_count() -> None:
    assert seconds({"w": Measured(profile=gpu(1e-6), unit_s=(1.0, 50.0, 2.0))}) == {"w": 2.0}
    assert seconds({"w": Measured(profile=DeviceProfile(device="cpu"), unit_s=(0.0,))}) == {}


def test_a_newcomer_goes_by_its_profile_beside_those_who_have_worked() -> None:
    got = seconds(
        {
            "a": Measured(profile=gpu(1e-6), unit_s=(3.0,)),
            "b": Measured(profile=gpu(4e-6), unit_s=(12.0,)),
            "newcomer": Measured(profile=gpu(2e-6)),
            "unmeasured": Measured(profile=DeviceProfile(device="cpu")),
        }
    )
    assert got == {"a": 3.0, "b": 12.0, "newcomer": pytest.approx(6.0)}


def test_before_anyone_has_worked_profiles_are_compared() -> None:
    fast, slow = Measured(profile=gpu(1e-6)), Measured(profile=gpu(3e-6))
    first = seconds({"fast": fast, "slow": slow})
    assert first["slow"] == pytest.approx(3 * first["fast"])
    known = Measured(profile=DeviceProfile(device="cpu"), unit_s=(5.0,))
    assert seconds({"known": known, "fast": fast}) == {"known": 5.0}  # nothing ties the model to seconds


def test_transfers_as_far_as_the_link_is_known() -> None:
    assert transfers_s(LinkRates(up_bytes_per_s=10.0, down_bytes_per_s=20.0, rtt_s=0.5), 100, 200) == 21.0
    assert transfers_s(LinkRates(), 100, 200) == 0.0


@pytest.mark.parametrize("unit_s", [1e-312, 5e-324, 1e300, 0.0, -1.0])
def test_times_that_no_worker_can_take_make_no_plan_fail(unit_s: float) -> None:
    work = sequence_work(1000, 8, 4)
    cpu = DeviceProfile(device="cpu", link=LinkRates(up_bytes_per_s=1e-18, down_bytes_per_s=1e-18))
    known = {
        WorkerId("a"): Measured(profile=cpu, unit_s=(unit_s,)),
        WorkerId("b"): Measured(profile=cpu, unit_s=(1.0,)),
    }
    found = paces(known, work, up_bytes=1e6, down_bytes=1e6)
    for of in ({**dict.fromkeys(known), **found}, fleet(Pace.bounded(unit_s, 1e300), Pace(unit_s=1.0))):
        plan = balanced(of, mean_units=10)
        assert sum(plan.values()) == 20 and min(plan.values()) >= 1
