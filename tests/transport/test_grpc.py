"""What only the real network has: TLS, ports, hostile clients."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
from urllib.parse import urlsplit

import grpc
import pytest
from transport.networks import Handlers, Sockets, run
from transport.tls import TestAuthority

from potluck.transport.connection import Peer
from potluck.transport.grpc import server as server_module
from potluck.transport.grpc.client import GrpcConnection, call_enrol
from potluck.transport.grpc.options import client_credentials, client_options, host_of, is_loopback
from potluck.transport.grpc.server import EnrolServer, GrpcServer, bind
from potluck.transport.grpc.status import from_status, to_status
from potluck.transport.security.names import SERVICE_NAME
from potluck.types.errors import (
    AddressError,
    ConnectionLost,
    CorruptError,
    NotAdmitted,
    PotluckError,
    Refused,
    VersionMismatch,
)
from potluck.types.ids import WorkerId


async def answer(peer, request):
    return f"{peer.id} {peer.role} {peer.address}".encode()


async def echo(peer, channel):
    while (message := await channel.receive()) is not None:
        await channel.send(message)


SERVICE = Handlers(Welcome=answer, Control=echo)


def test_the_peer_is_what_its_certificate_says():
    network = Sockets()
    seen = []

    async def note(peer, request):
        seen.append(peer)
        return b""

    async def main():
        identity = network.authority.client("pi-03")
        connection = GrpcConnection(f"127.0.0.1:{network.port}", identity)
        await connection.call("Welcome", b"")
        await connection.close()

    run(network, Handlers(Welcome=note), main)
    (peer,) = seen
    assert (peer.id, peer.role) == ("pi-03", "worker") and peer.serial > 1 << 64
    assert urlsplit(f"//{peer.address}").hostname == "127.0.0.1"


def test_a_server_of_another_authority_is_not_trusted():
    network, other = Sockets(), TestAuthority()

    async def main():
        connection = GrpcConnection(f"127.0.0.1:{network.port}", other.client("w1"))
        with pytest.raises(NotAdmitted, match="valid certificate of the authority"):
            await connection.call("Welcome", b"")
        await connection.close()

    run(network, SERVICE, main)


def test_a_client_certificate_does_not_make_a_server():
    """Whoever holds a worker's certificate cannot stand in for the coordinator."""
    network = Sockets()

    async def main():
        stolen = network.authority.client("coordinator.potluck")
        false = GrpcServer(check_peer=network.check_peer, identity=lambda: stolen)
        port = await false.start(SERVICE, 0, "127.0.0.1")
        connection = GrpcConnection(f"127.0.0.1:{port}", network.authority.client("w1"))
        with pytest.raises(NotAdmitted, match="valid certificate"):
            await connection.call("Welcome", b"secret")
        await connection.close()
        await false.stop()

    run(network, SERVICE, main)


@pytest.mark.parametrize("kind", ["expired", "another authority's", "a server's", "none"])
def test_bad_client_certificates_never_reach_the_service(kind):
    network = Sockets()
    service = Handlers(Welcome=answer)
    ours = network.authority
    match kind:
        case "expired":
            credentials = client_credentials(ours.client("w1", days=-1))
        case "another authority's":
            theirs = TestAuthority().client("w1")
            credentials = grpc.ssl_channel_credentials(ours.certificate_pem, theirs.key_pem, theirs.certificate_pem)
        case "a server's":
            credentials = client_credentials(ours.server())
        case _:
            credentials = grpc.ssl_channel_credentials(ours.certificate_pem)

    async def main():
        address = f"127.0.0.1:{network.port}"
        connection = GrpcConnection(address, ours.client("w1"))
        connection._channels[False] = grpc.aio.secure_channel(
            address, credentials, options=client_options(address, secure=True)
        )
        with pytest.raises(ConnectionLost):
            await connection.call("Welcome", b"")
        await connection.close()

    run(network, service, main)
    assert service.calls == []


def test_an_expired_certificate_is_hinted_at():
    network = Sockets()

    async def main():
        connection = GrpcConnection(f"127.0.0.1:{network.port}", network.authority.client("w1", days=-1))
        with pytest.raises(ConnectionLost, match=r"may have expired|Connection reset|no connection"):
            await connection.call("Welcome", b"")
        await connection.close()

    run(network, SERVICE, main)


def test_a_check_that_fails_tells_nothing_of_itself(caplog):
    network = Sockets()

    def broken(certificate_pem):
        raise RuntimeError("the member book is on fire")

    network.check_peer = broken

    async def main():
        connection = await network.connect("w1")
        with pytest.raises(Refused, match="internal error") as error:
            await connection.call("Welcome", b"")
        assert "fire" not in str(error.value)
        with pytest.raises(Refused, match="internal error"):
            await (await connection.open("Control")).receive()

    run(network, SERVICE, main)
    assert "the member book is on fire" in caplog.text


