"""Object transfers over both transports: whole, resumed, corrupted, refused."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from blake3 import blake3
from transport.networks import Handlers, run

from potluck.clock import ThreadExecutor
from potluck.protocol import pb
from potluck.protocol.frames import CHUNK_BYTES, pack_chunk
from potluck.storage.objects import ObjectStore
from potluck.transport import objects
from potluck.types.errors import ConnectionLost, CorruptError, DataError, Refused, ResourceError
from potluck.types.ids import Digest

LARGE = 64 << 20


def content(size: int) -> bytes:
    """Bytes without a pattern that chunks could share."""
    return hashlib.shake_128(b"content").digest(size)


def digest_of(data: bytes) -> Digest:
    return Digest("blake3:" + blake3(data).hexdigest())


class Site:
    """The coordinator's store and the worker's, and what passed between them."""

    def __init__(self, folder: Path, *, quota_bytes: int = 0) -> None:
        self.there = ObjectStore(folder / "there", quota_bytes=quota_bytes)
        self.here = ObjectStore(folder / "here")
        self.executor, self.their_executor = ThreadExecutor(1), ThreadExecutor(1)
        self.folder = folder
        self.stored: list[Digest] = []
        self.service = Handlers(GetObject=self._get, PutObject=self._put)
        self.allow = lambda digest: True
        self.admit = lambda info: None
        self.infos: list[pb.ObjectInfo] = []

    async def _get(self, peer, channel):
        await objects.serve_get(channel, self.there, self.their_executor, lambda digest: self.allow(digest))

    async def _put(self, peer, channel):
        def admit(info):
            self.infos.append(info)
            self.admit(info)

        self.stored.append(await objects.serve_put(channel, self.there, self.their_executor, admit))

    def file(self, data: bytes) -> tuple[Digest, Path]:
        path = self.folder / "file"
        path.write_bytes(data)
        return digest_of(data), path

    async def fetch(self, connection, digest, on_progress=None) -> Path:
        return await objects.fetch(connection, digest, self.here, self.executor, on_progress)

    async def push(self, connection, digest, path, on_progress=None) -> None:
        await objects.push(connection, digest, path, "key#0@7", self.executor, on_progress)

    def close(self) -> None:
        self.executor.close()
        self.their_executor.close()


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    yield made
    made.close()


class Tampering:
    """A connection whose streams hand each message to `up` or `down` on its way; what these return goes on."""

    def __init__(self, inner, *, up=lambda n, message: message, down=lambda n, message: message):
        self.inner, self.up, self.down = inner, up, down
        self.sent: list[bytes] = []
        self.received: list[bytes] = []
        self.opened = 0

    async def open(self, method):
        self.opened += 1
        return _TamperingChannel(self, await self.inner.open(method))


class _TamperingChannel:
    def __init__(self, connection, inner):
        self.connection, self.inner = connection, inner

    async def send(self, message):
        self.connection.sent.append(message)
        await self.inner.send(self.connection.up(len(self.connection.sent), message))

    async def receive(self):
        message = await self.inner.receive()
        if message is None:
            return None
        self.connection.received.append(message)
        return self.connection.down(len(self.connection.received), message)

    async def close(self):
        await self.inner.close()


def flip_bit(message: bytes) -> bytes:
    changed = bytearray(message)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


def offsets(messages: list[bytes]) -> list[int]:
    """Of the chunk frames among them."""
    return [int.from_bytes(m[:8], "little") for m in messages if len(m) > 1000]


SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 17]


@pytest.mark.parametrize("size", SIZES)
def test_an_object_arrives_whole_in_both_directions(network, site, size):
    data = content(size)
    digest, path = site.file(data)
    progress = []

    async def main():
        connection = await network.connect("w1")
        await site.push(connection, digest, path, progress.append)
        assert site.there.path(digest).read_bytes() == data
        assert (site.infos[0].digest, site.infos[0].size, site.infos[0].purpose) == (digest, size, "key#0@7")
        assert progress[-1] == size and progress == sorted(progress)
        del progress[:]
        fetched = await site.fetch(connection, digest, progress.append)
        assert fetched == site.here.path(digest) and fetched.read_bytes() == data
        assert progress == sorted(progress) and progress[-1:] == ([size] if size else [])

    run(network, site.service, main)
    assert site.stored == [digest]


def test_large_objects_never_hold_the_event_loop(network, site, stall_watchdog):
    stall_watchdog(0.05)
    data = content(LARGE)
    digest, path = site.file(data)

    async def main():
        connection = await network.connect("w1")
        await site.push(connection, digest, path)
        await site.fetch(connection, digest)
        assert await site.executor.run(lambda: site.here.path(digest).read_bytes() == data)
        frames = LARGE // CHUNK_BYTES
        assert LARGE + frames * 16 < connection.traffic.up["PutObject"] < LARGE + frames * 16 + 500
        assert LARGE + frames * 16 < connection.traffic.down["GetObject"] < LARGE + frames * 16 + 500

    run(network, site.service, main)


def test_what_is_there_already_is_not_sent(network, site):
    data = content(3 * CHUNK_BYTES)
    digest, path = site.file(data)
    site.there.put(data)
    site.here.put(data)

    async def main():
        connection = await network.connect("w1")
        assert (await site.fetch(connection, digest)).read_bytes() == data
        assert connection.traffic.total_up == connection.traffic.total_down == 0
        await site.push(connection, digest, path)
        assert connection.traffic.total_up < 500

    run(network, site.service, main)
    assert site.stored == [digest]


def test_a_push_goes_on_where_the_cut_left_it(network, site):
    data = content(24 * CHUNK_BYTES)
    digest, path = site.file(data)
    acknowledged = []

    async def main():
        first = Tampering(await network.connect("w1"))

        async def cut():
            while not acknowledged or acknowledged[-1] < 6 * CHUNK_BYTES:
                await asyncio.sleep(0)
            await network.cut("w1")

        results = await asyncio.gather(
            site.push(first, digest, path, acknowledged.append), cut(), return_exceptions=True
        )
        assert isinstance(results[0], ConnectionLost)
        safe_bytes = acknowledged[-1]
        assert 6 * CHUNK_BYTES <= safe_bytes < len(data)
        await asyncio.sleep(0.1)
        second = Tampering(await network.connect("w1"))
        await site.push(second, digest, path, acknowledged.append)
        assert min(offsets(second.sent)) >= safe_bytes, "nothing acknowledged is sent again"
        assert offsets(second.sent) == sorted(set(offsets(second.sent)))
        assert site.there.path(digest).read_bytes() == data

    # Slow enough that the cut comes in the middle.
    slow_down(site.there)
    run(network, site.service, main)


def test_a_fetch_goes_on_where_the_cut_left_it_even_in_a_new_process(network, site):
    data = content(24 * CHUNK_BYTES)
    digest = site.there.put(data)
    arrived = []
    slow_down(site.here)

    async def main():
        first = Tampering(await network.connect("w1"))

        async def cut():
            while not arrived or arrived[-1] < 6 * CHUNK_BYTES:
                await asyncio.sleep(0)
            await network.cut("w1")

        results = await asyncio.gather(site.fetch(first, digest, arrived.append), cut(), return_exceptions=True)
        assert isinstance(results[0], ConnectionLost)
        site.here = ObjectStore(site.folder / "here")
        held = site.here.arrived(digest)
        assert arrived[-1] <= held < len(data)
        second = Tampering(await network.connect("w1"))
        await site.fetch(second, digest)
        assert pb.GetObject.FromString(second.sent[0]).offset == held
        assert offsets(second.received)[0] == held
        assert site.here.path(digest).read_bytes() == data

    run(network, site.service, main)


def slow_down(store: ObjectStore) -> None:
    """Writes of this store take a while, so that a test can act in the middle of a transfer."""
    import time

    begin = store.begin

    def slow_begin(digest, size):
        partial = begin(digest, size)
        write = partial.write

        def slow_write(offset, data):
            time.sleep(0.005)
            return write(offset, data)

        partial.write = slow_write
        return partial

    store.begin = slow_begin


def test_a_flipped_bit_is_found_and_only_the_rest_is_sent_again(network, site):
    data = content(10 * CHUNK_BYTES)
    digest, path = site.file(data)

    def once_at(number):
        return lambda n, message: flip_bit(message) if n == number else message

    async def main():
        up = Tampering(await network.connect("w1"), up=once_at(5))  # the fourth chunk, behind the ObjectInfo
        await site.push(up, digest, path)
        assert site.there.path(digest).read_bytes() == data
        assert up.opened == 2
        again = offsets(up.sent[up.sent.index(up.sent[0], 1) :])
        assert again == [i * CHUNK_BYTES for i in range(3, 10)]
        down = Tampering(await network.connect("w1"), down=once_at(5))
        await site.fetch(down, digest)
        assert site.here.path(digest).read_bytes() == data
        assert down.opened == 2
        assert pb.GetObject.FromString(down.sent[1]).offset == 3 * CHUNK_BYTES

    run(network, site.service, main)


def test_a_link_that_always_corrupts_ends_in_an_error(network, site):
    data = content(2 * CHUNK_BYTES)
    digest, path = site.file(data)
    site_there = site.there.put(content(3 * CHUNK_BYTES))

    async def main():
        tampering = Tampering(
            await network.connect("w1"),
            up=lambda n, message: flip_bit(message) if len(message) > 1000 else message,
            down=lambda n, message: flip_bit(message) if len(message) > 1000 else message,
        )
        with pytest.raises(CorruptError, match="checksum"):
            await site.push(tampering, digest, path)
        assert tampering.opened == objects.MAX_VAIN_TRIES
        with pytest.raises(CorruptError, match="checksum"):
            await site.fetch(tampering, site_there)
        assert tampering.opened == 2 * objects.MAX_VAIN_TRIES

    run(network, site.service, main)
    assert not site.there.has(digest) and not site.here.has(site_there)


def test_many_flipped_bits_cost_one_try_each(network, site):
    """Each try brings some chunks further, so none is in vain."""
    data = content(12 * CHUNK_BYTES)
    digest, path = site.file(data)
    tampering = None

    def flip_a_later_one_each_time(n, message):
        return flip_bit(message) if offsets([message]) == [(3 * tampering.opened - 1) * CHUNK_BYTES] else message

    async def main():
        nonlocal tampering
        tampering = Tampering(await network.connect("w1"), up=flip_a_later_one_each_time)
        await site.push(tampering, digest, path)
        assert tampering.opened == 5 > objects.MAX_VAIN_TRIES

    run(network, site.service, main)
    assert site.there.path(digest).read_bytes() == data


def test_bytes_of_another_object_are_never_stored(network, site):
    """Valid chunks whose whole does not match the digest: from a sender that lies, or a file that changed."""
    _, path = site.file(content(2 * CHUNK_BYTES))
    wrong = digest_of(b"something else")
    site.there.path(wrong).write_bytes(content(2 * CHUNK_BYTES))

    async def main():
        connection = await network.connect("w1")
        with pytest.raises(CorruptError, match="arrived as"):
            await site.fetch(connection, wrong)
        site.there.remove(wrong)
        with pytest.raises(CorruptError, match="arrived as"):
            await site.push(connection, wrong, path)

    run(network, site.service, main)
    assert not site.there.has(wrong) and not site.here.has(wrong)
    assert not list((site.folder / "there" / "partial").iterdir())


def test_a_worker_gets_only_what_it_may_and_what_is_there(network, site):
    secret = site.there.put(b"secret")
    absent = digest_of(b"absent")
    site.allow = lambda digest: digest != secret

    async def main():
        connection = await network.connect("w1")
        for digest in (secret, absent):
            with pytest.raises(Refused, match=digest):
                await site.fetch(connection, digest)
        channel = await connection.open("GetObject")
        await channel.send(pb.GetObject(digest="../../etc/passwd").SerializeToString())
        with pytest.raises(Refused, match="not a digest"):
            await channel.receive()
        await channel.close()
        channel = await connection.open("GetObject")
        await channel.send(b"\xff\xff\xff")
        with pytest.raises(Refused, match="GetObject cannot be read"):
            await channel.receive()
        await channel.close()

    run(network, site.service, main)


def test_what_is_not_admitted_is_refused_before_its_bytes(network, site):
    digest, path = site.file(content(20 * CHUNK_BYTES))

    def admit(info):
        raise Refused("nobody waits for the upload")

    site.admit = admit

    async def main():
        connection = await network.connect("w1")
        with pytest.raises(Refused, match="nobody waits for the upload"):
            await site.push(connection, digest, path)
        assert connection.traffic.total_up < 500
        channel = await connection.open("PutObject")
        await channel.send(pb.ObjectInfo(digest="sha256:xyz", size=3).SerializeToString())
        with pytest.raises(Refused, match="not a digest"):
            await channel.receive()
        await channel.close()

    run(network, site.service, main)
    assert not list((site.folder / "there" / "partial").iterdir())


def test_a_full_store_says_so_to_the_worker(network, tmp_path):
    site = Site(tmp_path, quota_bytes=CHUNK_BYTES)
    digest, path = site.file(content(2 * CHUNK_BYTES))

    async def main():
        with pytest.raises(ResourceError, match="quota"):
            await site.push(await network.connect("w1"), digest, path)

    run(network, site.service, main)
    site.close()


@pytest.mark.parametrize(
    "frame",
    [
        pack_chunk(5 * CHUNK_BYTES, bytes(10)),  # a gap
        pack_chunk(0, bytes(2 * CHUNK_BYTES)),  # more than was said
        pack_chunk(2**63, bytes(10)),
        b"short",
        pack_chunk(0, bytes(100))[:-1],
    ],
    ids=["gap", "too much", "far away", "short", "cut"],
)
def test_nonsense_frames_are_refused_and_harm_nothing(network, site, frame):
    digest, _ = site.file(content(CHUNK_BYTES))

    async def main():
        connection = await network.connect("w1")
        channel = await connection.open("PutObject")
        await channel.send(pb.ObjectInfo(digest=digest, size=CHUNK_BYTES).SerializeToString())
        assert pb.PutAck.FromString(await channel.receive()).offset == 0
        await channel.send(frame)
        with pytest.raises(CorruptError):
            await channel.receive()
        await channel.close()

    run(network, site.service, main)
    assert site.there.arrived(digest) == 0


def test_bytes_that_come_twice_do_not_count_twice(network, site):
    data = content(2 * CHUNK_BYTES)
    digest, _ = site.file(data)

    async def main():
        channel = await (await network.connect("w1")).open("PutObject")
        await channel.send(pb.ObjectInfo(digest=digest, size=2 * CHUNK_BYTES).SerializeToString())
        for _ in range(2):
            await channel.send(pack_chunk(0, data[:CHUNK_BYTES]))

        async def hear():
            while (message := await channel.receive()) is not None:
                assert pb.PutAck.FromString(message).offset <= CHUNK_BYTES

        with pytest.raises(CorruptError, match="not all of them are new"):
            await hear()
        await channel.close()

    run(network, site.service, main)


def test_a_worker_that_holds_too_much_of_something_else_gets_all_of_it(network, site):
    data = content(2 * CHUNK_BYTES)
    digest = site.there.put(data)
    site.here.begin(digest, 9 * CHUNK_BYTES).write(0, content(4 * CHUNK_BYTES))

    async def main():
        fetched = await site.fetch(await network.connect("w1"), digest)
        assert fetched.read_bytes() == data

    run(network, site.service, main)


def test_two_who_send_the_same_object_at_once_do_no_harm(network, site):
    data = content(12 * CHUNK_BYTES)
    digest, path = site.file(data)

    async def main():
        connections = [await network.connect(f"w{i}") for i in range(3)]
        await asyncio.gather(*(site.push(connection, digest, path) for connection in connections))

    run(network, site.service, main)
    assert site.there.path(digest).read_bytes() == data
    assert site.stored == [digest] * 3


def test_two_fetches_of_one_object_at_once_do_no_harm(network, site):
    data = content(12 * CHUNK_BYTES)
    digest = site.there.put(data)

    async def main():
        connection = await network.connect("w1")
        paths = await asyncio.gather(*(site.fetch(connection, digest) for _ in range(3)))
        assert [path.read_bytes() == data for path in paths] == [True] * 3

    run(network, site.service, main)


def test_a_file_that_cannot_be_sent_is_named(network, site, tmp_path):
    digest, path = site.file(content(20 * CHUNK_BYTES))

    async def main():
        connection = await network.connect("w1")
        with pytest.raises(DataError, match="nowhere"):
            await site.push(connection, digest, tmp_path / "nowhere")

        def cut_short(offset):
            if offset:
                with path.open("rb+") as file:
                    file.truncate(8 * CHUNK_BYTES)

        with pytest.raises(DataError, match="became shorter"):
            await site.push(connection, digest, path, cut_short)

    slow_down(site.there)
    run(network, site.service, main)


def test_an_object_that_is_removed_meanwhile_is_refused(network, site):
    digest = site.there.put(content(20 * CHUNK_BYTES))
    slow_down(site.here)

    async def main():
        with pytest.raises(Refused, match="not here any more"):
            await site.fetch(await network.connect("w1"), digest, lambda n: site.there.remove(digest))

    run(network, site.service, main)


def test_a_cancelled_transfer_leaves_nothing_running(network, site):
    digest, path = site.file(content(24 * CHUNK_BYTES))
    slow_down(site.there)
    started = asyncio.Event()

    async def main():
        connection = await network.connect("w1")
        pushing = asyncio.create_task(site.push(connection, digest, path, lambda n: n and started.set()))
        await started.wait()
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing
        await site.push(connection, digest, path)

    run(network, site.service, main)
    assert site.there.has(digest)


def test_what_a_sender_had_on_its_way_is_taken_before_its_stream_ends(site):
    """Another stream has brought the rest meanwhile; gRPC would tell it that its link is lost."""
    data = content(2 * CHUNK_BYTES)
    digest = site.there.put(data)
    answers = []

    class Late:
        """The sender's end, with two chunks on the way when it is told that all is done."""

        def __init__(self):
            self.coming = [
                pb.ObjectInfo(digest=digest, size=len(data)).SerializeToString(),
                pack_chunk(0, data[:CHUNK_BYTES]), pack_chunk(CHUNK_BYTES, data[CHUNK_BYTES:]), None,
            ]  # fmt: skip

        async def receive(self):
            return self.coming.pop(0)

        async def send(self, message):
            answers.append(pb.PutAck.FromString(message))

    channel = Late()
    asyncio.run(objects.serve_put(channel, site.there, site.their_executor, lambda _: None))
    assert [answer.done for answer in answers] == [True] and channel.coming == []


def test_a_sender_that_is_gone_once_it_has_its_answer_has_stored_its_object(site):
    data = content(CHUNK_BYTES)
    digest = site.there.put(data)

    class Gone:
        def __init__(self):
            self.has_asked = False

        async def receive(self):
            if self.has_asked:
                raise ConnectionLost("its link broke")
            self.has_asked = True
            return pb.ObjectInfo(digest=digest, size=len(data)).SerializeToString()

        async def send(self, message):
            pass

    assert asyncio.run(objects.serve_put(Gone(), site.there, site.their_executor, lambda _: None)) == digest
