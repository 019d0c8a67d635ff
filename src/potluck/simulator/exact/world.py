"""A world of one coordinator and some workers: the hosts' own code over the memory transport.

On a `VirtualLoop` it is a simulation: links take modelled time, compute is charged `cost_s`, and the same seed gives
the same trace. On a real loop it is a run in one process. A crash ends a host without a goodbye: its stream is cut,
its memory is gone and its disk stays as it was.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from potluck.clock import Clock, Executor, Lanes
from potluck.coordinator.core import Coordinator
from potluck.coordinator.deck import Deck
from potluck.coordinator.events import Event
from potluck.coordinator.kit import Kit
from potluck.coordinator.loop import train
from potluck.coordinator.plan import Plan
from potluck.coordinator.service import CoordinatorService
from potluck.protocol import pb
from potluck.protocol.frames import CHUNK_HEADER_BYTES, unpack_chunk
from potluck.simulator.exact.lives import Fate, Life, LifeExecutor
from potluck.simulator.exact.modelled import ModelledRunner
from potluck.simulator.exact.networks import Modelled, Network
from potluck.storage.objects import ObjectStore
from potluck.strategies.run import RunSpec
from potluck.strategies.state import State
from potluck.transport.connection import Channel, Connection, Peer, Service, Traffic
from potluck.transport.memory import Link as NetworkLink
from potluck.types.errors import CorruptError
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile
from potluck.worker.agent import Agent, Introduction
from potluck.worker.equip import equip
from potluck.worker.gate import Gate
from potluck.worker.link import Link
from potluck.worker.policy import Policy
from potluck.worker.runner import Runner

finished = "the run is finished"


@dataclass(kw_only=True)
class Host:
    """One simulated worker machine."""

    id: WorkerId
    link: NetworkLink
    cost_s: Callable[[pb.Lease], float]
    passed: Callable[[float, float], None]
    max_memory_bytes: int = 0
    data: Sequence[Path] = ()
    policy: Policy | None = None
    life: Life | None = None
    task: asyncio.Task[None] | None = None
    agent: Agent | None = None
    notes: list[str] = field(default_factory=list[str])


class SeededKit(Kit):
    """The chance of a run that is played from its seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def secret(self) -> str:
        return str(self._seed)


