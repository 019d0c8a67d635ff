"""Pieces on a device: one after the other through its compute, within the memory that its owner gives.

Receiving the next piece, computing this one and sending the last go on side by side. Counted against the limit
(`worker.room`), before any of it is allocated, are pieces from their first frame on, what the one at work says that it
needs, replies not yet sent, and kept shards, which go first. A stream is not read on while there is no room.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from potluck.clock import Clock, Executor
from potluck.codecs.bundle import Packing, Rows, tensors_in
from potluck.codecs.factors import decode, decoded_bytes
from potluck.strategies.task import installed
from potluck.transport.pieces import (
    PieceJoiner,
    PieceReply,
    PieceRequest,
    piece_frames,
    resting_frame,
    withdrawn,
)
from potluck.types.errors import CorruptError, InvalidUpdate
from potluck.types.untrusted import printable
from potluck.worker.room import Parts, Room, nbytes

MAX_QUEUED = 64
MAX_ERROR_LENGTH = 300
least_limit_bytes = 1 << 20
overhead_bytes = 1 << 12
"""Of heads and alignment, beside the tensors that a piece is planned with."""


class Pieces:
    """`limit_bytes` is what the owner gives for task data. Everything but `compute` runs on the event loop."""

    def __init__(self, *, compute: Executor, clock: Clock, limit_bytes: int, note: Callable[[str], None]) -> None:
        self._compute, self._clock, self._note = compute, clock, note
        self.limit_bytes = max(int(limit_bytes), least_limit_bytes)
        self.num_done = 0
        self._held = False
        self.reset()

    def reset(self) -> None:
        """A new stream: whatever came on the last one is not wanted any more."""
        self._joiner = PieceJoiner(lambda id: 0 if id in self._too_large else self.limit_bytes, self._clock.now)
        self._too_large: deque[int] = deque(maxlen=MAX_QUEUED)  # whose frames are passed over
        self._claims: dict[int, int] = {}  # bytes of pieces that are here in part
        self._queue: deque[PieceRequest] = deque()
        self._at_work: int | None = None
        self._withdrawn: set[int] = set()
        self._replies: deque[PieceReply] = deque()
        self._sending: PieceReply | None = None
        self._changed = asyncio.Event()
        self._to_send = asyncio.Event()
        self._told_resting = False
        self.room = Room(self.limit_bytes)  # the last stream's may still be in use in the compute thread

    # Its owner's terms

    def hold(self) -> None:
        """Decline what is here, and take nothing until `release`."""
        self._held = True
        while self._queue:
            self._decline(self._queue.popleft())
        self._to_send.set()

    def release(self) -> None:
        self._held = False
        self._to_send.set()

    def _decline(self, request: PieceRequest) -> None:
        self.room.give(len(request.bundle))
        self._reply(PieceReply(id=request.id, error="its owner needs the machine", declined=True))

    # The stream

    async def take(self, head: Mapping[str, Any], data: memoryview) -> None:
        """One frame of a piece, once there is room for all of it. CorruptError on nonsense."""
        if "withdraw" in head:
            self._drop(withdrawn(head))
            return
        if not await self._begun(head):
            return
        if (done := self._joiner.add(head, data)) is None:
            return
        del self._claims[done.id]
        try:
            self._queued(PieceRequest.read(done))
        except CorruptError:
            self.room.give(len(done.data))
            raise

    async def _begun(self, head: Mapping[str, Any]) -> bool:
        """Whether a frame is to be read on. Takes the room for a piece at its first one; one that the owner's limit
        does not allow is refused before any of it is kept."""
        match head:
            case {"piece": int(id), "offset": 0, "total": int(total), "memory": int(memory)} if total >= 0 <= memory:
                pass
            case {"offset": 0}:
                raise CorruptError("the first frame of a piece does not say what it takes")
            case _:
                return True
        most = max(total, memory)
        if most > self.limit_bytes:
            self._too_large.append(id)
            given = f"{self.limit_bytes:,} are given; see --max-memory"
            self._reply(PieceReply(id=id, error=f"it takes {most:,} bytes and {given}"))
        self.room.give(self._claims.pop(id, 0))
        while len(self._replies) > MAX_QUEUED or not (most > self.limit_bytes or self._has_room(total, most)):
            if not self._is_busy:
                raise CorruptError("more pieces are here in part than the memory that is given can hold")
            self._changed.clear()
            await self._changed.wait()
        if most <= self.limit_bytes:
            self._claims[id] = total
        return True

    @property
    def _is_busy(self) -> bool:
        return bool(self._queue or self._at_work is not None or self._replies or self._sending)

    def _has_room(self, num_bytes: int, memory_bytes: int) -> bool:
        """Takes the room for a bundle, where that leaves enough for the work on any of those that wait."""
        waiting = [(num_bytes, memory_bytes), *((len(r.bundle), r.memory_bytes) for r in self._queue)]
        work = max(memory - bundle for bundle, memory in waiting) + overhead_bytes
        return self.room.take(num_bytes, beside=max(work, 0) if self._is_busy else 0)

    def _queued(self, request: PieceRequest) -> None:
        if len(self._queue) >= MAX_QUEUED:
            raise CorruptError(f"more than {MAX_QUEUED} pieces are here at once")
        if self._held:
            self._decline(request)
            return
        self._queue.append(request)
        self._changed.set()

    def _drop(self, ids: list[int]) -> None:
        self._joiner.drop(ids)
        dropped = {*ids}
        if self._at_work is not None and self._at_work in dropped:
            self._withdrawn.add(self._at_work)
        gone = [message for message in (*self._queue, *self._replies) if message.id in dropped]
        self.room.give(sum(len(message.bundle) for message in gone) + sum(self._claims.pop(id, 0) for id in dropped))
        self._queue = deque(r for r in self._queue if r.id not in dropped)
        self._replies = deque(r for r in self._replies if r.id not in dropped)
        self._changed.set()

    def serve(self, send: Callable[[bytes], Awaitable[None]]) -> tuple[Coroutine[Any, Any, None], ...]:
        """What is to go on side by side for as long as a new stream lasts."""
        self.reset()
        return self.work(), self.send(send)

    async def send(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Replies as they are made, for as long as the stream lasts."""
        while True:
            self._to_send.clear()
            if self._told_resting != self._held:
                self._told_resting = self._held
                await send(resting_frame(self._held))
            while self._replies:
                reply = self._sending = self._replies.popleft()
                for frame in piece_frames(reply):
                    await send(frame)
                num_bytes, reply, self._sending = len(reply.bundle), None, None
                self.room.give(num_bytes)
                self._changed.set()
            await self._to_send.wait()

    # The work

    async def work(self) -> None:
        """Pieces in the order they came, for as long as the stream lasts."""
        while True:
            while not self._queue:
                self._changed.clear()
                await self._changed.wait()
            await self._work_on(self._queue.popleft())

    async def _work_on(self, request: PieceRequest) -> None:
        id, num_bytes, room = request.id, len(request.bundle), self.room
        self._at_work = id
        kept = room.pin({request.operands[key] for key in request.kept})
        more = max(request.memory_bytes - num_bytes - sum(map(nbytes, kept.values())), 0) + overhead_bytes
        while not (fits := room.take(more)) and (self._replies or self._sending):
            self._changed.clear()
            await self._changed.wait()
        handed = [(request, kept)]
        del request, kept  # whoever else had them would keep their memory when others are given its room
        if fits:
            reply = await self._compute.run(self._perform, handed, more, room)
        else:
            reply = PieceReply(id=id, error=f"it takes {more:,} bytes more and other pieces leave no room")
        handed.clear()
        room.unpin()
        self._at_work = None
        room.give(num_bytes)
        self.num_done += 1
        if id in self._withdrawn:
            self._withdrawn.discard(id)
            room.give(len(reply.bundle))
        else:
            self._reply(reply)
        self._changed.set()

    def _reply(self, reply: PieceReply) -> None:
        self._replies.append(reply)
        self._to_send.set()

    def _perform(self, handed: list[tuple[PieceRequest, Mapping[str, Parts]]], more: int, room: Room) -> PieceReply:
        """In the compute thread. `more` bytes beside bundle and shards are taken for it; in the end, its reply's."""
        started, (request, kept) = self._clock.now(), handed.pop()
        reply = PieceReply(id=request.id)
        try:
            operands = _operands(request)
            if missing := _missing(request, kept, operands):
                return replace(reply, missing=tuple(missing))
            wire = str(request.arguments.get("wire", "fp32"))
            here = sum(map(nbytes, operands.values()))
            most = here + more + (0 if request.memory_bytes else room.free_bytes)
            result = Packing({k: Rows.of(x) for k, x in _call(request, operands, wire, most).items()})
            if len(result) > more and not room.take(len(result) - more):
                raise InvalidUpdate(f"its result takes {len(result):,} bytes and {more:,} are left of what it said")
            room.give(max(more - len(result), 0))
            more = len(result)
            for key in operands.keys() - request.kept:
                if name := request.operands[key]:
                    room.keep(name, operands[key], lambda parts: {part: x.clone() for part, x in parts.items()})
            seconds = max(self._clock.now() - started, 0.0)
            reply = replace(reply, seconds=seconds, down=request.arrival, bundle=result)
        except Exception as error:  # whatever a task or its libraries raise costs that piece, not the worker
            reason = printable(f"{type(error).__name__}: {error}", MAX_ERROR_LENGTH)
            self._note(f"a piece of {printable(request.task, 100)} failed: {reason}")
            reply = replace(reply, error=reason)
        finally:
            room.give(more - len(reply.bundle))
        return reply