def test_the_server_certificate_rotates_while_it_runs():
    old, new = TestAuthority(), TestAuthority()
    current = [old.server()]

    def check_peer(certificate_pem):
        return Peer(id=WorkerId("w1"))

    async def main():
        server = GrpcServer(check_peer=check_peer, identity=lambda: current[0])
        address = f"127.0.0.1:{await server.start(SERVICE, 0, '127.0.0.1')}"
        first = GrpcConnection(address, old.client("w1"))
        channel = await first.open("Control")
        await channel.send(b"x")
        assert await channel.receive() == b"x"
        current[0] = new.server()
        second = GrpcConnection(address, new.client("w1"))
        assert (await second.call("Welcome", b"")).startswith(b"w1")
        await channel.send(b"y")
        assert await channel.receive() == b"y", "streams that are open stay"
        late = GrpcConnection(address, old.client("w1"))
        with pytest.raises(NotAdmitted):
            await late.call("Welcome", b"")
        await channel.close()
        for connection in (first, second, late):
            await connection.close()
        await server.stop()

    asyncio.run(main())


def test_a_port_in_use_is_one_sentence(capfd):
    network = Sockets()

    async def main():
        second = GrpcServer(check_peer=network.check_peer, identity=network.authority.server)
        with pytest.raises(AddressError, match=f"port {network.port} on 127.0.0.1 is in use"):
            await second.start(SERVICE, network.port, "127.0.0.1")
        enrol = EnrolServer(None, identity=network.authority.server)
        with pytest.raises(AddressError, match="is in use"):
            await enrol.start(network.port, "127.0.0.1")

    run(network, SERVICE, main)
    assert "add_port" not in capfd.readouterr().err


def test_a_port_is_free_again_after_stop():
    network = Sockets()

    async def main():
        first = GrpcServer(check_peer=network.check_peer, identity=network.authority.server)
        port = await first.start(SERVICE, 0, "127.0.0.1")
        connection = GrpcConnection(f"127.0.0.1:{port}", network.authority.client("w1"))
        channel = await connection.open("Control")
        await channel.send(b"x")
        assert await channel.receive() == b"x"
        await first.stop()
        with pytest.raises(ConnectionLost):
            await channel.receive()
        second = GrpcServer(check_peer=network.check_peer, identity=network.authority.server)
        assert await second.start(SERVICE, port, "127.0.0.1") == port
        again = await connection.open("Control")  # the same connection finds the new process
        await again.send(b"y")
        assert await again.receive() == b"y"
        await again.close()
        await connection.close()
        await second.stop()

    run(network, SERVICE, main)


def test_a_stream_that_is_over_is_let_go_at_once():
    """Without waiting for a collection of cycles: gRPC's server stops when its last call is let go."""
    network = Sockets()

    async def main():
        server = GrpcServer(check_peer=network.check_peer, identity=network.authority.server)
        port = await server.start(SERVICE, 0, "127.0.0.1")
        connection = GrpcConnection(f"127.0.0.1:{port}", network.authority.client("w1"))
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                channel = await connection.open("Control")
                await channel.send(b"x")
                assert await channel.receive() == b"x"
                await channel.close()
            await asyncio.sleep(0.2)
            assert [o for o in gc.get_objects() if type(o) is server_module._CoordinatorEnd] == []
            await connection.close()
            await asyncio.wait_for(server.stop(), 5)
        finally:
            gc.enable()

    run(network, SERVICE, main)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_ours(host):
    async def main():
        with pytest.raises(AddressError, match="not an address of this machine"):
            bind(grpc.aio.server(), host, 50999, None)

    asyncio.run(main())


def test_plain_text_is_for_loopback_only():
    async def main():
        server = GrpcServer(check_peer=None, identity=None, insecure=True)
        for host in ("[::]", "0.0.0.0", "192.0.2.1", "coordinator.example"):
            with pytest.raises(AddressError, match="plain text"):
                await server.start(SERVICE, 0, host)
            with pytest.raises(AddressError, match="plain text"):
                GrpcConnection(f"{host}:1", insecure_as=Peer(id=WorkerId("w1")))
        port = await server.start(SERVICE, 0, "127.0.0.1")
        connection = GrpcConnection(f"127.0.0.1:{port}", insecure_as=Peer(id=WorkerId("w1")))
        assert (await connection.call("Welcome", b"")).startswith(b"w1 worker 127.0.0.1:")
        await connection.close()
        await server.stop()

    asyncio.run(main())
    with pytest.raises(ValueError, match="insecure"):
        GrpcServer(check_peer=None, identity=None)
    with pytest.raises(ValueError, match="insecure_as"):
        GrpcConnection("127.0.0.1:1")


