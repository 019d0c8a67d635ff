"""Pieces on a device: one after the other through its compute, within the memory that its owner gives.

Receiving the next piece, computing this one and sending the last go on side by side. Counted against the limit are the
pieces that are here, whole or in part, what the one at work needs, replies not yet sent, and kept shards; shards go
first, the one used longest ago before others. A stream is not read on while there is no room, except that one piece
is always taken: a tile larger than the rest of the room must not stand still for ever.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from torch import Tensor

from potluck.clock import Clock, Executor
from potluck.codecs.bundle import pack_tensors, tensors_in
from potluck.codecs.factors import decode
from potluck.strategies.bag import Operand
from potluck.strategies.task import installed
from potluck.transport.pieces import (
    PieceJoiner,
    PieceReply,
    PieceRequest,
    piece_frames,
    resting_frame,
    withdrawn,
)
from potluck.types.errors import CorruptError
from potluck.types.untrusted import printable

MAX_QUEUED = 64
MAX_ERROR_LENGTH = 300
least_limit_bytes = 1 << 20


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
        self._queue: deque[PieceRequest] = deque()
        self._at_work: PieceRequest | None = None
        self._withdrawn: set[int] = set()
        self._replies: deque[PieceReply] = deque()
        self._changed = asyncio.Event()
        self._to_send = asyncio.Event()
        self._told_resting = False
        self.shards = Shards()  # the last stream's may still be looked at in the compute thread

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
        self._reply(PieceReply(id=request.id, error="its owner needs the machine", declined=True))

    # The stream

    async def take(self, head: Mapping[str, Any], data: memoryview) -> None:
        """One frame of a piece; returns when there is room for the next. CorruptError on nonsense."""
        if "withdraw" in head:
            self._drop(withdrawn(head))
            return
        self._refuse_too_large(head)
        done = self._joiner.add(head, data)
        if done is not None:
            self._queued(PieceRequest.read(done))
        while self._num_bytes() > self.limit_bytes and (self._queue or self._at_work or self._replies):
            self._changed.clear()
            await self._changed.wait()

    def _refuse_too_large(self, head: Mapping[str, Any]) -> None:
        """A piece that its owner's limit does not allow, before any of it is kept."""
        match head:
            case {"piece": int(id), "total": int(total), "memory": int(memory)} if (
                max(total, memory) > self.limit_bytes
            ):
                self._too_large.append(id)
                given = f"{self.limit_bytes:,} are given; see --max-memory"
                self._reply(PieceReply(id=id, error=f"it takes {max(total, memory):,} bytes and {given}"))
            case _:
                pass

    def _queued(self, request: PieceRequest) -> None:
        if self._held:
            self._decline(request)
            return
        if len(self._queue) >= MAX_QUEUED:
            raise CorruptError(f"more than {MAX_QUEUED} pieces are here at once")
        self._queue.append(request)
        self._changed.set()

    def _drop(self, ids: list[int]) -> None:
        self._joiner.drop(ids)
        dropped = {*ids}
        if self._at_work is not None and self._at_work.id in dropped:
            self._withdrawn.add(self._at_work.id)
        self._queue = deque(r for r in self._queue if r.id not in dropped)
        self._replies = deque(r for r in self._replies if r.id not in dropped)
        self._changed.set()

    def _num_bytes(self) -> int:
        """That are here, shards apart: those make room."""
        queued = sum(len(r.bundle) for r in self._queue)
        at_work = len(self._at_work.bundle) if self._at_work is not None else 0
        return self._joiner.num_bytes + queued + at_work + sum(len(r.bundle) for r in self._replies)

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
                for frame in piece_frames(self._replies.popleft()):
                    await send(frame)
                self._changed.set()
            await self._to_send.wait()

    # The work

    async def work(self) -> None:
        """Pieces in the order they came, for as long as the stream lasts."""
        while True:
            while not self._queue:
                self._changed.clear()
                await self._changed.wait()
            request = self._at_work = self._queue.popleft()
            room = self.limit_bytes - self._num_bytes() - max(request.memory_bytes - len(request.bundle), 0)
            reply = await self._compute.run(self._perform, request, room, self.shards)
            is_wanted = request.id not in self._withdrawn
            self._withdrawn.discard(request.id)
            self._at_work = None
            self.num_done += 1
            if is_wanted:
                self._reply(reply)
            self._changed.set()

    def _reply(self, reply: PieceReply) -> None:
        self._replies.append(reply)
        self._to_send.set()

    def _perform(self, request: PieceRequest, room: int, shards: Shards) -> PieceReply:
        """In the compute thread, which alone touches the shards. `room` is what they and this piece may take."""
        started = self._clock.now()
        try:
            operands = _operands(request)
            missing = shards.resolve(request, operands)
            shards.shrink(room)
            if missing:
                return PieceReply(id=request.id, missing=tuple(missing))
            wire = str(request.arguments.get("wire", "fp32"))
            tensors = {key: decode(parts, wire) for key, parts in operands.items()}
            result = _call(request, tensors, request.memory_bytes or self.limit_bytes)
            bundle = pack_tensors(result)
            seconds = max(self._clock.now() - started, 0.0)
            return PieceReply(id=request.id, seconds=seconds, down=request.arrival, bundle=bundle)
        except Exception as error:  # whatever a task or its libraries raise costs that piece, not the worker
            reason = printable(f"{type(error).__name__}: {error}", MAX_ERROR_LENGTH)
            self._note(f"a piece of {printable(request.task, 100)} failed: {reason}")
            return PieceReply(id=request.id, error=reason)