def _operands(request: PieceRequest) -> dict[str, dict[str, Tensor]]:
    """Those that were sent, each in its parts."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in (tensors_in(request.bundle) if request.bundle else {}).items():
        key, _, part = name.rpartition("/")
        found.setdefault(key, {})[part] = tensor
    return found


def _missing(request: PieceRequest, kept: Mapping[str, Parts], operands: dict[str, dict[str, Tensor]]) -> list[str]:
    """Put kept values beside those that were sent; operands that are not kept any more. CorruptError."""
    missing: list[str] = []
    for key, name in request.operands.items():
        if key in request.kept:
            if name in kept:
                operands[key] = dict(kept[name])
            else:
                missing.append(key)
        elif key not in operands:
            raise CorruptError(f"piece {request.id} lacks its operand {key}")
    if not operands.keys() <= request.operands.keys():
        raise CorruptError(f"piece {request.id} has operands that it does not name")
    return missing


def _call(
    request: PieceRequest, operands: Mapping[str, Mapping[str, Tensor]], wire: str, most_bytes: int
) -> Mapping[str, Tensor]:
    """What the function makes; one that takes `most_bytes` takes no more in all, its tensors and result included."""
    function = installed(request.task)
    if function is None or function.kind != "pure":
        raise ValueError(f"this worker has no pure task named {request.task[:100]!r}")
    here = sum(map(nbytes, operands.values()))
    decoded = sum(decoded_bytes(parts, wire) for parts in operands.values())
    if here + decoded > most_bytes:
        raise InvalidUpdate(f"its operands take {here + decoded:,} bytes and it said no more than {most_bytes:,}")
    tensors = {key: decode(parts, wire) for key, parts in operands.items()}
    given: dict[str, Any] = {**request.arguments, **tensors}
    if "most_bytes" in inspect.signature(function.function).parameters:
        given["most_bytes"] = most_bytes - (here if decoded else 0)
    return function.function(None, **given).inline
