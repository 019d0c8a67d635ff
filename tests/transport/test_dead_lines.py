"""A line that is dead without a word: nothing arrives and no end is told, as behind a pulled cable."""

from __future__ import annotations

import asyncio

import pytest
from transport.networks import Handlers, Sockets, run

from potluck.transport.grpc import options
from potluck.types.errors import ConnectionLost


@pytest.mark.parametrize("which", ["both", "up", "down"])
def test_the_worker_notices_by_itself(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    monkeypatch.setattr(options, "control_keepalive_s", 1)
    monkeypatch.setattr(options, "control_keepalive_timeout_s", 1)
    network = Sockets()

    async def listen(peer, channel):
        await channel.send(b"here")
        await channel.receive()

    async def main():
        connection = await network.connect("w1")
        channel = await connection.open("Control")
        assert await channel.receive() == b"here"
        wire, _ = network.wires["w1"]
        for way in ("up", "down"):
            getattr(wire, way).is_blocked = which in (way, "both")
        with pytest.raises(ConnectionLost):
            await asyncio.wait_for(channel.receive(), 20)
        await channel.close()
        wire.block(False)
        again = await (await network.connect("w1")).open("Control")
        assert await again.receive() == b"here"
        await again.close()

    run(network, Handlers(Control=listen), main)
