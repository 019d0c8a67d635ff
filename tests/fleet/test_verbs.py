"""The verbs of a fleet, by toy strategies on the virtual clock, through the shipping hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor
from worlds import virtual_world

from potluck.clock import SystemClock, ThreadExecutor, run_virtual
from potluck.fleet.config import FleetConfig
from potluck.fleet.live import LiveFleet
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.fleet import Fleet, Reply, WorkerInfo
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.task import BoundTask, Result, task
from potluck.types.errors import RoundFailed, RunStopped
from potluck.types.ids import WorkerId
from potluck.types.vector import Vector


class NoSettings(BaseModel):
    pass


@dataclass(frozen=True, kw_only=True)
class Seen(State):
    """A state that keeps what its rounds brought."""

    values: tuple[Any, ...] = ()


class Toy:
    """A strategy whose round is a function of state and fleet that returns what it saw."""

    Config: ClassVar[type[BaseModel]] = NoSettings
    State: ClassVar[type[State]] = Seen

    def __init__(self, play: Callable[[Seen, Fleet], Any]) -> None:
        self._play = play

    def init(self, run: RunFacts) -> Seen:
        return Seen(params=run.initial)

    async def run_round(self, state: Seen, fleet: Fleet) -> Seen:
        seen = await self._play(state, fleet)
        return replace(state, round=state.round + 1, values=(*state.values, *seen))

    def estimate(self, run: RunFacts) -> RoundBytes:
        return RoundBytes(up=0, down=0)


@task("toy.multiply")
def multiply(replica: object, *, a: Tensor, b: Tensor) -> Result:
    return Result({"rows": len(a)}, inline={"c": a @ b})


@task("toy.count")
def count(replica: object, *, number: int) -> Result:
    return Result({"number": number})


@task("toy.weigh")
def weigh(replica: object, *, theta: Vector) -> Result:
    return Result({"numel": theta.numel})


@task("toy.fail")
def fail(replica: object, *, number: int) -> Result:
    raise ValueError(f"number {number} cannot be done")


@task("toy.session", kind="session")
def session(replica: Any, *, num_steps: int) -> Result:
    total = 0
    for step in range(num_steps):
        replica.mailbox.emit(step, {"step": step}, {})
        total += replica.mailbox.take(step)["value"]
    return Result({"total": total})


@task("toy.listening", kind="session")
def listening(replica: Any, *, num_steps: int) -> Result:
    for step in range(num_steps):
        theta = replica.mailbox.take(step)["theta"]
        replica.mailbox.emit(step, {"sum": float(theta.tensor().double().sum())}, {})
    return Result({})


def double(x: Tensor, **_: Any) -> list[Tensor]:
    return [2 * x]


def second(_: pb.Lease) -> float:
    return 1.0


def play(
    folder: Path,
    rounds: Callable[[Seen, Fleet], Any],
    *,
    num_rounds: int = 1,
    costs: dict[str, Callable[[pb.Lease], float]] | None = None,
    disturb: Callable[[World], Any] | None = None,
    **fleet: Any,
) -> tuple[Seen, World]:
    costs = costs or {"w1": second, "w2": second}
    problem = Problem(num_rounds=num_rounds, validate=False)
    problem.fleet = FleetConfig(min_workers=len(costs), **{"no_progress_s": 20.0, **fleet})

    async def main() -> tuple[Seen, World]:
        world = virtual_world(problem, Toy(rounds), folder)
        for name, cost_s in costs.items():
            world.add(name, cost_s=cost_s)
        await world.start()
        if disturb is not None:
            await disturb(world)
        state = await world.finish()
        assert isinstance(state, Seen)
        return state, world

    return run_virtual(main())


def test_map_carries_inline_tensors_both_ways(tmp_path: Path) -> None:
    a, b = torch.arange(12.0).reshape(4, 3), torch.eye(3) * 2

    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        tasks = [multiply.bind(a=a[i : i + 1], b=b) for i in range(4)]
        replies = await fleet.map(tasks, key="tiles")
        product = torch.cat([r.inline["c"] for r in replies])
        assert torch.equal(product, a @ b)
        return [int(r.scalars["rows"]) for r in replies]

    state, _ = play(tmp_path, rounds)
    assert state.values == (1, 1, 1, 1)


def test_map_gives_the_work_of_a_dead_worker_to_another(tmp_path: Path) -> None:
    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        replies = await fleet.map([count.bind(number=i) for i in range(6)], key="bag")
        return [(r.scalars["number"], r.worker) for r in replies]

    async def disturb(world: World) -> None:
        await world.clock.sleep(3.5)
        await world.crash("w2")

    state, _ = play(tmp_path, rounds, costs={"w1": second, "w2": lambda _: 1e4}, disturb=disturb)
    assert [n for n, _ in state.values] == list(range(6))
    assert {w for _, w in state.values} == {"w1"}


def test_a_slow_copy_loses_against_a_second_one(tmp_path: Path) -> None:
    """Near the end the slowest task is issued twice and the first valid reply wins."""

    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        return [r.worker for r in await fleet.map([count.bind(number=i) for i in range(4)], key="bag")]

    state, world = play(
        tmp_path, rounds, costs={"w1": second, "w2": lambda _: 1000.0}, no_progress_s=5000.0, deadlines=False
    )
    assert set(state.values) == {"w1"}
    assert world.trace[-1][0] - world.trace[0][0] < 60.0


def test_a_task_that_fails_everywhere_ends_the_round_with_its_reason(tmp_path: Path) -> None:
    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        return [r.scalars for r in await fleet.map([fail.bind(number=7)], key="bag")]

    with pytest.raises(RunStopped, match="number 7 cannot be done"):
        play(tmp_path, rounds, max_discarded_rounds=1, quarantine_after=10)


def test_one_bad_worker_does_not_end_a_bag_that_others_can_do(tmp_path: Path) -> None:
    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        return [r.worker for r in await fleet.map([count.bind(number=7) for _ in range(4)], key="bag")]

    def broken(lease: pb.Lease) -> float:
        raise ValueError("the disk is broken")

    state, world = play(tmp_path, rounds, costs={"w1": broken, "w2": lambda _: 15.0}, num_rounds=1)
    assert set(state.values) == {"w2"}
    assert world.last is not None and world.last.roster.members[WorkerId("w1")].quarantined.startswith("3 failed tasks")


def test_what_fails_at_everyone_is_held_against_no_one(tmp_path: Path) -> None:
    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        tasks = {w.id: fail.bind(number=7) for w in fleet.workers()}
        return [r.worker for r in (await fleet.call(tasks, key="numbers", min_replies=1)).replies]

    with pytest.raises(RunStopped, match="number 7 cannot be done"):
        play(tmp_path, rounds, costs={f"w{i}": second for i in range(1, 5)}, max_discarded_rounds=6)


def bad_w1(state: Seen, fleet: Fleet) -> Any:
    """A round in which w1 can do nothing."""
    tasks = {w.id: (fail if w.id == "w1" else count).bind(number=7) for w in fleet.workers()}

    async def values() -> list[Any]:
        return [r.worker for r in (await fleet.call(tasks, key="numbers", min_replies=1)).replies]

    return values()


def test_a_run_of_quarantined_workers_stops_after_a_while(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="every worker here is quarantined: w1 is quarantined: 3 failed tasks"):
        play(tmp_path, bad_w1, costs={"w1": second})


def test_a_bad_worker_that_comes_first_does_not_end_the_run_of_those_who_follow(tmp_path: Path) -> None:
    async def disturb(world: World) -> None:
        await world.clock.sleep(15.0)  # w1 is quarantined by then
        world.add("w2", cost_s=second)

    state, _ = play(tmp_path, bad_w1, costs={"w1": second}, disturb=disturb)
    assert state.values == ("w2",)


def test_next_takes_replies_as_they_come(tmp_path: Path) -> None:
    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        def offer(worker: WorkerInfo) -> BoundTask:
            return count.bind(number=state.round)

        seen: list[Reply] = [await fleet.next(offer, key=f"arrival-{i}") for i in range(5)]
        return [r.worker for r in seen]

    state, _ = play(tmp_path, rounds, num_rounds=2, costs={"w1": lambda _: 1.0, "w2": lambda _: 4.0})
    assert len(state.values) == 10
    assert state.values.count("w1") > 2 * state.values.count("w2") > 0


def test_what_open_work_is_given_stays_though_the_state_has_moved_on(tmp_path: Path) -> None:
    """A worker may still be fetching it over a slow link when the round that handed it out is committed."""

    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        assert isinstance(fleet, LiveFleet)
        if state.round == 0:
            (doubled,) = await fleet.apply(double, state.params)
            await fleet.next(lambda w: weigh.bind(theta=doubled), key="arrival")
            return [fleet.publisher.digests[doubled]]
        held = [d for lease in fleet.book.open.values() for d in lease.message.objects]
        return [held == [state.values[0]] and fleet.objects.has(state.values[0])]

    state, _ = play(tmp_path, rounds, num_rounds=2, costs={"w1": second, "w2": lambda _: 15.0})
    assert state.values[1] is True


def test_next_delivers_again_what_a_discarded_round_took(tmp_path: Path) -> None:
    """A reply counts as consumed when a state that used it commits."""
    attempts: list[list[str]] = []

    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        keys = [(await fleet.next(lambda w: count.bind(number=1), key=f"arrival-{i}")).key for i in range(2)]
        attempts.append(keys)
        if len(attempts) == 1:
            raise RoundFailed("just this once")
        return keys

    state, _ = play(tmp_path, rounds)
    assert attempts[0] == attempts[1] == list(state.values)


def test_call_needs_its_minimum_of_replies(tmp_path: Path) -> None:
    calls: list[int] = []

    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        calls.append(len(fleet.workers()))
        work = {w.id: count.bind(number=1) for w in fleet.workers()}
        got = await fleet.call(work, key="c", min_replies=2)
        return [r.worker for r in got.replies]

    def hang_once() -> Callable[[pb.Lease], float]:
        times = iter([100.0])
        return lambda _: next(times, 1.0)

    state, world = play(tmp_path, rounds, costs={"w1": second, "w2": hang_once()})
    assert state.values == ("w1", "w2")
    reasons = [e.detail["reason"] for e in world.events if e.kind == "discarded"]
    assert len(reasons) >= 1 and all("1 of 2 workers replied and 2 must" in r for r in reasons)
    assert "w2 has made no progress" in reasons[0]


def play_for_real(folder: Path, rounds: Callable[[Seen, Fleet], Any]) -> tuple[Seen, World]:
    """One worker and one round on a real clock: sessions block their thread."""
    problem = Problem(num_rounds=1, validate=False)
    problem.fleet = FleetConfig(heartbeat_s=0.2)

    async def main() -> tuple[Seen, World]:
        world = World(
            problem.plan(Toy(rounds)), problem.make_deck, folder, clock=SystemClock(), make_executor=ThreadExecutor
        )
        world.add("w1")
        await world.start()
        state = await asyncio.wait_for(world.finish(), 30)
        assert isinstance(state, Seen)
        return state, world

    return asyncio.run(main())


def test_a_session_emits_and_takes_by_steps(tmp_path: Path) -> None:
    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        worker = fleet.workers()[0].id
        await fleet.open(worker, session.bind(num_steps=3), key="talk")
        seen: list[Any] = []
        for step in range(3):
            reply = await fleet.receive("talk", step)
            seen.append(reply.scalars["step"])
            await fleet.send("talk", step, {"value": 10 + step})
        return seen

    state, _ = play_for_real(tmp_path, rounds)
    assert state.values == (0, 1, 2)


def test_a_session_is_sent_versions_that_its_worker_does_not_have(tmp_path: Path) -> None:
    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        await fleet.open(fleet.workers()[0].id, listening.bind(num_steps=2), key="talk")
        (doubled,) = await fleet.apply(double, state.params)
        sums: list[Any] = []
        for step, theta in enumerate((state.params, doubled)):
            await fleet.send("talk", step, {"theta": theta})
            sums.append((await fleet.receive("talk", step)).scalars["sum"])
        return sums

    state, world = play_for_real(tmp_path, rounds)
    assert world.last is not None
    expected = world.last.params.read(state.params).double().sum().item()
    assert state.values == pytest.approx((expected, 2 * expected), rel=1e-12)
    assert [e.text for e in world.events if e.kind in ("lost", "discarded")] == []


def test_an_input_that_cannot_be_had_costs_the_session_and_not_the_worker(tmp_path: Path) -> None:
    tries: list[WorkerId] = []

    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        assert isinstance(fleet, LiveFleet)
        tries.append(fleet.workers()[0].id)
        if len(tries) > 1:
            return [len(tries)]
        await fleet.publisher.publish([("theta", state.params)])
        await fleet.open(tries[0], listening.bind(num_steps=1), key="talk")
        await fleet.send("talk", 0, {"theta": state.params})
        fleet.objects.remove(fleet.publisher.digests[state.params])
        return [(await fleet.receive("talk", 0)).scalars["sum"]]

    state, world = play_for_real(tmp_path, rounds)
    assert state.values == (2,)
    assert tries == ["w1", "w1"]
    (lost,) = [e.text for e in world.events if e.kind == "lost"]
    assert lost.startswith("w1 could not do toy.listening: its input of step 0 cannot be had: the object blake3:")
    (discarded,) = [e.detail["reason"] for e in world.events if e.kind == "discarded"]
    assert discarded == f"session talk is gone: {lost}"


def test_a_machine_that_became_slower_is_given_up_on_once(tmp_path: Path) -> None:
    """Its past does not predict it any more, so it is forgotten: else it would miss every deadline from then on."""
    took: list[float] = [1.0] * 4 + [30.0] * 4

    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        tasks = {worker.id: count.bind(number=state.round) for worker in fleet.workers()}
        await fleet.call(tasks, key="count", min_replies=1)
        return [state.round]

    def cost(_: pb.Lease) -> float:
        return took.pop(0) if took else 30.0

    state, world = play(tmp_path, rounds, num_rounds=7, costs={"w1": cost, "w2": second}, no_progress_s=100.0)
    assert state.values == tuple(range(7))
    assert [e.text for e in world.events if e.kind == "lost"] == [
        "w1 has worked 6 s on toy.count and its past allows 6 s"
    ]


def test_a_worker_that_is_here_and_does_nothing_is_not_waited_for_in_every_round(tmp_path: Path) -> None:
    """What it once began is no progress of what it was given since."""

    async def rounds(state: Seen, fleet: Fleet) -> list[Any]:
        tasks = {worker.id: count.bind(number=state.round) for worker in fleet.workers()}
        return [len((await fleet.call(tasks, key=f"count{state.round}", min_replies=1)).replies)]

    async def disturb(world: World) -> None:
        world.add("w3", cost_s=lambda _: 1e9)

    state, world = play(
        tmp_path, rounds, num_rounds=12, disturb=disturb, costs={"w1": second, "w2": second}, no_progress_s=30.0,
        deadlines=False,
    )  # fmt: skip
    assert state.values[1:] == (2,) * 11
    lost = [e.text for e in world.events if e.kind == "lost"]
    assert len(lost) == 3 and all("w3 has made no progress for 3" in text for text in lost)
    assert world.last is not None and "3 failed tasks in a row" in world.last.roster.members[WorkerId("w3")].quarantined
