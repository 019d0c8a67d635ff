"""Objects over a link: fetch and push on the worker's side, serve_get and serve_put on the coordinator's.

A transfer goes on where it stopped. The receiver says how many bytes it holds, and only what follows is sent. Chunks
carry a checksum; a broken one, or a whole that does not match its digest, is asked for again. Nothing here waits
for a time: the holder of a link decides when a lack of progress ends it.

Files are read and written, and chunks checked, in the executor, a few chunks at a time while the next ones travel.
Both ends hold at most two such batches, which are the smaller the more transfers a process has under way; beyond that
the channel makes the sender wait.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from potluck.clock import Executor
from potluck.protocol import parse, pb
from potluck.protocol.frames import CHUNK_BYTES, CHUNK_HEADER_BYTES, read_chunk, unpack_chunk
from potluck.storage.digest import check_digest
from potluck.storage.objects import ObjectStore, PartialObject
from potluck.transport.connection import Channel, Connection
from potluck.types.errors import ConnectionLost, CorruptError, DataError, Refused
from potluck.types.ids import Digest

BATCH_CHUNKS = 4
MAX_BATCHED_CHUNKS = 16
"""In the batches of all transfers of a process together, as long as each has one chunk."""
MAX_COMING_BYTES = 32 << 20
"""On the way to a process in all uploads together, as long as each may have two chunks. gRPC itself lets each have as
much as the link seems to hold, which on a busy coordinator is far more."""
TELL_BYTES = 2 << 20
"""A receiver that is kept busy says what is safe after so many bytes; one that waits says it at once."""
MAX_VAIN_TRIES = 3
"""Corrupt transfers in a row that bring no byte further; after them the error is raised."""

Progress = Callable[[int], None]
"""Hears how many bytes of the object are at the receiver."""


class _Crowd:
    """The transfers that this process has under way."""

    def __init__(self) -> None:
        self._num = 0

    @property
    def batch_chunks(self) -> int:
        """What each may have in a batch."""
        return max(1, min(BATCH_CHUNKS, MAX_BATCHED_CHUNKS // max(self._num, 1)))

    @property
    def window_bytes(self) -> int:
        """What may be on its way in each upload."""
        return max(2 * CHUNK_BYTES, MAX_COMING_BYTES // max(self._num, 1))

    @contextmanager
    def joined(self) -> Iterator[None]:
        self._num += 1
        try:
            yield
        finally:
            self._num -= 1


_crowd = _Crowd()

M = TypeVar("M", pb.GetObject, pb.ObjectInfo, pb.PutAck)


async def fetch(
    connection: Connection, digest: Digest, store: ObjectStore, executor: Executor, on_progress: Progress | None = None
) -> Path:
    """Have an object in `store`, from the coordinator as far as it is not here; its path.

    ConnectionLost: call it again on the next connection, it goes on. Refused, ResourceError, and CorruptError when
    the object arrives corrupt again and again.
    """
    tries = _Tries()
    while not await executor.run(store.has, digest):
        held_bytes = await executor.run(store.arrived, digest)
        with tries.counted(held_bytes):
            await _fetch_rest(connection, digest, held_bytes, store, executor, on_progress or _silent)
    return store.path(digest)


async def push(
    connection: Connection, digest: Digest, path: Path, purpose: str, executor: Executor,
    on_progress: Progress | None = None,
) -> None:  # fmt: skip
    """Bring the file at `path`, whose digest is `digest`, to the coordinator. Errors as in `fetch`."""
    tries = _Tries()
    source = await executor.run(_Source, path)
    info = pb.ObjectInfo(digest=digest, size=source.size, purpose=purpose)
    done = False
    while not done:
        done = await _push_rest(connection, info, source, executor, on_progress or _silent, tries)


async def serve_get(channel: Channel, store: ObjectStore, executor: Executor, allow: Callable[[Digest], bool]) -> None:
    """Answer a GetObject stream. Refused if `allow` says no or the object is not here."""
    request = _parse(pb.GetObject, await channel.receive())
    digest = check_digest(request.digest)
    if not allow(digest) or not await executor.run(store.has, digest):
        raise Refused(f"the object {digest} is not to be had here, or not by this worker")
    try:
        source = await executor.run(_Source, store.path(digest))
        await channel.send(pb.ObjectInfo(digest=digest, size=source.size).SerializeToString())
        # Whoever holds more than the whole object holds something else: it gets all of it.
        await _send_chunks(channel, source, request.offset if request.offset <= source.size else 0, executor)
    except DataError as error:  # removed meanwhile: nothing that the worker's data could mend
        raise Refused(f"the object {digest} is not here any more") from error


async def serve_put(
    channel: Channel, store: ObjectStore, executor: Executor, admit: Callable[[pb.ObjectInfo], None]
) -> Digest:
    """Answer a PutObject stream; the object's digest once it is stored whole. `admit` may raise Refused."""
    info = _parse(pb.ObjectInfo, await channel.receive())
    digest = check_digest(info.digest)
    admit(info)
    if not await executor.run(store.has, digest):
        partial = await executor.run(store.begin, digest, info.size)
        start = partial.offset  # another stream of this object may move it on
        await channel.send(pb.PutAck(offset=start, window=2 * CHUNK_BYTES).SerializeToString())
        async with aclosing(_take_chunks(channel, partial, start, executor)) as arriving:
            async for safe_bytes in arriving:
                await channel.send(pb.PutAck(offset=safe_bytes, window=_crowd.window_bytes).SerializeToString())
        await executor.run(partial.finish)
    await channel.send(pb.PutAck(offset=info.size, done=True).SerializeToString())
    await _let_end(channel)
    return digest


