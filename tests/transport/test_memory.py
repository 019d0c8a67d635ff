"""The modelled links: times are exact on the virtual clock."""

from __future__ import annotations

import asyncio
import random

import pytest
from transport.networks import Handlers

from potluck.clock import VirtualClock, run_virtual
from potluck.transport.connection import Peer
from potluck.transport.memory import WATERMARK_BYTES, Link, MemoryNetwork
from potluck.types.errors import ConnectionLost, NotAdmitted
from potluck.types.ids import WorkerId

W1 = WorkerId("w1")


def now() -> float:
    return asyncio.get_running_loop().time()


async def echo(peer, channel):
    while (message := await channel.receive()) is not None:
        await channel.send(message)


async def sink(peer, channel):
    while await channel.receive() is not None:
        pass


def connect(network: MemoryNetwork, service: Handlers, link: Link, id: str = "w1"):
    return network.connect(service, Peer(id=WorkerId(id)), link)


def test_a_call_takes_rate_and_round_trip():
    async def answer(peer, request):
        return bytes(3000)

    async def main():
        network = MemoryNetwork(VirtualClock())
        link = Link(up_bytes_per_s=1000, down_bytes_per_s=3000, rtt_s=0.5)
        connection = await connect(network, Handlers(Welcome=answer), link)
        await connection.call("Welcome", bytes(2000))
        return now()

    assert run_virtual(main()) == pytest.approx(2.0 + 0.25 + 1.0 + 0.25)


def test_messages_follow_each_other_without_waiting_for_the_round_trip():
    async def main():
        network = MemoryNetwork(VirtualClock())
        arrivals = []

        async def serve(peer, channel):
            while await channel.receive() is not None:
                arrivals.append(now())

        connection = await connect(network, Handlers(Data=serve), Link(up_bytes_per_s=100, rtt_s=2))
        channel = await connection.open("Data")
        for _ in range(3):
            await channel.send(bytes(100))
        await asyncio.sleep(10)
        return arrivals

    assert run_virtual(main()) == pytest.approx([2.0, 3.0, 4.0])


def test_streams_share_a_rate_evenly():
    async def main():
        network = MemoryNetwork(VirtualClock())
        arrivals = {}

        async def serve(peer, channel):
            while (message := await channel.receive()) is not None:
                arrivals[len(message)] = now()

        connection = await connect(network, Handlers(Data=serve, Control=serve), Link(up_bytes_per_s=1000))
        first, second = await connection.open("Data"), await connection.open("Data")
        await first.send(bytes(3000))
        await asyncio.sleep(1.0)
        await second.send(bytes(500))
        await asyncio.sleep(10)
        return arrivals

    # Alone for 1 s, then halved until the short one is through at 2 s, then alone for the last 1500 bytes.
    assert run_virtual(main()) == pytest.approx({500: 2.0, 3000: 3.5})


def test_a_heartbeat_does_not_wait_behind_bulk():
    async def main():
        network = MemoryNetwork(VirtualClock())
        connection = await connect(
            network, Handlers(Data=sink, Control=echo), Link(up_bytes_per_s=125_000, down_bytes_per_s=125_000)
        )
        bulk, control = await connection.open("Data"), await connection.open("Control")

        async def flood():
            for _ in range(100):
                await bulk.send(bytes(1 << 20))

        flooding = asyncio.create_task(flood())
        waits = []
        for _ in range(20):
            await asyncio.sleep(2)
            start = now()
            await control.send(bytes(500))
            await control.receive()
            waits.append(now() - start)
        flooding.cancel()
        return max(waits)

    assert run_virtual(main()) == pytest.approx(500 / 62_500 + 500 / 125_000)


def test_a_sender_holds_no_more_than_the_watermark_and_what_is_in_flight():
    async def main(link: Link) -> tuple[int, float]:  # bytes held, seconds for 100 MiB
        network = MemoryNetwork(VirtualClock())
        go = asyncio.Event()

        async def serve(peer, channel):
            await go.wait()
            await sink(peer, channel)

        connection = await connect(network, Handlers(Data=serve), link)
        channel = await connection.open("Data")
        sent = 0

        async def fill():
            nonlocal sent
            while True:
                await asyncio.wait_for(channel.send(bytes(1 << 20)), 60)
                sent += 1 << 20

        with pytest.raises(TimeoutError):
            await fill()
        go.set()
        await asyncio.sleep(60)
        start = now()
        for _ in range(100):
            await channel.send(bytes(1 << 20))
        return sent, now() - start

    assert run_virtual(main(Link()))[0] == WATERMARK_BYTES
    fat = Link(up_bytes_per_s=float(10 << 20), rtt_s=1.0)
    sent, seconds = run_virtual(main(fat))
    assert sent == WATERMARK_BYTES + (10 << 20)
    assert 8.5 < seconds < 10, "a long round trip must not slow bulk down"


def test_one_message_larger_than_the_watermark_passes():
    async def main():
        network = MemoryNetwork(VirtualClock())
        connection = await connect(network, Handlers(Control=big), Link())
        channel = await connection.open("Control")
        return len(await channel.receive())

    async def big(peer, channel):
        await channel.send(bytes(WATERMARK_BYTES * 2))

    assert run_virtual(main()) == WATERMARK_BYTES * 2


