"""Joining, on the joining machine: from a join line to an identity.

1. Fetch the certificate of the enrol port with a TLS handshake that believes nothing yet.
2. Compare its key with the pin in the join line. If they differ, stop: the token has not left this machine.
3. Over a second connection that believes exactly this certificate, send the token and a certificate request.
4. Keep the certificate that comes back, and the authority's, as the identity.

The key is made and kept before it is used: if the answer is lost on the way, the next try brings the same key, and the
coordinator gives the same membership again without using the token up twice.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from cryptography import x509

from potluck.clock import Executor
from potluck.protocol import pb, version
from potluck.transport.grpc.client import call_enrol
from potluck.transport.security.identity import Identity
from potluck.transport.security.keys import (
    UNREADABLE,
    certificate_key,
    certificate_to_pem,
    key_from_pem,
    key_name,
    key_to_pem,
    new_key,
    new_request,
)
from potluck.transport.security.link import SCHEME, JoinLink, format_address, parse_address, read_link
from potluck.transport.security.messages import parse_message
from potluck.transport.security.names import SERVER_NAME
from potluck.transport.security.private_files import read_private, write_private
from potluck.transport.security.proxy import open_stream
from potluck.types.errors import CoordinatorUnreachable, CorruptError, NotAdmitted, PotluckError

KEY_FILE = "joining.pem"


Asking = Callable[[str], Awaitable[None]]
"""Hears the name that is about to be asked for, before it leaves this machine."""


async def _unheard(_: str) -> None:
    pass


async def obtain(
    link: JoinLink, *, name: str, folder: Path, executor: Executor, now: float, asking: Asking = _unheard
) -> Identity:
    """The identity in `folder` if it is one of this link's coordinator and not expired; else join and keep it there.

    A line with another port means that the coordinator has moved: joining again with the key kept here gives the same
    membership and its new serve port.
    """
    known = await executor.run(_known, link, folder)
    if known is not None and not known.expired(now) and known.enrol_port == link.port:
        return known.at(link.host)
    return await enrol(link, name=name, folder=folder, executor=executor, asking=asking)


async def enter(
    text: str, *, name: str, folder: Path, executor: Executor, now: float, asking: Asking = _unheard
) -> Identity:
    """`obtain` by a join line, or a file with one; or by HOST:PORT, where a coordinator that was joined is now.

    PotluckError if `text` is none of these; NotAdmitted where a line is needed.
    """
    if SCHEME in text.lower() or text.startswith("@") or not await executor.run(_is_address, text):
        return await obtain(read_link(text), name=name, folder=folder, executor=executor, now=now, asking=asking)
    host, port = parse_address(text)
    if not await executor.run(Identity.exists, folder):
        raise NotAdmitted(f"{folder} has joined no coordinator yet, so the address {text} needs a join line with it")
    known = await executor.run(Identity.load, folder)
    if known.expired(now):
        raise NotAdmitted(f"the certificate in {folder} has expired; ask for a new join line")
    moved = replace(known, host=host, enrol_port=port, serve_port=port + 1)
    await executor.run(moved.save, folder)
    return moved


async def enrol(
    link: JoinLink, *, name: str, folder: Path, executor: Executor, timeout_s: float = 30.0, asking: Asking = _unheard
) -> Identity:
    """Join with `link` as a new member that would like to be called `name`; the identity is saved in `folder`.

    AddressError, CoordinatorUnreachable: nobody there. NotAdmitted: another key than the pin, or a token that is not
    accepted. VersionMismatch. ConnectionLost: try again.
    """
    try:
        authority_pem = await asyncio.wait_for(
            executor.run(fetch_authority, link.host, link.port, link.pin, timeout_s / 2), timeout_s
        )
    except TimeoutError as error:
        raise CoordinatorUnreachable(
            f"the coordinator at {link.address} did not finish a handshake in {timeout_s:.0f} s; try again later"
        ) from error
    key_pem, request_pem = await executor.run(_joining_key, link, folder)
    request = pb.EnrolRequest(version=version(), token=link.token, request_pem=request_pem, name=name[:200])
    await asking(name[:200])
    reply = await call_enrol(link.address, authority_pem, request.SerializeToString(), timeout_s=timeout_s)
    return await executor.run(_accept, link, folder, key_pem, authority_pem, reply)


def fetch_authority(host: str, port: int, pin: str, timeout_s: float = 15.0) -> bytes:
    """The PEM certificate of the authority at `host:port`, its key equal to `pin`. Blocks; nothing secret is sent."""
    address = format_address(host, port)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the pin below is the check; the handshake proves that they hold the key
    context.set_alpn_protocols(["h2"])
    stream = open_stream(host, port, timeout_s=timeout_s)
    try:
        with stream, context.wrap_socket(stream, server_hostname=SERVER_NAME) as tls:
            data = tls.getpeercert(binary_form=True)
    except OSError as error:  # ssl.SSLError is one
        raise CoordinatorUnreachable(
            f"the machine at {address} answers, but not as a coordinator ({_reason(error)}); check host and port"
        ) from error
    try:
        certificate = x509.load_der_x509_certificate(data or b"")
        found = key_name(certificate_key(certificate))
    except (*UNREADABLE, CorruptError):
        certificate, found = None, "one of another kind"
    if certificate is None or found != pin:
        raise NotAdmitted(
            f"the machine at {address} has the key {found} and the join line names {pin}; the line is for another "
            "coordinator, or something on the way intercepts the connection: ask for a new line (nothing was sent)"
        )
    return certificate_to_pem(certificate)


def _is_address(text: str) -> bool:
    try:
        parse_address(text)
    except PotluckError:
        return False
    return not Path(text).is_file()


def _known(link: JoinLink, folder: Path) -> Identity | None:
    if not Identity.exists(folder):
        return None
    identity = Identity.load(folder)
    return identity if identity.pin == link.pin else None


def _joining_key(link: JoinLink, folder: Path) -> tuple[bytes, bytes]:
    """The key to join with (this member's own, or one kept from an earlier try, or new) and a request for it."""
    known = _known(link, folder)
    path = folder / KEY_FILE
    if known is not None:
        key = key_from_pem(known.key_pem)
    elif path.exists():
        key = key_from_pem(read_private(path, what="the key of an earlier try to join"))
    else:
        key = new_key()
        write_private(path, key_to_pem(key))
    return key_to_pem(key), new_request(key)


def _accept(link: JoinLink, folder: Path, key_pem: bytes, authority_pem: bytes, data: bytes) -> Identity:
    reply = parse_message(pb.EnrolReply, data)
    identity = Identity(
        host=link.host,
        serve_port=reply.serve_port,
        enrol_port=link.port,
        key_pem=key_pem,
        certificate_pem=reply.certificate_pem,
        authority_pem=authority_pem,
    )
    try:
        identity.check()
    except CorruptError as error:
        raise CorruptError(f"the coordinator at {link.address} sent an unusable certificate: {error}") from error
    identity.save(folder)
    (folder / KEY_FILE).unlink(missing_ok=True)
    return identity


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "TLS failed").lower().replace("_", " ")
    return error.strerror or str(error)
