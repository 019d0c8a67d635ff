"""The world without values agrees with the one that has them, and plays faults as the shipping code meets them."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.coordinator.deck import Deck
from potluck.coordinator.plan import Plan
from potluck.fleet.config import FleetConfig
from potluck.optim.inner import InnerConfig
from potluck.planner.flops import step_work
from potluck.planner.memory import ModelDims
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.simulator.fleets import Device, machines
from potluck.simulator.large.device_faults import DeviceFault, draw_faults
from potluck.simulator.large.meta import CoordinatorMachine, MetaObjects
from potluck.simulator.large.report import ScaleReport
from potluck.simulator.large.scale import simulate_scale
from potluck.storage.objects import ObjectStore
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.fed_avg import FedAvg, FedAvgConfig
from potluck.strategies.strategy import Strategy
from potluck.strategies.sync_sgd import SyncSGD, SyncSGDConfig
from potluck.transport.memory import Link
from potluck.types.ids import WorkerId
from potluck.worker.need import replica_memory

at_once = CoordinatorMachine(
    check_bytes_per_s=math.inf, add_bytes_per_s=math.inf, apply_bytes_per_s=math.inf, encode_bytes_per_s=math.inf
)
fleet = [
    Device(
        name="w", count=4, flops=(1e5, 4e5), up_bytes_per_s=(2e4, 1e5), down_bytes_per_s=(1e5, 2e5),
        rtt_s=(0.01, 0.05), idle_w=(10.0, 10.0), busy_w=(50.0, 50.0),
    )
]  # fmt: skip
num_steps = 4


def diloco() -> Strategy:
    return DiLoCo(DiLoCoConfig(num_inner_steps=num_steps, min_reply_fraction=0.5))


def meta(problem: Problem, strategy: Strategy, folder: Path, faults: list[DeviceFault] | None = None) -> ScaleReport:
    stored = ObjectStore(folder / "shards")

    def make_deck(objects: ObjectStore) -> Deck:
        deck = problem.make_deck(stored)
        assert isinstance(objects, MetaObjects)
        for digest in stored.digests():
            objects.place(digest, stored.size(digest))
        return deck

    return simulate_scale(
        problem.plan(strategy), fleet, seed=3, faults=faults or [], coordinator=at_once, make_deck=make_deck
    )


def costs(plan: Plan, lease: pb.Lease, flops: float) -> float:
    """What a task takes on a device, as the cost model has it."""
    dims = ModelDims.of(plan.spec.model_config_json, plan.layout.numel)
    num_sequences = sum(s.stop - s.start for s in lease.spans)
    work = step_work(dims, seq_len=plan.spec.seq_len, num_tokens=num_sequences * plan.spec.seq_len)
    return work.flops / (3 if lease.held_out else 1) / flops


def real(problem: Problem, strategy: Strategy, folder: Path) -> tuple[World, list[float], dict[WorkerId, int]]:
    """The same devices with values: the world, its rounds' seconds, and bytes of shards that each device fetched."""
    plan = problem.plan(strategy)

    async def main() -> World:
        world = World(plan, problem.make_deck, folder, clock=VirtualClock(), make_executor=InlineExecutor)
        await world.start()
        for each in machines(fleet, seed=3):
            link = Link(up_bytes_per_s=each.up_bytes_per_s, down_bytes_per_s=each.down_bytes_per_s, rtt_s=each.rtt_s)
            world.add(each.id, link=link, cost_s=lambda lease, flops=each.flops: costs(plan, lease, flops))
        await world.finish()
        return world

    world = run_virtual(main())
    assert world.last is not None
    shards = set(world.last.deck.digests())
    fetched = {
        id: sum(store.size(d) for d in store.digests() & shards)
        for id in world.hosts
        for store in [ObjectStore(folder / id / "runs" / "contract" / "objects")]
    }
    return world, [float(e.detail["seconds"]) for e in world.events if e.kind == "round"], fetched