@pytest.mark.parametrize(
    ("address", "host", "loopback"),
    [
        ("127.0.0.1:80", "127.0.0.1", True),
        ("[::1]:80", "::1", True),
        ("localhost:1", "localhost", True),
        ("[2001:db8::1]:80", "2001:db8::1", False),
        ("localhost.example:80", "localhost.example", False),
        ("0.0.0.0:80", "0.0.0.0", False),
    ],
)
def test_which_addresses_are_loopback(address, host, loopback):
    assert host_of(address) == host and is_loopback(host) == loopback


def test_nobody_there_is_a_lost_connection():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def main():
        connection = GrpcConnection(f"127.0.0.1:{port}", TestAuthority().client("w1"))
        with pytest.raises(ConnectionLost, match=f"127.0.0.1:{port}: nothing listens there"):
            await connection.call("Welcome", b"")
        channel = await connection.open("Control")
        with pytest.raises(ConnectionLost):
            await channel.send(b"x")
        await channel.close()
        await connection.close()

    asyncio.run(main())


def test_something_else_on_the_port_is_a_lost_connection():
    async def main():
        async def talk(reader, writer):
            writer.write(b"220 mail.example ESMTP\r\n")
            await reader.read(100)
            writer.close()

        other = await asyncio.start_server(talk, "127.0.0.1", 0)
        port = other.sockets[0].getsockname()[1]
        connection = GrpcConnection(f"127.0.0.1:{port}", TestAuthority().client("w1"))
        with pytest.raises(ConnectionLost):
            await connection.call("Welcome", b"", timeout_s=5)
        await connection.close()
        other.close()

    asyncio.run(main())


def raw_channel(network):
    """A member's connection without what our client does for it."""
    return grpc.aio.secure_channel(
        f"127.0.0.1:{network.port}",
        client_credentials(network.authority.client("w1")),
        options=client_options("127.0.0.1:1", secure=True),
    )


def test_a_method_nobody_knows():
    network = Sockets()

    async def main():
        connection = await network.connect("w1")
        with pytest.raises(NotAdmitted, match="may not use Nonsense"):
            await connection.call("Nonsense", b"")
        raw = raw_channel(network)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await raw.unary_unary("/other.Service/Welcome")(b"")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await raw.close()

    run(network, SERVICE, main)


def test_a_client_that_ignores_the_bounds_is_stopped_by_the_server():
    network = Sockets()
    received = []

    async def take(peer, channel):
        while (message := await channel.receive()) is not None:
            received.append(len(message))

    async def main():
        raw = raw_channel(network)
        for method, size in (("Control", (64 << 20) + 1), ("PutObject", 3 << 20)):
            call = raw.stream_stream(f"/{SERVICE_NAME}/{method}")()
            await call.write(b"x" * 10)
            await call.write(bytes(size))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            told = from_status(error.value, "here")
            assert type(told) is Refused and str(size) in str(told)
        await raw.close()

    run(network, Handlers(Control=take, PutObject=take), main)
    assert received == [10, 10]


def test_garbage_on_the_port_does_no_harm():
    network = Sockets()

    async def main():
        connection = await network.connect("w1")
        channel = await connection.open("Control")
        for garbage in (
            b"",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(400),
            b"GET / HTTP/1.1\r\n\r\n",
        ):
            _, writer = await asyncio.open_connection("127.0.0.1", network.port)
            writer.write(garbage)
            await writer.drain()
            writer.close()
        await channel.send(b"x")
        assert await channel.receive() == b"x"
        await channel.close()

    run(network, SERVICE, main)


