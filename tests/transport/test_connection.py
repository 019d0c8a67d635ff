"""What both transports owe their users: the seam's contract, over memory and over real sockets with mutual TLS."""

from __future__ import annotations

import asyncio
import logging

import pytest
from transport.networks import Handlers, Sockets, run

from potluck.protocol.frames import MAX_FRAME_BYTES
from potluck.transport.rules import MAX_REQUEST_BYTES
from potluck.types import errors
from potluck.types.errors import ConnectionLost, NotAdmitted, PotluckError, Refused

MEGABYTE = bytes(1 << 20)


async def echo(peer, channel):
    while (message := await channel.receive()) is not None:
        await channel.send(message)


async def send_on(channel):
    for _ in range(100):
        await channel.send(b"x")
        await asyncio.sleep(0.01)


async def echo_call(peer, request):
    return peer.id.encode() + b"/" + peer.role.encode() + b":" + request


def test_a_call_carries_bytes_both_ways_and_says_who_calls(network):
    async def main():
        connection = await network.connect("w1")
        assert await connection.call("Welcome", b"hello") == b"w1/worker:hello"
        operator = await network.connect("op", "operator")
        assert await operator.call("Status", b"") == b"op/operator:"

    run(network, Handlers(Welcome=echo_call, Status=echo_call), main)


def test_a_stream_keeps_order_and_ends_in_good_order_on_both_sides(network):
    ended = []

    async def serve(peer, channel):
        await echo(peer, channel)
        ended.append("read to the end")
        await channel.send(b"last")

    async def main():
        connection = await network.connect("w1")
        channel = await connection.open("Control")
        for i in range(50):
            await channel.send(b"%d" % i)
        assert [await channel.receive() for _ in range(50)] == [b"%d" % i for i in range(50)]
        await channel.send(b"")
        assert await channel.receive() == b""
        await channel.close()
        await channel.close()
        assert ended == ["read to the end"]
        assert await channel.receive() is None
        with pytest.raises(ConnectionLost):
            await channel.send(b"late")

    run(network, Handlers(Control=serve), main)


def test_the_coordinator_ends_a_stream_by_returning(network):
    async def serve(peer, channel):
        await channel.receive()
        for i in range(20):
            await channel.send(b"%d" % i)

    async def main():
        channel = await (await network.connect("w1")).open("Control")
        await channel.send(b"go")
        await asyncio.sleep(0.1)  # all of it and the end arrive before anybody reads
        assert [await channel.receive() for _ in range(20)] == [b"%d" % i for i in range(20)]
        assert await channel.receive() is None
        assert await channel.receive() is None
        with pytest.raises(ConnectionLost):
            await send_on(channel)
        await channel.close()

    run(network, Handlers(Control=serve), main)


def test_what_was_sent_before_close_arrives(network):
    got = []

    async def serve(peer, channel):
        while (message := await channel.receive()) is not None:
            got.append(message)

    async def main():
        channel = await (await network.connect("w1")).open("Control")
        for i in range(10):
            await channel.send(b"%d" % i * 100_000)
        await channel.close()
        assert got == [b"%d" % i * 100_000 for i in range(10)]

    run(network, Handlers(Control=serve), main)


def test_cancelling_a_receive_loses_nothing(network):
    async def serve(peer, channel):
        while (message := await channel.receive()) is not None:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(channel.receive(), 0.01)
            await channel.send(message)

    async def main():
        channel = await (await network.connect("w1")).open("Control")
        for i in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(channel.receive(), 0.01)
            await channel.send(b"%d" % i)
            await asyncio.sleep(0.01 * i)
            assert await channel.receive() == b"%d" % i
        await channel.close()

    run(network, Handlers(Control=serve), main)


def test_back_pressure_stops_a_sender_and_a_cancelled_send_keeps_the_stream(network):
    read = asyncio.Event()
    got = 0

    async def serve(peer, channel):
        nonlocal got
        await read.wait()
        while (message := await channel.receive()) is not None:
            got += len(message)
        await channel.send(b"%d" % got)

    async def main():
        channel = await (await network.connect("w1")).open("Data")
        sent = 0

        async def fill():
            nonlocal sent
            while sent < 200:
                await asyncio.wait_for(channel.send(MEGABYTE), 0.5)
                sent += 1

        with pytest.raises(TimeoutError):
            await fill()
        assert sent < 40, "a sender must wait for its reader"
        read.set()
        for _ in range(30):
            await channel.send(MEGABYTE)
        await channel.close()
        # The cancelled one may or may not have gone out.
        assert got in ((sent + 30) << 20, (sent + 31) << 20)

    run(network, Handlers(Data=serve), main)


