"""Real threads end before the folder they write to is anyone else's."""

from __future__ import annotations

import asyncio
import threading

from potluck.clock import ThreadExecutor


def test_closing_waits_for_what_has_begun_and_drops_the_rest() -> None:
    begun, may_end, done = threading.Event(), threading.Event(), list[str]()

    def work(name: str) -> None:
        begun.set()
        may_end.wait(10.0)
        done.append(name)

    async def main() -> None:
        executor = ThreadExecutor()
        tasks = [asyncio.ensure_future(executor.run(work, name)) for name in ("first", "second")]
        await asyncio.to_thread(begun.wait, 10.0)
        for task in tasks:
            task.cancel()  # as a stop does: the thread goes on
        threading.Timer(0.1, may_end.set).start()
        executor.close()
        assert done == ["first"]

    asyncio.run(main())
    assert done == ["first"]
