"""The floor of a transfer: raw bytes on grpc.aio streams with mutual TLS, out of memory and into nothing.

No checksums, no digest, no resuming: what the wire allows. Only the certificates are Potluck's. A second floor reads
the bytes from a file and writes them to one, and does nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from potluck.protocol.frames import CHUNK_BYTES
from potluck.transport.grpc.options import TlsIdentity
from potluck.transport.security.names import SERVER_NAME

_unbounded = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _pieces(num_bytes: int, source: Path | None) -> Iterator[bytes]:
    if source is None:
        piece = bytes(CHUNK_BYTES)
        yield from (piece for _ in range(num_bytes // CHUNK_BYTES))
        return
    with source.open("rb", buffering=0) as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece


async def _take(pieces: AsyncIterator[bytes], target: Path | None) -> int:
    total = 0
    with target.open("wb", buffering=0) if target else nullcontext() as file:
        async for piece in pieces:
            total += file.write(piece) if file else len(piece)
    return total


async def serve_bare(identity: TlsIdentity, folder: Path) -> tuple[grpc.aio.Server, int]:
    """A running server and its port on loopback. A request names the size, and the file in `folder` or none."""

    async def down(request: bytes, context: Any) -> AsyncIterator[bytes]:
        size, _, name = request.decode().partition(" ")
        for piece in _pieces(int(size), folder / name if name else None):
            yield piece

    async def up(pieces: AsyncIterator[bytes], context: Any) -> bytes:
        name = (await anext(pieces)).decode()
        return str(await _take(pieces, folder / name if name else None)).encode()

    server = grpc.aio.server(options=_unbounded)
    methods = {
        "Down": grpc.unary_stream_rpc_method_handler(down),
        "Up": grpc.stream_unary_rpc_method_handler(up),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bare", methods)])
    credentials = grpc.ssl_server_credentials(
        [(identity.key_pem, identity.certificate_pem)], identity.authority_pem, require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    return server, port


class BareClient:
    """One channel to `serve_bare`."""

    def __init__(self, port: int, identity: TlsIdentity) -> None:
        credentials = grpc.ssl_channel_credentials(identity.authority_pem, identity.key_pem, identity.certificate_pem)
        options = [*_unbounded, ("grpc.ssl_target_name_override", SERVER_NAME)]
        self._channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)

    async def down(self, num_bytes: int, *, source: str = "", target: Path | None = None) -> None:
        """The server's file `source` to the file `target`, or bytes out of memory into nothing."""
        pieces = self._channel.unary_stream("/bare/Down")(f"{num_bytes} {source}".encode())
        assert await _take(aiter(pieces), target) == num_bytes

    async def up(self, num_bytes: int, *, source: Path | None = None, target: str = "") -> None:
        call = self._channel.stream_unary("/bare/Up")()
        await call.write(target.encode())
        for piece in _pieces(num_bytes, source):
            await call.write(piece)
        await call.done_writing()
        assert int(await call) == num_bytes

    async def close(self) -> None:
        await self._channel.close()