@pytest.mark.parametrize("method", ["diloco", "sync_sgd"])
def test_without_values_a_run_takes_as_long_and_moves_as_much(method: str, tmp_path: Path) -> None:
    def make() -> Strategy:
        return diloco() if method == "diloco" else SyncSGD(SyncSGDConfig())

    def problem() -> Problem:
        made = Problem(num_rounds=3, up_codec="int8", fleet=FleetConfig(min_workers=4, no_progress_s=600.0))
        made.inner = made.inner.model_copy(update={"warmup": 0.0})  # a step of rate 0 makes no new version to move
        made.validate = False  # the world with values cannot interrupt the copy of a task that came too late
        return made

    world, round_s, fetched = real(problem(), make(), tmp_path / "real")
    report = meta(problem(), make(), tmp_path / "meta")
    assert report.round_s == pytest.approx(round_s, rel=0.02)
    assert [d.id for d in report.devices] == list(world.hosts)
    assert {d.id: d.up_bytes for d in report.devices} == world.object_bytes_up
    assert {d.id: d.down_bytes - fetched[d.id] for d in report.devices} == world.object_bytes_down
    assert world.last is not None and world.last.state is not None
    assert report.num_tokens == world.last.state.tokens


def test_the_same_seed_gives_the_same_report(tmp_path: Path) -> None:
    faults = [DeviceFault(at_s=20.0, device=WorkerId("w-2"), kind="crash")]
    one, two = (run_with(tmp_path / name, *faults) for name in ("one", "two"))
    assert one == two
    assert one.num_lost == 1


def test_phases_of_a_device_add_up_to_the_run_and_give_its_energy(tmp_path: Path) -> None:
    report = meta(Problem(num_rounds=2), diloco(), tmp_path)
    for number, device in enumerate(report.devices):
        spans = [s for s in report.timeline if s.device == number]
        by_phase = {p: sum(s.stop_s - s.start_s for s in spans if s.phase == p) for p in ("compute", "send", "receive")}
        assert device.phases.compute_s == pytest.approx(by_phase["compute"])
        assert device.phases.send_s == pytest.approx(by_phase["send"])
        assert device.phases.receive_s == pytest.approx(by_phase["receive"])
        assert device.phases.total_s == pytest.approx(report.seconds)
        assert device.energy_j == pytest.approx(10 * report.seconds + 40 * device.phases.compute_s)
        assert device.num_rounds == 2
    assert report.energy_j is None  # of the coordinator no power is known


def run_with(tmp_path: Path, *faults: DeviceFault, num_rounds: int = 3) -> ScaleReport:
    problem = Problem(num_rounds=num_rounds, fleet=FleetConfig(min_workers=3, no_progress_s=600.0), validate=False)
    return meta(problem, diloco(), tmp_path, list(faults))


def end_of_work(report: ScaleReport, device: int, round: int) -> float:
    """A second before it has computed what it has to in that round."""
    span = [s for s in report.timeline if s.device == device and s.phase == "compute"][round]
    return span.stop_s - 1.0


def test_a_device_that_falls_silent_is_missed_after_three_heartbeats_and_the_grace(tmp_path: Path) -> None:
    calm = run_with(tmp_path / "calm")
    slowest = max(range(4), key=lambda i: calm.devices[i].phases.compute_s)
    at_s = end_of_work(calm, slowest, 1)
    silent = DeviceFault(at_s=at_s, device=calm.devices[slowest].id, kind="silence")
    report = run_with(tmp_path / "silent", silent)
    assert report.num_lost == 1 and report.num_rounds == 3
    begun_s = calm.seconds - sum(calm.round_s[1:])
    # 3 heartbeats of 2 s, 6 s to come back, at the next tick; then the outer step, at once here.
    assert begun_s + report.round_s[1] == pytest.approx(at_s + 12.0, abs=1.0)
    assert report.devices[slowest].num_rounds == 1


def test_a_device_that_crashes_and_returns_goes_on_with_the_run(tmp_path: Path) -> None:
    calm = run_with(tmp_path / "calm")
    slowest = max(range(4), key=lambda i: calm.devices[i].phases.compute_s)
    at_s, id = end_of_work(calm, slowest, 0), calm.devices[slowest].id
    crash = DeviceFault(at_s=at_s, device=id, kind="crash")
    back = DeviceFault(at_s=at_s + 2.0, device=id, kind="return")
    report = run_with(tmp_path / "back", crash, back)
    assert report.num_lost == 0 and report.devices[slowest].num_rounds == 3
    assert report.seconds > calm.seconds + 2.0  # the round's work was done again