class World:
    """`plan` and `deck` describe the run; everything is kept under `folder`, one folder a machine.

    `fate` hears of every point where a machine's process could be interrupted (see `lives.Fate`). With `base_share_dir`
    the workers fetch a frozen base once between them, as those of one machine do.
    """

    def __init__(
        self,
        plan: Plan,
        make_deck: Callable[[ObjectStore], Deck],
        folder: Path,
        *,
        clock: Clock,
        make_executor: Callable[[], Executor],
        network: Network | None = None,
        fate: Fate | None = None,
        base_share_dir: Path | None = None,
    ) -> None:
        self._base_share_dir = base_share_dir
        self.plan, self._make_deck, self.folder = plan, make_deck, folder
        self.clock, self._make_executor = clock, make_executor
        self.network = network or Modelled(clock)
        self.fate = fate
        self._lives: dict[str, int] = {}  # how many a machine has had
        self._disks: dict[str, Path] = {}  # where the disk of a machine is now
        self.hosts: dict[WorkerId, Host] = {}
        self.events: list[Event] = []
        self.on_event: Callable[[Event], None] = lambda _: None
        self.slowness: dict[str, float] = {}  # how many times longer a machine's work takes
        self.life: Life | None = None  # the coordinator's
        self.run: Coordinator | None = None
        self.last: Coordinator | None = None  # also after the end
        self.object_bytes_up: dict[str, int] = {}  # chunks of objects of the model's size, by worker
        self.object_bytes_down: dict[str, int] = {}
        self.training: asyncio.Task[State] | None = None
        self.booting: asyncio.Task[None] | None = None
        self._is_over = False
        self._lived_s = 0.0  # of workers that died since
        self.jumps_s: dict[str, float] = {}  # by which the wall clock of a machine is off
        self.context = copy_context()  # of nobody's process

    @property
    def training_is_over(self) -> bool:
        return self.training is not None and self.training.done()

    @property
    def trace(self) -> list[tuple[float, str]]:
        """What happened and when, for comparing runs."""
        return [(event.at, event.text) for event in self.events]

    # The coordinator

    async def start(self) -> None:
        """Start the coordinator, or start it again from what its disk holds."""
        booting = self.restart()
        await asyncio.wait([booting])
        if not booting.cancelled():
            booting.result()

    def restart(self) -> asyncio.Task[None]:
        """Begin to start it, from anywhere."""
        self.life = life = self._begin("coordinator")
        self.booting = life.spawn(self._boot(life))
        return self.booting

    async def _boot(self, life: Life) -> None:
        executor = self._executor(life)
        objects = await executor.run(ObjectStore, life.folder / "objects")
        deck = await executor.run(self._make_deck, objects)
        run = await Coordinator.open(
            self.plan, life.folder, deck=deck, objects=objects, clock=MachineClock(self, life.machine),
            lanes=Lanes.one(executor), on_event=lambda event: self._heard(life, event),
            kit=SeededKit(self.plan.spec.seed),
        )  # fmt: skip
        self.run = self.last = run
        run.traffic = self.traffic
        service: Service = CoordinatorService(run)
        await self.network.open(service if self.fate is None else FatedService(service, life))
        life.spawn(run.fleet.watch())
        self.training = life.spawn(train(run))

    def _heard(self, life: Life, event: Event) -> None:
        if life.alive:
            self.events.append(event)
            self.on_event(event)

    def traffic(self, worker: str) -> Traffic:
        return self.network.traffic(WorkerId(worker))

    async def finish(self) -> State:
        """Wait for the run's end, let everyone go and give the last state."""
        assert self.training is not None and self.run is not None
        try:
            while not self.training.done() and self.run.failure is None:
                await asyncio.wait(
                    [self.training, change := asyncio.ensure_future(self.run.roster.change())],
                    return_when=asyncio.FIRST_COMPLETED,
                )
                change.cancel()
            if self.run.failure is not None:
                raise self.run.failure
            state = self.training.result()
        finally:
            self.run.stop(finished)
            await self.clock.sleep(0.1)
            await self.shut_down()
        return state

    async def crash_coordinator(self) -> None:
        """As under kill -9: nothing is said and nothing more is written."""
        life = self.life
        assert life is not None
        self.kill_coordinator()
        await life.gone()
        await self.network.close()

    def kill_coordinator(self, *, keeps_disk: bool = True) -> None:
        """The same at once, from wherever in the coordinator this is called."""
        self._end(self.life, keeps_disk=keeps_disk)
        self.network.fail()
        self.run = None

    async def shut_down(self) -> None:
        self._is_over = True  # nobody is started again, so disks stay where they are
        for id in list(self.hosts):
            await self.crash(id)
        await self.network.close()
        if self.run is not None and self.life is not None:
            self.life.fate = None
            await self.run.close()
            self.life.end()
            await self.life.gone()
            for executor in self.life.executors:
                executor.close()

    # Machines

    def disk(self, machine: str) -> Path:
        """Where its files are: another folder after each crash."""
        return self._disks.get(machine, self.folder / machine)

    def _begin(self, machine: str) -> Life:
        disk = self._disks[machine] = self.disk(machine)
        disk.mkdir(parents=True, exist_ok=True)
        self._lives[machine] = self._lives.get(machine, 0) + 1
        return Life(machine, disk, begun_at=self.clock.now(), fate=self.fate)

    def _end(self, life: Life | None, *, keeps_disk: bool) -> None:
        """The process is gone; the machine's next one finds the disk as it is now, or an empty one."""
        if life is None or not life.alive:
            return
        life.end()
        for executor in life.executors:
            executor.close()  # what a real thread is at, it ends: the disk is looked at after that
        if self._is_over:
            return
        new = self.folder / f"{life.machine}.{self._lives[life.machine]}"
        if keeps_disk:
            copy_disk(life.folder, new)
        self._disks[life.machine] = new

    def _executor(self, life: Life) -> Executor:
        executor = self._make_executor()
        life.executors.append(executor)
        return LifeExecutor(life, executor, lambda: self.slowness.get(life.machine, 1.0))

    # Workers

    def add(
        self,
        name: str,
        *,
        link: NetworkLink | None = None,
        cost_s: Callable[[pb.Lease], float] = lambda _: 0.0,
        passed: Callable[[float, float], None] = lambda _began, _ended: None,
        max_memory_bytes: int = 0,
        data: Sequence[Path] = (),
        policy: Policy | None = None,
    ) -> None:
        """A new worker machine, switched on. `passed` hears when the time of its work passed; it has as much memory as
        this one unless that is said, and `data` are files of its own, `policy` its owner's."""
        id = WorkerId(name)
        self.hosts[id] = Host(
            id=id, link=link or NetworkLink(), cost_s=cost_s, passed=passed, max_memory_bytes=max_memory_bytes,
            data=data, policy=policy,
        )  # fmt: skip
        self.switch_on(id)

    def switch_on(self, id: WorkerId) -> None:
        host = self.hosts[id]
        life, clock = self._begin(id), MachineClock(self, id)
        host.life = life
        gate = Gate(clock=clock, files=self._executor(life), policy=host.policy)

        async def connect() -> Connection:
            return Tap(await self.network.connect(Peer(id=id), host.link), self, life, id)

        async def equipped(spec: RunSpec, link: Link) -> Runner:
            return await equip(
                spec, link, folder=life.folder, device="cpu", clock=clock, compute=self._executor(life),
                files=self._executor(life), note=agent.note, told=host.notes.append,
                max_memory_bytes=host.max_memory_bytes,
                make=partial(ModelledRunner, cost_s=host.cost_s, passed=host.passed),
                data=host.data, base_share_dir=self._base_share_dir, gate=gate,
            )  # fmt: skip

        agent = host.agent = Agent(
            Introduction(id=id, profile=DeviceProfile(device="cpu"), process=str(self._lives[id])), connect=connect,
            equip=equipped, clock=clock, told=host.notes.append, gate=gate,
        )  # fmt: skip
        host.task = life.spawn(agent.work())

    async def crash(self, name: str) -> None:
        """A worker dies without a word; its disk stays. Raises what it had ended with by itself."""
        host = self.hosts[WorkerId(name)]
        life, task = host.life, host.task
        self.kill(name)
        if life is not None:
            await life.gone()
        if task is not None and task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error

    def kill_for(self, name: str, seconds: float, *, keeps_disk: bool = True) -> None:
        """It dies now, if it is not dead, and is switched on again after that."""
        if self.hosts[WorkerId(name)].life is None:
            return
        self.kill(name, keeps_disk=keeps_disk)
        self.later(seconds, lambda: self.switch_on(WorkerId(name)))

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        """From nobody's process; not any more once the world is over."""
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, lambda: None if self._is_over else do(), context=self.context)

    def alive_s(self) -> float:
        """Seconds that the workers have been alive, all together."""
        now = self.clock.now()
        return self._lived_s + sum(now - h.life.begun_at for h in self.hosts.values() if h.life is not None)

    def kill(self, name: str, *, keeps_disk: bool = True) -> None:
        """The same at once, from wherever in the worker this is called."""
        host = self.hosts[WorkerId(name)]
        if host.life is not None:
            self._lived_s += self.clock.now() - host.life.begun_at
        self._end(host.life, keeps_disk=keeps_disk)
        host.life = host.task = host.agent = None
        self.network.cut(host.id)


