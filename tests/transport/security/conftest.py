"""A coordinator's two ports on real sockets with real TLS, as small as they can be, and a worker's way to them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from potluck.clock import SystemClock, ThreadExecutor
from potluck.protocol import pb
from potluck.storage.database import Database
from potluck.storage.members import Members
from potluck.transport.connection import Channel, Peer
from potluck.transport.grpc.client import GrpcConnection
from potluck.transport.grpc.server import EnrolServer, GrpcServer
from potluck.transport.security.admission import Admission
from potluck.transport.security.authority import Authority, ServerCertificates
from potluck.transport.security.enroller import Enroller
from potluck.transport.security.identity import Identity
from potluck.transport.security.link import JoinLink
from potluck.types.errors import ConnectionLost


class SettableClock(SystemClock):
    """The system's clock, moved by a test."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def connect_as(identity: Identity) -> GrpcConnection:
    return GrpcConnection(identity.address, identity)


class Coordinator:
    """The security half of a coordinator: the real authority, member book, enroller and admission."""

    def __init__(self, folder: Path) -> None:
        self.clock = SettableClock()
        self.executor = ThreadExecutor(2)
        self.authority = Authority.open(folder, now=self.clock.time())
        self.members = Members(Database(folder / "members.sqlite"))
        self.admission = Admission(self.members, self.clock)
        self.certificates = ServerCertificates(self.authority, self.clock)
        self.requests: list[bytes] = []  # of Enrol
        self.replaced: list[str] = []
        self.drop_replies = 0  # Enrol answers that the network loses

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Coordinator]:
        serve = GrpcServer(check_peer=self.admission.check_peer, identity=self.certificates.current)
        self.serve_port = await serve.start(self, 0, "127.0.0.1")
        self.enroller = Enroller(
            self.authority,
            self.members,
            self.clock,
            self.executor,
            serve_port=self.serve_port,
            on_replaced=self.replaced.append,
        )
        enrol = EnrolServer(self._enrol, identity=self.authority.enrol_identity)
        self.enrol_port = await enrol.start(0, "127.0.0.1")
        try:
            yield self
        finally:
            await enrol.stop()
            await serve.stop()

    def link(self, token: str, *, pin: str = "", host: str = "127.0.0.1") -> JoinLink:
        return JoinLink(host=host, port=self.enrol_port, token=token, pin=pin or self.authority.pin)

    async def call(self, peer: Peer, method: str, request: bytes) -> bytes:
        """As a `Service`: renews, and tells everybody else who they are."""
        if method == "Renew":
            return await self.enroller.renew(peer, request)
        return f"{peer.id} {peer.role}".encode()

    async def open(self, peer: Peer, method: str, channel: Channel) -> None:
        raise NotImplementedError

    async def _enrol(self, request: bytes, address: str) -> bytes:
        self.requests.append(request)
        reply = await self.enroller.handle(request, address)
        if self.drop_replies:
            self.drop_replies -= 1
            raise ConnectionLost("the reply was lost")
        return reply


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    made = Coordinator(tmp_path / "coordinator")
    yield made
    made.executor.close()
    made.members._db.close()


@pytest.fixture
def connect_identity() -> Callable[[Identity], GrpcConnection]:
    return connect_as


class ConnectProxy:
    """An HTTP CONNECT proxy that leads every name to this machine and remembers what it was asked."""

    def __init__(self, *, status: str = "200 OK") -> None:
        self.status = status
        self.heads: list[str] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.port = self._server.getsockname()[1]
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client = self._server.accept()[0]
            except OSError:
                return
            self._open.append(client)
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            if not (byte := client.recv(1)):
                return
            head += byte
        self.heads.append(head.decode())
        client.sendall(f"HTTP/1.1 {self.status}\r\n\r\n".encode())
        if not self.status.startswith("200"):
            client.close()
            return
        port = int(self.heads[-1].split()[1].rpartition(":")[2])
        upstream = socket.create_connection(("127.0.0.1", port))
        self._open.append(upstream)
        self._start(self._pump, upstream, client)
        self._pump(client, upstream)

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for stream in (self._server, *self._open):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()
        for thread in self._threads:
            thread.join(5)


@pytest.fixture
def make_proxy() -> Iterator[Callable[..., ConnectProxy]]:
    made: list[ConnectProxy] = []

    def make(**options: str) -> ConnectProxy:
        made.append(ConnectProxy(**options))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


@pytest.fixture(autouse=True)
def no_proxy_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def enrol_request() -> Callable[..., bytes]:
    from potluck.transport.security.keys import new_key, new_request

    def make(token: str, *, major: int = 1, request_pem: bytes | None = None, name: str = "anna") -> bytes:
        pem = new_request(new_key()) if request_pem is None else request_pem
        version = pb.Version(major=major, minor=0)
        return pb.EnrolRequest(version=version, token=token, request_pem=pem, name=name).SerializeToString()

    return make
