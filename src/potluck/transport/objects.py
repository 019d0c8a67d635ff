"""Draft transfers, to be replaced by their owner's."""
from __future__ import annotations
from collections.abc import Callable
from pathlib import Path
from potluck.clock import Executor
from potluck.protocol import pb
from potluck.protocol.frames import CHUNK_BYTES, pack_chunk, unpack_chunk
from potluck.storage.objects import ObjectStore
from potluck.transport.connection import Channel, Connection
from potluck.types.errors import ConnectionLost, Refused
from potluck.types.ids import Digest

def _read(path: Path, offset: int) -> bytes:
    with path.open("rb") as f:
        f.seek(offset)
        return pack_chunk(offset, f.read(CHUNK_BYTES))

async def fetch(connection: Connection, digest: Digest, store: ObjectStore, executor: Executor, on_progress: Callable[[int], None] | None = None) -> Path:
    if store.has(digest):
        return store.path(digest)
    channel = await connection.open("GetObject")
    try:
        await channel.send(pb.GetObject(digest=digest, offset=0).SerializeToString())
        info = pb.ObjectInfo.FromString(await channel.receive() or b"")
        if info.error:
            raise Refused(info.error)
        partial = await executor.run(store.begin, digest, info.size)
        while partial.offset < info.size:
            frame = await channel.receive()
            if frame is None:
                raise ConnectionLost("short")
            offset, data = unpack_chunk(frame)
            await executor.run(partial.write, offset, data)
            if on_progress:
                on_progress(partial.offset)
        await executor.run(partial.finish)
    finally:
        await channel.close()
    return store.path(digest)

async def push(connection: Connection, digest: Digest, path: Path, purpose: str, executor: Executor, on_progress: Callable[[int], None] | None = None) -> None:
    size = path.stat().st_size
    channel = await connection.open("PutObject")
    try:
        await channel.send(pb.ObjectInfo(digest=digest, size=size, purpose=purpose).SerializeToString())
        ack = pb.PutAck.FromString(await channel.receive() or b"")
        offset = ack.offset
        while offset < size and not ack.done:
            frame = await executor.run(_read, path, offset)
            await channel.send(frame)
            offset += len(frame) - 16
        while not ack.done:
            message = await channel.receive()
            if message is None:
                raise ConnectionLost("short")
            ack = pb.PutAck.FromString(message)
    finally:
        await channel.close()

async def serve_get(channel: Channel, store: ObjectStore, executor: Executor, allow: Callable[[Digest], bool]) -> None:
    request = pb.GetObject.FromString(await channel.receive() or b"")
    digest = Digest(request.digest)
    if not allow(digest) or not store.has(digest):
        await channel.send(pb.ObjectInfo(digest=digest, error="not here").SerializeToString())
        return
    size = store.size(digest)
    await channel.send(pb.ObjectInfo(digest=digest, size=size).SerializeToString())
    offset = request.offset
    while offset < size:
        frame = await executor.run(_read, store.path(digest), offset)
        await channel.send(frame)
        offset += len(frame) - 16

async def serve_put(channel: Channel, store: ObjectStore, executor: Executor, admit: Callable[[pb.ObjectInfo], None]) -> Digest:
    info = pb.ObjectInfo.FromString(await channel.receive() or b"")
    admit(info)
    digest = Digest(info.digest)
    if not store.has(digest):
        partial = await executor.run(store.begin, digest, info.size)
        await channel.send(pb.PutAck(offset=partial.offset).SerializeToString())
        while partial.offset < info.size:
            frame = await channel.receive()
            if frame is None:
                raise ConnectionLost("short")
            offset, data = unpack_chunk(frame)
            await executor.run(partial.write, offset, data)
        await executor.run(partial.finish)
    await channel.send(pb.PutAck(offset=info.size, done=True).SerializeToString())
    return digest
