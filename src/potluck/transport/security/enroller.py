"""Joining, on the coordinator: what the enrol port and the call Renew answer.

Version first, then the token, then the certificate. Of a certificate request only the public key is believed. Failures
from one address are slowed down, and after some refused unread until time has passed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

from cryptography import x509

from potluck.clock import Clock, Executor
from potluck.protocol import check_version, pb
from potluck.storage.members import CertificateRow, Members
from potluck.transport.connection import Peer
from potluck.transport.security.authority import CLIENT_LIFE_S, Authority
from potluck.transport.security.identity import Identity
from potluck.transport.security.keys import key_name, key_to_pem, new_key, requested_key
from potluck.transport.security.messages import parse_message
from potluck.types.errors import NotAdmitted
from potluck.types.ids import WorkerId

LOCAL_OPERATOR = "operator-here"


class Enroller:
    """Turns tokens into certificates. `on_replaced` hears of members whose earlier certificates ended."""

    def __init__(
        self,
        authority: Authority,
        members: Members,
        clock: Clock,
        executor: Executor,
        *,
        serve_port: int,
        on_replaced: Callable[[WorkerId], None] | None = None,
    ) -> None:
        self._authority, self._members = authority, members
        self._clock, self._executor = clock, executor
        self._serve_port = serve_port
        self._on_replaced = on_replaced
        self._brake = Brake(clock)

    async def handle(self, request: bytes, address: str) -> bytes:
        """Answer Enrol. VersionMismatch, NotAdmitted."""
        host = address_host(address)
        message = parse_message(pb.EnrolRequest, request)
        check_version(message.version, who=f"the machine at {host}")
        self._brake.check(host)
        try:
            reply, replaced = await self._executor.run(self._admit, message, self._clock.time())
        except NotAdmitted:
            await self._brake.failed(host)
            raise
        if replaced is not None and self._on_replaced is not None:
            self._on_replaced(replaced)
        return reply

    async def renew(self, peer: Peer, request: bytes) -> bytes:
        """Answer Renew: the next certificate of a member that its present one has proven. NotAdmitted."""
        message = parse_message(pb.RenewRequest, request)
        return await self._executor.run(self._renew, peer, message, self._clock.time())

    def _admit(self, message: pb.EnrolRequest, now: float) -> tuple[bytes, WorkerId | None]:
        key = requested_key(message.request_pem)
        row = CertificateRow(serial=x509.random_serial_number(), key=key_name(key), expires=now + CLIENT_LIFE_S)
        admitted = self._members.admit(message.token, wanted=message.name, certificate=row, now=now)
        certificate_pem = self._authority.issue_client(
            admitted.id, role=admitted.role, key=key, serial=row.serial, now=now
        )
        reply = pb.EnrolReply(
            certificate_pem=certificate_pem,
            authority_pem=self._authority.certificate_pem,
            worker_id=admitted.id,
            serve_port=self._serve_port,
            role=admitted.role,
        )
        return reply.SerializeToString(), admitted.id if admitted.replaced else None

    def _renew(self, peer: Peer, message: pb.RenewRequest, now: float) -> bytes:
        key = requested_key(message.request_pem)
        row = CertificateRow(serial=x509.random_serial_number(), key=key_name(key), expires=now + CLIENT_LIFE_S)
        role = self._members.renew(peer.id, certificate=row, now=now)
        certificate_pem = self._authority.issue_client(peer.id, role=role, key=key, serial=row.serial, now=now)
        return pb.RenewReply(certificate_pem=certificate_pem).SerializeToString()


def local_operator(authority: Authority, members: Members, folder: Path, *, serve_port: int, now: float) -> Identity:
    """The operator of the coordinator's own machine: a new identity in `folder`; the one before it ends. Blocks."""
    key = new_key()
    row = CertificateRow(
        serial=x509.random_serial_number(), key=key_name(key.public_key()), expires=now + CLIENT_LIFE_S
    )
    members.enlist(WorkerId(LOCAL_OPERATOR), role="operator", certificate=row, now=now)
    identity = Identity(
        host="127.0.0.1",
        serve_port=serve_port,
        key_pem=key_to_pem(key),
        certificate_pem=authority.issue_client(
            LOCAL_OPERATOR, role="operator", key=key.public_key(), serial=row.serial, now=now
        ),
        authority_pem=authority.certificate_pem,
    )
    identity.save(folder)
    return identity


class Brake:
    """Slows down whoever fails: each failure from an address takes one of `burst` tries, which come back with time."""

    def __init__(
        self,
        clock: Clock,
        *,
        burst: int = 10,
        refill_s: float = 6.0,
        pause_s: float = 0.5,
        max_addresses: int = 4096,
    ) -> None:
        self._clock = clock
        self._burst, self._refill_s, self._pause_s = burst, refill_s, pause_s
        self._max_addresses = max_addresses
        self._clear_at: dict[str, float] = {}  # when all tries are back

    def check(self, host: str) -> None:
        """NotAdmitted if `host` has no try left."""
        now = self._clock.now()
        wait_s = self._clear_at.get(host, now) - now - (self._burst - 1) * self._refill_s
        if wait_s > 0:
            raise NotAdmitted(
                f"too many refused attempts to join came from {host} (limit {self._burst}); try again in {wait_s:.0f} s"
            )

    async def failed(self, host: str) -> None:
        """Take a try away, then let the caller wait."""
        now = self._clock.now()
        self._clear_at[host] = max(self._clear_at.get(host, now), now) + self._refill_s
        if len(self._clear_at) > self._max_addresses:
            self._forget(now)
        await self._clock.sleep(self._pause_s)

    def _forget(self, now: float) -> None:
        """Drop addresses that have all tries back; if that is not enough, those that come clear first."""
        kept = sorted((at, host) for host, at in self._clear_at.items() if at > now)
        self._clear_at = {host: at for at, host in kept[-self._max_addresses // 2 :]}


def address_host(address: str) -> str:
    """The host of a peer's address, as gRPC writes it (`ipv4:1.2.3.4:567`, `ipv6:%5B::1%5D:567`) or plain."""
    text = unquote(address)
    for prefix in ("ipv4:", "ipv6:", "dns:"):
        text = text.removeprefix(prefix)
    if text.startswith("["):
        host = text[1:].partition("]")[0]
    else:
        host = text.rpartition(":")[0] if text.count(":") == 1 else text
    return host[:64] or "an unknown address"