class MachineClock:
    """A machine's: the world's time, and a wall clock that may be wrong."""

    def __init__(self, world: World, machine: str) -> None:
        self._world, self._machine = world, machine

    def now(self) -> float:
        return self._world.clock.now()

    def time(self) -> float:
        return self._world.clock.time() + self._world.jumps_s.get(self._machine, 0.0)

    async def sleep(self, seconds: float) -> None:
        await self._world.clock.sleep(seconds)


def copy_disk(old: Path, new: Path) -> None:
    """As it is at this moment. What SQLite shares in memory is not on the disk."""
    shutil.copytree(old, new, ignore=shutil.ignore_patterns("*-shm"), symlinks=True)


class Tap:
    """A worker's connection: ends with its process, and counts the bytes of objects.

    Counted are chunks up, and chunks down that are neither training data nor what every member has from the start.
    """

    def __init__(self, inner: Connection, world: World, life: Life, id: WorkerId) -> None:
        self._inner, self._world, self._life, self._id = inner, world, life, id

    @property
    def traffic(self) -> Traffic:
        return self._inner.traffic

    async def call(self, method: str, request: bytes, *, timeout_s: float = 30.0) -> bytes:
        self._life.check()
        await self._life.point()
        reply = await self._inner.call(method, request, timeout_s=timeout_s)
        await self._life.point()
        return reply

    async def open(self, method: str) -> Channel:
        self._life.check()
        channel: Channel = FatedChannel(await self._inner.open(method), self._life, method)
        return TappedChannel(channel, self._world, self._id) if method in ("GetObject", "PutObject") else channel

    async def close(self) -> None:
        await self._inner.close()


class FatedChannel:
    """One end of a stream, as a process holds it."""

    def __init__(self, inner: Channel, life: Life, method: str) -> None:
        self._inner, self._life, self._method = inner, life, method

    async def send(self, message: bytes) -> None:
        self._life.check()
        await self._life.point()
        for each in self._life.sends(self._method, message):
            await self._inner.send(each)

    async def receive(self) -> bytes | None:
        self._life.check()
        message = await self._inner.receive()
        await self._life.point()
        return message

    async def close(self) -> None:
        await self._inner.close()


class FatedService:
    """The coordinator's service: what it does belongs to the coordinator's process."""

    def __init__(self, inner: Service, life: Life) -> None:
        self._inner, self._life = inner, life

    async def call(self, peer: Peer, method: str, request: bytes) -> bytes:
        return await self._life.spawn(self._call(peer, method, request))

    async def _call(self, peer: Peer, method: str, request: bytes) -> bytes:
        await self._life.point()
        reply = await self._inner.call(peer, method, request)
        await self._life.point()
        return reply

    async def open(self, peer: Peer, method: str, channel: Channel) -> None:
        await self._life.spawn(self._inner.open(peer, method, FatedChannel(channel, self._life, method)))


class TappedChannel:
    def __init__(self, inner: Channel, world: World, id: WorkerId) -> None:
        self._inner, self._world, self._id = inner, world, id
        self._first = True
        self._counts_down = True

    async def send(self, message: bytes) -> None:
        if self._first:  # GetObject or ObjectInfo
            self._first = False
            run = self._world.run
            digest = pb.GetObject.FromString(message).digest
            self._counts_down = run is None or digest not in {*run.deck.digests(), *run.plan.open_objects}
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
