"""What joins a world's hosts: modelled links, or real sockets on loopback."""

from __future__ import annotations

from typing import Protocol

from potluck.clock import Clock
from potluck.transport.connection import Connection, Peer, Service, Traffic
from potluck.transport.grpc.client import GrpcConnection
from potluck.transport.grpc.server import GrpcServer
from potluck.transport.memory import Link, MemoryNetwork
from potluck.types.errors import ConnectionLost, NotAdmitted
from potluck.types.ids import WorkerId


class Network(Protocol):
    """One coordinator's service at a time, and workers that connect to it."""

    async def open(self, service: Service) -> None: ...

    async def connect(self, peer: Peer, link: Link) -> Connection:
        """ConnectionLost while no service is open."""
        ...

    def cut(self, id: WorkerId) -> None:
        """Break every stream of a worker, as a pulled cable does."""
        ...

    def partition(self, id: WorkerId) -> None:
        """Break a worker's streams, and refuse it new ones until `heal`."""
        ...

    def heal(self, id: WorkerId) -> None: ...

    def fail(self) -> None:
        """The coordinator is gone, without a word; from anywhere, at once. `close` then takes the rest away."""
        ...

    async def close(self) -> None: ...

    def traffic(self, id: WorkerId) -> Traffic: ...


class Modelled:
    """The memory transport: links have rates and delays on whatever clock the world has."""

    def __init__(self, clock: Clock) -> None:
        self._network = MemoryNetwork(clock)
        self._service: Service | None = None
        self._known: dict[WorkerId, None] = {}

    async def open(self, service: Service) -> None:
        self._service = service

    async def connect(self, peer: Peer, link: Link) -> Connection:
        if self._service is None:
            raise ConnectionLost("the coordinator is down")
        self._known[peer.id] = None
        return await self._network.connect(self._service, peer, link)

    def cut(self, id: WorkerId) -> None:
        self._network.cut(id)

    def partition(self, id: WorkerId) -> None:
        self._network.partition(id)

    def heal(self, id: WorkerId) -> None:
        self._network.heal(id)

    def fail(self) -> None:
        self._service = None
        for id in self._known:
            self._network.cut(id)

    async def close(self) -> None:
        self.fail()

    def traffic(self, id: WorkerId) -> Traffic:
        return self._network.traffic(id)


class Sockets:
    """gRPC over loopback, in plain text. Links are what the machine has; needs a real clock."""

    def __init__(self) -> None:
        self._server: GrpcServer | None = None
        self._port = 0

    async def open(self, service: Service) -> None:
        self._server = GrpcServer(check_peer=_nobody, identity=None, insecure=True)
        self._port = await self._server.start(service, 0, "127.0.0.1")

    async def connect(self, peer: Peer, link: Link) -> Connection:
        if self._server is None:
            raise ConnectionLost("the coordinator is down")
        return GrpcConnection(f"127.0.0.1:{self._port}", insecure_as=peer)

    def cut(self, id: WorkerId) -> None:
        if self._server is not None:
            self._server.drop(id, ConnectionLost("the link was cut"))

    def partition(self, id: WorkerId) -> None:
        raise NotImplementedError("real sockets are cut, not kept cut: use a proxy")

    def heal(self, id: WorkerId) -> None:
        raise NotImplementedError("nothing was cut for longer")

    def fail(self) -> None:
        pass  # a real socket takes a moment to close

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def traffic(self, id: WorkerId) -> Traffic:
        return self._server.traffic(id) if self._server is not None else Traffic()


def _nobody(certificate_pem: bytes) -> Peer:
    raise NotAdmitted("without TLS nobody brings a certificate")
