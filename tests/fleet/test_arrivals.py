"""Work without a barrier: `gather` on the virtual clock, through the shipping hosts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from worlds import virtual_world

from potluck.aggregation.config import AggregationConfig, Rule
from potluck.clock import run_virtual
from potluck.coordinator.divergence import Diverged
from potluck.fleet.config import FleetConfig
from potluck.optim.inner import InnerConfig
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.async_diloco import AsyncDiLoCo, AsyncDiLoCoConfig, AsyncDiLoCoState
from potluck.strategies.fleet import Fleet
from potluck.types.errors import RunStopped
from potluck.types.ids import Digest, WorkerId

Accepted = list[list[str]]
"""By commit, the workers whose updates counted, in the order of keys."""


class DivergingOnce(AsyncDiLoCo):
    """Its third commit is judged to be no good, once."""

    has_diverged = False

    async def run_round(self, state: AsyncDiLoCoState, fleet: Fleet) -> AsyncDiLoCoState:
        proposed = await super().run_round(state, fleet)
        if state.round == 2 and not self.has_diverged:
            self.has_diverged = True
            raise Diverged("it came apart", state.round)
        return proposed


def play(
    folder: Path, *, seconds: Sequence[float], num_rounds: int, disturb: Callable[[World], Any] | None = None,
    strategy: AsyncDiLoCo | None = None, fleet: dict[str, Any] | None = None, inner: InnerConfig | None = None,
    rule: Rule = "mean", **settings: Any,
) -> tuple[AsyncDiLoCoState, World, Accepted]:  # fmt: skip
    """`seconds` that each worker takes for a step."""
    problem = Problem(num_rounds=num_rounds, validate=False, aggregation=AggregationConfig(rule=rule))
    problem.fleet = FleetConfig.model_validate({"min_workers": len(seconds), "no_progress_s": 60.0, **(fleet or {})})
    problem.inner = inner or problem.inner
    strategy = strategy or AsyncDiLoCo(AsyncDiLoCoConfig(num_inner_steps=4, **settings))

    def cost(step_s: float) -> Callable[[pb.Lease], float]:
        return lambda lease: step_s * lease.num_sequences / 4

    async def main() -> tuple[AsyncDiLoCoState, World, Accepted]:
        world = virtual_world(problem, strategy, folder)
        for i, step_s in enumerate(seconds):
            world.add(f"w{i + 1}", cost_s=cost(step_s))
        await world.clock.sleep(1.0)
        await world.start()
        if disturb is not None:
            await disturb(world)
        accepted: Accepted = []
        while not world.training_is_over:
            await world.clock.sleep(0.1)
        assert world.run is not None
        for (rows,) in world.run.ledger.audit("SELECT accepted FROM commits ORDER BY round"):
            accepted.append([worker for _, worker, *_ in json.loads(rows)])
        state = await world.finish()
        assert isinstance(state, AsyncDiLoCoState)
        return state, world, accepted

    return run_virtual(main())


def test_updates_count_as_they_come(tmp_path: Path) -> None:
    _, world, accepted = play(tmp_path, seconds=[1.0, 2.4], num_rounds=7)
    assert accepted == [["w1"], ["w1"], ["w2"], ["w1"], ["w1"], ["w2"], ["w1"]]
    assert world.trace[-1][0] - world.trace[0][0] < 22.0  # 5 updates of w1 take 20 s: nobody waits


def test_those_beyond_the_quorum_are_given_a_grace_and_then_count_next_time(tmp_path: Path) -> None:
    """w1 and w2 take 4 s; w3 takes 4.8 s once, within a quarter of 4 s longer, and then 10 s, which is not."""
    pace = iter([1.2])

    async def slow_down(world: World) -> None:
        await world.crash("w3")
        world.hosts[WorkerId("w3")].cost_s = lambda lease: next(pace, 2.5) * lease.num_sequences / 4
        world.switch_on(WorkerId("w3"))

    _, _, accepted = play(tmp_path, seconds=[1.0] * 3, num_rounds=5, quorum=0.6, grace=0.25, disturb=slow_down)
    assert accepted[:2] == [["w1", "w2", "w3"], ["w1", "w2"]]
    assert ["w1", "w2", "w3"] in accepted[2:]
    assert all(len(set(commit)) == len(commit) for commit in accepted)


def test_a_rule_that_bears_wrong_workers_takes_one_update_of_each(tmp_path: Path) -> None:
    """However fast one is, and however many updates a commit takes: also where fewer workers are left than that."""

    async def lose_one(world: World) -> None:
        await world.clock.sleep(20.0)
        await world.crash("w4")
        world.hosts[WorkerId("w3")].cost_s = lambda _: 2.0

    _, _, accepted = play(
        tmp_path,
        seconds=[0.1, 1.0, 1.5, 2.0],
        num_rounds=6,
        rule="median",
        updates_per_commit=4,
        disturb=lose_one,
        fleet={"min_workers": 3},
    )
    assert ["w1", "w2", "w3", "w4"] in accepted[:3], accepted
    assert accepted[-1] == ["w1", "w2", "w3"]
    assert all(len(set(commit)) == len(commit) >= 3 for commit in accepted)


def test_a_buffer_takes_several_updates_of_one_worker_who_never_waits(tmp_path: Path) -> None:
    state, world, accepted = play(tmp_path, seconds=[1.0, 3.6], num_rounds=4, updates_per_commit=3)
    assert accepted == [["w1", "w1", "w1"], ["w1", "w1", "w2"], ["w1", "w1", "w2"], ["w1", "w1", "w1"]]
    assert state.tokens == 12 * 4 * 4 * 8
    assert world.trace[-1][0] - world.trace[0][0] < 42.0


def test_what_was_accepted_before_a_crash_of_the_coordinator_counts_once(tmp_path: Path) -> None:
    calm, _, accepted = play(tmp_path / "calm", seconds=[1.0, 1.7], num_rounds=3, updates_per_commit=3)

    async def disturb(world: World) -> None:
        await world.clock.sleep(7.5)  # w1 has delivered, w2 too; the third is under way
        await world.crash_coordinator()
        await world.start()

    state, _, again = play(tmp_path, seconds=[1.0, 1.7], num_rounds=3, updates_per_commit=3, disturb=disturb)
    assert accepted[0] == again[0] == ["w1", "w1", "w2"]
    assert state.tokens == calm.tokens


def test_an_update_is_checked_before_it_counts(tmp_path: Path) -> None:
    limits = {"max_update_norm": 1e-9, "quarantine_after": 2, "quarantine_s": 1e4}
    with pytest.raises(RunStopped, match=r"quarantined.*refused.*norm"):
        play(tmp_path, seconds=[1.0, 1.0], num_rounds=3, fleet=limits)


def test_a_run_that_came_apart_takes_no_work_along_that_began_before(tmp_path: Path) -> None:
    strategy = DivergingOnce(AsyncDiLoCoConfig(num_inner_steps=4))
    state, world, accepted = play(tmp_path, seconds=[1.0, 2.5], num_rounds=5, strategy=strategy)
    assert [e.detail["round"] for e in world.events if e.kind == "rolled_back"] == [2]
    assert len(accepted) == 5 and state.tokens == 5 * 4 * 4 * 8
    run = world.last
    assert run is not None
    assert sum(epoch["consumed"] for epoch in run.deck.account()) == state.tokens // 8


def check_books(world: World, state: AsyncDiLoCoState) -> None:
    """All that was trained counts, and no more is handed out than is at work or waits for its commit."""
    run = world.last
    assert run is not None
    account = run.deck.account()
    assert sum(epoch["consumed"] for epoch in account) == state.tokens // 8
    kept = [rows[-1] for rows in run.fleet.floating.leases.values() if rows[-1].status != "lost"]
    held = [span for row in kept for span in pb.Lease.FromString(row.lease).spans]
    assert sum(epoch["outstanding"] for epoch in account) == sum(span.stop - span.start for span in held)


def test_the_work_of_who_dies_is_given_up_while_the_others_go_on(tmp_path: Path) -> None:
    died_at: list[float] = []

    async def disturb(world: World) -> None:
        await world.clock.sleep(3.0)
        await world.crash("w2")
        died_at.append(world.clock.time())

    state, world, accepted = play(tmp_path, seconds=[1.0, 2.4], num_rounds=6, disturb=disturb, fleet={"min_workers": 1})
    assert accepted == [["w1"]] * 6
    (lost,) = [event for event in world.events if event.kind == "lost"]
    assert lost.text.startswith("w2 has been away for 6 s") and 6.0 <= lost.at - died_at[0] <= 7.0
    check_books(world, state)


def test_an_update_that_is_too_stale_is_dropped_and_its_data_dealt_again(tmp_path: Path) -> None:
    state, world, accepted = play(tmp_path, seconds=[1.0, 3.6], num_rounds=9, max_staleness=2)
    assert accepted == [["w1"]] * 9
    lost = [event for event in world.events if event.kind == "lost"]
    assert {event.detail["worker"] for event in lost} == {"w2"} and len(lost) == 2
    assert "w2 was 3 commits at an update, which counts after 2 at most" in lost[0].text
    check_books(world, state)


@pytest.mark.parametrize("restarts", [False, True])
def test_an_accepted_update_that_cannot_be_used_costs_its_commit_and_not_the_run(
    tmp_path: Path, restarts: bool
) -> None:
    """The disk loses w1's update, which the second commit of two would take; w1 has gone on from its state by then."""

    async def disturb(world: World) -> None:
        run = world.run
        assert run is not None
        while (run.state is None or run.state.round < 1) or not run.fleet.floating.replies:
            await world.clock.sleep(0.1)
        (reply,) = run.fleet.floating.replies.values()
        await world.clock.sleep(0.5)
        assert reply.worker == "w1" and len(run.fleet.book.of(WorkerId("w1"))) == 1
        name = run.objects.path(Digest(reply.object)).name
        if restarts:
            await world.crash_coordinator()
        (world.disk("coordinator") / "objects" / name).unlink()
        if restarts:
            await world.start()

    state, world, accepted = play(
        tmp_path, seconds=[1.0, 1.3], num_rounds=4, updates_per_commit=2, disturb=disturb,
        fleet={"max_discarded_rounds": 2},
    )  # fmt: skip
    (discarded,) = [event.text for event in world.events if event.kind == "discarded"]
    assert "an accepted update cannot be read any more" in discarded
    assert len(accepted) == 4 and state.tokens == 8 * 4 * 4 * 8
    assert not [event.text for event in world.events if event.kind == "note" and "afresh" in event.text]
    check_books(world, state)


