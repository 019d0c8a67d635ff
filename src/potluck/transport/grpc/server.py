"""The coordinator's ports over gRPC: `GrpcServer` (serve port, mutual TLS) and `EnrolServer` (enrol port, TLS).

Who calls is what the client certificate says. It is checked on every call, so a revoked member is out at its next
call; `drop` also ends the streams it has open. No stream holds a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc

from potluck.transport.connection import STREAMS, Peer, Service, Traffic
from potluck.transport.grpc.buffers import keep_buffers
from potluck.transport.grpc.channel import Outcome, Reader, Writer
from potluck.transport.grpc.descriptors import spare_connections
from potluck.transport.grpc.options import TlsIdentity, is_loopback, server_credentials, server_options
from potluck.transport.grpc.status import to_status
from potluck.transport.rules import answer_call, answer_stream, check_size, loss_grace_s, told
from potluck.transport.security.names import ENROL_METHOD, SERVICE_NAME
from potluck.types.errors import AddressError, ConnectionLost, NotAdmitted
from potluck.types.ids import WorkerId

MAX_ENROL_BYTES = 65536
MAX_ENROLS = 64
"""Enrol calls served at once; more are refused."""
MAX_ENROL_CONNECTIONS = 128
enrol_idle_s = 20
"""A connection to the enrol port that asks nothing is ended after this long."""
loss_notice_s = 0.01
"""A broken stream first looks like one that ended in good order; this much later gRPC has said which it was."""

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
_prefix = f"/{SERVICE_NAME}/"


class GrpcServer:
    """Serves one `Service` to those `check_peer` accepts.

    `check_peer` gets the client certificate as PEM and gives the peer or raises NotAdmitted. `identity` is asked at
    every handshake, so a renewed server certificate is used at once. `insecure` serves plain text, on loopback only,
    and believes what a caller says it is.
    """

    def __init__(
        self, *, check_peer: Callable[[bytes], Peer], identity: Callable[[], TlsIdentity] | None, insecure: bool = False
    ) -> None:
        if (identity is None) != insecure:
            raise ValueError("a server takes either an identity or `insecure`")
        self._check_peer, self._identity = check_peer, identity
        self._service: Service | None = None
        self._server: grpc.aio.Server | None = None
        self._live: dict[asyncio.Task[Exception | None], _CoordinatorEnd] = {}
        self._traffic: dict[WorkerId, Traffic] = {}

    async def start(self, service: Service, port: int, host: str = "[::]") -> int:
        """The port it listens on (0 picks one). AddressError if it cannot have it."""
        keep_buffers()
        self._service = service
        if self._identity is None and not is_loopback(host):
            raise AddressError(f"plain text on {host} is refused; listen on 127.0.0.1 or leave TLS on")
        handler = _Router(self._handler)
        server = grpc.aio.server(handlers=(handler,), options=server_options(max_connections=spare_connections()))
        credentials = None if self._identity is None else server_credentials(self._identity, mutual=True)
        bound = bind(server, host, port, credentials)
        await server.start()
        self._server = server
        return bound

    async def stop(self, grace_s: float = 0.5) -> None:
        """End every stream, then the server."""
        for task, end in list(self._live.items()):
            end.cut(task, ConnectionLost("the coordinator stops"))
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None

    def traffic(self, worker: WorkerId) -> Traffic:
        """What was exchanged with a worker over all its connections."""
        return self._traffic.setdefault(worker, Traffic())

    def drop(self, worker: WorkerId, error: Exception | None = None) -> None:
        """End the worker's streams now, as NotAdmitted unless `error` says otherwise."""
        error = error or NotAdmitted(f"{worker} is not a member of this run any more")
        for task, end in list(self._live.items()):
            if end.peer.id == worker:
                end.cut(task, error)

    def _handler(self, method: str) -> Any:
        if method in STREAMS:

            async def stream(_: Any, context: _Context) -> None:
                await self._stream(method, context)

            return grpc.stream_stream_rpc_method_handler(stream)

        async def call(request: bytes, context: _Context) -> bytes:
            return await self._call(method, request, context)

        return grpc.unary_unary_rpc_method_handler(call)

    async def _call(self, method: str, request: bytes, context: _Context) -> bytes:
        assert self._service is not None
        peer = await self._peer(method, context)
        traffic = self.traffic(peer.id)
        traffic.add_up(method, len(request))
        # A task of its own: a caller that goes away must not stop what it asked for half-way.
        answer = asyncio.create_task(answer_call(self._service, peer, method, request))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            reply = await asyncio.shield(answer)
        except Exception as error:
            await context.abort(*to_status(error))
        traffic.add_down(method, len(reply))
        return reply

    async def _stream(self, method: str, context: _Context) -> None:
        assert self._service is not None
        peer = await self._peer(method, context)
        end = _CoordinatorEnd(context, peer, method, self.traffic(peer.id))
        serving = asyncio.create_task(answer_stream(self._service, peer, method, end))
        self._live[serving] = end
        try:
            await asyncio.wait((serving,))
        except asyncio.CancelledError:  # the worker is gone: the service finds out at its next send or receive
            end.lose()
            await asyncio.wait((serving,), timeout=loss_grace_s)
            raise
        finally:
            del self._live[serving]
            serving.cancel()
            end.finish()
        error = end.error or (ConnectionLost("the stream was ended") if serving.cancelled() else serving.result())
        if error is not None:
            await context.abort(*to_status(error))

    async def _peer(self, method: str, context: _Context) -> Peer:
        """Who calls; ends the call if that is nobody we know."""
        address = address_of(context)
        try:
            if self._identity is None:
                given = dict(context.invocation_metadata() or ())
                name, role = str(given.get("potluck-id", ""))[:200], str(given.get("potluck-role", "worker"))[:40]
                return Peer(id=WorkerId(name), role=role, address=address)
            certificates = list((context.auth_context() or {}).get("x509_pem_cert", ()))
            if not certificates:
                raise NotAdmitted("no client certificate came with the connection; join the run first")
            return replace(self._check_peer(bytes(certificates[0])), address=address)
        except Exception as error:
            await context.abort(*to_status(told(error, method, address)))
            raise


