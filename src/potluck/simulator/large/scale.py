"""Large fleets: a run of a big model on thousands of machines, in seconds and without the model.

The coordinator's core, loop, service and fleet, the workers' agents and runners and the strategy are those that ship.
Modelled is what lies below: values (`meta`), computation (`meta_worker`), how objects move and signs of life
(`network`).
"""

from __future__ import annotations

import asyncio
import gc
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from potluck.clock import Lanes, VirtualClock, run_virtual
from potluck.coordinator.core import Coordinator
from potluck.coordinator.deck import Deck
from potluck.coordinator.events import Event
from potluck.coordinator.loop import train
from potluck.coordinator.plan import Plan
from potluck.coordinator.service import CoordinatorService
from potluck.planner.cost import Phases, energy_j
from potluck.planner.memory import check_fits
from potluck.simulator.fleets import Device, Machine, machines
from potluck.simulator.large.device_faults import DeviceFault
from potluck.simulator.large.meta import CoordinatorMachine, MetaKit, MetaObjects, MeteredExecutor
from potluck.simulator.large.meta_worker import Deeds, Inline
from potluck.simulator.large.network import FluidNetwork, Moved
from potluck.simulator.large.node import Ground, Node, quiet_heartbeat_s
from potluck.simulator.large.report import DeviceReport, ScaleReport
from potluck.storage.objects import ObjectStore
from potluck.strategies.registry import install_tasks
from potluck.strategies.state import State
from potluck.types.errors import RunStopped
from potluck.types.ids import WorkerId
from potluck.types.profile import Speeds
from potluck.worker.need import replica_memory

longest_play_s = 1e7
"""Of virtual time."""
vain_wait_s = 60.0
"""Devices that are on come back sooner."""
join_wait_s = 60.0
"""So long a run waits for all devices, before the first round."""


def simulate_scale(
    plan: Plan,
    devices: Sequence[Device],
    *,
    seed: int = 0,
    faults: Iterable[DeviceFault] = (),
    coordinator: CoordinatorMachine | None = None,
    make_deck: Callable[[ObjectStore], Deck] | None = None,
    told: Callable[[Event], None] = lambda _: None,
) -> ScaleReport:
    """Play a whole run, from when all devices have joined. The same arguments give the same report.

    `faults` are a sequence, or come in the order of time without end (`draw_faults`). `plan.initial` is never called.
    Without `make_deck` no data is dealt or moved, as with private text, and nothing is validated. RunStopped and its
    kin are in `stopped`, not raised.
    """
    with tempfile.TemporaryDirectory(prefix="potluck-scale-") as name, _rare_collections():
        fleet = SimulatedFleet(
            plan, machines(devices, seed=seed), Path(name), coordinator or CoordinatorMachine(), told=told
        )
        return run_virtual(fleet.play(faults, make_deck or _no_data))


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Millions of small objects live for long: to look through all of them again and again is a third of the time."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _no_data(_: ObjectStore) -> Deck:
    return Deck([], [], seed=0, shared=False)