@pytest.mark.parametrize("settings", [{}, {"quorum": 0.6}, {"updates_per_commit": 3}], ids=["one", "quorum", "buffer"])
def test_a_run_whose_losses_are_not_finite_anywhere_stops(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Nobody is to blame where all fail, so nobody is left out, and without a barrier no round would end by itself."""
    inner = InnerConfig(lr=1e18, batch_size=4, warmup=0.1)
    with pytest.raises(RunStopped, match=r"all others fail: w1 could not do .* the loss is nan"):
        play(tmp_path, seconds=[1.0, 1.0], num_rounds=5, inner=inner, **settings)


@pytest.mark.parametrize("settings", [{}, {"quorum": 1.0}], ids=["one", "quorum"])
def test_a_machine_whose_work_fails_discards_nobody_elses(tmp_path: Path, settings: dict[str, Any]) -> None:
    async def fail(world: World) -> None:
        agent = world.hosts[WorkerId("w2")].agent
        assert agent is not None

        async def no_work(*_: object) -> None:
            raise OSError("its memory is broken")

        while agent.runner is None:
            await world.clock.sleep(0.01)
        agent.runner._do = no_work  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]

    state, world, accepted = play(tmp_path, seconds=[2.0, 1.0], num_rounds=4, disturb=fail, **settings)
    assert state.round == 4
    assert accepted[1:] == [["w1"]] * 3
    assert world.last is not None and world.last.roster.members[WorkerId("w2")].num_quarantines
    assert not any(event.kind == "discarded" for event in world.events)
