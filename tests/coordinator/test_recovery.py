"""What a coordinator that was killed or lost files goes on from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds import virtual_world

from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.contract.checks import cost_s
from potluck.coordinator.events import Event
from potluck.fleet.config import FleetConfig
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.storage.params import ParamStore
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig, DiLoCoState, inner
from potluck.strategies.fleet import Fleet, weighted_mean
from potluck.transport.memory import Link
from potluck.transport.pace import Limits
from potluck.types.errors import CorruptError
from potluck.types.ids import Digest, WorkerId
from potluck.types.params import Params


def test_a_checkpoint_in_the_middle_of_a_round_loses_no_data_and_counts_none_twice(tmp_path: Path) -> None:
    problem = Problem(num_rounds=4, fleet=FleetConfig(min_workers=2))

    async def main() -> None:
        world = virtual_world(problem, DiLoCo(DiLoCoConfig(num_inner_steps=5)), tmp_path)
        for name in ("w1", "w2"):
            world.add(name, cost_s=cost_s)
        await world.start()
        while world.run is None or world.run.state is None or world.run.state.round < 2:
            await world.clock.sleep(0.1)
        await world.clock.sleep(1.0)  # in the third round
        (epoch,) = world.run.deck.account()
        assert (epoch["consumed"], epoch["outstanding"]) == (80, 40)
        await world.run.checkpoint(world.run.state)
        await world.crash_coordinator()
        for file in (world.disk("coordinator") / "params").glob("r*.f32"):
            file.unlink()
        await world.clock.sleep(1.0)
        await world.start()
        state = await world.finish()
        assert any("going back to the checkpoint of round 2" in event.text for event in world.events)
        assert (state.round, state.tokens) == (4, 160 * problem.seq_len)
        assert world.last is not None
        (epoch,) = world.last.deck.account()
        assert (epoch["consumed"], epoch["outstanding"]) == (160, 0)
        assert sum(row["tokens"] for row in world.last.contributions()) == state.tokens

    run_virtual(main())


def test_a_run_of_which_nothing_is_whole_says_so_and_leaves_its_ledger_alone(tmp_path: Path) -> None:
    """What was committed is not thrown away by itself: there may be a copy."""
    problem = Problem(num_rounds=4)

    async def main() -> None:
        world = virtual_world(problem, DiLoCo(DiLoCoConfig(num_inner_steps=5)), tmp_path)
        world.add("w1", cost_s=cost_s)
        await world.start()
        while world.run is None or world.run.state is None or world.run.state.round < 2:
            await world.clock.sleep(0.1)
        await world.crash_coordinator()
        disk = world.disk("coordinator")
        for file in [*(disk / "params").glob("r*.f32"), *disk.glob("checkpoints/*/params.safetensors")]:
            file.write_bytes(b"spoilt")
        for _ in range(2):
            await world.start()
            assert world.training is not None
            await asyncio.wait([world.training])
            with pytest.raises(CorruptError, match=r"has lost its 2 committed rounds: .*; no checkpoint is whole; .*"):
                world.training.result()
            assert world.last is not None and world.last.ledger.audit("SELECT count(*) FROM commits") == [(2,)]
            await world.crash_coordinator()

    run_virtual(main())


def test_a_stop_waits_for_a_checkpoint_that_is_being_saved(tmp_path: Path) -> None:
    """What a thread has begun does not end with the task that waits for it, and the stop saves one of that name."""
    held: list[bool] = []

    async def main() -> None:
        def cost_s(fn: Any) -> float:
            if getattr(fn, "__name__", "") == "save":
                assert world.run is not None
                held.append(world.run.whole.locked())
            return 0.0

        world = World(
            Problem(num_rounds=1, validate=False).plan(DiLoCo(DiLoCoConfig(num_inner_steps=1))), Problem().make_deck,
            tmp_path, clock=VirtualClock(), make_executor=lambda: InlineExecutor(cost_s),
        )  # fmt: skip
        world.add("w1")
        await world.start()
        await world.finish()

    run_virtual(main())
    assert held == [True]


def test_what_a_paused_coordinator_did_not_read_is_not_held_against_its_workers(tmp_path: Path) -> None:
    problem = Problem(num_rounds=2, validate=False, fleet=FleetConfig(min_workers=2))  # they stood still too

    async def main() -> World:
        world = virtual_world(problem, DiLoCo(DiLoCoConfig(num_inner_steps=2)), tmp_path)
        await world.start()
        for name in ("w1", "w2"):
            world.add(name, cost_s=lambda _: 5.0)
        await world.clock.sleep(2.0)
        asyncio.get_running_loop()._jumping.elapsed += 1000.0  # type: ignore[attr-defined]
        await world.finish()
        return world

    events = run_virtual(main()).events
    assert [e.detail["workers"] for e in events if e.kind == "round"] == [["w1", "w2"]] * 2
    assert not [e.text for e in events if e.kind in ("lost", "discarded")]


def run_of_two(folder: Path, problem: Problem, limits: Limits, link: Link) -> list[Event]:
    """Rounds of w1 and of w2, whose link is another one; what is told."""

    async def main() -> World:
        world = virtual_world(problem, DiLoCo(DiLoCoConfig(num_inner_steps=2)), folder)
        await world.start()
        assert world.run is not None
        world.run.pacer.limit(limits)
        world.add("w1", cost_s=lambda _: 2.0)
        world.add("w2", cost_s=lambda _: 2.0, link=link)
        await world.finish()
        return world

    return run_virtual(main()).events


def test_a_slow_link_makes_rounds_long_and_loses_none(tmp_path: Path) -> None:
    """An upload of ten times the work's own time, when the work's time is well known."""
    problem = Problem(num_rounds=6, validate=False, fleet=FleetConfig(min_workers=2))
    events = run_of_two(tmp_path, problem, Limits(), Link(up_bytes_per_s=28928 / 20))
    assert [e.detail["workers"] for e in events if e.kind == "round"] == [["w1", "w2"]] * 6
    assert not [e.text for e in events if e.kind == "lost"]


def test_who_waits_for_a_limit_of_rates_is_not_without_progress(tmp_path: Path) -> None:
    problem = Problem(num_rounds=2, validate=False, fleet=FleetConfig(min_workers=2, no_progress_s=20.0))
    events = run_of_two(tmp_path, problem, Limits(up=28928 / 60), Link())
    rounds = [e.detail for e in events if e.kind == "round"]
    assert [r["workers"] for r in rounds] == [["w1", "w2"]] * 2 and rounds[0]["seconds"] > 60
    assert not [e.text for e in events if e.kind == "lost"]


def test_an_update_that_was_lost_here_is_sent_again_and_its_work_is_not_done_again(tmp_path: Path) -> None:
    done: list[str] = []
    problem = Problem(num_rounds=2, validate=False)
    problem.fleet = FleetConfig(min_workers=1, no_progress_s=500.0)

    def cost_s(lease: pb.Lease) -> float:
        done.append(lease.key)
        return 1.0

    async def main() -> World:
        world = virtual_world(problem, DiLoCo(DiLoCoConfig(num_inner_steps=2)), tmp_path)
        await world.start()
        assert world.run is not None
        intake, objects = world.run.intake, world.run.objects
        asked: list[str] = []

        def has_lost_the_first(digest: str) -> bool:
            asked.append(digest)
            if len(asked) == 1:
                objects.remove(Digest(digest))
            return objects.has(Digest(digest))

        intake._has = has_lost_the_first  # type: ignore[method-assign]
        world.add("w1", cost_s=cost_s)
        await world.finish()
        assert len(asked) > 2
        return world

    world = run_virtual(main())
    assert len([e for e in world.events if e.kind == "round"]) == 2
    assert len(done) == 2
    assert world.trace[-1][0] - world.trace[0][0] < 30.0


@pytest.mark.parametrize("loss", ["gone", "torn", "old bytes"])
def test_an_accepted_update_that_the_disk_lost_costs_its_round_and_not_the_run(tmp_path: Path, loss: str) -> None:
    """As after a power cut: the ledger knows the update, and its bytes are not what came."""
    problem = Problem(num_rounds=2, validate=False)
    problem.fleet = FleetConfig(min_workers=2, no_progress_s=200.0, max_discarded_rounds=2)

    async def main() -> World:
        world = virtual_world(problem, DiLoCo(DiLoCoConfig(num_inner_steps=2, min_reply_fraction=1.0)), tmp_path)
        await world.start()
        world.add("w1", cost_s=lambda _: 1.0)
        world.add("w2", cost_s=lambda _: 30.0)
        await world.clock.sleep(20.0)
        assert world.run is not None
        (reply,) = world.run.ledger.replies(0, 0)
        name = world.run.objects.path(Digest(reply.object)).name
        await world.crash_coordinator()
        path = world.disk("coordinator") / "objects" / name
        match loss:
            case "gone":
                path.unlink()
            case "torn":
                path.write_bytes(path.read_bytes()[:100])
            case _:
                path.write_bytes(bytes(path.stat().st_size))
                (path.parent / "boot").write_text("another")
        await world.start()
        await world.finish()
        return world

    world = run_virtual(main())
    assert [e.detail["workers"] for e in world.events if e.kind == "round"] == [["w1", "w2"]] * 2
    (discarded,) = [e.text for e in world.events if e.kind == "discarded"]
    assert "an accepted update cannot be read any more" in discarded
    assert not [e.text for e in world.events if e.kind == "lost"]


class Adopts(DiLoCo):
    """A method whose state is the aggregate itself."""

    async def run_round(self, state: DiLoCoState, fleet: Fleet) -> DiLoCoState:
        work = inner.bind(theta=state.params, num_steps=1, progress=(0.0, 1.0)).granted(4)
        got = await fleet.call(
            {w.id: work for w in fleet.workers()}, key="inner", min_replies=1,
            reduce=weighted_mean("delta", by="num_tokens"),
        )  # fmt: skip
        return replace(
            state, params=got.reduced, round=state.round + 1, tokens=state.tokens + int(got.sum("num_tokens"))
        )


def test_an_aggregate_that_cannot_be_written_discards_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt: list[Path] = []

    def settle(store: ParamStore, handles: Iterable[Params], settle: Any = ParamStore.settle) -> None:
        if store._deferred and not spoilt:
            spoilt.extend(p for p in tmp_path.glob("coordinator/objects/blake3-*") if p.stat().st_size > 20_000)
            for path in spoilt:
                path.unlink()
        settle(store, handles)

    monkeypatch.setattr(ParamStore, "settle", settle)
    problem = Problem(num_rounds=2, validate=False, fleet=FleetConfig(min_workers=1, no_progress_s=200.0))

    async def main() -> World:
        world = virtual_world(problem, Adopts(DiLoCoConfig(num_inner_steps=1)), tmp_path)
        await world.start()
        world.add("w1", cost_s=lambda _: 1.0)
        await world.finish()
        return world

    events = run_virtual(main()).events
    assert [e.kind for e in events if e.kind in ("round", "discarded")] == ["discarded", "round", "round"]


def test_a_coordinator_that_comes_back_has_the_next_result_within_seconds(tmp_path: Path) -> None:
    """It waits neither for a heartbeat, nor for more workers than it takes to go on with a round that was begun."""

    async def main() -> None:
        problem = Problem(num_rounds=3, validate=False, fleet=FleetConfig(min_workers=3, reconnect_s=60.0))
        world = virtual_world(problem, DiLoCo(DiLoCoConfig(num_inner_steps=5)), tmp_path)
        await world.start()
        for name, cost in (("w1", 4.0), ("w2", 4.0), ("w3", 6.0)):
            world.add(name, cost_s=lambda _, cost=cost: cost)
        while world.run is None or world.run.state is None or world.run.state.round < 1:
            await world.clock.sleep(0.1)
        await world.clock.sleep(5.0)
        assert len(world.run.ledger.replies(1, 0)) == 2
        await world.crash_coordinator()
        await world.crash("w1")  # what it gave is here already
        await world.clock.sleep(8.0)
        await world.start()
        listening = world.clock.now()
        while len(world.run.ledger.replies(1, 0)) == 2:
            await world.clock.sleep(0.01)
        assert world.clock.now() - listening < 2.5
        while world.run.state is None or world.run.state.round < 2:
            await world.clock.sleep(0.1)
        rounds = [event.detail for event in world.events if event.kind == "round"]
        assert rounds[1]["workers"] == ["w1", "w2", "w3"]
        world.switch_on(WorkerId("w1"))
        await world.finish()

    run_virtual(main())