def test_a_device_that_hangs_is_given_up_by_its_past(tmp_path: Path) -> None:
    calm = run_with(tmp_path / "calm", num_rounds=4)
    slowest = max(range(4), key=lambda i: calm.devices[i].phases.compute_s)
    hang = DeviceFault(
        at_s=end_of_work(calm, slowest, 2), device=calm.devices[slowest].id, kind="slow", factor=math.inf
    )
    report = run_with(tmp_path / "hung", hang, num_rounds=4)
    assert report.num_lost >= 1 and report.num_rounds == 4
    work_s = calm.devices[slowest].phases.compute_s / 4
    # Of two rounds its deadline is p + max(4 MAD, p, 5 s).
    assert report.round_s[2] - calm.round_s[2] == pytest.approx(max(work_s, 5.0), abs=3.0)


def test_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    small = replace(fleet[0], name="small", memory_bytes=(1e4, 1e4), count=2)
    report = simulate_scale(
        Problem(num_rounds=1, fleet=FleetConfig(min_workers=4)).plan(diloco()), [*fleet, small], coordinator=at_once
    )
    assert report.unfit == ("small-1", "small-2") and len(report.devices) == 4


def test_what_a_method_keeps_must_fit_too() -> None:
    problem = Problem(num_rounds=1, fleet=FleetConfig(min_workers=4), inner=InnerConfig(optimizer="sgd"))
    plan = problem.plan(FedAvg(FedAvgConfig(num_inner_steps=2, control_variates=True)))
    need = replica_memory(plan.spec, plan.layout.numel, precision="fp32")
    assert need.kept_bytes == 4 * plan.layout.numel
    enough = float(need.device_bytes + need.kept_bytes)
    more = [replace(fleet[0], name=f"m{m:.0f}", memory_bytes=(m, m), count=1) for m in (enough - 1, enough)]
    report = simulate_scale(plan, [*fleet, *more], coordinator=at_once)
    assert report.unfit == (f"m{enough - 1:.0f}-1",) and len(report.devices) == 5


def test_a_run_that_nobody_can_go_on_with_ends_and_says_so(tmp_path: Path) -> None:
    faults = [DeviceFault(at_s=30.0, device=WorkerId(f"w-{i}"), kind="crash") for i in (1, 2)]
    report = run_with(tmp_path, *faults)
    assert report.num_rounds < 3
    assert report.stopped.startswith("nobody comes any more: waiting for workers: 2 of 3 here (w-3, w-4)")


def test_faults_are_drawn_in_the_order_of_time_and_every_device_recovers() -> None:
    drawn = list(islice(draw_faults(fleet, seed=5, per_hour=2.0), 4000))
    assert drawn == list(islice(draw_faults(fleet, seed=5, per_hour=2.0), 4000))
    assert [f.at_s for f in drawn] == sorted(f.at_s for f in drawn)
    of_one = [f for f in drawn if f.device == "w-1"]
    assert all((f.kind == "return") == bool(i % 2) for i, f in enumerate(of_one))
    # Half an hour on average until the next fault, ten minutes until it is over.
    assert of_one[-1].at_s / len(of_one) == pytest.approx((1800 + 600) / 2, rel=0.1)


def test_a_class_has_faults_of_its_own() -> None:
    (device,) = fleet
    flaky = [replace(device, name="calm", count=2), replace(device, name="flaky", count=1, faults_per_hour=2.0)]
    drawn = list(islice(draw_faults(flaky, seed=5, per_hour=0.0), 2000))
    assert {f.device for f in drawn} == {"flaky-1"}
    assert drawn[-1].at_s / len(drawn) == pytest.approx((1800 + 600) / 2, rel=0.1)
    assert not list(draw_faults([replace(device, name="calm")], seed=5, per_hour=0.0))


def test_a_run_under_drawn_faults_ends(tmp_path: Path) -> None:
    problem = Problem(num_rounds=6, fleet=FleetConfig(min_workers=1, no_progress_s=600.0), validate=False)
    faults = draw_faults(fleet, seed=2, per_hour=30.0)
    report = simulate_scale(problem.plan(diloco()), fleet, seed=3, faults=faults, coordinator=at_once)
    assert report.num_rounds == 6 and report.num_lost > 0 and report.stopped == ""
