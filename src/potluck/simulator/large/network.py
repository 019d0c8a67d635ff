"""The network of a large simulation: control messages one by one, objects as one fluid operation each.

The coordinator's own link is shared by all transfers, max-min fair (`fluid`); a device's link bounds its own.
Who may fetch and store what is decided by the shipping service. A transfer goes on where it stopped.

Liveness of undisturbed devices costs no messages: they are vouched for, and what their heartbeats would have told of
their work is told when it changes. A device that falls silent is cut off when its heartbeats would have been missed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from potluck.clock import Clock, Executor
from potluck.coordinator.service import CoordinatorService
from potluck.fleet.roster import missed_heartbeats, most_reports_per_s
from potluck.protocol import pb
from potluck.protocol.frames import CHUNK_BYTES, CHUNK_HEADER_BYTES
from potluck.simulator.fleets import Machine
from potluck.simulator.large.fluid import Flow, SharedLink
from potluck.simulator.large.meta import CoordinatorMachine, MetaObjects
from potluck.storage.objects import ObjectStore
from potluck.transport.connection import Connection, Peer, Traffic
from potluck.transport.memory import Link, MemoryNetwork
from potluck.transport.objects import Progress
from potluck.types.errors import ConnectionLost, Refused
from potluck.types.ids import Digest, WorkerId

framing = 1 + CHUNK_HEADER_BYTES / CHUNK_BYTES
"""Bytes on the link for each of an object."""
Way = Literal["GetObject", "PutObject"]
Phase = Literal["receive", "compute", "send"]


@dataclass(eq=False)
class _Transfer:
    flow: Flow
    link: SharedLink
    done: asyncio.Future[None]
    left: float | None = None  # bytes, once it was stopped

    def stop(self) -> float:
        """Bytes that did not pass."""
        if self.left is None:
            self.left = self.link.stop(self.flow)
        return self.left


@dataclass
class Moved:
    """Of one device: bytes of objects, whole and in part."""

    up_bytes: float = 0.0
    down_bytes: float = 0.0


class FluidNetwork:
    """One coordinator's service, at most one at a time, and the devices that reach it."""

    def __init__(self, clock: Clock, machine: CoordinatorMachine, objects: MetaObjects, heartbeat_s: float) -> None:
        self.clock, self._objects, self._heartbeat_s = clock, objects, heartbeat_s
        self._network = MemoryNetwork(clock)
        self._service: CoordinatorService | None = None
        self._up, self._down = SharedLink(clock, machine.down_bytes_per_s), SharedLink(clock, machine.up_bytes_per_s)
        self._transfers: dict[WorkerId, dict[_Transfer, None]] = {}
        self._left: dict[tuple[WorkerId, Way, Digest], float] = {}  # bytes of transfers that were broken off
        self.moved: dict[WorkerId, Moved] = {}

    def open(self, service: CoordinatorService) -> None:
        self._service = service
        service.run.roster.vouches_for_new = True

    async def connect(self, machine: Machine) -> Connection:
        """ConnectionLost while no service is open."""
        link = Link(rtt_s=machine.rtt_s)  # control messages are small against the rates
        return await self._network.connect(self._open_service(), Peer(id=machine.id), link)

    def traffic(self, worker: str) -> Traffic:
        return self._network.traffic(WorkerId(worker))

    async def close(self) -> None:
        self._service = None
        for worker in list(self._transfers):
            self._break(worker)
        await self._network.close()

    # Faults

    def cut(self, worker: WorkerId) -> None:
        """Its link breaks, and may be taken up again."""
        self._break(worker)
        self._network.cut(worker)

    def refuse(self, worker: WorkerId, is_away: bool) -> None:
        """Whether what a device sends is lost: it, or its link, is away."""
        if is_away:
            self._network.partitioned.add(worker)
        else:
            self._network.partitioned.discard(worker)

    @property
    def silence_s(self) -> float:
        """How long nothing may be heard of a device until it is cut off."""
        run = self._open_service().run
        return missed_heartbeats * max(self._heartbeat_s, run.roster.num_connected / most_reports_per_s)

    def stop_transfers(self, worker: WorkerId) -> None:
        """Its bytes stop without a word; who waits for them does until the link is cut."""
        for transfer in self._transfers.get(worker, {}):
            transfer.stop()

    def _break(self, worker: WorkerId) -> None:
        for transfer in list(self._transfers.pop(worker, {})):
            if not transfer.done.done():
                transfer.done.set_exception(ConnectionLost(f"the link of {worker} broke"))

    # What heartbeats would tell

    def seen(self, worker: WorkerId, activity: str) -> None:
        """A device begins a part of its work."""
        if self._service is None:
            return
        fleet, now = self._service.run.fleet, self.clock.now()
        held = sorted(fleet.book.of(worker), key=lambda x: x.message.kind != "pure")
        for number, lease in enumerate(held):  # it does one after the other
            if not number and lease.seen(pb.Progress(activity=activity), now):
                fleet.watching.look(lease)
            lease.progress_at = math.inf  # it moves on until something is heard of the contrary

    def stalled(self, worker: WorkerId) -> None:
        """A device does not get on any more, though its heartbeats go on."""
        if self._service is None:
            return
        fleet, now = self._service.run.fleet, self.clock.now()
        for lease in fleet.book.of(worker):
            lease.progress_at = now
            fleet.watching.look(lease)

    # Objects

    async def get(self, machine: Machine, digest: Digest, told: Progress) -> int:
        """The coordinator's object, over the links; its size. Refused, ConnectionLost."""
        run = self._open_service().run
        await self._answer(machine)
        member = run.roster.members.get(machine.id)
        if member is None or not self._objects.has(digest) or not self._open_service().may_fetch(member)(digest):
            raise Refused(f"the object {digest} is not to be had here, or not by this worker")
        size = self._objects.size(digest)
        told(0)
        await self._move(machine, "GetObject", digest, size, self._down, machine.down_bytes_per_s)
        told(size)
        return size

    async def put(self, machine: Machine, digest: Digest, size: int, purpose: str, told: Progress) -> None:
        """An object to the coordinator. Refused, ConnectionLost."""
        await self._answer(machine)
        service = self._open_service()
        member = service.run.roster.members.get(machine.id)
        if member is None:
            raise ConnectionLost(f"{machine.id} has not said Welcome since the coordinator started")
        service.may_store(member)(pb.ObjectInfo(digest=digest, size=size, purpose=purpose))
        told(0)
        if not self._objects.has(digest):
            await self._move(machine, "PutObject", digest, size, self._up, machine.up_bytes_per_s)
            await self._answer(machine)  # the last bytes arrive, and that is told
            self._objects.place(digest, size)
        told(size)

    async def _answer(self, machine: Machine) -> None:
        """A round trip."""
        self._open_service()
        if machine.id in self._network.partitioned:
            raise ConnectionLost(f"no answer from the coordinator: {machine.id} is cut off")
        if machine.rtt_s:
            await self.clock.sleep(machine.rtt_s)

    async def _move(
        self, machine: Machine, way: Way, digest: Digest, size: int, link: SharedLink, rate: float
    ) -> None:  # fmt: skip
        key: tuple[WorkerId, Way, Digest] = (machine.id, way, digest)
        due = self._left.pop(key, float(size))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        flow = link.start(due * framing, rate, lambda: None if done.done() else done.set_result(None))
        transfer = _Transfer(flow, link, done)
        self._transfers.setdefault(machine.id, {})[transfer] = None
        try:
            await done
        finally:
            left = transfer.stop() / framing
            self._transfers.get(machine.id, {}).pop(transfer, None)
            if left:
                self._left[key] = left
            self._count(machine.id, way, due - left)

    def _count(self, worker: WorkerId, way: Way, num_bytes: float) -> None:
        moved, traffic = self.moved.setdefault(worker, Moved()), self._network.traffic(worker)
        if way == "GetObject":
            moved.down_bytes += num_bytes
            traffic.add_down(way, round(num_bytes * framing))
        else:
            moved.up_bytes += num_bytes
            traffic.add_up(way, round(num_bytes * framing))

    def _open_service(self) -> CoordinatorService:
        if self._service is None:
            raise ConnectionLost("the coordinator is down")
        return self._service


