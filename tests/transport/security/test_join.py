"""Joining over real sockets and real TLS: what is let in, and what is refused before anything is read."""

import asyncio
import os
import socket
import ssl
import stat

import grpc
import pytest

from potluck.protocol import pb
from potluck.transport.grpc.client import call_enrol
from potluck.transport.security.authority import Authority
from potluck.transport.security.enrol import enrol, enter, fetch_authority, obtain
from potluck.transport.security.enroller import local_operator
from potluck.transport.security.identity import Identity, apply_renewal, renewal_request
from potluck.transport.security.keys import (
    certificate_from_pem,
    certificate_key,
    key_from_pem,
    key_name,
    new_key,
)
from potluck.transport.security.link import JoinLink
from potluck.types.errors import (
    AddressError,
    ConnectionLost,
    CoordinatorUnreachable,
    NotAdmitted,
    PotluckError,
    VersionMismatch,
)

DAY_S = 86400.0


@pytest.fixture
def join(coordinator, tmp_path):
    """Join with a token, as a worker in its own folder."""

    async def join(token, *, name="anna", folder="anna", **link):
        return await enrol(
            coordinator.link(token, **link),
            name=name,
            folder=tmp_path / folder,
            executor=coordinator.executor,
        )

    return join


@pytest.fixture
def whoami(connect_identity):
    async def whoami(identity, method="Welcome"):
        connection = connect_identity(identity)
        try:
            return (await connection.call(method, b"")).decode()
        finally:
            await connection.close()

    return whoami


@pytest.fixture
def raw_enrol(coordinator):
    async def raw_enrol(request):
        address = f"127.0.0.1:{coordinator.enrol_port}"
        return await call_enrol(address, coordinator.authority.certificate_pem, request, timeout_s=10)

    return raw_enrol


def invite(coordinator, **options):
    return coordinator.members.invite(now=coordinator.clock.time(), **options)


def test_a_token_becomes_an_identity_that_the_serve_port_knows(coordinator, join, whoami, tmp_path):
    async def main():
        async with coordinator.serving():
            identity = await join(invite(coordinator))
            return identity, await whoami(identity), await whoami(Identity.load(tmp_path / "anna"))

    identity, said, said_after_load = asyncio.run(main())
    assert said == said_after_load == "anna worker"
    assert (identity.worker_id, identity.role) == ("anna", "worker")
    assert identity.address == f"127.0.0.1:{coordinator.serve_port}"
    assert identity.pin == coordinator.authority.pin
    if os.name == "posix":
        assert stat.S_IMODE((tmp_path / "anna" / "identity.json").stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "coordinator" / "authority.pem").stat().st_mode) == 0o600
    assert not (tmp_path / "anna" / "joining.pem").exists()


def test_a_wrong_pin_stops_before_the_token_is_sent(coordinator, join):
    other = Authority.new(coordinator.clock.time())

    async def main():
        async with coordinator.serving():
            with pytest.raises(NotAdmitted, match=r"nothing was sent") as caught:
                await join(invite(coordinator), pin=other.pin)
            return str(caught.value)

    sentence = asyncio.run(main())
    assert coordinator.requests == []
    assert coordinator.authority.pin in sentence and other.pin in sentence


def test_wrong_expired_withdrawn_and_used_up_tokens_are_told_apart(coordinator, join):
    now = coordinator.clock.time()

    async def main():
        async with coordinator.serving():
            with pytest.raises(NotAdmitted, match=r"not one of this coordinator"):
                await join("a" * 26)
            expired = coordinator.members.invite(now=now - 3 * 3600, hours=1)
            with pytest.raises(NotAdmitted, match=r"expired 2\.0 hours ago"):
                await join(expired)
            withdrawn = invite(coordinator)
            assert coordinator.members.withdraw(withdrawn)
            with pytest.raises(NotAdmitted, match=r"withdrawn"):
                await join(withdrawn)
            once = invite(coordinator)
            await join(once, folder="first")
            with pytest.raises(NotAdmitted, match=r"used up"):
                await join(once, folder="second")

    asyncio.run(main())
    assert [m.id for m in coordinator.members.members()] == ["anna"]


