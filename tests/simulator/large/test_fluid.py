"""Transfers over one shared link end when max-min fair sharing says, whenever they begin."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence

import pytest

from potluck.clock import VirtualClock, run_virtual
from potluck.simulator.large.fluid import Flow, SharedLink


async def ends_of(amounts: list[float], rates: list[float], capacity: float) -> list[float]:
    clock, done = VirtualClock(), asyncio.Event()
    link, ends = SharedLink(clock, capacity), [math.nan] * len(amounts)

    def ended(number: int) -> None:
        ends[number] = clock.now()
        if not any(map(math.isnan, ends)):
            done.set()

    for number, (amount, rate) in enumerate(zip(amounts, rates, strict=True)):
        link.start(amount, rate, lambda number=number: ended(number))
    await done.wait()
    return ends


def shared_s(amounts: Sequence[float], rates: Sequence[float], capacity: float) -> tuple[float, ...]:
    """When each of the transfers that start together ends, in seconds.

    Transfer i moves `amounts[i]` bytes over a link of its own of `rates[i]` and over one that all share, such as the
    coordinator's egress, of `capacity` bytes a second. The shared one is divided max-min fair, and anew whenever a
    transfer ends.
    """
    ends = [0.0] * len(amounts)
    left = {i: float(amount) for i, amount in enumerate(amounts) if amount > 0}
    now = 0.0
    while left:
        given = _max_min([rates[i] for i in left], capacity)
        lasting = {i: left[i] / rate if rate > 0 else math.inf for i, rate in zip(left, given, strict=True)}
        passed = min(lasting.values())
        if passed == math.inf:
            for i in left:
                ends[i] = math.inf
            break
        now += passed
        for i, rate in zip(list(left), given, strict=True):
            left[i] -= rate * passed
            if lasting[i] <= passed * (1 + 1e-12):
                ends[i] = now
                del left[i]
    return tuple(ends)


def _max_min(rates: Sequence[float], capacity: float) -> list[float]:
    """Nobody gets more than its own rate, and nobody less than another who wants no less."""
    given = [0.0] * len(rates)
    left = capacity
    for position, i in enumerate(sorted(range(len(rates)), key=lambda i: rates[i])):
        given[i] = min(rates[i], left / (len(rates) - position))
        left -= given[i]
    return given


@pytest.mark.parametrize("seed", range(40))
def test_those_that_start_together_end_as_the_reference_says(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 40)
    amounts = [chance.uniform(1e5, 1e7) for _ in range(count)]
    rates = [chance.choice([1e4, 2e5, chance.uniform(1e3, 1e6)]) for _ in range(count)]
    capacity = chance.choice([math.inf, 1e5, 1e6, chance.uniform(1e4, 1e7)])
    got = run_virtual(ends_of(amounts, rates, capacity))
    assert got == pytest.approx(shared_s(amounts, rates, capacity), rel=1e-6, abs=1e-3)


@pytest.mark.parametrize(
    ("amounts", "rates", "ends"),
    [
        ([10, 10], [5, 5], (5.0, 5.0)),  # through 4 B/s: both at 2 B/s
        ([20, 30], [1, 9], (20.0, 10.0)),  # the slow one wants only 1 B/s, so the other gets 3 B/s
        ([4, 20], [9, 9], (2.0, 6.0)),  # 4 bytes at 2 B/s; the other has 16 left and 4 B/s from then on
    ],
)
def test_transfers_share_by_hand(amounts: list[float], rates: list[float], ends: tuple[float, ...]) -> None:
    assert shared_s(amounts, rates, 4) == pytest.approx(ends)
    assert run_virtual(ends_of(amounts, rates, 4)) == pytest.approx(ends)


def test_one_that_comes_later_takes_its_share_and_gives_it_back() -> None:
    async def main() -> dict[str, float]:
        clock, ends = VirtualClock(), dict[str, float]()
        link = SharedLink(clock, 100.0)
        link.start(1000.0, 80.0, lambda: ends.update(first=clock.now()))
        await clock.sleep(5.0)  # 400 bytes at 80
        link.start(250.0, math.inf, lambda: ends.update(second=clock.now()))
        await clock.sleep(100.0)
        return ends

    # At 50 each the second takes 5 s; the first then has 350 bytes left, at 80 again.
    assert run_virtual(main()) == pytest.approx({"second": 10.0, "first": 10.0 + 350 / 80})


def test_one_that_is_stopped_leaves_its_share_to_the_others() -> None:
    async def main() -> tuple[float, float]:
        clock, ends = VirtualClock(), list[float]()
        link = SharedLink(clock, 100.0)
        flows: list[Flow] = [link.start(1000.0, math.inf, lambda: ends.append(clock.now())) for _ in range(2)]
        await clock.sleep(4.0)
        stopped = link.stop(flows[1])
        await clock.sleep(100.0)
        return stopped, ends[0]

    assert run_virtual(main()) == pytest.approx((800.0, 12.0))
