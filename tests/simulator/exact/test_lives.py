"""A life that has ended: nothing of it stays, whatever its tasks were at."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from potluck.clock import InlineExecutor, run_virtual
from potluck.simulator.exact.lives import Life, LifeExecutor


def test_a_task_that_outlives_its_cancellation_ends_at_its_next_point(tmp_path: Path) -> None:
    """What it was at swallowed that, or it was begun as a last word."""

    async def script() -> None:
        life = Life("w1", tmp_path, begun_at=0.0)
        executor = LifeExecutor(life, InlineExecutor())

        async def stubborn() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60.0)
            await executor.run(str)

        tasks: list[asyncio.Task[Any]] = [life.spawn(stubborn())]
        await asyncio.sleep(0.1)
        life.end()
        tasks.append(life.spawn(executor.run(str)))
        async with asyncio.timeout(1.0):
            await life.gone()
        assert all(task.cancelled() for task in tasks)

    run_virtual(script())
