"""How much may be on its way: a coordinator's memory does not grow with its uploads."""

import asyncio
from pathlib import Path

from potluck.clock import ThreadExecutor
from potluck.protocol import pb
from potluck.protocol.frames import CHUNK_BYTES
from potluck.storage.digest import digest_file
from potluck.transport import objects
from potluck.transport.objects import push


class Receiver:
    """Takes chunks and says what the test tells it to say."""

    def __init__(self) -> None:
        self.num_chunks = -1  # the first message names the object
        self.acks: asyncio.Queue[pb.PutAck] = asyncio.Queue()

    async def open(self, method: str) -> "Receiver":
        return self

    async def send(self, message: bytes) -> None:
        self.num_chunks += 1

    async def receive(self) -> bytes:
        return (await self.acks.get()).SerializeToString()

    async def close(self) -> None:
        pass

    async def chunks_after(self, ack: pb.PutAck) -> int:
        self.acks.put_nowait(ack)
        before = -2
        while before != self.num_chunks:
            before = self.num_chunks
            await asyncio.sleep(0.05)
        return self.num_chunks


def test_a_sender_is_never_further_ahead_than_its_receiver_allows(tmp_path: Path) -> None:
    path = tmp_path / "object"
    path.write_bytes(bytes(12 * CHUNK_BYTES + 5))

    async def main() -> None:
        receiver, executor = Receiver(), ThreadExecutor(2, "test")
        pushing = asyncio.create_task(push(receiver, digest_file(path), path, "test", executor))
        assert await receiver.chunks_after(pb.PutAck(offset=0, window=2 * CHUNK_BYTES)) == 2
        assert await receiver.chunks_after(pb.PutAck(offset=CHUNK_BYTES, window=2 * CHUNK_BYTES)) == 3
        assert await receiver.chunks_after(pb.PutAck(offset=2 * CHUNK_BYTES, window=5 * CHUNK_BYTES)) == 7
        assert await receiver.chunks_after(pb.PutAck(offset=3 * CHUNK_BYTES)) == 13  # an older coordinator names none
        receiver.acks.put_nowait(pb.PutAck(offset=path.stat().st_size, done=True))
        await asyncio.wait_for(pushing, 10)
        executor.close()

    asyncio.run(main())


def test_all_uploads_share_what_may_come() -> None:
    crowd = objects._Crowd()
    windows = [crowd.window_bytes]
    held = [crowd.joined() for _ in range(64)]
    for each in held:
        each.__enter__()
        windows.append(crowd.window_bytes)
    assert windows[0] == windows[1] == objects.MAX_COMING_BYTES
    assert all(n * window <= objects.MAX_COMING_BYTES for n, window in enumerate(windows) if 0 < n <= 16)
    assert windows[64] == 2 * CHUNK_BYTES
    for each in held:
        each.__exit__(None, None, None)
    assert crowd.window_bytes == objects.MAX_COMING_BYTES and crowd.batch_chunks == objects.BATCH_CHUNKS