def test_another_major_version_is_refused_before_the_token_is_read(coordinator, raw_enrol, enrol_request):
    token = invite(coordinator)

    async def main():
        async with coordinator.serving():
            with pytest.raises(VersionMismatch, match=r"the machine at 127\.0\.0\.1 speaks protocol 2\.0"):
                await raw_enrol(enrol_request(token, major=2))
            with pytest.raises(VersionMismatch, match=r"protocol 9\.0"):
                await raw_enrol(enrol_request("no token", major=9))

    asyncio.run(main())
    assert [t.uses_left for t in coordinator.members.invitations(now=coordinator.clock.time())] == [1]


def test_only_the_key_of_a_request_is_believed(coordinator, raw_enrol, enrol_request):
    """A request whose subject claims to be an operator gives a worker; one that is no request gives nothing."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.x509.oid import NameOID

    key = new_key()
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, "root"),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "operator"),
        ]
    )
    builder = x509.CertificateSigningRequestBuilder(subject).add_extension(
        x509.BasicConstraints(ca=True, path_length=9), critical=True
    )
    boastful = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    large = builder.sign(rsa.generate_private_key(65537, 2048), hashes.SHA256())
    large = large.public_bytes(serialization.Encoding.PEM)
    token = invite(coordinator, uses=3)

    async def main():
        async with coordinator.serving():
            reply = await raw_enrol(enrol_request(token, request_pem=boastful))
            with pytest.raises(NotAdmitted, match=r"another kind of key"):
                await raw_enrol(enrol_request(token, request_pem=large))
            with pytest.raises(NotAdmitted, match=r"cannot be read"):
                await raw_enrol(enrol_request(token, request_pem=b"-----BEGIN nonsense"))
            with pytest.raises(NotAdmitted, match=r"5000 bytes and the limit"):
                await raw_enrol(enrol_request(token, request_pem=b"x" * 5000))
            with pytest.raises(NotAdmitted, match=r"EnrolRequest of 3 bytes cannot be read"):
                await raw_enrol(b"\xff\xff\xff")
            return pb.EnrolReply.FromString(reply)

    reply = asyncio.run(main())
    certificate = certificate_from_pem(reply.certificate_pem)
    assert certificate.subject.rfc4514_string() == "OU=worker,CN=anna"
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert key_name(certificate_key(certificate)) == key_name(key.public_key())
    assert coordinator.members.invitations(now=coordinator.clock.time())[0].uses_left == 2


def test_a_reply_lost_on_the_way_does_not_cost_the_membership(coordinator, join, tmp_path):
    coordinator.drop_replies = 1

    async def main():
        async with coordinator.serving():
            token = invite(coordinator)
            with pytest.raises(ConnectionLost):
                await join(token)
            assert (tmp_path / "anna" / "joining.pem").exists()
            return await join(token)

    assert asyncio.run(main()).worker_id == "anna"
    assert [m.id for m in coordinator.members.members()] == ["anna"]


def test_a_known_machine_keeps_its_identity_without_a_token(coordinator, join, tmp_path):
    async def main():
        async with coordinator.serving():
            first = await join(invite(coordinator))

            async def again(token, pin=""):
                return await obtain(
                    coordinator.link(token, pin=pin),
                    name="anna",
                    folder=tmp_path / "anna",
                    executor=coordinator.executor,
                    now=coordinator.clock.time(),
                )

            same = await again("b" * 26)
            coordinator.clock.ahead_s = 31 * DAY_S  # expired: the same key with a good line is the same member
            late = await again(invite(coordinator))
            return first, same, late

    first, same, late = asyncio.run(main())
    assert first == same
    assert late.worker_id == first.worker_id and late.subject.serial != first.subject.serial
    assert late.expires > first.expires + 30 * DAY_S
    assert len(coordinator.requests) == 2


def test_a_coordinator_that_moved_is_found_by_its_new_line(coordinator, join, whoami, tmp_path):
    async def main():
        async with coordinator.serving():
            before = await join(invite(coordinator))
        async with coordinator.serving():  # other ports
            after = await obtain(
                coordinator.link(invite(coordinator)),
                name="anna",
                folder=tmp_path / "anna",
                executor=coordinator.executor,
                now=coordinator.clock.time(),
            )
            return before, after, await whoami(after)

    before, after, said = asyncio.run(main())
    assert (before.worker_id, after.worker_id, said) == ("anna", "anna", "anna worker")
    assert after.serve_port == coordinator.serve_port != before.serve_port
    assert after.key_pem == before.key_pem


def test_a_coordinator_that_moved_is_found_by_its_address_alone(coordinator, join, tmp_path):
    async def main():
        async with coordinator.serving():
            identity = await join(invite(coordinator))
        options = {"name": "x", "executor": coordinator.executor, "now": coordinator.clock.time()}
        moved = await enter("new.example.org:9000", folder=tmp_path / "anna", **options)
        assert (moved.host, moved.enrol_port, moved.serve_port) == ("new.example.org", 9000, 9001)
        assert (moved.worker_id, moved.certificate_pem) == (identity.worker_id, identity.certificate_pem)
        assert Identity.load(tmp_path / "anna").address == "new.example.org:9001"
        with pytest.raises(NotAdmitted, match="has joined no coordinator yet"):
            await enter("new.example.org:9000", folder=tmp_path / "bert", **options)
        late = {**options, "now": identity.expires + 1}
        with pytest.raises(NotAdmitted, match="has expired; ask for a new join line"):
            await enter("new.example.org:9000", folder=tmp_path / "anna", **late)
        with pytest.raises(PotluckError, match="neither a join line"):
            await enter("no such thing", folder=tmp_path / "anna", **options)

    asyncio.run(main())


def test_a_revoked_member_is_refused_on_an_open_connection(coordinator, join, connect_identity):
    async def main():
        async with coordinator.serving():
            connection = connect_identity(await join(invite(coordinator)))
            assert await connection.call("Welcome", b"") == b"anna worker"
            coordinator.members.remove("anna")
            with pytest.raises(NotAdmitted, match=r"anna is revoked or unknown"):
                await connection.call("Welcome", b"")
            await connection.close()

    asyncio.run(main())


def test_a_certificate_that_expires_is_refused_on_an_open_connection(coordinator, join, connect_identity):
    async def main():
        async with coordinator.serving():
            connection = connect_identity(await join(invite(coordinator)))
            coordinator.clock.ahead_s = 29.9 * DAY_S
            assert await connection.call("Welcome", b"") == b"anna worker"
            coordinator.clock.ahead_s = 30.1 * DAY_S
            with pytest.raises(NotAdmitted, match=r"anna has expired"):
                await connection.call("Welcome", b"")
            await connection.close()

    asyncio.run(main())


def test_an_expired_certificate_does_not_get_through_the_handshake(coordinator, whoami):
    now = coordinator.clock.time()
    identity = local_identity(coordinator.authority, now=now - 40 * DAY_S)

    async def main():
        async with coordinator.serving():
            with pytest.raises(ConnectionLost):
                await whoami(Identity(host="127.0.0.1", serve_port=coordinator.serve_port, **identity))

    asyncio.run(main())


def test_a_certificate_of_another_authority_does_not_get_through_the_handshake(coordinator, whoami):
    now = coordinator.clock.time()
    theirs = local_identity(Authority.new(now), now=now)
    theirs["authority_pem"] = coordinator.authority.certificate_pem

    async def main():
        async with coordinator.serving():
            with pytest.raises(ConnectionLost):
                await whoami(Identity(host="127.0.0.1", serve_port=coordinator.serve_port, **theirs))

    asyncio.run(main())


def test_a_certificate_that_the_member_book_does_not_know_is_refused(coordinator, whoami):
    """Signed by the authority, but never written down: e.g. made with a stolen copy of an older state."""
    identity = local_identity(coordinator.authority, now=coordinator.clock.time())

    async def main():
        async with coordinator.serving():
            with pytest.raises(NotAdmitted, match=r"revoked or unknown"):
                await whoami(Identity(host="127.0.0.1", serve_port=coordinator.serve_port, **identity))

    asyncio.run(main())


def test_client_and_server_certificates_do_not_stand_in_for_each_other(coordinator, join, whoami):
    async def main():
        async with coordinator.serving():
            member = await join(invite(coordinator))
            server = coordinator.certificates.current()
            as_client = Identity(
                host="127.0.0.1",
                serve_port=coordinator.serve_port,
                key_pem=server.key_pem,
                certificate_pem=server.certificate_pem,
                authority_pem=server.authority_pem,
            )
            with pytest.raises(ConnectionLost):
                await whoami(as_client)
            impostor = grpc.aio.server()
            port = impostor.add_secure_port(
                "127.0.0.1:0", grpc.ssl_server_credentials([(member.key_pem, member.certificate_pem)])
            )
            await impostor.start()
            with pytest.raises(NotAdmitted, match=r"does not hold a valid certificate"):
                await whoami(
                    Identity(
                        host="127.0.0.1",
                        serve_port=port,
                        key_pem=member.key_pem,
                        certificate_pem=member.certificate_pem,
                        authority_pem=member.authority_pem,
                    )
                )
            await impostor.stop(None)

    asyncio.run(main())


def test_renewal_over_the_open_connection_gives_a_new_key_and_the_same_member(coordinator, join, connect_identity):
    async def main():
        async with coordinator.serving():
            old = await join(invite(coordinator))
            connection = connect_identity(old)
            renewal = renewal_request(old)
            coordinator.clock.ahead_s = 21 * DAY_S
            new = apply_renewal(old, renewal, await connection.call("Renew", renewal.request))
            await connection.close()
            return old, new

    old, new = asyncio.run(main())
    now = coordinator.clock.time()
    assert old.needs_renewal(now) and not old.needs_renewal(now - 2 * DAY_S)
    assert not new.needs_renewal(now) and not new.expired(now)
    assert (new.worker_id, new.role, new.address) == (old.worker_id, old.role, old.address)
    assert key_name(key_from_pem(new.key_pem).public_key()) != key_name(key_from_pem(old.key_pem).public_key())
    assert coordinator.members.holder(new.subject.serial) == ("anna", "worker")
    assert coordinator.members.holder(old.subject.serial) == ("anna", "worker")


def test_a_removed_member_cannot_renew(coordinator, join):
    async def main():
        async with coordinator.serving():
            old = await join(invite(coordinator))
            peer = coordinator.admission.check_peer(old.certificate_pem)
            coordinator.members.remove("anna")
            with pytest.raises(NotAdmitted, match=r"anna is no member any more"):
                await coordinator.enroller.renew(peer, renewal_request(old).request)

    asyncio.run(main())


def test_the_server_certificate_rotates_while_connections_go_on(coordinator, join, connect_identity):
    def served_serial(identity):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", coordinator.serve_port), timeout=5) as stream,
            context.wrap_socket(stream, server_hostname="coordinator.potluck") as tls,
        ):
            pem = ssl.DER_cert_to_PEM_cert(tls.getpeercert(binary_form=True) or b"")
            return certificate_from_pem(pem.encode()).serial_number

    async def main():
        async with coordinator.serving():
            identity = await join(invite(coordinator))
            open_before = connect_identity(identity)
            assert await open_before.call("Welcome", b"") == b"anna worker"
            before = [await asyncio.to_thread(served_serial, identity) for _ in range(2)]
            coordinator.certificates._life_s = 1000 * DAY_S
            coordinator.certificates._current = coordinator.authority.issue_server(
                now=coordinator.clock.time() - 61 * DAY_S, life_s=90 * DAY_S
            )  # as it stands two thirds through its life
            after = await asyncio.to_thread(served_serial, identity)
            fresh = connect_identity(identity)
            said = [await open_before.call("Welcome", b""), await fresh.call("Welcome", b"")]
            await open_before.close()
            await fresh.close()
            return before, after, said

    before, after, said = asyncio.run(main())
    assert before[0] == before[1] != after
    assert after == certificate_from_pem(coordinator.certificates.current().certificate_pem).serial_number
    assert said == [b"anna worker", b"anna worker"]


def test_a_named_invitation_replaces_the_key_of_its_member(coordinator, join, whoami):
    async def main():
        async with coordinator.serving():
            first = await join(invite(coordinator, name="lab-7"), name="ignored")
            second = await join(invite(coordinator, name="lab-7"), name="ignored", folder="new-disk")
            with pytest.raises(NotAdmitted, match=r"lab-7 is revoked"):
                await whoami(first)
            return first, second, await whoami(second)

    first, second, said = asyncio.run(main())
    assert first.worker_id == second.worker_id == "lab-7"
    assert said == "lab-7 worker"
    assert coordinator.replaced == ["lab-7"]


def test_an_operator_is_one_by_its_certificate_only(coordinator, join, whoami, tmp_path):
    async def main():
        async with coordinator.serving():
            far = await join(invite(coordinator, role="operator", name="boss"), folder="boss")
            here = [
                local_operator(
                    coordinator.authority,
                    coordinator.members,
                    tmp_path / "operator",
                    serve_port=coordinator.serve_port,
                    now=coordinator.clock.time(),
                )
                for _ in range(2)
            ]
            with pytest.raises(NotAdmitted):
                await whoami(here[0], "Status")  # a restart makes a new one and ends the one before
            with pytest.raises(NotAdmitted, match=r"boss has the role operator and may not use Welcome"):
                await whoami(far)
            with pytest.raises(NotAdmitted, match=r"anna has the role worker and may not use Admin"):
                await whoami(await join(invite(coordinator)), "Admin")
            return await whoami(far, "Status"), await whoami(Identity.load(tmp_path / "operator"), "Status")

    assert asyncio.run(main()) == ("boss operator", "operator-here operator")


def test_garbage_on_the_enrol_port_harms_nobody(coordinator, join):
    def throw_garbage():
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + os.urandom(2000), os.urandom(4000), b""):
            with socket.create_connection(("127.0.0.1", coordinator.enrol_port), timeout=5) as stream:
                stream.sendall(junk)

    async def main():
        async with coordinator.serving():
            await asyncio.to_thread(throw_garbage)
            return await join(invite(coordinator))

    assert asyncio.run(main()).worker_id == "anna"
    assert len(coordinator.requests) == 1


def test_joining_through_a_connect_proxy(coordinator, join, whoami, make_proxy, monkeypatch):
    """Both connections, by a name that only the proxy can resolve, with the proxy's user and password."""
    proxy = make_proxy()
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:s%40c@127.0.0.1:{proxy.port}")

    async def main():
        async with coordinator.serving():
            identity = await join(invite(coordinator), host="coordinator.invalid")
            return identity, await whoami(identity)

    identity, said = asyncio.run(main())
    assert said == "anna worker" and identity.host == "coordinator.invalid"
    enrol = f"CONNECT coordinator.invalid:{coordinator.enrol_port} HTTP/1.1"
    serve = f"CONNECT coordinator.invalid:{coordinator.serve_port} HTTP/1.1"
    assert [head.splitlines()[0] for head in proxy.heads] == [enrol, enrol, serve]
    assert all("Proxy-Authorization: Basic bWU6c0Bj" in head for head in proxy.heads)


