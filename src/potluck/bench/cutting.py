"""A link that breaks: passes TCP connections on and resets them after chosen numbers of bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

_piece_bytes = 1 << 16


class CuttingRelay:
    """Listens on loopback for one target port.

    `cuts`: after how many bytes of one `way` ("up": towards the target, or "down") all connections are reset, each
    once, in order, when nothing passed for `stall_s`. Counts what it passed on that way, over all connections.
    """

    def __init__(self, target_port: int, *, cuts: Sequence[int], way: str, stall_s: float = 0.0) -> None:
        self._target_port, self._cuts, self._way = target_port, list(cuts), way
        self._stall_s = stall_s
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Future[None]] = set()
        self.num_bytes = 0

    @property
    def num_cuts_left(self) -> int:
        return len(self._cuts)

    async def open(self) -> int:
        """The port it listens on."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_piece_bytes)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self._reset()
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*self._passing)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing = asyncio.ensure_future(self._pass_on(reader, writer))
        self._passing.add(passing)
        await passing
        self._passing.discard(passing)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target_port, limit=_piece_bytes)
        self._writers |= {writer, back}
        await asyncio.gather(
            self._copy(reader, back, counted=self._way == "up"), self._copy(there, writer, counted=self._way == "down")
        )

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_piece_bytes):
                if counted and self._cuts and self.num_bytes + len(data) >= self._cuts[0]:
                    data = data[: self._cuts.pop(0) - self.num_bytes]
                    writer.write(data)
                    await writer.drain()
                    self.num_bytes += len(data)
                    await asyncio.sleep(self._stall_s)
                    self._reset()
                    break
                writer.write(data)
                await writer.drain()
                self.num_bytes += len(data) if counted else 0
        writer.close()
        self._writers.discard(writer)

    def _reset(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()
