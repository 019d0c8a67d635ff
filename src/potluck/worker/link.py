"""The worker's link to its coordinator: one connection at a time, replaced when it breaks.

Objects go over it, and what it gives is learnt from them: nothing is sent only to measure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from potluck.clock import Clock, Executor
from potluck.planner.link import LinkMeter
from potluck.storage.objects import ObjectStore
from potluck.transport import objects
from potluck.transport.connection import Connection
from potluck.types.errors import ConnectionLost
from potluck.types.ids import Digest

T = TypeVar("T")


class Mover(Protocol):
    """Moves whole objects over a connection: `transport.objects`, or a model of it. Errors as there."""

    async def fetch(
        self, connection: Connection, digest: Digest, store: ObjectStore, executor: Executor,
        on_progress: objects.Progress | None = None,
    ) -> Path: ...  # fmt: skip

    async def push(
        self, connection: Connection, digest: Digest, path: Path, purpose: str, executor: Executor,
        on_progress: objects.Progress | None = None,
    ) -> None: ...  # fmt: skip


class Link:
    """Hands out the connection of the moment; whoever meets a broken one waits for the next."""

    def __init__(self, clock: Clock, mover: Mover = objects) -> None:
        self._clock, self._mover = clock, mover
        self.meter = LinkMeter()
        self._connection: Connection | None = None
        self._up = asyncio.Event()

    def set(self, connection: Connection | None) -> None:
        self._connection = connection
        if connection is None:
            self._up.clear()
        else:
            self._up.set()

    async def connection(self) -> Connection:
        while self._connection is None:  # it may break again before the one who waited runs
            await self._up.wait()
        return self._connection

    async def retry(self, action: Callable[[Connection], Awaitable[T]]) -> T:
        """Run a resumable action until it ends without losing the link."""
        while True:
            connection = await self.connection()
            try:
                return await action(connection)
            except ConnectionLost:
                if self._connection is connection:
                    await asyncio.sleep(0.1)  # the agent notices the same loss and clears the link

    async def fetch(
        self, digest: Digest, store: ObjectStore, executor: Executor, on_progress: objects.Progress | None = None
    ) -> None:
        """Have an object in `store`, however often the link breaks. Other errors as in `objects.fetch`."""
        await self.retry(lambda connection: self._fetch_by(connection, digest, store, executor, on_progress))

    async def fetch_once(self, digest: Digest, store: ObjectStore, executor: Executor) -> None:
        """The same before there is work: ConnectionLost where the link breaks, to join again then. What came stays.

        A coordinator that was started again knows no member that has not joined it, and would never give the rest.
        """
        await self._fetch_by(await self.connection(), digest, store, executor, None)

    async def _fetch_by(
        self, connection: Connection, digest: Digest, store: ObjectStore, executor: Executor,
        on_progress: objects.Progress | None,
    ) -> None:  # fmt: skip
        timed = _Timed(self._clock, on_progress)
        await self._mover.fetch(connection, digest, store, executor, timed.moved)
        timed.end(self.meter.received, self.meter)

    async def push(
        self, connection: Connection, digest: Digest, path: Path, purpose: str, executor: Executor,
        on_progress: objects.Progress | None = None,
    ) -> None:  # fmt: skip
        """Bring a file to the coordinator over this connection. Errors as in `objects.push`."""
        timed = _Timed(self._clock, on_progress)
        await self._mover.push(connection, digest, path, purpose, executor, timed.moved)
        timed.end(self.meter.sent, self.meter)


class _Timed:
    """One transfer: how many bytes really moved, and how long it took."""

    def __init__(self, clock: Clock, on_progress: objects.Progress | None) -> None:
        self._clock, self._on_progress = clock, on_progress
        self._begun = clock.now()
        self._answered_s: float | None = None
        self._first = self._last = 0  # bytes at the receiver, of the whole object

    def moved(self, num_bytes: int) -> None:
        if self._answered_s is None:
            self._answered_s = self._clock.now() - self._begun
            self._first = num_bytes
        self._last = num_bytes
        if self._on_progress is not None:
            self._on_progress(num_bytes)

    def end(self, heard: Callable[[int, float], None], meter: LinkMeter) -> None:
        """It came to its end. What was at the receiver already has told nothing."""
        if self._answered_s is not None:
            meter.answered(self._answered_s)
            if self._last > self._first:
                heard(self._last - self._first, self._clock.now() - self._begun)
