"""Transfers over one shared link end when max-min fair sharing says, whenever they begin."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from potluck.clock import VirtualClock, run_virtual
from potluck.planner.cost import shared_s
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


@pytest.mark.parametrize("seed", range(40))
def test_those_that_start_together_end_as_the_cost_model_says(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 40)
    amounts = [chance.uniform(1e5, 1e7) for _ in range(count)]
    rates = [chance.choice([1e4, 2e5, chance.uniform(1e3, 1e6)]) for _ in range(count)]
    capacity = chance.choice([math.inf, 1e5, 1e6, chance.uniform(1e4, 1e7)])
    got = run_virtual(ends_of(amounts, rates, capacity))
    assert got == pytest.approx(shared_s(amounts, rates, capacity), rel=1e-6, abs=1e-3)


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
    async def main() -> tuple[float, float, float]:
        clock, ends = VirtualClock(), list[float]()
        link = SharedLink(clock, 100.0)
        flows: list[Flow] = [link.start(1000.0, math.inf, lambda: ends.append(clock.now())) for _ in range(2)]
        await clock.sleep(4.0)
        left = link.left_bytes(flows[0])
        stopped = link.stop(flows[1])
        await clock.sleep(100.0)
        return left, stopped, ends[0]

    assert run_virtual(main()) == pytest.approx((800.0, 800.0, 12.0))
