"""One coordinator and its workers over either transport, with the faults the contract tests need."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from cryptography import x509
from transport.tls import TestAuthority

from potluck.bench.rig.wire import Wire
from potluck.clock import SystemClock
from potluck.transport.connection import Channel, Connection, Peer, Traffic
from potluck.transport.grpc.client import GrpcConnection
from potluck.transport.grpc.server import GrpcServer
from potluck.transport.memory import MemoryNetwork
from potluck.transport.security.keys import subject_of
from potluck.types.errors import NotAdmitted
from potluck.types.ids import WorkerId

Handler = Callable[[Peer, Channel], Awaitable[None]]


class Handlers:
    """A `Service` made of one function per method."""

    def __init__(self, **methods: Any) -> None:
        self.methods = methods
        self.calls: list[tuple[str, str]] = []

    async def call(self, peer: Peer, method: str, request: bytes) -> bytes:
        self.calls.append((peer.id, method))
        return await self.methods[method](peer, request)

    async def open(self, peer: Peer, method: str, channel: Channel) -> None:
        self.calls.append((peer.id, method))
        await self.methods[method](peer, channel)


class Memory:
    def __init__(self) -> None:
        self.network = MemoryNetwork(SystemClock())

    @contextlib.asynccontextmanager
    async def serving(self, service: Handlers) -> AsyncIterator[None]:
        self.service = service
        try:
            yield
        finally:
            await self.network.close()

    async def connect(self, id: str, role: str = "worker") -> Connection:
        return await self.network.connect(self.service, Peer(id=WorkerId(id), role=role))

    async def cut(self, id: str) -> None:
        self.network.cut(WorkerId(id))

    def revoke(self, id: str) -> None:
        self.network.refuse(WorkerId(id))

    def traffic(self, id: str) -> Traffic:
        return self.network.traffic(WorkerId(id))


class Sockets:
    """gRPC with mutual TLS on loopback. Each worker's bytes pass a wire, whose sockets `cut` resets."""

    def __init__(self) -> None:
        self.authority = TestAuthority()
        self.revoked: set[str] = set()
        self.wires: dict[str, tuple[Wire, int]] = {}
        self.connections: list[GrpcConnection] = []

    def check_peer(self, certificate_pem: bytes) -> Peer:
        subject = subject_of(x509.load_pem_x509_certificate(certificate_pem))
        if subject.id in self.revoked:
            raise NotAdmitted(f"{subject.id} is not a member of this run any more")
        return Peer(id=WorkerId(subject.id), role=subject.role, serial=subject.serial)

    @contextlib.asynccontextmanager
    async def serving(self, service: Handlers) -> AsyncIterator[None]:
        certificate = self.authority.server()
        self.server = GrpcServer(check_peer=self.check_peer, identity=lambda: certificate)
        self.port = await self.server.start(service, 0, "127.0.0.1")
        try:
            yield
        finally:
            for connection in self.connections:
                await connection.close()
            for wire, _ in self.wires.values():
                await wire.close()
            await self.server.stop()

    async def connect(self, id: str, role: str = "worker") -> Connection:
        if id not in self.wires:
            wire = Wire()
            self.wires[id] = wire, await wire.open(self.port)
        connection = GrpcConnection(f"127.0.0.1:{self.wires[id][1]}", self.authority.client(id, role))
        self.connections.append(connection)
        return connection

    async def cut(self, id: str) -> None:
        self.wires[id][0].reset()

    def revoke(self, id: str) -> None:
        self.revoked.add(id)
        self.server.drop(WorkerId(id))

    def traffic(self, id: str) -> Traffic:
        return self.server.traffic(WorkerId(id))


def run(network: Memory | Sockets, service: Handlers, main: Callable[[], Awaitable[None]]) -> None:
    """Serve, do `main`, shut down; nothing may be left running."""

    async def whole() -> None:
        async with network.serving(service):
            await asyncio.wait_for(main(), 50)
        for _ in range(100):
            left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            if not left:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"still running: {left}")

    def threads() -> set[threading.Thread]:
        """All but gRPC's one poller, which stays, and the executors that belong to the test."""
        return {t for t in threading.enumerate() if "_poll_wrapper" not in t.name and not t.name.startswith("potluck")}

    before = threads()
    asyncio.run(whole())
    assert threads() <= before