class _CoordinatorEnd:
    """The coordinator's end of one stream."""

    def __init__(self, context: _Context, peer: Peer, method: str, traffic: Traffic) -> None:
        self._context, self.peer, self._method, self._traffic = context, peer, method, traffic
        self._reader, self._writer = Reader(self._read), Writer(self._write)
        self._lost = asyncio.Event()
        self.error: Exception | None = None

    async def send(self, message: bytes) -> None:
        check_size(self._method, len(message), up=False)
        await self._writer.send(message)
        self._traffic.add_down(self._method, len(message))

    async def receive(self) -> bytes | None:
        message = await self._reader.receive()
        if message is not None:
            check_size(self._method, len(message), up=True)
            self._traffic.add_up(self._method, len(message))
        return message

    async def close(self) -> None:
        pass  # the coordinator ends a stream by returning from `Service.open`

    def finish(self) -> None:
        """The service is through with it. The call is let go at once, not when cycles are collected: a server stops
        when its last call has gone."""
        self._reader.close()
        self._writer.close()
        self._reader, self._writer = Reader(_over), Writer(_too_late)

    def lose(self) -> None:
        self._lost.set()

    def cut(self, serving: asyncio.Task[Exception | None], error: Exception) -> None:
        """End the stream from this side, with a reason."""
        self.error = error
        serving.cancel()

    async def _read(self) -> Outcome:
        try:
            message: Any = await self._context.read()
        except (Exception, asyncio.CancelledError):
            return self._gone()
        if isinstance(message, bytes):
            return message
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(loss_notice_s):
                await self._lost.wait()
            return self._gone()
        return None

    async def _write(self, message: bytes) -> Outcome:
        if self._lost.is_set():
            return self._gone()
        try:
            await self._context.write(message)
        except (Exception, asyncio.CancelledError):
            return self._gone()
        return None

    def _gone(self) -> ConnectionLost:
        return ConnectionLost(f"{self.peer.id} is gone")


async def _over() -> Outcome:
    return None


async def _too_late(message: bytes) -> Outcome:
    return ConnectionLost("the stream is over")


class EnrolServer:
    """The port where a token becomes a certificate. Authenticates itself, asks nothing of the caller.

    `handle(request, address)` answers; requests over 64 KiB never reach it.
    """

    def __init__(
        self, handle: Callable[[bytes, str], Awaitable[bytes]], *, identity: Callable[[], TlsIdentity]
    ) -> None:
        self._handle, self._identity = handle, identity
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int, host: str = "[::]") -> int:
        """The port it listens on (0 picks one). AddressError if it cannot have it."""
        handler = _Router(self._handler, {ENROL_METHOD})
        options = server_options(MAX_ENROL_BYTES, max_connections=MAX_ENROL_CONNECTIONS, idle_s=enrol_idle_s)
        server = grpc.aio.server(handlers=(handler,), options=options, maximum_concurrent_rpcs=MAX_ENROLS)
        bound = bind(server, host, port, server_credentials(self._identity, mutual=False))
        await server.start()
        self._server = server
        return bound

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def _handler(self, method: str) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._enrol)

    async def _enrol(self, request: bytes, context: _Context) -> bytes:
        address = address_of(context)
        try:
            return await self._handle(request, address)
        except Exception as error:
            await context.abort(*to_status(told(error, ENROL_METHOD, address)))
            raise


class _Router(grpc.GenericRpcHandler):
    """Raw bytes in and out, by the last part of the path."""

    def __init__(self, make: Callable[[str], Any], methods: frozenset[str] | set[str] | None = None) -> None:
        self._make, self._methods = make, methods

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path = str(handler_call_details.method)
        method = path.removeprefix(_prefix)
        if method == path or (self._methods is not None and method not in self._methods):
            return None  # gRPC answers UNIMPLEMENTED
        return self._make(method)


def bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """Give the server its port; AddressError in one sentence if that cannot be."""
    address = f"{host}:{port}" if host.startswith("[") or ":" not in host else f"[{host}]:{port}"
    if port:
        check_port(host.strip("[]"), port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise AddressError(f"{address} cannot be listened on; choose another address or port") from error


def check_port(host: str, port: int) -> None:
    """Try the port with a plain socket first: gRPC's own failure has no reason in it and prints to the terminal."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise AddressError(f"{host} is not an address of this machine; listen on another one") from error
    try:
        with socket.socket(family, kind, protocol) as probe:
            if hasattr(socket, "SO_REUSEADDR") and not hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does; not on Windows
            probe.bind(where)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, getattr(errno, "WSAEADDRINUSE", -1)):
            raise AddressError(
                f"port {port} on {host} is in use by another program; choose another port or end that program"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise AddressError(f"port {port} needs rights this user has not; choose a port above 1023") from error
        if family == socket.AF_INET6 and host == "::":
            return  # no IPv6 here: gRPC falls back to IPv4 by itself
        raise AddressError(f"{host} is not an address of this machine ({error}); listen on another one") from error


def address_of(context: _Context) -> str:
    """`host:port` of the caller."""
    return unquote(str(context.peer())).partition(":")[2]