def test_a_proxy_that_refuses_is_named(make_proxy, monkeypatch):
    proxy = make_proxy(status="403 Forbidden")
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
    with pytest.raises(CoordinatorUnreachable, match=rf"proxy at 127\.0\.0\.1:{proxy.port} did not open .*403"):
        fetch_authority("coordinator.invalid", 7000, "a" * 32)


def test_nobody_there_and_somebody_else_there():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(CoordinatorUnreachable, match=rf"127\.0\.0\.1:{port} does not answer"):
        fetch_authority("127.0.0.1", port, "a" * 32)
    with pytest.raises(AddressError, match=r"nowhere\.invalid does not resolve"):
        fetch_authority("nowhere.invalid", 7000, "a" * 32)


def test_a_port_that_speaks_something_else():
    async def main():
        def answer(reader, writer):
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(CoordinatorUnreachable, match=r"answers, but not as a coordinator"):
                await asyncio.to_thread(fetch_authority, "127.0.0.1", port, "a" * 32)

    asyncio.run(main())


def test_many_join_at_once_and_the_event_loop_stays_free(coordinator, tmp_path, stall_watchdog):
    async def main():
        async with coordinator.serving():
            token = coordinator.members.invite(now=coordinator.clock.time(), uses=8)

            async def one(number):
                return await enrol(
                    coordinator.link(token),
                    name="desk",
                    folder=tmp_path / str(number),
                    executor=coordinator.executor,
                )

            return await asyncio.gather(*(one(n) for n in range(10)), return_exceptions=True)

    results = asyncio.run(main())
    ids = sorted(r.worker_id for r in results if isinstance(r, Identity))
    assert ids == sorted(["desk", *(f"desk-{n}" for n in range(2, 9))])
    assert sum(isinstance(r, NotAdmitted) for r in results) == 2


def test_the_printed_line_is_all_that_is_needed(coordinator, tmp_path):
    async def main():
        async with coordinator.serving():
            line = coordinator.link(invite(coordinator)).format()
            return await enrol(
                JoinLink.parse(line),
                name="anna",
                folder=tmp_path / "anna",
                executor=coordinator.executor,
            )

    assert asyncio.run(main()).worker_id == "anna"


def local_identity(authority, *, now):
    from potluck.transport.security.keys import key_to_pem

    key = new_key()
    certificate = authority.issue_client("ghost", role="worker", key=key.public_key(), serial=77, now=now)
    return {
        "key_pem": key_to_pem(key),
        "certificate_pem": certificate,
        "authority_pem": authority.certificate_pem,
    }
