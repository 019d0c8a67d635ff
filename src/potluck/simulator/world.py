"""A world of one coordinator and some workers: the hosts' own code over the memory transport.

On a `VirtualLoop` it is a simulation: links take modelled time, compute is charged `cost_s`, and the same seed gives
the same trace. On a real loop it is a run in one process. A crash ends a host without a goodbye: its stream is cut,
its memory is gone and its folder stays as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from potluck.clock import Clock, Executor, Lanes
from potluck.coordinator.core import Coordinator, Plan
from potluck.coordinator.deck import Deck
from potluck.coordinator.events import Event
from potluck.coordinator.loop import train
from potluck.coordinator.service import CoordinatorService
from potluck.protocol import pb
from potluck.protocol.frames import CHUNK_HEADER_BYTES, unpack_chunk
from potluck.simulator.networks import Modelled, Network
from potluck.storage.objects import ObjectStore
from potluck.strategies.run import RunSpec
from potluck.strategies.state import State
from potluck.transport.connection import Channel, Connection, Peer, Traffic
from potluck.transport.memory import Link as NetworkLink
from potluck.types.errors import CorruptError
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile
from potluck.worker.agent import Agent, Introduction
from potluck.worker.equip import equip
from potluck.worker.link import Link
from potluck.worker.runner import Runner

finished = "the run is finished"


@dataclass(kw_only=True)
class Host:
    """One simulated worker machine."""

    id: WorkerId
    link: NetworkLink
    cost_s: Callable[[pb.Lease], float]
    task: asyncio.Task[None] | None = None
    agent: Agent | None = None
    notes: list[str] = field(default_factory=list[str])


class World:
    """`plan` and `deck` describe the run; everything is kept under `folder`, one folder a machine."""

    def __init__(
        self,
        plan: Plan,
        make_deck: Callable[[ObjectStore], Deck],
        folder: Path,
        *,
        clock: Clock,
        make_executor: Callable[[], Executor],
        network: Network | None = None,
    ) -> None:
        self.plan, self._make_deck, self.folder = plan, make_deck, folder
        self.clock, self._make_executor = clock, make_executor
        self.network = network or Modelled(clock)
        self._executors: list[Executor] = []
        self.hosts: dict[WorkerId, Host] = {}
        self.events: list[Event] = []
        self.run: Coordinator | None = None
        self.last: Coordinator | None = None  # also after the end
        self.object_bytes_up: dict[str, int] = {}  # chunks of objects of the model's size, by worker
        self.object_bytes_down: dict[str, int] = {}
        self._training: asyncio.Task[State] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def training_is_over(self) -> bool:
        return self._training is not None and self._training.done()

    @property
    def trace(self) -> list[tuple[float, str]]:
        """What happened and when, for comparing runs."""
        return [(event.at, event.text) for event in self.events]

    # The coordinator

    async def start(self) -> None:
        """Start the coordinator, or start it again from what its folder holds."""
        home = self.folder / "coordinator"
        home.mkdir(parents=True, exist_ok=True)
        objects = ObjectStore(home / "objects")
        self.run = await Coordinator.open(
            self.plan, home, deck=self._make_deck(objects), objects=objects, clock=self.clock,
            lanes=Lanes.one(self._executor()),
            on_event=self.events.append,
        )  # fmt: skip
        self.last = self.run
        self.run.traffic = self.traffic
        await self.network.open(CoordinatorService(self.run))
        self._watching = asyncio.create_task(self.run.fleet.watch())
        self._training = asyncio.create_task(train(self.run))

    def traffic(self, worker: str) -> Traffic:
        return self.network.traffic(WorkerId(worker))

    async def finish(self) -> State:
        """Wait for the run's end, let everyone go and give the last state."""
        assert self._training is not None and self.run is not None
        try:
            while not self._training.done() and self.run.failure is None:
                await asyncio.wait(
                    [self._training, change := asyncio.ensure_future(self.run.roster.change())],
                    return_when=asyncio.FIRST_COMPLETED,
                )
                change.cancel()
            if self.run.failure is not None:
                raise self.run.failure
            state = self._training.result()
        finally:
            self.run.stop(finished)
            await self.clock.sleep(0.1)
            await self.shut_down()
        return state

    async def crash_coordinator(self) -> None:
        """As under kill -9: nothing is said and nothing more is written."""
        assert self.run is not None
        for task in (self._training, self._watching):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.network.close()
        await self.run.intake.close()
        self.run.ledger.close()
        self.run = None

    async def shut_down(self) -> None:
        for id in list(self.hosts):
            await self.crash(id)
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.network.close()
        if self.run is not None:
            await self.run.close()
        for executor in self._executors:
            executor.close()

    def _executor(self) -> Executor:
        executor = self._make_executor()
        self._executors.append(executor)
        return executor

    # Workers

    def add(
        self,
        name: str,
        *,
        link: NetworkLink | None = None,
        cost_s: Callable[[pb.Lease], float] = lambda _: 0.0,
    ) -> None:
        """A new worker machine, switched on."""
        id = WorkerId(name)
        self.hosts[id] = Host(id=id, link=link or NetworkLink(), cost_s=cost_s)
        self.switch_on(id)

    def switch_on(self, id: WorkerId) -> None:
        host = self.hosts[id]

        async def connect() -> Connection:
            return Tap(await self.network.connect(Peer(id=id), host.link), self, id)

        async def equipped(spec: RunSpec, link: Link) -> Runner:
            assert host.agent is not None
            return await equip(
                spec, link, folder=self.folder / id, device="cpu", clock=self.clock, compute=self._executor(),
                files=self._executor(), note=host.agent.note, cost_s=host.cost_s,
            )  # fmt: skip

        host.agent = Agent(
            Introduction(id=id, profile=DeviceProfile(device="cpu")), connect=connect, equip=equipped,
            clock=self.clock, told=host.notes.append,
        )  # fmt: skip
        host.task = asyncio.create_task(host.agent.work())

    async def crash(self, name: str) -> None:
        """A worker dies without a word; its folder stays."""
        host = self.hosts[WorkerId(name)]
        if host.task is not None:
            host.task.cancel()
            results = await asyncio.gather(host.task, return_exceptions=True)
            errors = [r for r in results if isinstance(r, Exception)]
            host.task = None
            if errors:
                raise errors[0]
        self.network.cut(host.id)


