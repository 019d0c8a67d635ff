"""Reads and writes on one gRPC stream, made safe for callers that are cancelled.

gRPC ends a whole call when a task that reads or writes it is cancelled, and allows one read and one write at a time.
Here each operation is a task of its own: a cancelled caller leaves it running, and the next caller takes its result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Outcome = bytes | None | Exception
"""A message; the end of the stream, or a write that is done; what went wrong."""


class Reader:
    """`read` never raises: its outcome is kept until somebody takes it."""

    def __init__(self, read: Callable[[], Awaitable[Outcome]]) -> None:
        self._read = read
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[Outcome] | None = None
        self._end: tuple[Outcome] | None = None

    async def receive(self) -> bytes | None:
        async with self._turn:
            if self._end is None:
                if self._task is None:
                    self._task = asyncio.create_task(_run(self._read))
                outcome = await asyncio.shield(self._task)
                self._task = None
                if isinstance(outcome, bytes):
                    return outcome
                self._end = (outcome,)
            if isinstance(self._end[0], Exception):
                raise self._end[0].with_traceback(None)
            return None


class Writer:
    """One write at a time, in the order of the callers."""

    def __init__(self, write: Callable[[bytes], Awaitable[Outcome]]) -> None:
        self._write = write
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[Outcome] | None = None

    async def send(self, message: bytes) -> None:
        async with self._turn:
            if self._task is not None:  # left behind by a cancelled caller
                await asyncio.shield(self._task)
            self._task = asyncio.create_task(_run(self._write, message))
            outcome = await asyncio.shield(self._task)
            self._task = None
            if isinstance(outcome, Exception):
                raise outcome

    async def flush(self) -> None:
        """Wait until the last write is done."""
        async with self._turn:
            if self._task is not None:
                await asyncio.wait((self._task,))


async def _run(operation: Callable[..., Awaitable[Outcome]], *args: bytes) -> Outcome:
    return await operation(*args)
