"""What every channel and server is set to, and the credentials they are given.

Keepalive: both sides ping an idle connection each minute, well below the 5 to 10 minutes after which NATs and balancers
drop it, and the server permits it, or gRPC would end the connection with `too_many_pings`. A worker pings more often
beside its heartbeats, where no bulk is in the way: a line that is dead without a word is noticed so.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from potluck.transport.rules import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from potluck.transport.security.names import SERVER_NAME
from potluck.transport.security.proxy import channel_options

Options = list[tuple[str, str | int]]

keepalive_s = 60
keepalive_timeout_s = 60
"""Long, since on a slow link a ping waits behind what is already in the socket's buffer."""
control_keepalive_s, control_keepalive_timeout_s = 10, 20
handshake_timeout_s = 20
MAX_STREAMS = 64
"""Streams one connection may have open at once."""


@dataclass(frozen=True, kw_only=True)
class TlsIdentity:
    """One side of mutual TLS, as PEM: its key and certificate, and the authority it trusts the other side by."""

    key_pem: bytes = field(repr=False)
    certificate_pem: bytes
    authority_pem: bytes


def shared_options(limit_bytes: int, *, bulk: bool = True) -> Options:
    time_s, timeout_s = keepalive_s, keepalive_timeout_s
    if not bulk:
        time_s, timeout_s = control_keepalive_s, control_keepalive_timeout_s
    return [
        ("grpc.max_receive_message_length", limit_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", time_s * 1000),
        ("grpc.keepalive_timeout_ms", timeout_s * 1000),
        ("grpc.http2.ping_timeout_ms", timeout_s * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(limit_bytes: int = MAX_REQUEST_BYTES, *, max_connections: int, idle_s: int = 0) -> Options:
    """`max_connections` at once, those in handshake included; with `idle_s` one without a call is ended after that."""
    return [
        ("grpc.max_allowed_incoming_connections", max_connections),
        *([("grpc.max_connection_idle_ms", idle_s * 1000)] if idle_s else []),
        *shared_options(limit_bytes),
        ("grpc.so_reuseport", 0),  # else a second coordinator on the port would silently share its workers
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", handshake_timeout_s * 1000),
        ("grpc.http2.min_ping_interval_without_data_ms", control_keepalive_s * 1000 // 2),
    ]


def client_options(address: str, *, secure: bool, bulk: bool = True) -> Options:
    """For one channel of its own, `bulk` or small messages only. AddressError if a proxy variable is not understood."""
    options: Options = [
        *shared_options(MAX_MESSAGE_BYTES, bulk=bulk),
        ("grpc.use_local_subchannel_pool", 1),  # else channels to one address share one TCP connection
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", handshake_timeout_s * 1000),  # this long a connection may take to come up
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_retries", 0),
        *channel_options(host_of(address)),
    ]
    return [*options, ("grpc.ssl_target_name_override", SERVER_NAME)] if secure else options


def client_credentials(identity: TlsIdentity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(identity.authority_pem, identity.key_pem, identity.certificate_pem)


def server_credentials(identity: Callable[[], TlsIdentity], *, mutual: bool) -> grpc.ServerCredentials:
    """Credentials that follow `identity` while the server runs: each handshake asks it, in a thread of gRPC."""
    current = identity()

    def changed() -> Any:  # None: as before
        nonlocal current
        latest = identity()
        if latest == current:
            return None
        current = latest
        return _configuration(latest, mutual=mutual)

    first = _configuration(current, mutual=mutual)
    return grpc.dynamic_ssl_server_credentials(first, changed, require_client_authentication=mutual)


def _configuration(identity: TlsIdentity, *, mutual: bool) -> grpc.ServerCertificateConfiguration:
    pairs = [(identity.key_pem, identity.certificate_pem)]
    return grpc.ssl_server_certificate_configuration(pairs, identity.authority_pem if mutual else None)


def host_of(address: str) -> str:
    """The host in `host:port` or `[host]:port`."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
