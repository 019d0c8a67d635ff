"""Closing a stream never swallows the cancellation of who closes it."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from potluck.transport.connection import Traffic
from potluck.transport.grpc.client import _WorkerEnd  # pyright: ignore[reportPrivateUsage]


class OpenCall:
    """A call on which nothing comes until the coordinator ends it."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    async def read(self) -> None:
        await self.ended.wait()

    async def write(self, message: bytes) -> None:
        raise AssertionError(f"nothing is sent, and this was: {message!r}")

    async def done_writing(self) -> None:
        return

    async def code(self) -> Any:
        return grpc.StatusCode.OK

    def end(self) -> None:
        self.ended.set()
        for callback in self._callbacks:
            callback(self)

    def cancel(self) -> bool:
        return True


@pytest.mark.parametrize("num_turns", range(12))
def test_a_cancel_while_the_stream_ends_is_kept(num_turns: int) -> None:
    """Both in one turn of the event loop: a worker that was removed is cancelled just as its streams end."""

    async def main() -> None:
        call = OpenCall()
        end = _WorkerEnd(call, "PutObject", "127.0.0.1:1", Traffic())  # pyright: ignore[reportArgumentType]
        went_on = asyncio.Event()

        async def close() -> None:
            await end.close()
            went_on.set()
            await asyncio.Event().wait()

        closing = asyncio.create_task(close())
        for _ in range(20):
            await asyncio.sleep(0)
        call.end()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        closing.cancel()
        done, _ = await asyncio.wait([closing], timeout=0.5)
        assert done and closing.cancelled(), (
            f"cancelled {num_turns} turns after the end; it went on: {went_on.is_set()}"
        )

    asyncio.run(main())


class GrpcOwnError(Exception):
    """As `ExecuteBatchError` of gRPC's: an Exception of no public class."""


def test_a_link_that_breaks_while_a_stream_is_closed_ends_the_stream_and_nothing_else() -> None:
    class BreakingCall(OpenCall):
        async def done_writing(self) -> None:
            self.end()
            raise GrpcOwnError('Failed "execute_batch"')

    async def main() -> None:
        call = BreakingCall()
        end = _WorkerEnd(call, "Data", "127.0.0.1:1", Traffic())  # pyright: ignore[reportArgumentType]
        async with asyncio.timeout(5):
            await end.close()
        assert call.ended.is_set()

    asyncio.run(main())
