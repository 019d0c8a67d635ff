"""The worker's (or operator's) way to its coordinator over gRPC.

Two TCP connections: one for calls and Control, one for bulk streams. On a slow link the socket's buffer alone holds
many seconds of bulk data, and a heartbeat must not wait behind it.

Nothing here reconnects by plan: what breaks is ConnectionLost, and the holder decides when to try again.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeAlias
from weakref import WeakSet

import grpc

from potluck.transport.connection import Channel, Peer, Traffic
from potluck.transport.grpc.buffers import keep_buffers
from potluck.transport.grpc.channel import Outcome, Reader, Writer
from potluck.transport.grpc.options import (
    Options,
    TlsIdentity,
    client_credentials,
    client_options,
    host_of,
    is_loopback,
)
from potluck.transport.grpc.status import from_status
from potluck.transport.rules import BULK_STREAMS, check_size, close_wait_s
from potluck.transport.security.names import ENROL_METHOD, SERVICE_NAME
from potluck.types.errors import AddressError, ConnectionLost

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"

reason_wait_s = 1.0
_write_failed = "Internal error from Core"
"""What gRPC says of a call that ended while it wrote. What the coordinator said comes a moment before or after."""


class GrpcConnection:
    """Connects at its first use.

    `identity` is for mutual TLS; plain text takes `insecure_as` and a loopback address.
    """

    def __init__(self, address: str, identity: TlsIdentity | None = None, *, insecure_as: Peer | None = None) -> None:
        if (identity is None) == (insecure_as is None):
            raise ValueError("a connection takes either an identity or `insecure_as`")
        if insecure_as is not None and not is_loopback(host_of(address)):
            raise AddressError(f"plain text to {address} is refused; only loopback addresses may go without TLS")
        keep_buffers()
        self.address, self._identity = address, identity
        self._metadata = (("potluck-id", insecure_as.id), ("potluck-role", insecure_as.role)) if insecure_as else ()
        self._channels: dict[bool, grpc.aio.Channel] = {}  # by whether it is for bulk
        self._ends: WeakSet[_WorkerEnd] = WeakSet()
        self._traffic = Traffic()
        self._closed = False

    @property
    def traffic(self) -> Traffic:
        return self._traffic

    async def call(self, method: str, request: bytes, *, timeout_s: float = 30.0) -> bytes:
        check_size(method, len(request), up=True)
        call = self._channel(bulk=False).unary_unary(f"/{SERVICE_NAME}/{method}")(
            request, timeout=timeout_s, metadata=self._metadata
        )
        self._traffic.add_up(method, len(request))
        try:
            reply: bytes = await call
        except grpc.aio.AioRpcError as error:
            raise from_status(error, self.address) from None
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            raise ConnectionLost("the connection is closed") from None
        self._traffic.add_down(method, len(reply))
        return reply

    async def open(self, method: str) -> Channel:
        call = self._channel(bulk=method in BULK_STREAMS).stream_stream(f"/{SERVICE_NAME}/{method}")(
            metadata=self._metadata
        )
        end = _WorkerEnd(call, method, self.address, self._traffic)
        self._ends.add(end)
        return end

    async def close(self) -> None:
        """Every stream and call still open is lost."""
        self._closed = True
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close()
        for end in list(self._ends):
            end.gone.set()

    def _channel(self, *, bulk: bool) -> grpc.aio.Channel:
        if self._closed:
            raise ConnectionLost("the connection is closed")
        channel = self._channels.get(bulk)
        if channel is None:
            options = client_options(self.address, secure=self._identity is not None, bulk=bulk)
            if self._identity is None:
                channel = grpc.aio.insecure_channel(self.address, options=options)
            else:
                channel = grpc.aio.secure_channel(self.address, client_credentials(self._identity), options=options)
            self._channels[bulk] = channel
        return channel


class _WorkerEnd:
    """The worker's end of one stream."""

    def __init__(self, call: _Call, method: str, address: str, traffic: Traffic) -> None:
        self._call, self._method, self._address, self._traffic = call, method, address, traffic
        self._reader, self._writer = Reader(self._read), Writer(self._write)
        self._closed = False
        self._over = asyncio.Event()  # the coordinator's word on the call is here
        self._error: grpc.aio.AioRpcError | None = None  # and is this; None for good order
        self.gone = asyncio.Event()  # nothing more becomes of the call
        self._has_begun = False
        call.add_done_callback(self._note_status)
        call.add_done_callback(lambda _: self._writer.close())
        call.add_done_callback(lambda _: self.gone.set())

    async def send(self, message: bytes) -> None:
        check_size(self._method, len(message), up=True)
        if self._closed:
            raise ConnectionLost("the stream is closed")
        await self._writer.send(message)
        self._traffic.add_up(self._method, len(message))

    async def receive(self) -> bytes | None:
        if self._closed:
            return None
        message = await self._reader.receive()
        if message is not None:
            self._traffic.add_down(self._method, len(message))
        return message

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._method != "GetObject":  # there the worker has nothing more to say, so the end need not be orderly
            with contextlib.suppress(TimeoutError, ConnectionLost):
                async with asyncio.timeout(close_wait_s):
                    await self._end()
        self._call.cancel()
        self._reader.close()
        self._writer.close()

    async def _end(self) -> None:
        """Let out what was sent, say that it was all, and wait for the coordinator to end the stream too."""
        await self._writer.flush()
        with contextlib.suppress(Exception):  # a link that breaks at this moment raises a private class of gRPC's
            await self._call.done_writing()
        with contextlib.suppress(Exception):  # whatever it ended with: nobody listens any more
            while await self._reader.receive() is not None:
                pass

    async def _read(self) -> Outcome:
        try:
            message = await self._call.read()
            if isinstance(message, bytes):
                return message
            return await self._lost() if await self._status() else None
        except grpc.aio.AioRpcError:
            return await self._lost()
        except asyncio.CancelledError:
            return ConnectionLost("the stream is closed")

    async def _write(self, message: bytes) -> Outcome:
        try:
            if not self._has_begun:
                return await self._write_first(message)
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return await self._lost()
        except asyncio.CancelledError:
            return ConnectionLost("the stream is closed")
        return None

    async def _write_first(self, message: bytes) -> Outcome:
        """gRPC lets a first write wait for ever where the call ends before its headers were sent."""
        writing, ending = asyncio.ensure_future(self._call.write(message)), asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait({writing, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                await asyncio.wait({writing}, timeout=reason_wait_s)
            if not writing.done():
                if self._over.is_set():
                    return await self._lost()
                return ConnectionLost("the connection was closed before the stream had begun")
            await writing
            self._has_begun = True
            return None
        finally:
            writing.cancel()
            ending.cancel()

    async def _lost(self) -> Exception:
        """Why a call that has ended did so."""
        error = await self._status()
        return (
            ConnectionLost("the coordinator has ended the stream")
            if error is None
            else from_status(error, self._address)
        )

    async def _status(self) -> grpc.aio.AioRpcError | None:
        """What the coordinator said of a call that has ended; None for good order."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(reason_wait_s):
                await self._over.wait()
            return self._error
        return await _error_of(self._call)

    def _note_status(self, call: _Call) -> None:
        """Called each time gRPC sets the call's status: a failed write sets one too, before the real one or over it."""
        try:
            _error_of(call).send(None)  # the status is there, so this does not wait
        except StopIteration as done:
            error: grpc.aio.AioRpcError | None = done.value
            if not self._over.is_set() and (error is None or error.details() != _write_failed):
                self._error = error
                self._over.set()


async def _error_of(call: _Call) -> grpc.aio.AioRpcError | None:
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return None
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), await call.trailing_metadata(), details=await call.details())


async def call_enrol(address: str, authority_pem: bytes, request: bytes, *, timeout_s: float = 30.0) -> bytes:
    """The one call of the enrol port: TLS that trusts exactly `authority_pem`, no client certificate."""
    options: Options = client_options(address, secure=True)
    credentials = grpc.ssl_channel_credentials(authority_pem)
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        try:
            reply: bytes = await channel.unary_unary(f"/{SERVICE_NAME}/{ENROL_METHOD}")(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_status(error, address) from None
    return reply


def was_cancelled() -> bool:
    """Within `except CancelledError`: whether this task was cancelled, and not merely the call it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