async def _let_end(channel: Channel) -> None:
    """Take what a sender had on its way when another stream brought the rest of its object, until it ends the stream.

    gRPC tells a sender whose stream ends under a message that the link is lost, and not what it was answered.
    """
    with suppress(ConnectionLost):  # it has its answer, or comes again for it
        for _ in range(MAX_COMING_BYTES // CHUNK_BYTES + 1):
            if await channel.receive() is None:
                return


# The worker's side of one stream


async def _fetch_rest(
    connection: Connection, digest: Digest, held_bytes: int, store: ObjectStore, executor: Executor, told: Progress
) -> None:  # fmt: skip
    channel = await connection.open("GetObject")
    try:
        await channel.send(pb.GetObject(digest=digest, offset=held_bytes).SerializeToString())
        info = _parse(pb.ObjectInfo, await channel.receive())
        partial = await executor.run(store.begin, digest, info.size)
        start = held_bytes if held_bytes <= info.size else 0
        if start < info.size:
            told(start)
        async with aclosing(_take_chunks(channel, partial, start, executor)) as arriving:
            async for safe_bytes in arriving:
                told(safe_bytes)
    finally:
        await channel.close()
    await executor.run(partial.finish)


async def _push_rest(
    connection: Connection, info: pb.ObjectInfo, source: _Source, executor: Executor, told: Progress, tries: _Tries
) -> bool:  # fmt: skip
    """Send what the coordinator lacks; False if it arrived corrupt and may be tried again."""
    channel = await connection.open("PutObject")
    try:
        await channel.send(info.SerializeToString())
        ack = _parse(pb.PutAck, await channel.receive())
        if not ack.done and ack.offset > source.size:
            raise Refused(f"the coordinator holds {ack.offset} bytes of an object of {source.size} bytes")
        with tries.counted(ack.offset):
            told(ack.offset)
            if not ack.done:
                await _send_and_hear(channel, source, ack, executor, told)
            return True
    finally:
        await channel.close()
    return False


async def _send_and_hear(channel: Channel, source: _Source, ack: pb.PutAck, executor: Executor, told: Progress) -> None:
    """Send chunks and take acknowledgements at once, until one says that all is done."""
    window = _Window(ack)

    async def hear() -> None:
        done = False
        while not done:
            ack = _parse(pb.PutAck, await channel.receive())
            done = ack.done
            window.move(ack)
            told(ack.offset)

    hearing = asyncio.ensure_future(hear())
    sending = asyncio.ensure_future(_send_chunks(channel, source, ack.offset, executor, window))
    try:
        await asyncio.wait((hearing, sending), return_when=asyncio.FIRST_COMPLETED)
        if not hearing.done() and not isinstance(sending.exception(), ConnectionLost | Refused | None):
            await sending  # this side's own error, such as a file that went away
        await hearing  # the coordinator's reason, where sending only saw the stream end
    finally:
        for task in (hearing, sending):
            task.cancel()
        await asyncio.gather(hearing, sending, return_exceptions=True)


# Both sides: chunks out of a file, chunks into a partial object


async def _send_chunks(
    channel: Channel, source: _Source, offset: int, executor: Executor, window: _Window | None = None
) -> None:  # fmt: skip
    """Everything from `offset` on; the next batch is read while one is sent."""
    with _crowd.joined():
        reading = asyncio.ensure_future(executor.run(source.frames, offset))
        try:
            while frames := await reading:
                sent, offset = offset, offset + sum(map(len, frames)) - len(frames) * CHUNK_HEADER_BYTES
                reading = asyncio.ensure_future(executor.run(source.frames, offset))
                for frame in frames:
                    if window is not None:
                        await window.opened(sent)
                    await channel.send(frame)
                    sent += len(frame) - CHUNK_HEADER_BYTES
        finally:
            await _settle(reading)


class _Window:
    """How far a sender may be ahead of what its receiver has."""

    def __init__(self, ack: pb.PutAck) -> None:
        self._moved = asyncio.Event()
        self.move(ack)

    def move(self, ack: pb.PutAck) -> None:
        self._safe_bytes, self._size = ack.offset, ack.window
        self._moved.set()

    async def opened(self, sent_bytes: int) -> None:
        """Wait until what follows `sent_bytes` may be sent."""
        while self._size and sent_bytes - self._safe_bytes >= self._size:
            self._moved.clear()
            await self._moved.wait()


async def _take_chunks(
    channel: Channel, partial: PartialObject, offset: int, executor: Executor
) -> AsyncGenerator[int, None]:
    """Write what arrives from `offset` on; yields how many bytes are safe, until that is all of them.

    What arrived before a link broke is written before the error is raised.
    """
    arriving = _Arriving(channel, offset, partial)
    told_bytes, writing = partial.offset - TELL_BYTES, None  # the first bytes are told at once
    try:
        while partial.offset < partial.size:
            frames = await arriving.batch()
            if not frames:
                raise CorruptError(f"{partial.size} bytes of {partial.digest} came and not all of them are new")
            writing = asyncio.ensure_future(executor.run(_write, partial, frames))
            safe_bytes = await asyncio.shield(writing)
            if arriving.is_idle or safe_bytes - told_bytes >= TELL_BYTES or safe_bytes == partial.size:
                told_bytes = safe_bytes
                yield safe_bytes
    finally:
        await arriving.close()
        if writing is not None:
            await _settle(writing)
        partial.rest()


class _Arriving:
    """Chunk frames as they come, until all of the object was sent: received while earlier ones are written."""

    def __init__(self, channel: Channel, offset: int, partial: PartialObject) -> None:
        self._channel, self._offset, self._partial = channel, offset, partial
        self._frames: list[bytes] = []
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._hearing: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing waits to be written."""
        return not self._frames

    async def batch(self) -> list[bytes]:
        """What has arrived, at least one frame; none if all that was to come has come. Raises what ended the link."""
        if self._hearing is None:
            self._hearing = asyncio.create_task(self._hear())
        while not self._frames:
            if self._hearing.done():
                self._hearing.result()
                return []
            self._news.clear()
            await self._news.wait()
        frames, self._frames = self._frames, []
        self._room.set()
        return frames

    async def _hear(self) -> None:
        size = self._partial.size
        with _crowd.joined():
            try:
                while self._offset < size:
                    frame = await self._channel.receive()
                    if frame is None:
                        raise ConnectionLost(f"the stream ended at byte {self._offset} of {size}")
                    self._frames.append(frame)
                    self._offset += max(len(frame) - CHUNK_HEADER_BYTES, 0)
                    self._news.set()
                    while len(self._frames) >= _crowd.batch_chunks:
                        self._room.clear()
                        await self._room.wait()
            finally:
                self._news.set()

    async def close(self) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.gather(self._hearing, return_exceptions=True)


def _write(partial: PartialObject, frames: list[bytes]) -> int:
    for frame in frames:
        partial.write(*unpack_chunk(frame))
    return partial.offset


async def _settle(work: asyncio.Future[Any]) -> None:
    """Let file work end, whatever its outcome: nobody may close or go on with the file before."""
    while not work.done():
        await asyncio.wait((work,))
    if not work.cancelled():
        work.exception()


class _Source:
    """A file that is sent. Opened for each batch, so that nothing is left open and, on Windows, it can be removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._open() as file:
            self.size = file.seek(0, os.SEEK_END)

    def frames(self, offset: int) -> list[bytes]:
        """The next batch of chunk frames; empty at the end."""
        frames: list[bytes] = []
        if offset >= self.size:
            return frames
        with self._open() as file:
            file.seek(offset)
            while len(frames) < _crowd.batch_chunks and offset < self.size:
                num_bytes = min(CHUNK_BYTES, self.size - offset)
                frame = read_chunk(offset, num_bytes, file.readinto)
                if len(frame) < num_bytes + CHUNK_HEADER_BYTES:
                    raise DataError(
                        f"{self._path} became shorter than {self.size} bytes while it was sent; do not edit it"
                    )
                frames.append(frame)
                offset += num_bytes
        return frames

    def _open(self) -> FileIO:
        try:
            return FileIO(self._path)  # unbuffered: reads are large
        except OSError as error:
            raise DataError(f"{self._path} cannot be read to send it ({error.strerror or error})") from error


class _Tries:
    """Counts corrupt transfers that brought no byte further."""

    def __init__(self) -> None:
        self._best, self._vain = -1, 0

    @contextmanager
    def counted(self, held_bytes: int) -> Iterator[None]:
        """Swallows a CorruptError as long as another try makes sense. `held_bytes`: at the receiver, before it."""
        if held_bytes > self._best:
            self._best, self._vain = held_bytes, 0
        try:
            yield
        except CorruptError:
            self._vain += 1
            if self._vain >= MAX_VAIN_TRIES:
                raise


def _parse(kind: type[M], data: bytes | None) -> M:
    """A message from the network. Refused where it is not one, ConnectionLost where the stream ended instead."""
    if data is None:
        raise ConnectionLost(f"the stream ended and a {kind.__name__} was due")
    return parse(kind, data)


def _silent(num_bytes: int) -> None:
    """No one listens to the progress."""