def _operands(request: PieceRequest) -> dict[str, dict[str, Tensor]]:
    """Those that were sent, each in its parts."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in (tensors_in(request.bundle) if request.bundle else {}).items():
        key, _, part = name.rpartition("/")
        found.setdefault(key, {})[part] = tensor
    return found


def _call(request: PieceRequest, tensors: Mapping[str, Tensor], most_bytes: int) -> Mapping[str, Tensor]:
    """What the function makes; one that takes `most_bytes` makes no more than the piece was said to need."""
    function = installed(request.task)
    if function is None or function.kind != "pure":
        raise ValueError(f"this worker has no pure task named {request.task[:100]!r}")
    given: dict[str, Any] = {**request.arguments, **tensors}
    if "most_bytes" in inspect.signature(function.function).parameters:
        given["most_bytes"] = most_bytes
    return function.function(None, **given).inline


class Shards:
    """Tensors that are kept by name, the one used last at the end. Those that are said to stay are given up last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Mapping[str, Tensor]] = OrderedDict()
        self._passing: OrderedDict[str, None] = OrderedDict()  # names of those that do not stay, in the same order
        self.num_bytes = 0

    def clear(self) -> None:
        self._kept.clear()
        self._passing.clear()
        self.num_bytes = 0

    def resolve(self, request: PieceRequest, operands: dict[str, dict[str, Tensor]]) -> list[str]:
        """Put kept values beside those that were sent, and keep those that have a name; operands that are missing."""
        missing: list[str] = []
        for key, name in request.operands.items():
            if key in request.kept:
                if (found := self._kept.get(name)) is None:
                    missing.append(key)
                    continue
                self._kept.move_to_end(name)
                if name in self._passing:
                    self._passing.move_to_end(name)
                operands[key] = dict(found)
            elif key not in operands:
                raise CorruptError(f"piece {request.id} lacks its operand {key}")
            elif name:
                self._put(name, operands[key], owns=len(operands) == 1)
        return missing

    def _put(self, name: str, parts: Mapping[str, Tensor], *, owns: bool) -> None:
        """`owns`: their memory holds nothing else."""
        self._drop(name)
        if not Operand.stays(name):
            self._passing[name] = None
        self._kept[name] = parts if owns else {part: x.clone() for part, x in parts.items()}
        self.num_bytes += sum(x.nbytes for x in parts.values())

    def _drop(self, name: str) -> None:
        self._passing.pop(name, None)
        self.num_bytes -= sum(x.nbytes for x in self._kept.pop(name, {}).values())

    def shrink(self, most_bytes: int) -> None:
        while self._kept and self.num_bytes > most_bytes:
            self._drop(next(iter(self._passing or self._kept)))
