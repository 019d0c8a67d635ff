"""The way out through an HTTP CONNECT proxy, as the usual environment variables name it.

Same answer for the plain TLS handshake of the join and for gRPC channels: `channel_options` overrides what gRPC would
read by itself, which knows lower-case names only and would send loopback traffic to the proxy too.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from potluck.transport.security.link import format_address
from potluck.types.errors import AddressError, CoordinatorUnreachable

_PROXY_NAMES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXEMPT_NAMES = ("no_grpc_proxy", "no_proxy")
_MAX_REPLY_BYTES = 16384


@dataclass(frozen=True, kw_only=True)
class Proxy:
    host: str
    port: int
    user: str = field(default="", repr=False)  # user:password, percent-decoded
    url: str = field(default="", repr=False)


def proxy_for(host: str, environ: Mapping[str, str] | None = None) -> Proxy | None:
    """The proxy to use for `host`, None for a direct connection. AddressError if a variable cannot be understood."""
    environ = os.environ if environ is None else environ
    if _is_loopback(host) or any(_exempts(entry, host) for entry in _first(environ, _EXEMPT_NAMES)[1].split(",")):
        return None
    name, value = _first(environ, _PROXY_NAMES)
    if not value:
        return None
    wrong = AddressError(f"the environment variable {name} does not name a proxy like http://HOST:PORT; correct it")
    try:
        parts: SplitResult = urlsplit(value if "://" in value else f"http://{value}")
        proxy_host, port = parts.hostname, parts.port
    except ValueError:
        raise wrong from None
    if not proxy_host or parts.scheme != "http":
        raise wrong
    user = ":".join(unquote(part) for part in (parts.username or "", parts.password or ""))
    port = port or 80
    credentials = parts.netloc.rpartition("@")[0]
    url = f"http://{credentials + '@' if credentials else ''}{format_address(proxy_host, port)}"
    return Proxy(host=proxy_host, port=port, user=user if parts.username else "", url=url)


def channel_options(host: str, environ: Mapping[str, str] | None = None) -> list[tuple[str, str | int]]:
    """gRPC channel options that send the channel to `host` the way `proxy_for` says."""
    proxy = proxy_for(host, environ)
    return [("grpc.enable_http_proxy", 0)] if proxy is None else [("grpc.http_proxy", proxy.url)]


def open_stream(
    host: str, port: int, *, timeout_s: float = 10.0, environ: Mapping[str, str] | None = None
) -> socket.socket:
    """A TCP connection to `host:port`, through the proxy if there is one. Blocks.

    AddressError if a name does not resolve, CoordinatorUnreachable if nobody answers or the proxy refuses.
    """
    proxy = proxy_for(host, environ)
    target = format_address(host, port)
    if proxy is None:
        return _connect(host, port, timeout_s, f"the coordinator at {target}")
    where = format_address(proxy.host, proxy.port)
    stream = _connect(proxy.host, proxy.port, timeout_s, f"the HTTP proxy at {where}")
    try:
        head = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n"
        if proxy.user:
            head += f"Proxy-Authorization: Basic {base64.b64encode(proxy.user.encode()).decode()}\r\n"
        stream.sendall(f"{head}\r\n".encode())
        status = _read_reply(stream)
    except OSError as error:
        stream.close()
        raise CoordinatorUnreachable(f"the HTTP proxy at {where} broke off ({error}); check the proxy") from error
    words = status.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].startswith("2"):
        stream.close()
        raise CoordinatorUnreachable(
            f"the HTTP proxy at {where} did not open a way to {target} and answered {status[:100]!r}; "
            "allow CONNECT to that port there, or set no_proxy"
        )
    return stream


def _connect(host: str, port: int, timeout_s: float, what: str) -> socket.socket:
    try:
        return socket.create_connection((host, port), timeout=timeout_s)
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(f"the name {host} does not resolve to an address; check it, or the network") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise CoordinatorUnreachable(f"{what} does not answer ({reason}); check that it runs and is open") from error


def _read_reply(stream: socket.socket) -> str:
    """The status line of the proxy's answer. Byte by byte, so that nothing behind the head is swallowed."""
    reply = bytearray()
    while not reply.endswith(b"\r\n\r\n"):
        byte = stream.recv(1)
        if not byte or len(reply) >= _MAX_REPLY_BYTES:
            break
        reply += byte
    return bytes(reply).split(b"\r\n", 1)[0].decode("latin-1")


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    for name in names:
        for spelling in (name, name.upper()):
            if value := environ.get(spelling, "").strip():
                return spelling, value
    return "", ""


def _is_loopback(host: str) -> bool:
    if host.rstrip(".").lower() == "localhost":
        return True
    address = _ip(host)
    return address is not None and address.is_loopback


def _exempts(entry: str, host: str) -> bool:
    """Whether one entry of no_proxy (`*`, a domain, an address, a network) covers `host`."""
    entry, host = entry.strip().lower(), host.rstrip(".").lower()
    if not entry:
        return False
    if entry == "*":
        return True
    address = _ip(host)
    if address is not None:
        with contextlib.suppress(ValueError):
            return address in ipaddress.ip_network(entry.strip("[]"), strict=False)
    domain = entry.removeprefix("*").lstrip(".")
    return host == domain or host.endswith(f".{domain}")


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
