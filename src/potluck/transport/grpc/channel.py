"""Reads and writes on one gRPC stream, made safe for callers that are cancelled.

gRPC ends a whole call when a task that reads or writes it is cancelled, and allows one read and one write at a time.
Here one task reads and one writes for as long as the stream is open, and callers wait for what they do: a cancelled
caller disturbs neither, and a message costs no task of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

Outcome = bytes | None | Exception
"""A message; the end of the stream, or a write that is done; what went wrong."""

MAX_READ_AHEAD = 1
"""Messages that wait for a caller; beyond that the sender waits."""


class Reader:
    """`read` never raises. It is called from the first `receive` on, until it gives an end."""

    def __init__(self, read: Callable[[], Awaitable[Outcome]]) -> None:
        self._read = read
        self._arrived: deque[bytes] = deque()
        self._end: tuple[Outcome] | None = None
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    async def receive(self) -> bytes | None:
        if self._reading is None:
            self._reading = asyncio.create_task(self._run())
        while not self._arrived:
            if self._end is not None:
                if isinstance(self._end[0], Exception):
                    raise self._end[0].with_traceback(None)
                return None
            self._news.clear()
            await self._news.wait()
        self._room.set()
        return self._arrived.popleft()

    def close(self) -> None:
        """Nobody receives any more. A read under way ends with the call."""
        self._closed = True
        self._room.set()

    async def _run(self) -> None:
        while not self._closed:
            outcome = await self._read()
            if not isinstance(outcome, bytes):
                self._end = (outcome,)
                self._news.set()
                return
            self._arrived.append(outcome)
            self._news.set()
            while len(self._arrived) >= MAX_READ_AHEAD and not self._closed:
                self._room.clear()
                await self._room.wait()


class Writer:
    """One write at a time, in the order of the callers. `write` never raises."""

    def __init__(self, write: Callable[[bytes], Awaitable[Outcome]]) -> None:
        self._write = write
        self._waiting: deque[tuple[bytes, asyncio.Future[Outcome]]] = deque()
        self._news, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._writing: asyncio.Task[None] | None = None
        self._closed = False

    async def send(self, message: bytes) -> None:
        """Returns when it is written. A caller that is cancelled before its turn has sent nothing."""
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._run())
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((message, done))
        self._idle.clear()
        self._news.set()
        outcome = await done
        if isinstance(outcome, Exception):
            raise outcome

    async def flush(self) -> None:
        """Wait until nothing is left to write."""
        await self._idle.wait()

    def close(self) -> None:
        """What waits is still written; whoever sends after it learns what the call ended with."""
        self._closed = True
        self._news.set()

    async def _run(self) -> None:
        while True:
            while self._waiting:
                message, done = self._waiting.popleft()
                if done.cancelled():
                    continue
                outcome = await self._write(message)
                if not done.done():
                    done.set_result(outcome)
            self._idle.set()
            if self._closed:
                return
            self._news.clear()
            await self._news.wait()