class SimulatedFleet:
    """A run and its machines."""

    def __init__(
        self, plan: Plan, fleet: Sequence[Machine], folder: Path, machine: CoordinatorMachine, *,
        told: Callable[[Event], None],
    ) -> None:  # fmt: skip
        self.folder, self.clock, self._machine, self._told = folder, VirtualClock(), machine, told
        heartbeat_s = plan.fleet.heartbeat_s
        self.plan = replace(
            plan,
            initial=lambda: torch.empty(plan.layout.numel, device="meta"),
            fleet=plan.fleet.model_copy(update={"heartbeat_s": quiet_heartbeat_s}),
        )
        install_tasks(plan.spec.strategy)
        self.events: list[Event] = []
        self._objects = MetaObjects(folder / "objects")
        self.network = FluidNetwork(self.clock, machine, self._objects, heartbeat_s)
        self._ground = Ground(self.clock, self.network, plan.spec, Deeds(plan.spec, plan.layout), folder / "devices")
        unfit = _too_small(plan, fleet)
        self.unfit = tuple(m.id for m in fleet if m.id in unfit)
        fitting = [m for m in fleet if m.id not in unfit]
        self.nodes = {m.id: Node(self._ground, number, m) for number, m in enumerate(fitting)}

    async def play(self, faults: Iterable[DeviceFault], make_deck: Callable[[ObjectStore], Deck]) -> ScaleReport:
        if not self.nodes:
            raise RunStopped(f"none of the {len(self.unfit)} devices has the memory to train this model")
        kit = MetaKit(self._machine, self._objects)
        ledger, compute = Inline(), MeteredExecutor(self.clock, kit.meter, self._machine.num_threads)
        run = await Coordinator.open(
            self.plan, self.folder, deck=make_deck(self._objects), objects=self._objects, clock=self.clock,
            lanes=Lanes(ledger, ledger, compute), on_event=self._heard, kit=kit,
        )  # fmt: skip
        run.traffic = self.network.traffic
        self.network.open(CoordinatorService(run))
        watching = asyncio.create_task(run.fleet.watch())
        training = asyncio.create_task(self._train(run))
        for node in self.nodes.values():
            node.switch_on()
        happening = asyncio.create_task(self._happen(faults))
        waiting = asyncio.create_task(self._wait_in_vain(run, happening))
        stopped = ""
        try:
            await asyncio.wait((training, waiting), timeout=longest_play_s, return_when=asyncio.FIRST_COMPLETED)
            if training.done():
                await training
            elif waiting.done():
                stopped = waiting.result()
            else:
                stopped = f"{longest_play_s / 86_400:.0f} days are the longest that is played; give a smaller budget"
        except RunStopped as reason:
            stopped = str(reason)
        finally:
            seconds = self.clock.now()
            for task in (training, waiting, happening, watching):
                task.cancel()
            results = await asyncio.gather(training, waiting, happening, watching, return_exceptions=True)
            for node in self.nodes.values():
                await node.stop()
            await self.network.close()
            given = {row["id"]: row for row in run.contributions()}
            await run.close()
        for error in results:
            if isinstance(error, Exception) and not isinstance(error, RunStopped):
                raise error
        return self._report(run.state, seconds, stopped, given, kit.meter.total_s)

    async def _train(self, run: Coordinator) -> State:
        await run.recover()  # from now on devices can join
        while run.roster.num_connected < len(self.nodes) and self.clock.now() < join_wait_s:
            await self.clock.sleep(0.5)
        return await train(run)

    def _heard(self, event: Event) -> None:
        self.events.append(event)
        self._told(event)

    async def _happen(self, faults: Iterable[DeviceFault]) -> None:
        """Every fault at its time, and silent devices cut off when they are missed."""
        if isinstance(faults, Sequence):
            faults = sorted(faults, key=lambda fault: fault.at_s)
        missing: set[asyncio.Task[None]] = set()
        try:
            for fault in faults:
                await self.clock.sleep(max(fault.at_s - self.clock.now(), 0.0))
                if (node := self.nodes.get(fault.device)) is None:
                    continue
                match fault.kind:
                    case "crash":
                        await node.stop()
                    case "silence":
                        node.freeze()
                        missing.add(asyncio.create_task(self._miss(node, node.num_starts)))
                    case "slow":
                        node.compute.slow_down(fault.factor)
                        if math.isinf(fault.factor):
                            self.network.stalled(fault.device)
                    case "return":
                        await node.stop()
                        node.switch_on()
            if missing:
                await asyncio.wait(missing)
        finally:
            for task in missing:
                task.cancel()

    async def _wait_in_vain(self, run: Coordinator, happening: asyncio.Task[None]) -> str:
        """Ends when no device will come any more and the run waits for some; why, for people."""
        await asyncio.wait((happening,))
        num_looks = 0
        while num_looks < 2:
            await self.clock.sleep(vain_wait_s)
            num_looks = num_looks + 1 if run.fleet.phase.startswith("waiting for workers") else 0
        return f"nobody comes any more: {run.fleet.phase}"

    async def _miss(self, node: Node, start: int) -> None:
        await self.clock.sleep(self.network.silence_s)
        if node.num_starts == start:  # it was not switched on again meanwhile
            await node.stop()

    def _report(
        self, state: State | None, seconds: float, stopped: str, given: dict[str, dict[str, int]], work_s: float
    ) -> ScaleReport:
        rounds = [float(e.detail["seconds"]) for e in self.events if e.kind == "round"]
        machine = self._machine
        compute = Phases(compute_s=min(work_s / machine.num_threads, seconds))
        compute = replace(compute, wait_s=seconds - compute.compute_s)
        return ScaleReport(
            seconds=seconds,
            num_rounds=state.round if state else 0,
            num_tokens=state.tokens if state else 0,
            stopped=stopped,
            round_s=tuple(rounds),
            devices=tuple(self._device_report(n, seconds, given.get(n.machine.id, {})) for n in self.nodes.values()),
            unfit=self.unfit,
            num_lost=sum(e.kind == "lost" for e in self.events),
            coordinator_compute_s=work_s,
            coordinator_energy_j=energy_j(compute, Speeds(idle_w=machine.idle_w, load_w=machine.busy_w)),
            timeline=tuple(self._ground.timeline),
        )

    def _device_report(self, node: Node, seconds: float, given: dict[str, int]) -> DeviceReport:
        machine, moved = node.machine, self.network.moved.get(node.machine.id, Moved())
        busy_s = sum(node.phase_s.values())
        phases = Phases(
            compute_s=node.phase_s["compute"], send_s=node.phase_s["send"], receive_s=node.phase_s["receive"],
            wait_s=max(seconds - busy_s, 0.0),
        )  # fmt: skip
        return DeviceReport(
            id=machine.id,
            device=machine.device,
            phases=phases,
            up_bytes=moved.up_bytes,
            down_bytes=moved.down_bytes,
            num_rounds=given.get("rounds", 0),
            num_tokens=given.get("tokens", 0),
            energy_j=energy_j(
                Phases(compute_s=phases.compute_s, wait_s=seconds - phases.compute_s),
                Speeds(idle_w=machine.idle_w, load_w=machine.busy_w),
            ),
            seconds=seconds,
        )


def _too_small(plan: Plan, fleet: Sequence[Machine]) -> set[WorkerId]:
    """Which machines cannot hold the training of this model."""
    need = replica_memory(plan.spec, plan.layout.numel, precision=plan.spec.precision)
    return {
        m.id for m in fleet
        if check_fits(need, device="cpu", device_free_bytes=int(m.memory_bytes), host_free_bytes=0)
    }  # fmt: skip
