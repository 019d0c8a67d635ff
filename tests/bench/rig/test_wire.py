"""The wire that tests and benches make links bad with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from potluck.bench.rig.wire import Way, Wire

Use = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def over(wire: Wire, use: Use) -> list[bytes]:
    """Use one connection over the wire to a server that says back what it hears, and notes how each of them ended."""
    ends: list[bytes] = []

    async def main() -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while data := await reader.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
                ends.append(b"end")
            except OSError:
                ends.append(b"reset")
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = await wire.open(server.sockets[0].getsockname()[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.wait_for(use(reader, writer), 10)
        writer.close()
        await wire.close()
        server.close()
        await asyncio.sleep(0.05)

    asyncio.run(main())
    return ends


def test_rates_and_delays_are_those_that_were_asked_for() -> None:
    wire = Wire(up=Way(bytes_per_s=400_000, delay_s=0.05), down=Way(delay_s=0.1))

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun = time.monotonic()
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        trip_s = time.monotonic() - begun
        assert 0.15 <= trip_s < 0.45
        begun = time.monotonic()
        writer.write(bytes(200_000))
        await reader.readexactly(200_000)
        assert 0.6 <= time.monotonic() - begun < 2.0
        assert wire.up.num_bytes == wire.down.num_bytes == 200_001

    over(wire, use)


def test_a_cut_lets_exactly_so_many_bytes_through() -> None:
    wire = Wire(down=Way(cuts=[1000]))

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(5000))
        try:
            heard = await reader.read()
        except OSError:
            heard = b""
        assert len(heard) <= 1000 == wire.down.num_bytes

    over(wire, use)


def test_a_blocked_way_loses_nothing_and_hides_the_end() -> None:
    wire = Wire()

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire.block()
        writer.write(b"late")
        listening = asyncio.ensure_future(reader.read(4))
        done, _ = await asyncio.wait([listening], timeout=0.2)
        assert not done
        wire.block(False)
        assert await listening == b"late"
        wire.block()
        wire.reset(callers=False)  # the far end is gone and this one cannot know
        ending = asyncio.ensure_future(reader.read())
        done, _ = await asyncio.wait([ending], timeout=0.2)
        assert not done
        wire.block(False)
        assert await ending == b""

    ends = over(wire, use)
    assert len(ends) == 1
