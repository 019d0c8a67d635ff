"""The memory transport: coordinator and workers in one process, over modelled links.

A link has a rate and half the round-trip time in each direction. Rate is shared like a fluid: of n streams that have
something to send, each moves at rate / n, so a small control message never waits behind a bulk one. Works on the
virtual clock, where the same program gives the same trace, and on a real loop.

Nothing is random and no task runs of its own: timers move the bytes.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from potluck.clock import Clock
from potluck.transport.connection import Channel, Peer, Service, Traffic
from potluck.transport.rules import answer_call, answer_stream, check_size, close_wait_s, loss_grace_s
from potluck.types.errors import ConnectionLost, NotAdmitted
from potluck.types.ids import WorkerId

WATERMARK_BYTES = 4 << 20
"""Bytes a stream holds in one direction before `send` waits, beside what the link itself has in flight."""
MAX_IN_FLIGHT_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Link:
    """What lies between a worker and its coordinator."""

    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    rtt_s: float = 0.0


@dataclass(slots=True)
class _Item:
    """A message on its way."""

    remaining: float  # bytes still to be put on the link
    deliver: Callable[[], None]


class _Pipe:
    """One direction of a link: fluid sharing between lanes, then a constant delay."""

    def __init__(self, clock: Clock, bytes_per_s: float, delay_s: float) -> None:
        self._clock, self._rate, self._delay_s = clock, bytes_per_s, delay_s
        self.in_flight_bytes = min(MAX_IN_FLIGHT_BYTES, bytes_per_s * delay_s * 2) if delay_s else 0.0
        self._lanes: dict[object, deque[_Item]] = {}
        self._since = 0.0
        self._sending: asyncio.TimerHandle | None = None
        self._flying: deque[tuple[float, _Item]] = deque()
        self._landing: asyncio.TimerHandle | None = None

    def send(self, lane: object, num_bytes: int, deliver: Callable[[], None]) -> None:
        """Messages of one lane arrive in order; lanes share the rate."""
        item = _Item(num_bytes, deliver)
        if math.isinf(self._rate):
            self._fly(item)
            return
        self._progress()
        self._lanes.setdefault(lane, deque()).append(item)
        self._finish_heads()

    def drop(self, lane: object) -> None:
        """What the lane still had to send is gone."""
        if lane in self._lanes:
            self._progress()
            del self._lanes[lane]
            self._finish_heads()

    def clear(self) -> None:
        """Everything on the way is gone."""
        self._lanes.clear()
        self._flying.clear()
        for timer in (self._sending, self._landing):
            if timer is not None:
                timer.cancel()
        self._sending = self._landing = None

    def _progress(self) -> None:
        """Account for what moved since the last look."""
        now = self._clock.now()
        if self._lanes:
            share = (now - self._since) * self._rate / len(self._lanes)
            for items in self._lanes.values():
                items[0].remaining -= share
        self._since = now

    def _finish_heads(self) -> None:
        for lane, items in list(self._lanes.items()):
            while items and items[0].remaining <= 0.5:  # half a byte: what rounding of times may leave
                self._fly(items.popleft())
            if not items:
                self._lanes.pop(lane, None)
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        if self._lanes:
            wait_s = min(items[0].remaining for items in self._lanes.values()) * len(self._lanes) / self._rate
            self._sending = asyncio.get_running_loop().call_later(wait_s, self._sent)

    def _sent(self) -> None:
        self._sending = None
        self._progress()
        self._finish_heads()

    def _fly(self, item: _Item) -> None:
        if not self._delay_s:
            item.deliver()
            return
        self._flying.append((self._clock.now() + self._delay_s, item))
        if self._landing is None:
            self._landing = asyncio.get_running_loop().call_later(self._delay_s, self._land)

    def _land(self) -> None:
        self._landing = None
        now = self._clock.now()
        while self._flying and self._flying[0][0] <= now + 1e-9:
            self._flying.popleft()[1].deliver()
        if self._flying and self._landing is None:
            self._landing = asyncio.get_running_loop().call_later(self._flying[0][0] - now, self._land)


class _Way:
    """One direction of one stream: what is under way, what has arrived, and how it ended."""

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe
        self._limit = WATERMARK_BYTES + pipe.in_flight_bytes
        self._held_bytes = 0  # sent and not yet taken out at the other end
        self._inbox: deque[bytes] = deque()
        self._turn = asyncio.Lock()  # one sender at a time, in order
        self._room = asyncio.Event()
        self._arrived = asyncio.Event()
        self._unread = True  # False: nobody reads any more, so arrivals are dropped
        self._receive_end: Exception | None = None
        self._ended = False
        self.send_error: Exception | None = None

    async def send(self, message: bytes) -> None:
        async with self._turn:
            while self.send_error is None and self._held_bytes and self._held_bytes + len(message) > self._limit:
                self._room.clear()
                await self._room.wait()
            if self.send_error is not None:
                raise self.send_error.with_traceback(None)
            self._held_bytes += len(message)
            self._pipe.send(self, len(message), lambda: self._arrive(message))

    def send_end(self, error: Exception | None) -> None:
        """The last thing on this way: good order, or what went wrong."""
        if self.send_error is None:
            self.send_error = ConnectionLost("the stream has ended")
            self._pipe.send(self, 0, lambda: self.end(error))

    def _arrive(self, message: bytes) -> None:
        if self._unread:
            self._inbox.append(message)
            self._arrived.set()
        else:
            self._take(message)

    def _take(self, message: bytes) -> None:
        self._held_bytes -= len(message)
        self._room.set()

    async def receive(self) -> bytes | None:
        while not self._inbox and not self._ended:
            self._arrived.clear()
            await self._arrived.wait()
        if self._inbox:
            message = self._inbox.popleft()
            self._take(message)
            return message
        if self._receive_end is not None:
            raise self._receive_end.with_traceback(None)
        return None

    def end(self, error: Exception | None) -> None:
        """The reader finds the end behind what has arrived."""
        if not self._ended:
            self._ended, self._receive_end = True, error
            self._arrived.set()

    def abandon(self) -> None:
        """Nobody reads any more: the sender must not wait for room."""
        self._unread = False
        while self._inbox:
            self._take(self._inbox.popleft())

    def lose(self, *, sender: Exception, reader: Exception) -> None:
        """The link broke: what had not been read is gone too. Each end learns its own reason."""
        self.abandon()
        self.send_error = self.send_error or sender
        self._room.set()
        self.end(reader)


class _WorkerEnd:
    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    async def send(self, message: bytes) -> None:
        stream = self._stream
        check_size(stream.method, len(message), up=True)
        await stream.up.send(bytes(message))
        stream.connection.traffic.add_up(stream.method, len(message))

    async def receive(self) -> bytes | None:
        message = await self._stream.down.receive()
        if message is not None:
            self._stream.connection.traffic.add_down(self._stream.method, len(message))
        return message

    async def close(self) -> None:
        stream = self._stream
        if stream.method == "GetObject":  # nothing more to say, so the coordinator need not go on
            stream.lose(ConnectionLost("the worker gave the stream up"))
            return
        stream.up.send_end(None)
        stream.down.abandon()
        stream.down.end(None)
        try:
            async with asyncio.timeout(close_wait_s):
                await stream.over.wait()
        except TimeoutError:
            stream.lose(ConnectionLost("the worker gave the stream up"))


class _CoordinatorEnd:
    def __init__(self, stream: _Stream, traffic: Traffic) -> None:
        self._stream, self._traffic = stream, traffic

    async def send(self, message: bytes) -> None:
        check_size(self._stream.method, len(message), up=False)
        await self._stream.down.send(bytes(message))
        self._traffic.add_down(self._stream.method, len(message))

    async def receive(self) -> bytes | None:
        message = await self._stream.up.receive()
        if message is not None:
            self._traffic.add_up(self._stream.method, len(message))
        return message

    async def close(self) -> None:
        pass  # the coordinator ends a stream by returning from `Service.open`


class _Stream:
    """Both directions of one stream and the task that serves it."""

    def __init__(self, connection: MemoryConnection, method: str) -> None:
        self.connection, self.method = connection, method
        self.up, self.down = _Way(connection.up), _Way(connection.down)
        self.over = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """The opening has reached the coordinator."""
        if self.over.is_set():
            return
        self._serving = self.connection.network.spawn(self._serve())

    async def _serve(self) -> None:
        connection = self.connection
        end = _CoordinatorEnd(self, connection.network.traffic(connection.peer.id))
        error = await answer_stream(connection.service, connection.peer, self.method, end)
        if self.over.is_set():
            return
        self.up.abandon()
        self.down.send_end(error)
        # From here on the worker's sends go nowhere; it learns why when the end arrives.
        connection.down.send(self.down, 0, lambda: self._over(error))

    def _over(self, error: Exception | None) -> None:
        ended = ConnectionLost("the coordinator has ended the stream")
        self.up.lose(sender=error or ended, reader=ended)
        self._forget()

    def _forget(self) -> None:
        self.over.set()
        self.connection.streams.pop(self, None)

    def lose(self, error: Exception) -> None:
        """Broken for both: the worker is told `error`, the coordinator that its peer is gone."""
        gone = ConnectionLost(f"{self.connection.peer.id} is gone")
        self.up.lose(sender=error, reader=gone)
        self.down.lose(sender=gone, reader=error)
        self.connection.up.drop(self.up)
        self.connection.down.drop(self.down)
        self._forget()
        if self._serving is not None and not self._serving.done():
            timer = asyncio.get_running_loop().call_later(loss_grace_s, self._serving.cancel)
            self._serving.add_done_callback(lambda _: timer.cancel())


class MemoryConnection:
    """A worker's connection over one modelled link. Made by `MemoryNetwork.connect`."""

    def __init__(self, network: MemoryNetwork, service: Service, peer: Peer, link: Link) -> None:
        self.network, self.service, self.peer, self._link = network, service, peer, link
        self.up = _Pipe(network.clock, link.up_bytes_per_s, link.rtt_s / 2)
        self.down = _Pipe(network.clock, link.down_bytes_per_s, link.rtt_s / 2)
        self.traffic = Traffic()
        self.streams: dict[_Stream, None] = {}
        self._calls: dict[asyncio.Future[bytes], None] = {}
        self._closed = False

    async def call(self, method: str, request: bytes, *, timeout_s: float = 30.0) -> bytes:
        await self._reach()
        check_size(method, len(request), up=True)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[reply] = None
        self.traffic.add_up(method, len(request))
        message = bytes(request)
        self.up.send(reply, len(message), lambda: self._serve(method, message, reply))
        try:
            async with asyncio.timeout(timeout_s):
                data = await reply
        except TimeoutError as late:
            raise ConnectionLost(f"{method} was not answered within {timeout_s:g} s") from late
        finally:
            self._calls.pop(reply, None)
        self.traffic.add_down(method, len(data))
        return data

    def _serve(self, method: str, request: bytes, reply: asyncio.Future[bytes]) -> None:
        self.network.spawn(self._answer(method, request, reply))

    async def _answer(self, method: str, request: bytes, reply: asyncio.Future[bytes]) -> None:
        traffic = self.network.traffic(self.peer.id)
        traffic.add_up(method, len(request))
        try:
            data = await answer_call(self.service, self.peer, method, request)
        except Exception as error:
            told = error
            if not reply.done():
                self.down.send(reply, 0, lambda: None if reply.done() else reply.set_exception(told))
            return
        if not reply.done():
            traffic.add_down(method, len(data))
            self.down.send(reply, len(data), lambda: None if reply.done() else reply.set_result(data))

    async def open(self, method: str) -> Channel:
        await self._reach()
        stream = _Stream(self, method)
        self.streams[stream] = None
        self.up.send(stream.up, 0, stream.start)
        return _WorkerEnd(stream)

    async def _reach(self) -> None:
        """ConnectionLost or NotAdmitted where the link would say so."""
        if self._closed:
            raise ConnectionLost("the connection is closed")
        if self.peer.id in self.network.partitioned:
            await self.network.clock.sleep(self._link.rtt_s)
            raise ConnectionLost(f"no answer from the coordinator: {self.peer.id} is cut off")
        if self.peer.id in self.network.refused:
            raise NotAdmitted(self.network.refused[self.peer.id])

    def cut(self, error: Exception | None = None) -> None:
        """The link breaks: every stream and call on it is lost at both ends. New ones may be opened."""
        error = error or ConnectionLost(f"the link of {self.peer.id} broke")
        self.up.clear()
        self.down.clear()
        for stream in list(self.streams):
            stream.lose(error)
        for reply in list(self._calls):
            if not reply.done():
                reply.set_exception(error)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.cut(ConnectionLost("the connection is closed"))
            self.network.forget(self)