def test_order_holds_where_many_messages_arrive_at_one_moment():
    async def main():
        network = MemoryNetwork(VirtualClock())
        connection = await connect(network, Handlers(Control=echo), Link(rtt_s=0.1))
        channel = await connection.open("Control")
        for i in range(200):
            await channel.send(b"%d" % i)
        return [int(await channel.receive()) for _ in range(200)]

    assert run_virtual(main()) == list(range(200))


def trace_of_a_busy_network(seed: int) -> list[tuple[float, str]]:
    async def main():
        network = MemoryNetwork(VirtualClock())
        trace: list[tuple[float, str]] = []
        service = Handlers(Control=echo, Data=echo, Welcome=lambda peer, request: asyncio.sleep(0.01, request))
        choose = random.Random(seed)

        async def worker(id: str) -> None:
            link = Link(up_bytes_per_s=choose.uniform(1e5, 1e6), down_bytes_per_s=2e6, rtt_s=choose.uniform(0, 0.2))
            while len(trace) < 400:
                connection = await connect(network, service, link, id)
                try:
                    await connection.call("Welcome", b"x")
                    channels = [await connection.open(m) for m in ("Control", "Data")]
                    for i in range(10):
                        for channel in channels:
                            await channel.send(bytes(choose.randrange(1, 200_000)))
                        for channel in channels:
                            message = await channel.receive()
                            trace.append((now(), f"{id} {i} {len(message or b'')}"))
                    for channel in channels:
                        await channel.close()
                except ConnectionLost as error:
                    trace.append((now(), f"{id} {error}"))
                    await asyncio.sleep(0.1)

        async def trouble() -> None:
            while len(trace) < 400:
                await asyncio.sleep(choose.uniform(0.5, 3))
                network.cut(WorkerId(f"w{choose.randrange(4)}"))

        await asyncio.gather(*(worker(f"w{i}") for i in range(4)), trouble())
        await network.close()
        return trace

    return run_virtual(main())


def test_the_same_seed_gives_the_same_trace():
    first = trace_of_a_busy_network(1)
    assert first == trace_of_a_busy_network(1)
    assert any("broke" in what for _, what in first)
    assert first != trace_of_a_busy_network(2)


def test_a_partition_lasts_until_it_heals():
    async def main():
        network = MemoryNetwork(VirtualClock())
        service = Handlers(Control=echo)
        channel = await (await connect(network, service, Link())).open("Control")
        network.partition(W1)
        with pytest.raises(ConnectionLost):
            await channel.receive()
        with pytest.raises(ConnectionLost, match="w1 is cut off"):
            await (await connect(network, service, Link())).open("Control")
        network.heal(W1)
        channel = await (await connect(network, service, Link())).open("Control")
        await channel.send(b"x")
        return await channel.receive()

    assert run_virtual(main()) == b"x"


def test_a_refused_member_is_let_in_again():
    async def main():
        network = MemoryNetwork(VirtualClock())
        connection = await connect(network, Handlers(Control=echo), Link())
        network.refuse(W1, "w1 was removed by anna")
        with pytest.raises(NotAdmitted, match="w1 was removed by anna"):
            await connection.open("Control")
        network.admit(W1)
        channel = await connection.open("Control")
        await channel.send(b"x")
        return await channel.receive()

    assert run_virtual(main()) == b"x"


def test_what_was_under_way_is_gone_after_a_cut():
    async def main():
        network = MemoryNetwork(VirtualClock())
        got = []

        async def serve(peer, channel):
            while (message := await channel.receive()) is not None:
                got.append(message)

        connection = await connect(network, Handlers(Data=serve), Link(up_bytes_per_s=100, rtt_s=1))
        channel = await connection.open("Data")
        for i in range(5):
            await channel.send(bytes([i]) * 100)
        await asyncio.sleep(2.6)  # two have arrived at 1.5 and 2.5, one is in flight, two are still to be sent
        network.cut(W1)
        await asyncio.sleep(100)
        return [m[0] for m in got]

    assert run_virtual(main()) == [0, 1]


def test_nothing_stays_behind():
    async def main():
        network = MemoryNetwork(VirtualClock())
        service = Handlers(Control=echo, GetObject=echo, Welcome=lambda peer, request: asyncio.sleep(0, b""))
        for i in range(20):
            connection = await connect(network, service, Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.1))
            await connection.call("Welcome", b"")
            for method in ("Control", "GetObject"):
                channel = await connection.open(method)
                await channel.send(b"x")
                await channel.receive()
                if i % 2:
                    await channel.close()
            await connection.close()
        await asyncio.sleep(0.01)
        assert not network._connections and not network._tasks
        assert asyncio.all_tasks() == {asyncio.current_task()}
        # No timers either: nothing moves the clock any more.
        assert not [t for t in asyncio.get_running_loop()._scheduled if not t.cancelled()]

    run_virtual(main())
