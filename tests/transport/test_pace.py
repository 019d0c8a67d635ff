"""Limits on the virtual clock: times are exact."""

from __future__ import annotations

import asyncio

import pytest

from potluck.clock import VirtualClock, run_virtual
from potluck.transport.connection import Traffic
from potluck.transport.pace import Limits, PacedChannel, PacedConnection, Pacer
from potluck.types.ids import WorkerId

A, B = WorkerId("a"), WorkerId("b")


def now() -> float:
    return asyncio.get_running_loop().time()


async def stream(
    pacer: Pacer, worker: WorkerId, num_pieces: int, piece_bytes: int = 100, way: str = "up"
) -> list[float]:
    """When each piece passed."""
    times = []
    for _ in range(num_pieces):
        await pacer.take(worker, way, piece_bytes)
        times.append(now())
    return times


def test_without_a_limit_nothing_waits():
    async def main():
        pacer = Pacer(VirtualClock())
        return await stream(pacer, A, 1000, 1 << 30)

    assert run_virtual(main()) == [0.0] * 1000


def test_the_total_limit_is_kept_to_the_byte():
    async def main():
        return await stream(Pacer(VirtualClock(), Limits(up=50)), A, 4)

    assert run_virtual(main()) == pytest.approx([0, 2, 4, 6])


def test_directions_do_not_share():
    async def main():
        pacer = Pacer(VirtualClock(), Limits(up=50, down=100))
        return await asyncio.gather(stream(pacer, A, 3), stream(pacer, A, 3, way="down"))

    up, down = run_virtual(main())
    assert up == pytest.approx([0, 2, 4])
    assert down == pytest.approx([0, 1, 2])


def test_workers_share_the_total_evenly_however_many_streams_they_have():
    async def main():
        pacer = Pacer(VirtualClock(), Limits(up=100))
        streams = [stream(pacer, A, 4) for _ in range(3)] + [stream(pacer, B, 4)]
        *many, one = await asyncio.gather(*streams)
        return sorted(at for times in many for at in times), one

    many, one = run_virtual(main())
    assert one == pytest.approx([1, 3, 5, 7])
    assert many == pytest.approx([0, 2, 4, 6, 8, 9, 10, 11, 12, 13, 14, 15])


def test_shares_are_in_bytes_not_in_pieces():
    async def main():
        pacer = Pacer(VirtualClock(), Limits(up=100))
        return await asyncio.gather(stream(pacer, A, 3, 300), stream(pacer, B, 6, 100))

    large, small = run_virtual(main())
    assert large == pytest.approx([0, 6, 12])
    assert small == pytest.approx([3, 4, 5, 9, 10, 11])


def test_who_comes_late_gets_half_and_makes_up_for_nothing():
    async def main():
        pacer = Pacer(VirtualClock(), Limits(up=100))

        async def late():
            await asyncio.sleep(9.5)
            return await stream(pacer, B, 3)

        return await asyncio.gather(stream(pacer, A, 14), late())

    first, late = run_virtual(main())
    assert late == pytest.approx([10, 12, 14])
    assert first[10:] == pytest.approx([11, 13, 15, 16])


def test_each_worker_has_its_own_limit_under_the_total():
    async def main():
        pacer = Pacer(VirtualClock(), Limits(up=100, up_per_worker=50))
        return await asyncio.gather(stream(pacer, A, 3), stream(pacer, B, 3))

    a, b = run_virtual(main())
    assert a == pytest.approx([0, 2, 4])
    assert b == pytest.approx([1, 3, 5])


def test_limits_change_while_pieces_wait():
    async def main():
        pacer = Pacer(VirtualClock(), Limits(up=10))
        task = asyncio.create_task(stream(pacer, A, 4))
        await asyncio.sleep(2)
        pacer.limit(Limits(up=25))  # the second piece waited until 10 and may pass at 4
        await asyncio.sleep(3)
        pacer.limit(Limits())
        return await task

    assert run_virtual(main()) == pytest.approx([0, 4, 5, 5])


def test_a_limit_that_comes_while_transfers_run_holds_from_then_on():
    async def main():
        pacer = Pacer(VirtualClock())
        first = await stream(pacer, A, 3)
        pacer.limit(Limits(up_per_worker=100))
        return first + await stream(pacer, A, 3)

    assert run_virtual(main()) == pytest.approx([0, 0, 0, 0, 1, 2])


def test_who_gives_up_waiting_takes_nothing():
    async def main():
        pacer = Pacer(VirtualClock(), Limits(up=100))
        await stream(pacer, A, 1)
        waiting = asyncio.create_task(stream(pacer, A, 1))
        await asyncio.sleep(0.5)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return await stream(pacer, B, 2)

    assert run_virtual(main()) == pytest.approx([1, 2])


def test_a_timer_that_fires_late_costs_no_rate():
    class Late(VirtualClock):
        def now(self):
            return super().now() + (0.01 if super().now() else 0.0)

    async def main():
        return await stream(Pacer(Late(), Limits(up=100)), A, 101)

    assert run_virtual(main())[-1] == pytest.approx(100, abs=0.02)


def test_a_paced_channel_takes_later_and_sends_later():
    class Wire:
        def __init__(self):
            self.sent = []

        async def send(self, message):
            self.sent.append(now())

        async def receive(self):
            return bytes(200)

        async def close(self):
            pass

    async def main():
        wire = Wire()
        channel = PacedChannel(wire, Pacer(VirtualClock(), Limits(up=100, down=50)), A)
        for _ in range(3):
            await channel.send(bytes(100))
        began = now()
        for _ in range(3):
            await channel.receive()
        return wire.sent, now() - began

    sent, seconds = run_virtual(main())
    assert sent == pytest.approx([0, 2, 4])
    assert seconds == pytest.approx(4)


def test_a_worker_s_own_limit_holds_for_its_results_and_not_for_its_heartbeats():
    class Wire:
        """A connection that notes when what was sent."""

        def __init__(self):
            self.sent, self.traffic, self.closed = [], Traffic(), False

        async def call(self, method, request, *, timeout_s=30.0):
            return request

        async def open(self, method):
            return Stream(self, method)

        async def close(self):
            self.closed = True

    class Stream:
        def __init__(self, wire, method):
            self.wire, self.method = wire, method

        async def send(self, message):
            self.wire.sent.append((self.method, now()))

        async def receive(self):
            return bytes(1000)

        async def close(self):
            pass

    async def main():
        wire = Wire()
        connection = PacedConnection(wire, Pacer(VirtualClock(), Limits(up=50)), A)
        assert await connection.call("Welcome", b"x") == b"x"
        put, data, control = [await connection.open(m) for m in ("PutObject", "Data", "Control")]
        for channel in (put, data, put, control):
            await channel.send(bytes(100))
        assert await put.receive() == bytes(1000)
        await control.send(bytes(100))
        await connection.close()
        assert wire.closed and connection.traffic is wire.traffic
        return wire.sent

    assert run_virtual(main()) == [("PutObject", 0), ("Data", 2), ("PutObject", 4), ("Control", 4), ("Control", 4)]