class MemoryNetwork:
    """All links of one process, by worker, with faults at hand."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.partitioned: set[WorkerId] = set()
        self.refused: dict[WorkerId, str] = {}
        self._connections: dict[WorkerId, dict[MemoryConnection, None]] = {}
        self._traffic: dict[WorkerId, Traffic] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._context = copy_context()  # what is spawned is nobody's who happens to send the first message

    async def connect(self, service: Service, peer: Peer, link: Link | None = None) -> MemoryConnection:
        """A connection of `peer` to the service; like a real one it fails at its first use, not here."""
        connection = MemoryConnection(self, service, peer, link or Link())
        self._connections.setdefault(peer.id, {})[connection] = None
        return connection

    def traffic(self, worker: WorkerId) -> Traffic:
        """What the coordinator exchanged with a worker over all its connections."""
        return self._traffic.setdefault(worker, Traffic())

    def cut(self, worker: WorkerId) -> None:
        """Break the worker's links once; it may connect again."""
        for connection in list(self._connections.get(worker, {})):
            connection.cut()

    def partition(self, worker: WorkerId) -> None:
        """Break the worker's links until `heal`."""
        self.partitioned.add(worker)
        self.cut(worker)

    def heal(self, worker: WorkerId) -> None:
        self.partitioned.discard(worker)

    def refuse(self, worker: WorkerId, sentence: str = "") -> None:
        """The member is removed: its streams end and what it tries is answered with NotAdmitted."""
        self.refused[worker] = sentence or f"{worker} is not a member of this run any more"
        for connection in list(self._connections.get(worker, {})):
            connection.cut(NotAdmitted(self.refused[worker]))

    def admit(self, worker: WorkerId) -> None:
        """Undo `refuse`."""
        self.refused.pop(worker, None)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a part of the service; the network holds the task until it ends."""
        task = asyncio.get_running_loop().create_task(work, context=self._context)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def forget(self, connection: MemoryConnection) -> None:
        held = self._connections.get(connection.peer.id, {})
        held.pop(connection, None)
        if not held:
            self._connections.pop(connection.peer.id, None)

    async def close(self) -> None:
        """End everything at once."""
        for connection in [c for held in list(self._connections.values()) for c in held]:
            await connection.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
