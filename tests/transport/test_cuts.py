"""What broken links and broken bytes cost: bytes that pass twice, counted on the link."""

from __future__ import annotations

import asyncio
import random
from functools import partial

import pytest
from transport.networks import Sockets, run
from transport.test_objects import Site, Tampering, content, flip_bit, offsets

from potluck.bench.rig.wire import Way, Wire
from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.protocol.frames import CHUNK_HEADER_BYTES
from potluck.transport import memory, objects
from potluck.transport.connection import Peer
from potluck.transport.grpc.client import GrpcConnection
from potluck.transport.memory import Link, MemoryNetwork
from potluck.types.errors import ConnectionLost
from potluck.types.ids import WorkerId

W1 = WorkerId("w1")
CHUNK = 16 << 10
SIZE = 256 * CHUNK
RATE = 1e6


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """A small object in as many chunks as a large one."""
    monkeypatch.setattr(objects, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(memory, "WATERMARK_BYTES", 4 * (CHUNK + CHUNK_HEADER_BYTES))


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    yield made
    made.close()


def inline(site: Site) -> Site:
    site.close()
    site.executor = site.their_executor = InlineExecutor()
    return site


def transfer(site: Site, way: str, size: int = SIZE):
    """How to do it, and where it arrives."""
    data = content(size)
    if way == "down":
        digest = site.there.put(data)
        return partial(site.fetch, digest=digest), site.here.path(digest)
    digest, path = site.file(data)
    return partial(site.push, digest=digest, path=path), site.there.path(digest)


@pytest.mark.parametrize("way", ["up", "down"])
def test_ten_cuts_cost_less_than_a_twentieth_of_the_object(site, way):
    """The link carries RATE bytes a second as long as anything is sent: seconds are bytes."""
    act, target = transfer(inline(site), way)

    async def main():
        network = MemoryNetwork(VirtualClock())
        link = Link(up_bytes_per_s=RATE, down_bytes_per_s=RATE)
        loop = asyncio.get_running_loop()
        for at in random.Random(way).sample(range(SIZE), 10):
            loop.call_later(at / RATE, network.cut, W1)
        num_cuts = 0
        while True:
            connection = await network.connect(site.service, Peer(id=W1), link)
            try:
                await act(connection)
                break
            except ConnectionLost:
                num_cuts += 1
        return loop.time() * RATE, num_cuts

    num_bytes, num_cuts = run_virtual(main())
    assert num_cuts == 10
    assert 1.005 * SIZE < num_bytes <= 1.05 * SIZE
    assert target.read_bytes() == content(SIZE)


@pytest.mark.parametrize("way", ["up", "down"])
def test_ten_cuts_of_a_real_link_too(site, way):
    size = 8 * SIZE
    act, target = transfer(site, way, size)
    network = Sockets()

    async def main():
        cut = Way(cuts=sorted(random.Random(way).sample(range(size), 10)), stall_s=0.1)
        wire = Wire(up=cut) if way == "up" else Wire(down=cut)
        port = await wire.open(network.port)
        while True:
            connection = GrpcConnection(f"127.0.0.1:{port}", network.authority.client("w1"))
            try:
                await act(connection)
                break
            except ConnectionLost:
                await asyncio.sleep(0.02)
            finally:
                await connection.close()
        assert not cut.cuts
        assert size < cut.num_bytes <= 1.05 * size
        await wire.close()

    run(network, site.service, main)
    assert target.read_bytes() == content(size)


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_flipped_bit_costs_its_chunk_and_what_was_in_flight_behind_it(site, way):
    act, target = transfer(inline(site), way)
    broken = 100

    def flip(n, message):
        return flip_bit(message) if tampering.opened == 1 and offsets([message]) == [broken * CHUNK] else message

    async def main():
        nonlocal tampering
        network = MemoryNetwork(VirtualClock())
        connection = await network.connect(site.service, Peer(id=W1), Link(up_bytes_per_s=RATE, down_bytes_per_s=RATE))
        tampering = Tampering(connection, **{way: flip})
        await act(tampering)
        return connection, asyncio.get_running_loop().time() * RATE

    tampering = None
    connection, num_bytes = run_virtual(main())
    assert tampering.opened == 2
    assert target.read_bytes() == content(SIZE)
    frame, window = CHUNK + CHUNK_HEADER_BYTES, 4
    passed = {"up": tampering.sent, "down": tampering.received}[way]
    in_flight = window + 2 if way == "up" else 1  # sent before the worker heard of it; nothing is read after it
    expected = [*range(broken), *range(broken, broken + in_flight), *range(broken, SIZE // CHUNK)]
    assert offsets(passed) == [number * CHUNK for number in expected]
    assert connection.traffic.total_up + connection.traffic.total_down < (256 + window + 1) * frame + 3000
    again = num_bytes - SIZE // CHUNK * frame
    assert frame <= again < (window + 1) * frame + 500
