"""Work on the head: it ends where it is not wanted any more, and time and chance come to it as values."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

import pytest
import torch

from potluck.clock import SystemClock, ThreadExecutor
from potluck.clock.conversation import Ask, Stopped
from potluck.coordinator.kit import Kit
from potluck.fleet.head import HeadDesk
from potluck.simulator.exact.world import SeededKit
from potluck.strategies.sub_gemm.strategy import guessed_s_per_flop, seconds_per_flop

unused = cast(Any, None)


def test_a_validation_ends_at_its_next_batch() -> None:
    """It asks for no product, and would otherwise go on to its end after Ctrl-C."""
    executor, seen = ThreadExecutor(1), list[int]()

    def work(ask: Ask) -> None:
        data = (torch.tensor([i]) for i in itertools.count())
        desk = HeadDesk(
            ask=ask,
            spreader=unused,
            scope="",
            params=unused,
            objects=unused,
            layout=unused,
            clock=SystemClock(),
            data=data,
            secret=lambda: "",
        )
        seen.extend(int(batch) for batch in desk.batches())

    async def script() -> None:
        working = asyncio.ensure_future(executor.converse(work))
        await asyncio.sleep(0.05)
        working.cancel()
        with pytest.raises((asyncio.CancelledError, Stopped)):
            await asyncio.wait_for(working, 10)

    asyncio.run(script())
    executor.close()


def test_time_and_chance_of_a_played_run_are_those_of_its_seed() -> None:
    ticks = itertools.count()
    assert seconds_per_flop(lambda: 0.0) == guessed_s_per_flop
    assert seconds_per_flop(lambda: float(next(ticks))) == pytest.approx(1 / (2 * 384**3))
    assert SeededKit(3).secret() == SeededKit(3).secret() != SeededKit(4).secret()
    assert Kit().secret() != Kit().secret()
