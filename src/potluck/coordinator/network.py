"""The two ports of a hosted run, enrol and serve, and who may use them."""

from __future__ import annotations

import ipaddress
import json
import socket
from pathlib import Path

from potluck.coordinator.admin import Admin
from potluck.coordinator.changes import Changes
from potluck.coordinator.core import Coordinator
from potluck.coordinator.service import CoordinatorService
from potluck.storage.database import Database
from potluck.storage.files import write_atomic
from potluck.storage.members import Members
from potluck.transport.grpc.buffers import release_buffers
from potluck.transport.grpc.server import EnrolServer, GrpcServer
from potluck.transport.security.admission import Admission
from potluck.transport.security.authority import Authority, ServerCertificates
from potluck.transport.security.enroller import Enroller, local_operator
from potluck.transport.security.link import JoinLink, parse_address
from potluck.types.ids import WorkerId

farewell_s = 3.0
join_line_uses = 1000
join_line_hours = 24.0 * 30


class Network:
    """The two ports of a hosted run and who may use them."""

    def __init__(self, run: Coordinator, *, changes: Changes | None = None, address: str = "", port: int = 0) -> None:
        """On this machine only, or where others reach it at `address`, NAME:PORT; `port` listens on another one.

        `changes` is what an operator may do to the recipe: nothing where there is none.
        """
        self._run, self._changes, self._address, self._port = run, changes, address, port
        self._server: GrpcServer | None = None
        self._enrol: EnrolServer | None = None
        self._database: Database | None = None

    async def open(self) -> str:
        """Open both ports; the join line."""
        run = self._run
        clock, files, folder = run.clock, run.lanes.ledger, run.folder
        name, port = parse_address(self._address) if self._address else ("127.0.0.1", 0)
        host = "[::]" if self._address else "127.0.0.1"
        wanted = self._port or port
        ports = (wanted, wanted + 1) if wanted else await files.run(_known_ports, folder)
        authority = await files.run(lambda: Authority.open(folder / "authority", now=clock.time()))
        database = self._database = await files.run(lambda: Database(folder / "members.db", durable=True))
        members = await files.run(Members, database)
        certificates = ServerCertificates(authority, clock)
        service = CoordinatorService(run)
        server = self._server = GrpcServer(
            check_peer=Admission(members, clock).check_peer, identity=certificates.current
        )
        serve_port = await server.start(service, ports[1], host)
        reached = port + 1 if port else serve_port  # behind a forwarded port that is not the one listened on
        enroller = Enroller(authority, members, clock, files, serve_port=reached, on_replaced=server.drop)
        self._enrol = EnrolServer(enroller.handle, identity=authority.enrol_identity)
        enrol_port = await self._enrol.start(ports[0], host)
        await files.run(write_atomic, folder / "ports.json", json.dumps([enrol_port, serve_port]).encode())
        run.seen = lambda id: members.seen(WorkerId(id), now=clock.time())
        run.tidy = release_buffers
        await files.run(release_buffers)  # what preparing the run left
        run.traffic = lambda id: server.traffic(WorkerId(id))
        await files.run(
            lambda: local_operator(authority, members, folder / "operator", serve_port=serve_port, now=clock.time())
        )
        token = await files.run(lambda: members.invite(now=clock.time(), uses=join_line_uses, hours=join_line_hours))
        link = JoinLink(host=name, port=port or enrol_port, token=token, pin=authority.pin)
        admin = Admin(run, members, clock, files, link=link, drop=server.drop, changes=self._changes)
        service.unary |= {"Renew": enroller.renew, "Admin": admin.handle}
        if self._address and (warning := await files.run(_reach_warning, name)):
            run.tell("note", warning)
        run.tell("listening", f"join with: potluck join {link.format()}", join_line=link.format())
        return link.format()

    async def close(self) -> None:
        """Close the ports, after workers could read that the run ended if it did; else they wait for it to go on."""
        clock = self._run.clock
        deadline = clock.now() + farewell_s * bool(self._run.stop_reason)
        while clock.now() < deadline and any(m.connected for m in self._run.roster.members.values()):
            await clock.sleep(0.1)
        if self._enrol is not None:
            await self._enrol.stop()
        if self._server is not None:
            await self._server.stop()
        if self._database is not None:
            await self._run.lanes.ledger.run(self._database.close)


def _reach_warning(name: str) -> str:
    """Why other machines may not reach this name, "" if nothing speaks against it."""
    try:
        address = ipaddress.ip_address(socket.gethostbyname(name))
    except (OSError, ValueError):
        return f"{name} does not resolve on this machine; it must on those that join"
    if address.is_loopback:
        return f"{name} is this machine's own loopback address: no other machine can join"
    if address.is_private:
        return f"{name} is a private address ({address}): only machines in its network can join"
    return ""


def _known_ports(folder: Path) -> tuple[int, int]:
    """The ports of the process before, so that its workers find this one; (0, 0), any, where they are taken."""
    try:
        enrol, serve = json.loads((folder / "ports.json").read_bytes())
        pair = (int(enrol), int(serve))
    except (OSError, ValueError, TypeError, OverflowError):
        return 0, 0
    return pair if all(map(_is_free, pair)) else (0, 0)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
        return True