def test_a_slow_worker_makes_the_coordinator_wait(network):
    sent = 0

    async def serve(peer, channel):
        nonlocal sent
        for _ in range(100):
            await channel.send(MEGABYTE)
            sent += 1

    async def main():
        channel = await (await network.connect("w1")).open("GetObject")
        await channel.send(b"go")
        await asyncio.sleep(0.5)
        assert sent < 40
        for _ in range(100):
            assert await channel.receive() == MEGABYTE
        assert await channel.receive() is None
        await channel.close()

    run(network, Handlers(GetObject=serve), main)


def test_traffic_is_counted_alike_on_both_sides(network):
    async def main():
        connection = await network.connect("w1")
        await connection.call("Welcome", b"12345")
        channel = await connection.open("Data")
        for size in (10, 20, 30):
            await channel.send(bytes(size))
            await channel.receive()
        await channel.close()
        assert connection.traffic.up == {"Welcome": 5, "Data": 60}
        assert connection.traffic.down == {"Welcome": len(b"w1/worker:12345"), "Data": 60}
        assert network.traffic("w1") == connection.traffic
        assert network.traffic("w2").total_up == 0

    run(network, Handlers(Welcome=echo_call, Data=echo), main)


ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, PotluckError)]


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_errors_keep_their_class_and_sentence(network, cls):
    sentence = 'pi-03 hat 1,8 GiB: "zu wenig" 100 %\nfür 模型; take less'

    async def refuse(peer, _):
        raise cls(sentence)

    async def main():
        connection = await network.connect("w1")
        with pytest.raises(cls) as call_error:
            await connection.call("Welcome", b"")
        channel = await connection.open("Control")
        with pytest.raises(cls) as stream_error:
            await channel.receive()
        for error in (call_error.value, stream_error.value):
            assert type(error) is cls
            assert str(error) == sentence.replace("\n", " "), "whole, but nothing that moves a terminal's cursor"
        with pytest.raises(cls):
            await channel.receive()
        await channel.close()

    run(network, Handlers(Welcome=refuse, Control=refuse), main)


def test_a_sender_learns_why_the_stream_was_refused(network):
    async def refuse(peer, channel):
        await channel.receive()
        raise Refused("enough")

    async def main():
        channel = await (await network.connect("w1")).open("Control")
        with pytest.raises(Refused, match="enough"):
            await send_on(channel)
        await channel.close()

    run(network, Handlers(Control=refuse), main)


@pytest.mark.parametrize(("letter", "num_letters"), [("a", 4096), ("%", 1365), ("ü", 682), ("模", 455), ("🥘", 341)])
def test_a_long_sentence_is_cut_and_still_told(network, letter, num_letters):
    async def refuse(peer, request):
        raise Refused(letter * 100_000)

    async def main():
        with pytest.raises(Refused) as error:
            await (await network.connect("w1")).call("Welcome", b"")
        assert str(error.value) == letter * num_letters

    run(network, Handlers(Welcome=refuse), main)


def test_trouble_of_the_coordinators_machine_is_no_refusal(network):
    """A worker that is refused gives up or is blamed; this one tries again."""

    async def fail(peer, _):
        raise OSError(24, "Too many open files")

    async def main():
        connection = await network.connect("w1")
        with pytest.raises(ConnectionLost, match="cannot serve that at the moment"):
            await connection.call("Welcome", b"")
        channel = await connection.open("PutObject")
        with pytest.raises(ConnectionLost, match="cannot serve that at the moment"):
            await channel.receive()
        await channel.close()

    run(network, Handlers(Welcome=fail, PutObject=fail), main)


def test_an_unforeseen_error_is_logged_and_only_its_place_is_told(network, caplog):
    async def fail(peer, _):
        raise KeyError("the secret")

    async def main():
        connection = await network.connect("w1")
        with pytest.raises(Refused, match="internal error in Welcome"):
            await connection.call("Welcome", b"")
        channel = await connection.open("Control")
        with pytest.raises(Refused, match="internal error in Control") as error:
            await channel.receive()
        assert "secret" not in str(error.value)
        await channel.close()

    with caplog.at_level(logging.ERROR):
        run(network, Handlers(Welcome=fail, Control=fail), main)
    assert [r.exc_info[0] for r in caplog.records if r.name.startswith("potluck")] == [KeyError, KeyError]