class Tap:
    """A connection that counts the bytes of objects: chunks up, and chunks down that are not training data."""

    def __init__(self, inner: Connection, world: World, id: WorkerId) -> None:
        self._inner, self._world, self._id = inner, world, id

    @property
    def traffic(self) -> Traffic:
        return self._inner.traffic

    async def call(self, method: str, request: bytes, *, timeout_s: float = 30.0) -> bytes:
        return await self._inner.call(method, request, timeout_s=timeout_s)

    async def open(self, method: str) -> Channel:
        channel = await self._inner.open(method)
        return TappedChannel(channel, self._world, self._id) if method in ("GetObject", "PutObject") else channel

    async def close(self) -> None:
        await self._inner.close()


class TappedChannel:
    def __init__(self, inner: Channel, world: World, id: WorkerId) -> None:
        self._inner, self._world, self._id = inner, world, id
        self._first = True
        self._counts_down = True

    async def send(self, message: bytes) -> None:
        if self._first:  # GetObject or ObjectInfo
            self._first = False
            assert self._world.run is not None
            self._counts_down = pb.GetObject.FromString(message).digest not in self._world.run.deck.digests()
        else:
            counts = self._world.object_bytes_up
            counts[self._id] = counts.get(self._id, 0) + len(message) - CHUNK_HEADER_BYTES
        await self._inner.send(message)

    async def receive(self) -> bytes | None:
        message = await self._inner.receive()
        if message is not None and self._counts_down and is_chunk(message):
            counts = self._world.object_bytes_down
            counts[self._id] = counts.get(self._id, 0) + len(message) - CHUNK_HEADER_BYTES
        return message

    async def close(self) -> None:
        await self._inner.close()


def is_chunk(message: bytes) -> bool:
    """A chunk frame, and not one of the short messages that frame a transfer."""
    try:
        unpack_chunk(message)
    except CorruptError:
        return False
    return True
