import asyncio
import time

import pytest

from potluck.clock import DeadlockError, InlineExecutor, VirtualClock, run_virtual


def test_hours_pass_at_once_and_in_order() -> None:
    order: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(sleeper("late", 7200.0), sleeper("early", 3600.0))

    begun = time.monotonic()
    run_virtual(main())
    assert order == [("early", 3600.0), ("late", 7200.0)]
    assert time.monotonic() - begun < 5.0


def test_compute_is_charged() -> None:
    async def main() -> float:
        clock, executor = VirtualClock(epoch=100.0), InlineExecutor()
        assert await executor.run(lambda: 42, cost_s=12.5) == 42
        assert clock.time() == 112.5
        return clock.now()

    assert run_virtual(main()) == 12.5


def test_timeouts_work_on_virtual_time() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 1e6)

    run_virtual(main())


def test_a_standstill_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError):
        run_virtual(main())