@pytest.mark.parametrize(
    ("role", "calls", "streams"),
    [
        ("worker", {"Welcome", "Renew"}, {"Control", "Data", "GetObject", "PutObject"}),
        ("operator", {"Status", "Admin", "Renew"}, set()),
        ("stranger", set(), set()),
    ],
)
def test_a_role_may_do_what_it_is_for_and_nothing_else(network, role, calls, streams):
    async def answer(peer, request):
        return b"ok"

    async def serve(peer, channel):
        await channel.send(b"ok")

    service = Handlers(
        **dict.fromkeys(("Welcome", "Renew", "Status", "Admin"), answer),
        **dict.fromkeys(("Control", "Data", "GetObject", "PutObject"), serve),
    )

    async def main():
        connection = await network.connect("x", role)
        for method in ("Welcome", "Renew", "Status", "Admin"):
            if method in calls:
                assert await connection.call(method, b"") == b"ok"
                continue
            with pytest.raises(NotAdmitted, match=f"x has the role {role} and may not use {method}"):
                await connection.call(method, b"")
        for method in ("Control", "Data", "GetObject", "PutObject"):
            channel = await connection.open(method)
            if method in streams:
                assert await channel.receive() == b"ok"
            else:
                with pytest.raises(NotAdmitted, match=f"x has the role {role} and may not use {method}"):
                    await channel.receive()
            await channel.close()
        assert {method for _, method in service.calls} == calls | streams, "the service never hears of a refused one"

    run(network, service, main)


def test_a_revoked_worker_is_out_at_once_and_the_others_stay(network):
    ended = []

    async def serve(peer, channel):
        try:
            await echo(peer, channel)
        finally:
            ended.append(peer.id)

    async def main():
        connections = [await network.connect(id) for id in ("w1", "w2")]
        channels = [await c.open("Control") for c in connections]
        for channel in channels:
            await channel.send(b"x")
            assert await channel.receive() == b"x"
        network.revoke("w1")
        with pytest.raises(NotAdmitted, match="w1 is not a member"):
            await channels[0].receive()
        await asyncio.sleep(0.05)
        assert ended == ["w1"]
        with pytest.raises(NotAdmitted, match="w1 is not a member"):
            await connections[0].call("Welcome", b"")
        with pytest.raises(NotAdmitted):
            await (await connections[0].open("Control")).receive()
        await channels[1].send(b"y")
        assert await channels[1].receive() == b"y"
        await channels[1].close()
        await channels[0].close()

    run(network, Handlers(Welcome=echo_call, Control=serve), main)


def test_a_cut_link_is_lost_on_both_sides_and_can_be_made_again(network):
    seen = []
    finished = asyncio.Event()

    async def serve(peer, channel):
        try:
            await echo(peer, channel)
        except ConnectionLost:
            seen.append("lost")
            raise

    async def slow(peer, request):
        await asyncio.sleep(0.3)
        finished.set()
        return b""

    async def main():
        connection = await network.connect("w1")
        channel = await connection.open("Control")
        await channel.send(b"x")
        assert await channel.receive() == b"x"
        reading = asyncio.create_task(channel.receive())
        calling = asyncio.create_task(connection.call("Welcome", b""))
        await asyncio.sleep(0.1)
        await network.cut("w1")
        results = await asyncio.gather(reading, calling, return_exceptions=True)
        assert [type(r) for r in results] == [ConnectionLost, ConnectionLost]
        with pytest.raises(ConnectionLost):
            await channel.send(b"y")
        await channel.close()
        await connection.close()
        await asyncio.wait_for(finished.wait(), 5)  # what was asked for is not stopped half-way
        assert seen == ["lost"]
        again = await (await network.connect("w1")).open("Control")
        await again.send(b"z")
        assert await again.receive() == b"z"
        await again.close()

    run(network, Handlers(Control=serve, Welcome=slow), main)


