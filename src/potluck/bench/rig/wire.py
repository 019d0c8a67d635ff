"""A link that can be made bad: passes TCP connections on, slowly, late, not at all, or until it breaks.

One wire stands for the line of one machine: all connections over it share the rate of each way. What ends a connection
travels like its bytes: on a way that is blocked neither arrives, as when a cable is pulled.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

whole_bytes, packet_bytes = 1 << 16, 1 << 11
"""What is passed on at once; less on a slow way, where connections take turns."""
max_queued = 256
"""Pieces on their way in one connection, beyond what the system's own buffers hold."""
look_s = 0.02
slack_s = 0.02

T = TypeVar("T")


class Way:
    """One direction of a wire. What is set here holds from the next piece on, and may be set from any thread.

    `cuts`: after how many bytes of this way, over all connections, all of them are reset, each once, in order, when
    nothing passed for `stall_s`.
    """

    def __init__(
        self, *, bytes_per_s: float = 0.0, delay_s: float = 0.0, cuts: Sequence[int] = (), stall_s: float = 0.0
    ) -> None:
        self.bytes_per_s = bytes_per_s  # 0 for as fast as it goes
        self.delay_s = delay_s
        self.cuts = list(cuts)
        self.stall_s = stall_s
        self.is_blocked = False  # nothing arrives and nobody is told
        self.num_bytes = 0  # that arrived
        self._free_at = 0.0

    async def carry(self, num_bytes: int) -> float:
        """Wait until the last of these bytes is on the line; when it arrives."""
        if self.bytes_per_s:
            now = time.monotonic()
            # A sleep that was a little too long has not left the line idle.
            self._free_at = max(now - slack_s, self._free_at) + num_bytes / self.bytes_per_s
            if self._free_at > now:
                await asyncio.sleep(self._free_at - now)
        return time.monotonic() + self.delay_s

    async def arrival(self, at: float) -> None:
        """Wait until what arrives at that time is there."""
        if (wait_s := at - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        while self.is_blocked:
            await asyncio.sleep(look_s)


class Wire:
    """Loopback ports that lead to others. `up` is the way to the target."""

    def __init__(self, *, up: Way | None = None, down: Way | None = None) -> None:
        self.up, self.down = up or Way(), down or Way()
        self.num_connections = 0
        self._servers: list[asyncio.Server] = []
        self._callers: set[asyncio.StreamWriter] = set()
        self._targets: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[None]] = set()

    async def open(self, target_port: int, *, host: str = "127.0.0.1", port: int = 0) -> int:
        """Lead one more port to that one of 127.0.0.1; its number (0 picks one)."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            passing = asyncio.create_task(self._pass_on(target_port, reader, writer))
            self._passing.add(passing)
            passing.add_done_callback(self._passing.discard)

        server = await asyncio.start_server(accept, host, port, limit=whole_bytes)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def block(self, is_blocked: bool = True) -> None:
        """Let nothing through, either way; or let it through again."""
        self.up.is_blocked = self.down.is_blocked = is_blocked

    def reset(self, *, callers: bool = True, targets: bool = True) -> None:
        """Reset every connection, at both of its ends or at one."""
        for writer in [*(self._callers if callers else ()), *(self._targets if targets else ())]:
            writer.transport.abort()

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        self.reset()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    async def _pass_on(self, target_port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._callers.add(writer)
        try:
            await self.up.arrival(0.0)
            with contextlib.suppress(OSError):
                there, back = await asyncio.open_connection("127.0.0.1", target_port, limit=whole_bytes)
                self._targets.add(back)
                try:
                    await asyncio.gather(self._copy(reader, back, self.up), self._copy(there, writer, self.down))
                finally:
                    self._targets.discard(back)
                    back.close()
        finally:
            self._callers.discard(writer)
            writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(max_queued)
        delivering = asyncio.create_task(self._deliver(queue, writer, way))
        try:
            data = b"."
            while data and not delivering.done():
                try:
                    data = await reader.read(packet_bytes if way.bytes_per_s else whole_bytes)
                except OSError:
                    data = b""
                await queue.put((await way.carry(len(data)), data))
            await delivering
        finally:
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)

    async def _deliver(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, way: Way) -> None:
        is_open = True
        while True:
            at, data = await queue.get()
            await way.arrival(at)
            if not data:
                break
            if not is_open:
                continue  # read on, so that the sender is not held up
            cuts_here = bool(way.cuts) and way.num_bytes + len(data) >= way.cuts[0]
            if cuts_here:
                data = data[: way.cuts.pop(0) - way.num_bytes]
            way.num_bytes += len(data)
            try:
                writer.write(data)
                await writer.drain()
            except OSError:
                is_open = False
            if cuts_here:
                await asyncio.sleep(way.stall_s)
                self.reset()
        writer.close()


class WireLoop:
    """An event loop in a thread of its own, for wires of a program that has none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wires", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def call(self, action: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(action)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def wire_loop() -> Iterator[WireLoop]:
    loop = WireLoop()
    try:
        yield loop
    finally:
        loop.close()
