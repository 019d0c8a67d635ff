"""One device of a simulated fleet: what survives its process, and its process while it is switched on."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from potluck.clock import Clock
from potluck.simulator.fleets import Machine
from potluck.simulator.large.meta_worker import (
    Deeds,
    DeviceCompute,
    Inline,
    MetaFolder,
    MetaRunner,
    MetaSources,
    MetaTrainer,
)
from potluck.simulator.large.network import FluidMover, FluidNetwork, Phase
from potluck.simulator.large.report import PhaseSpan
from potluck.strategies.run import RunSpec
from potluck.transport.connection import Connection
from potluck.types.profile import DeviceProfile
from potluck.worker.agent import Agent, Introduction
from potluck.worker.link import Link

quiet_heartbeat_s = 1e9
"""Between the messages that a device sends though nothing is new."""


@dataclass(frozen=True)
class Ground:
    """What all devices of a run have in common."""

    clock: Clock
    network: FluidNetwork
    spec: RunSpec
    deeds: Deeds
    folder: Path  # of all devices: none keeps anything there
    timeline: list[PhaseSpan] = field(default_factory=list[PhaseSpan])


class Node:
    """`number` is its place among the run's devices."""

    def __init__(self, ground: Ground, number: int, machine: Machine) -> None:
        self._ground, self._number, self.machine = ground, number, machine
        self._folder = MetaFolder(ground.folder)
        self.compute = DeviceCompute(ground.clock, machine.flops * machine.duty, partial(self._passed, "compute"))
        self._mover = FluidMover(ground.network, machine, self._folder.places, self._passed)
        self.phase_s: dict[Phase, float] = dict.fromkeys(("receive", "compute", "send"), 0.0)
        self.num_starts = 0
        self._agent: Agent | None = None
        self._task: asyncio.Task[None] | None = None

    def switch_on(self) -> None:
        if self._task is not None:
            return
        self.num_starts += 1
        machine, clock, spec = self.machine, self._ground.clock, self._ground.spec
        self._ground.network.refuse(machine.id, is_away=False)
        self.compute.slow_down(1.0)

        async def connect() -> Connection:
            return await self._ground.network.connect(machine)

        profile = DeviceProfile(device="cpu", device_name=machine.device, free_memory_bytes=int(machine.memory_bytes))
        allowed = ((spec.strategy, spec.strategy_digest),) if spec.strategy_digest else ()
        self._agent = Agent(
            Introduction(id=machine.id, profile=profile, strategies=allowed), connect=connect, equip=self._equip,
            clock=clock, told=lambda _: None, link=Link(clock, self._mover), least_heartbeat_s=quiet_heartbeat_s,
        )  # fmt: skip
        self._task = asyncio.create_task(self._agent.work())

    async def _equip(self, spec: RunSpec, link: Link) -> MetaRunner:
        ground, agent = self._ground, self._agent
        assert agent is not None
        runner = MetaRunner(
            ground.deeds, folder=self._folder, compute=self.compute,
            trainer=MetaTrainer(self._folder, ground.deeds.layout, self.compute, self._begins),
            sources=MetaSources(spec=ground.spec, objects=self._folder.places), link=link, clock=ground.clock,
            files=Inline(), note=agent.note,
        )  # fmt: skip
        await runner.restore()
        return runner

    async def stop(self) -> None:
        """Its process is gone; its folder stays."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._ground.network.cut(self.machine.id)

    def freeze(self) -> None:
        """It does nothing any more, and nobody knows yet."""
        self._ground.network.refuse(self.machine.id, is_away=True)
        self._ground.network.stop_transfers(self.machine.id)
        self.compute.slow_down(math.inf)

    def _begins(self) -> None:
        self._ground.network.seen(self.machine.id, "training")
        if self.compute.is_hung:
            self._ground.network.stalled(self.machine.id)

    def _passed(self, phase: Phase, start_s: float, stop_s: float) -> None:
        self.phase_s[phase] += stop_s - start_s
        self._ground.timeline.append(PhaseSpan(self._number, phase, start_s, stop_s))