def test_a_sender_that_waits_for_room_notices_a_cut(network):
    lost = asyncio.Event()

    async def serve(peer, channel):
        try:
            while True:
                await channel.send(MEGABYTE)
        except ConnectionLost:
            lost.set()

    async def main():
        channel = await (await network.connect("w1")).open("Data")
        await channel.send(b"go")
        await asyncio.sleep(0.3)

        async def push():
            while True:
                await channel.send(MEGABYTE)

        pushing = asyncio.create_task(push())
        await asyncio.sleep(0.3)
        await network.cut("w1")
        with pytest.raises(ConnectionLost):
            await pushing
        await asyncio.wait_for(lost.wait(), 5)
        await channel.close()

    run(network, Handlers(Data=serve), main)


def test_closing_the_connection_ends_everything_on_it(network):
    lost = asyncio.Event()

    async def serve(peer, channel):
        try:
            await echo(peer, channel)
        except ConnectionLost:
            lost.set()

    async def main():
        connection = await network.connect("w1")
        channel = await connection.open("Control")
        await channel.send(b"x")
        assert await channel.receive() == b"x"
        reading = asyncio.create_task(channel.receive())
        await asyncio.sleep(0.05)
        await connection.close()
        await connection.close()
        with pytest.raises(ConnectionLost):
            await reading
        await asyncio.wait_for(lost.wait(), 5)
        for attempt in (connection.call("Welcome", b""), connection.open("Control"), channel.send(b"y")):
            with pytest.raises(ConnectionLost):
                await attempt
        await channel.close()

    run(network, Handlers(Control=serve), main)


def test_a_call_that_is_not_answered_in_time_is_lost(network):
    async def never(peer, request):
        await asyncio.sleep(1)
        return b""

    async def main():
        connection = await network.connect("w1")
        start = asyncio.get_running_loop().time()
        with pytest.raises(ConnectionLost):
            await connection.call("Welcome", b"", timeout_s=0.2)
        assert 0.15 < asyncio.get_running_loop().time() - start < 0.9
        await asyncio.sleep(1)

    run(network, Handlers(Welcome=never), main)


def test_the_coordinator_may_say_more_at_once_than_a_worker(network):
    async def big(peer, channel):
        await channel.send(bytes((64 << 20) - 1024))

    async def reply(peer, request):
        return bytes(len(request) + 1)

    async def main():
        connection = await network.connect("w1")
        channel = await connection.open("Control")
        assert len(await channel.receive()) == (64 << 20) - 1024
        await channel.close()
        assert len(await connection.call("Welcome", bytes(MAX_REQUEST_BYTES - 1024))) == MAX_REQUEST_BYTES - 1023
        with pytest.raises(Refused, match=f"over the limit of {MAX_REQUEST_BYTES}"):
            await connection.call("Welcome", bytes(MAX_REQUEST_BYTES + 1))

    run(network, Handlers(Control=big, Welcome=reply), main)


@pytest.mark.parametrize("method", ["Control", "Data", "PutObject"])
def test_messages_are_bounded_by_their_kind(network, method):
    limit = MAX_REQUEST_BYTES if method == "Control" else MAX_FRAME_BYTES

    async def count(peer, channel):
        message = await channel.receive()
        await channel.send(b"%d" % len(message))

    async def main():
        channel = await (await network.connect("w1")).open(method)
        with pytest.raises(Refused, match=f"{limit + 1} bytes"):
            await channel.send(bytes(limit + 1))
        await channel.send(bytes(limit - 1024))
        assert await channel.receive() == b"%d" % (limit - 1024)
        await channel.close()

    run(network, Handlers(**{method: count}), main)


def test_a_service_that_ignores_a_cut_is_ended_after_a_while(network, monkeypatch):
    monkeypatch.setattr("potluck.transport.memory.loss_grace_s", 0.1)
    monkeypatch.setattr("potluck.transport.grpc.server.loss_grace_s", 0.1)
    ended = asyncio.Event()

    async def stubborn(peer, channel):
        await channel.send(b"here")
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    async def main():
        channel = await (await network.connect("w1")).open("Control")
        assert await channel.receive() == b"here"
        await network.cut("w1")
        await asyncio.wait_for(ended.wait(), 5)
        await channel.close()

    run(network, Handlers(Control=stubborn), main)


def test_bulk_has_a_tcp_connection_of_its_own():
    network = Sockets()

    async def main():
        connection = await network.connect("w1")
        control, data = await connection.open("Control"), await connection.open("Data")
        for channel in (control, data):
            await channel.send(b"x")
            assert await channel.receive() == b"x"
        assert network.wires["w1"][0].num_connections == 2
        await control.close()
        await data.close()

    run(network, Handlers(Control=echo, Data=echo), main)
