"""Faults from a seed, at any point where a process could be interrupted.

A machine's points are counted over all its lives: before and after each piece of work it runs, each message it sends or
receives, and each file it opens for writing, renames or removes. A `Fault` strikes at the n-th, or at the n-th after
something of that machine: the second commit, say. So one seed names one history, and a fault can fall between any two
steps of a program, not only between two moments of the clock.
"""

from __future__ import annotations

import asyncio
import random
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from potluck.protocol.frames import CHUNK_HEADER_BYTES
from potluck.simulator.exact.lives import Killed, Life, no_space
from potluck.simulator.exact.world import World, is_chunk
from potluck.types.errors import ResourceError
from potluck.types.ids import WorkerId

Kind = Literal[
    "crash", "torn", "wiped", "hang", "slow", "partition", "cut", "corrupt", "duplicate", "delay", "full", "clock",
    "leave",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
WORKERS_ONLY: frozenset[Kind] = frozenset({"wiped", "leave", "corrupt"})
"""A coordinator that loses its disk has lost the run; bits flip on a worker's side of a link."""
coordinator = "coordinator"


BOOT = "boot"
"""A machine's process begins."""
aims = {coordinator: ("commit", "discard", "reply", "issue", "settle", BOOT), "": ("_perform", "_encode", BOOT)}
"""Work whose end faults are aimed at, by the names of its functions: the coordinator's, and that of workers."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`kind` strikes `machine` at its `point`-th point; what lasts does so for `lasts_s` seconds.

    With `after` points count from the end of the `nth` piece of work of that name: the first is right behind it.
    """

    machine: str
    kind: Kind
    point: int
    lasts_s: float
    after: str = ""
    nth: int = 1

    def __str__(self) -> str:
        since = f"{self.after}#{self.nth}+" if self.after else ""
        return f"{self.kind}:{self.machine}@{since}{self.point}+{self.lasts_s:g}s"


def draw(
    chance: random.Random, workers: Sequence[str], *, num_faults: int, most_points: int, kinds: Sequence[Kind] = KINDS
) -> tuple[Fault, ...]:
    """So many faults, on any machine, within each machine's first `most_points` points."""
    found: list[Fault] = []
    for _ in range(num_faults):
        machine = chance.choice((coordinator, *workers))
        allowed: list[Kind] = [k for k in kinds if machine != coordinator or k not in WORKERS_ONLY]
        kind: Kind = chance.choice(allowed)
        lasts_s = round(0.1 * 1000 ** chance.random(), 2)  # 0.1 to 100 s
        found.append(Fault(machine=machine, kind=kind, point=chance.randrange(1, most_points), lasts_s=lasts_s))
    return tuple(found)


def aim(chance: random.Random, workers: Sequence[str], *, kinds: Sequence[Kind] = KINDS) -> tuple[Fault, ...]:
    """A few faults close to what matters: a process dies, or is cut off for long, just after it."""
    machine = chance.choice((coordinator, *workers))
    may_be: list[Kind] = [k for k in ("crash", "crash", "torn", "hang", "partition") if k in kinds]
    return tuple(
        Fault(
            machine=machine, kind=chance.choice(may_be), point=chance.choice((1, 1, 2, 3, 5, 8, 13, 21)),
            lasts_s=round(chance.choice((0.5, 10.0, 30.0)) * chance.uniform(0.8, 1.2), 2),
            after=chance.choice(aims.get(machine, aims[""])), nth=chance.randint(1, 6),
        )
        for _ in range(chance.randint(1, 3) if may_be else 0)
    )  # fmt: skip


class Chaos:
    """The fate of a world: strikes with its faults, and repairs what they broke when their time is over."""

    def __init__(self, faults: Sequence[Fault], told: Callable[[str], None] = lambda _: None) -> None:
        self._told = told
        self._due: dict[str, list[tuple[int, Fault]]] = {}  # by machine, with the points they strike at, in order
        self._aimed: dict[tuple[str, str, int], list[Fault]] = {}
        for fault in sorted(faults, key=lambda f: f.point):
            if fault.after:
                self._aimed.setdefault((fault.machine, fault.after, fault.nth), []).append(fault)
            else:
                self._due.setdefault(fault.machine, []).append((fault.point, fault))
        self._num_done: dict[tuple[str, str], int] = {}
        self._lives: dict[str, Life] = {}
        self.points: dict[str, int] = {}
        self.struck: list[Fault] = []
        self._stopped: dict[str, asyncio.Event] = {}  # machines that stand still
        self._full_until: dict[str, float] = {}
        self._twice_until: dict[str, float] = {}
        self._late_until: dict[str, tuple[float, float]] = {}
        self._flips: dict[str, int] = {}
        self._tearing: dict[str, Fault] = {}
        self._down: set[str] = set()

    def join(self, world: World) -> None:
        self.world = world

    @property
    def _now(self) -> float:
        return self.world.clock.now()

    # Where a life may be interrupted

    async def at_await(self, life: Life) -> None:
        for fault in self._due_now(life):
            self._strike(fault, life)
        if (until := self._late_until.get(life.machine)) is not None and life.alive:
            share = (self.points[life.machine] * 7919 % 97) / 97.0  # as good as chance, and the same each time
            if self._now < until[0]:
                await self.world.clock.sleep(until[1] * share)
        while life.alive and (stopped := self._stopped.get(life.machine)) is not None:
            await stopped.wait()

    def at_file(self, life: Life, event: str) -> None:
        if not life.alive:
            raise Killed
        for fault in self._due_now(life):
            self._strike(fault, life)
        if self._tearing.pop(life.machine, None) is not None or not life.alive:
            if life.alive:
                self._kill(life, 1.0)
            raise Killed
        if event == "open" and self._now < self._full_until.get(life.machine, 0.0):
            raise no_space(life.folder)

    def on_the_way(self, life: Life, method: str, message: bytes) -> tuple[bytes, ...]:
        if method == "Control" and self._now < self._twice_until.get(life.machine, 0.0):
            return (message, message)
        bulk = (method == "PutObject" and is_chunk(message)) or (method == "Data" and len(message) > 256)
        if self._flips.get(life.machine, 0) and bulk:
            self._flips[life.machine] -= 1
            return (flipped(message),)
        return (message,)

    def did(self, life: Life, what: str) -> None:
        if not life.alive or not self._aimed:
            return
        machine = life.machine
        self._num_done[machine, what] = nth = self._num_done.get((machine, what), 0) + 1
        for fault in self._aimed.pop((machine, what, nth), ()):
            insort(
                self._due.setdefault(machine, []), (self.points.get(machine, 0) + fault.point, fault),
                key=lambda due: due[0],
            )  # fmt: skip

    def _due_now(self, life: Life) -> list[Fault]:
        machine = life.machine
        if self._lives.get(machine) is not life:
            self._lives[machine] = life
            self.did(life, BOOT)
        self.points[machine] = number = self.points.get(machine, 0) + 1
        due = self._due.get(machine, [])
        found: list[Fault] = []
        while due and due[0][0] <= number:
            found.append(due.pop(0)[1])
        return found

    def stands_still(self, machine: str) -> bool:
        return machine in self._stopped

    # What happens

    def _strike(self, fault: Fault, life: Life) -> None:
        if not life.alive:
            return
        machine = fault.machine
        self.struck.append(fault)
        self._told(f"{self._now:9.3f} {fault}")
        match fault.kind:
            case "crash":
                self._kill(life, fault.lasts_s)
            case "wiped":
                self._kill(life, fault.lasts_s, keeps_disk=False)
            case "torn":
                self._tearing[machine] = fault  # at the next file operation
            case "hang":
                self._stopped.setdefault(machine, asyncio.Event())
                self._later(fault.lasts_s, lambda: self._resume(machine))
            case "slow":
                self.world.slowness[machine] = 10.0
                self._later(fault.lasts_s, lambda: self.world.slowness.pop(machine, None))
            case "partition":
                for id in self._links(machine):
                    self.world.network.partition(id)
                self._later(fault.lasts_s, lambda: self._heal(machine))
            case "cut":
                for id in self._links(machine):
                    self.world.network.cut(id)
            case "corrupt":
                self._flips[machine] = self._flips.get(machine, 0) + 1 + fault.point % 3
            case "duplicate":
                self._twice_until[machine] = self._now + fault.lasts_s
            case "delay":
                self._late_until[machine] = (self._now + fault.lasts_s, min(fault.lasts_s / 20, 1.0))
            case "full":
                self._full_until[machine] = self._now + fault.lasts_s
            case "clock":
                self.world.jumps_s[machine] = self.world.jumps_s.get(machine, 0.0) + (fault.lasts_s - 10.0) * 1000.0
            case "leave":
                if (agent := self.world.hosts[WorkerId(machine)].agent) is not None:
                    agent.leave()  # whoever watches the world brings it back

    def _links(self, machine: str) -> list[WorkerId]:
        return list(self.world.hosts) if machine == coordinator else [WorkerId(machine)]

    def _resume(self, machine: str) -> None:
        if (stopped := self._stopped.pop(machine, None)) is not None:
            stopped.set()

    def _heal(self, machine: str) -> None:
        for id in self._links(machine):
            self.world.network.heal(id)

    def _kill(self, life: Life, down_s: float, *, keeps_disk: bool = True) -> None:
        machine = life.machine
        if machine == coordinator:
            self.world.kill_coordinator(keeps_disk=keeps_disk)
        else:
            self.world.kill(machine, keeps_disk=keeps_disk)
        self._resume(machine)
        self._down.add(machine)
        self._later(down_s, lambda: self.revive(machine))

    def revive(self, machine: str) -> None:
        """Start a machine that is down, or whose process has ended by itself."""
        self._down.discard(machine)
        if machine == coordinator:
            self.world.restart()
        elif (task := self.world.hosts[WorkerId(machine)].task) is None or task.done():
            self.world.kill(machine)
            self.world.switch_on(WorkerId(machine))

    def bring_back(self, machine: str, seconds: float) -> None:
        """Start again a machine whose process has ended by itself, after a while."""
        self._down.add(machine)
        self._later(seconds, lambda: self.revive(machine))

    def full_disk(self, machine: str, error: BaseException) -> bool:
        """Whether that is the fault of a disk that was full by our doing."""
        return machine in self._full_until and isinstance(error, ResourceError | OSError)

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        self._later(seconds, do)

    def _later(self, seconds: float, do: Callable[[], object]) -> None:
        self.world.later(seconds, do)

    def is_down(self, machine: str) -> bool:
        return machine in self._down


def flipped(message: bytes) -> bytes:
    """With one bit of its data changed."""
    at = CHUNK_HEADER_BYTES + (len(message) - CHUNK_HEADER_BYTES) // 2
    return b"".join((message[:at], bytes([message[at] ^ 1]), message[at + 1 :]))