class FluidMover:
    """A device's way to move objects: a `worker.link.Mover`."""

    def __init__(
        self, network: FluidNetwork, machine: Machine, objects: MetaObjects, told: Callable[[Phase, float, float], None]
    ) -> None:
        self._network, self._machine, self._objects, self._told = network, machine, objects, told

    async def fetch(
        self, connection: Connection, digest: Digest, store: ObjectStore, executor: Executor,
        on_progress: Progress | None = None,
    ) -> Path:  # fmt: skip
        if not self._objects.has(digest):
            self._network.seen(self._machine.id, "downloading")
            begun = self._network.clock.now()
            try:
                size = await self._network.get(self._machine, digest, on_progress or _silent)
            finally:
                self._told("receive", begun, self._network.clock.now())
            self._objects.place(digest, size)
        return self._objects.path(digest)

    async def push(
        self, connection: Connection, digest: Digest, path: Path, purpose: str, executor: Executor,
        on_progress: Progress | None = None,
    ) -> None:  # fmt: skip
        self._network.seen(self._machine.id, "uploading")
        begun = self._network.clock.now()
        try:
            await self._network.put(self._machine, digest, self._objects.size(digest), purpose, on_progress or _silent)
        finally:
            self._told("send", begun, self._network.clock.now())


def _silent(num_bytes: int) -> None:
    """No one listens to the progress."""
