"""A coordinator's two ports on real sockets with real TLS, as small as they can be, and a worker's way to them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from potluck.clock import SystemClock, ThreadExecutor
from potluck.protocol import pb
from potluck.storage.database import Database
from potluck.storage.members import Members
from potluck.transport.connection import Channel, Peer, Traffic
from potluck.transport.security.admission import Admission
from potluck.transport.security.authority import Authority, ServerCertificates, ServerIdentity
from potluck.transport.security.enroller import Enroller
from potluck.transport.security.identity import Identity
from potluck.transport.security.link import JoinLink, parse_address
from potluck.transport.security.names import SERVER_NAME, SERVICE_NAME
from potluck.transport.security.proxy import channel_options
from potluck.types import errors
from potluck.types.errors import ConnectionLost, PotluckError


class SettableClock(SystemClock):
    """The system's clock, moved by a test."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


class PlainConnection:
    """A `Connection` for unary calls, as the gRPC transport makes them."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials) -> None:
        self.traffic = Traffic()
        options = [("grpc.ssl_target_name_override", SERVER_NAME), *channel_options(parse_address(address)[0])]
        self._channel = grpc.aio.secure_channel(address, credentials, options=options)

    async def call(self, method: str, request: bytes, *, timeout_s: float = 10.0) -> bytes:
        try:
            return await self._channel.unary_unary(f"/{SERVICE_NAME}/{method}")(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            name, _, sentence = (error.details() or "").partition(": ")
            kind = getattr(errors, name, None)
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION and kind is not None:
                raise kind(sentence) from error
            raise ConnectionLost(error.details()) from error

    async def open(self, method: str) -> Channel:
        raise NotImplementedError

    async def close(self) -> None:
        await self._channel.close()


def connect(address: str, authority_pem: bytes) -> PlainConnection:
    return PlainConnection(address, grpc.ssl_channel_credentials(authority_pem))


def connect_as(identity: Identity) -> PlainConnection:
    credentials = grpc.ssl_channel_credentials(identity.authority_pem, identity.key_pem, identity.certificate_pem)
    return PlainConnection(identity.address, credentials)


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
        serve = self._server({"Renew": self._renew, "Whoami": self._whoami})
        self.serve_port = serve.add_secure_port("127.0.0.1:0", self._rotating_credentials())
        self.enroller = Enroller(
            self.authority,
            self.members,
            self.clock,
            self.executor,
            serve_port=self.serve_port,
            on_replaced=self.replaced.append,
        )
        enrol = self._server({"Enrol": self._enrol})
        own = self.authority.enrol_identity()
        self.enrol_port = enrol.add_secure_port(
            "127.0.0.1:0", grpc.ssl_server_credentials([(own.key_pem, own.certificate_pem)])
        )
        await serve.start()
        await enrol.start()
        try:
            yield self
        finally:
            await enrol.stop(None)
            await serve.stop(None)

    def link(self, token: str, *, pin: str = "", host: str = "127.0.0.1") -> JoinLink:
        return JoinLink(host=host, port=self.enrol_port, token=token, pin=pin or self.authority.pin)

    def _server(self, handlers: dict[str, Callable]) -> grpc.aio.Server:
        server = grpc.aio.server()
        methods = {name: grpc.unary_unary_rpc_method_handler(handler) for name, handler in handlers.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, methods),))
        return server

    def _rotating_credentials(self) -> grpc.ServerCredentials:
        def configuration(identity: ServerIdentity) -> grpc.ServerCertificateConfiguration:
            pair = (identity.key_pem, identity.certificate_pem)
            return grpc.ssl_server_certificate_configuration([pair], root_certificates=identity.authority_pem)

        return grpc.dynamic_ssl_server_credentials(
            configuration(self.certificates.current()),
            lambda: configuration(self.certificates.current()),
            require_client_authentication=True,
        )

    async def _enrol(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self.requests.append(request)
        try:
            reply = await self.enroller.handle(request, context.peer())
        except PotluckError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{type(error).__name__}: {error}")
        if self.drop_replies:
            self.drop_replies -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the reply was lost")
        return reply

    async def _whoami(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        peer = await self._peer(context)
        return f"{peer.id} {peer.role}".encode()

    async def _renew(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return await self.enroller.renew(await self._peer(context), request)

    async def _peer(self, context: grpc.aio.ServicerContext) -> Peer:
        try:
            return self.admission.check_peer(context.auth_context()["x509_pem_cert"][0])
        except PotluckError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{type(error).__name__}: {error}")
            raise AssertionError from error


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    made = Coordinator(tmp_path / "coordinator")
    yield made
    made.executor.close()
    made.members._db.close()


@pytest.fixture
def worker_connect() -> Callable[[str, bytes], PlainConnection]:
    return connect


@pytest.fixture
def connect_identity() -> Callable[[Identity], PlainConnection]:
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
