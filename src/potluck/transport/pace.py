"""Rate limits of transfers, each direction apart: bytes per second in total and for each worker, shared fairly.

A piece of n bytes may pass when the worker's own limit and the total one allow it. Each limit is a line that is free
again n / rate seconds after a piece passed, so in any time t no more than rate * (t + slack_s) bytes pass, and one
piece. Under the total limit the worker that was served least since it came goes first, whatever number of streams it
has: start-time fair queueing with one queue for each worker (Goyal et al. 1996), where a worker that comes new or
again starts at the share of those who wait, so that it makes up for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from potluck.clock import Clock
from potluck.transport.connection import Channel, Connection, Traffic
from potluck.types.errors import ConnectionLost
from potluck.types.ids import WorkerId

Way = Literal["up", "down"]
slack_s = 0.05
"""How late a piece may pass a free line and still count as having passed in time, since timers fire late."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes per second; 0 for none. `up` is from the workers to the coordinator."""

    up: float = 0.0
    down: float = 0.0
    up_per_worker: float = 0.0
    down_per_worker: float = 0.0


@dataclass(slots=True)
class _Queue:
    """Of one worker, one way."""

    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque[tuple[int, asyncio.Future[None]]])
    served_bytes: float = 0.0  # its place among the others: lowest first
    free_at: float = -math.inf  # when its own limit lets the next piece pass
    last_bytes: int = 0  # the piece that `free_at` waits for, and when it passed
    last_at: float = 0.0


class _Gate:
    """One direction."""

    def __init__(self, clock: Clock, total: float, per_worker: float) -> None:
        self._clock, self._total, self._per_worker = clock, total, per_worker
        self._queues: dict[WorkerId, _Queue] = {}
        self._line = _Queue()  # of all workers together
        self._level_bytes = 0.0  # served_bytes of whoever was last let through
        self._timer: asyncio.TimerHandle | None = None

    def set_rates(self, total: float, per_worker: float) -> None:
        """From now on, for pieces that wait too."""
        self._total, self._per_worker = total, per_worker
        for line, rate in ((self._line, total), *((queue, per_worker) for queue in self._queues.values())):
            line.free_at = _free_at(line, rate)
        self._let_through()

    async def take(self, worker: WorkerId, num_bytes: int) -> None:
        if not self._total and not self._per_worker:
            return
        queue = self._queues.setdefault(worker, _Queue())
        if not queue.waiting:
            queue.served_bytes = max(queue.served_bytes, self._level_bytes)
        turn = asyncio.get_running_loop().create_future()
        queue.waiting.append((num_bytes, turn))
        self._let_through()
        try:
            await turn
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):  # let through already: those bytes are charged
                queue.waiting.remove((num_bytes, turn))
            self._let_through()
            raise

    def held_back(self) -> set[WorkerId]:
        return {worker for worker, queue in self._queues.items() if queue.waiting}

    def _let_through(self) -> None:
        """Everybody whose time has come, least served first; then a timer for the next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while waiting := [queue for queue in self._queues.values() if queue.waiting]:
            now = self._clock.now()
            wait_s = max(self._line.free_at, min(queue.free_at for queue in waiting)) - now
            if wait_s > 1e-9:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._let_through)
                return
            queue = min((q for q in waiting if q.free_at - now <= 1e-9), key=lambda q: q.served_bytes)
            num_bytes, turn = queue.waiting.popleft()
            self._level_bytes = queue.served_bytes
            queue.served_bytes += num_bytes
            for line, rate in ((self._line, self._total), (queue, self._per_worker)):
                line.last_bytes = num_bytes
                line.last_at = line.free_at if now - line.free_at <= slack_s else now
                line.free_at = _free_at(line, rate)
            if not turn.done():
                turn.set_result(None)
        self._forget()

    def _forget(self) -> None:
        """Nobody waits: once the lines are free again a worker is as one that never was here."""
        now = self._clock.now()
        if self._line.free_at <= now:
            self._queues = {worker: queue for worker, queue in self._queues.items() if queue.free_at > now}


def _free_at(line: _Queue, rate: float) -> float:
    return line.last_at + line.last_bytes / rate if rate else -math.inf


class Pacer:
    """The limits of one coordinator. Without any it costs nothing."""

    def __init__(self, clock: Clock, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._gates: dict[Way, _Gate] = {
            "up": _Gate(clock, self._limits.up, self._limits.up_per_worker),
            "down": _Gate(clock, self._limits.down, self._limits.down_per_worker),
        }

    @property
    def limits(self) -> Limits:
        return self._limits

    def limit(self, limits: Limits) -> None:
        """Change them while transfers run."""
        self._limits = limits
        self._gates["up"].set_rates(limits.up, limits.up_per_worker)
        self._gates["down"].set_rates(limits.down, limits.down_per_worker)

    def held_back(self) -> set[WorkerId]:
        """Of whom something waits for its turn."""
        return self._gates["up"].held_back() | self._gates["down"].held_back()

    async def take(self, worker: WorkerId, way: Way, num_bytes: int) -> None:
        """Wait until so many bytes of this worker may pass."""
        await self._gates[way].take(worker, num_bytes)


class PacedChannel:
    """An end of a worker's stream, whose chunks pass at the pace of the limits: the coordinator's, which `sends` down.

    What the other end sends is taken later, so that the link itself makes it wait. ConnectionLost where it neither
    takes nor sends a chunk for `patience_s`: an abandoned stream would keep its share of what may be on its way.
    """

    def __init__(
        self, channel: Channel, pacer: Pacer, worker: WorkerId, *, sends: Way = "down", patience_s: float | None = None
    ) -> None:
        self._channel, self._pacer, self._worker, self._patience_s = channel, pacer, worker, patience_s
        self._sends: Way = sends
        self._receives: Way = "up" if sends == "down" else "down"

    async def send(self, message: bytes) -> None:
        await self._pacer.take(self._worker, self._sends, len(message))
        async with self._patience():
            await self._channel.send(message)

    async def receive(self) -> bytes | None:
        async with self._patience():
            message = await self._channel.receive()
        if message is not None:
            await self._pacer.take(self._worker, self._receives, len(message))
        return message

    async def close(self) -> None:
        await self._channel.close()

    @contextlib.asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._patience_s):
                yield
        except TimeoutError:
            raise ConnectionLost(f"a transfer of {self._worker} stood still for {self._patience_s:.0f} s") from None


class PacedConnection:
    """A worker's connection whose results leave at the pace of its own limits. Heartbeats wait for nothing."""

    def __init__(self, connection: Connection, pacer: Pacer, worker: WorkerId) -> None:
        self._connection, self._pacer, self._worker = connection, pacer, worker

    @property
    def traffic(self) -> Traffic:
        return self._connection.traffic

    async def call(self, method: str, request: bytes, *, timeout_s: float = 30.0) -> bytes:
        return await self._connection.call(method, request, timeout_s=timeout_s)

    async def open(self, method: str) -> Channel:
        channel = await self._connection.open(method)
        if method not in ("PutObject", "Data"):
            return channel
        return PacedChannel(channel, self._pacer, self._worker, sends="up")

    async def close(self) -> None:
        await self._connection.close()