def test_the_enrol_port_answers_without_a_certificate_and_bounds_requests():
    authority = TestAuthority()
    seen = []

    async def handle(request, address):
        seen.append((len(request), address.rpartition(":")[0]))
        if request == b"old":
            raise VersionMismatch("you are too old")
        if request == b"bug":
            raise KeyError("the secret")
        return request[::-1]

    async def main():
        server = EnrolServer(handle, identity=authority.server)
        address = f"127.0.0.1:{await server.start(0, '127.0.0.1')}"
        assert await call_enrol(address, authority.certificate_pem, b"abc") == b"cba"
        with pytest.raises(VersionMismatch, match="you are too old"):
            await call_enrol(address, authority.certificate_pem, b"old")
        with pytest.raises(Refused, match="internal error in Enrol"):
            await call_enrol(address, authority.certificate_pem, b"bug")
        assert len(await call_enrol(address, authority.certificate_pem, bytes(65536))) == 65536
        with pytest.raises(Refused, match="too much"):
            await call_enrol(address, authority.certificate_pem, bytes(65537))
        with pytest.raises(NotAdmitted):
            await call_enrol(address, TestAuthority().certificate_pem, b"abc")
        connection = GrpcConnection(address, authority.client("w1"))
        with pytest.raises(Refused, match="does not know this call"):
            await connection.call("Welcome", b"")
        await connection.close()
        await server.stop()

    asyncio.run(main())
    assert seen == [(n, "127.0.0.1") for n in (3, 3, 3, 65536)]


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Connection reset by peer", ConnectionLost),
        (grpc.StatusCode.CANCELLED, "", ConnectionLost),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", ConnectionLost),
        (grpc.StatusCode.UNKNOWN, "Stream removed", ConnectionLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", ConnectionLost),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too large", Refused),
        (grpc.StatusCode.UNIMPLEMENTED, "", Refused),
        (grpc.StatusCode.UNAUTHENTICATED, "who?", NotAdmitted),
        (grpc.StatusCode.UNAVAILABLE, "SSL routines: CERTIFICATE_VERIFY_FAILED", NotAdmitted),
        (grpc.StatusCode.UNAVAILABLE, "ECDSA routines:OPENSSL_internal:BAD_SIGNATURE", NotAdmitted),
    ],
)
def test_what_a_status_without_our_mark_means(code, details, expected):
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
    assert type(from_status(error, "host:1")) is expected


def test_a_class_this_version_does_not_know_is_a_refusal():
    class FutureError(CorruptError):
        pass

    code, sentence, metadata = to_status(FutureError("no"))
    del FutureError
    metadata = grpc.aio.Metadata(("potluck-error", "NeverSeen"), ("x", "y"))
    told = from_status(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=sentence), "host:1")
    assert type(told) is Refused and str(told) == "no"
    metadata = grpc.aio.Metadata(("potluck-error", "Exception"))
    told = from_status(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=sentence), "host:1")
    assert type(told) is Refused and isinstance(told, PotluckError)


def test_strangers_cannot_take_every_connection(monkeypatch):
    """Each takes an open file of the process: without a bound nobody's update could be stored any more."""
    monkeypatch.setattr("potluck.transport.grpc.server.MAX_ENROL_CONNECTIONS", 4)
    monkeypatch.setattr("potluck.transport.grpc.server.spare_connections", lambda: 6)
    network = Sockets()

    async def num_open(port):
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        await asyncio.sleep(0.5)
        ended = [asyncio.ensure_future(reader.read()) for reader, _ in streams]
        done, waiting = await asyncio.wait(ended, timeout=0.5)
        for read in done:
            read.exception()
        for read in waiting:
            read.cancel()
        for _, writer in streams:
            writer.transport.abort()
        await asyncio.gather(*ended, return_exceptions=True)
        return len(waiting)

    async def main():
        enrol = EnrolServer(None, identity=network.authority.server)
        assert await num_open(await enrol.start(0, "127.0.0.1")) <= 4
        await enrol.stop()
        serve = GrpcServer(check_peer=network.check_peer, identity=network.authority.server)
        port = await serve.start(SERVICE, 0, "127.0.0.1")
        assert await num_open(port) <= 6
        connection = GrpcConnection(f"127.0.0.1:{port}", network.authority.client("w1"))
        await connection.call("Welcome", b"")  # they went, so there is room again
        await connection.close()
        await serve.stop()

    asyncio.run(main())


def test_a_connection_to_the_enrol_port_that_asks_nothing_is_ended(monkeypatch):
    monkeypatch.setattr("potluck.transport.grpc.server.enrol_idle_s", 1)
    authority = TestAuthority()

    async def main():
        server = EnrolServer(None, identity=authority.server)
        port = await server.start(0, "127.0.0.1")
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        await asyncio.wait_for(reader.read(), 8)  # until the server ends it
        writer.transport.abort()
        await server.stop()

    asyncio.run(main())


def test_a_first_message_does_not_wait_for_a_connection_that_was_closed():
    """The other side accepts the connection and says nothing, so the stream has not begun."""

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            connection = GrpcConnection(f"127.0.0.1:{silent.getsockname()[1]}", TestAuthority().client("w1"))
            channel = await connection.open("PutObject")
            sending = asyncio.ensure_future(channel.send(b"x"))
            await asyncio.sleep(0.2)
            await connection.close()
            with pytest.raises(ConnectionLost):
                await asyncio.wait_for(sending, 10)
            await channel.close()

    asyncio.run(main())
