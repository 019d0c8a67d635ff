"""Workers that are held, that leave, and whose machine sleeps, in a whole run on the virtual clock."""

from __future__ import annotations

from pathlib import Path

import torch
from worker.test_killed import Watched, at_step, num_inner_steps, play, problem_of, round_is, until, w1

from potluck.clock import VirtualClock
from potluck.worker.agent import Agent


def agent_of(world: Watched) -> Agent:
    agent = world.hosts[w1].agent
    assert agent is not None
    return agent


def test_a_worker_that_is_held_for_a_moment_keeps_its_lease_and_goes_on(tmp_path: Path) -> None:
    expected, took_s, _ = play(tmp_path / "a", problem_of())

    async def hold(world: Watched) -> None:
        await at_step(world, 3.5)
        agent_of(world).hold()
        await world.clock.sleep(10.0)
        assert world.num_steps["w1"] == num_inner_steps + 2  # the piece under way is computed when its time has passed
        agent_of(world).release()

    got, held_s, world = play(tmp_path / "b", problem_of(every_steps=2), hold)
    assert torch.equal(got, expected)
    assert world.num_steps["w1"] == 3 * num_inner_steps
    assert took_s + 8.0 < held_s < took_s + 13.0
    assert [len(e.detail["workers"]) for e in world.events if e.kind == "round"] == [2, 2, 2]


def test_a_worker_that_leaves_hands_its_lease_back_at_once(tmp_path: Path) -> None:
    """Its data is dealt to the others in the next round, and the round waits for nothing."""

    async def leave(world: Watched) -> None:
        await at_step(world, 3.5)
        agent_of(world).leave()
        left_at = world.clock.now()
        assert world.run is not None
        await until(world, lambda: not world.run or not world.run.fleet.book.of(w1))
        assert world.clock.now() - left_at < 0.7  # a tick of the fleet
        await until(world, lambda: round_is(world, 2))
        world.switch_on(w1)

    problem = problem_of(every_steps=2)
    _, _, world = play(tmp_path, problem, leave)
    assert [len(e.detail["workers"]) for e in world.events if e.kind == "round"] == [2, 1, 2]
    assert next(e.detail["reason"] for e in world.events if e.kind == "left") == "left"
    assert world.last is not None and world.last.state is not None
    num_sequences = 5 * num_inner_steps * world.last.facts.inner.batch_size
    assert world.last.state.tokens == num_sequences * world.last.facts.seq_len
    epochs = world.last.deck.account()
    assert sum(e["outstanding"] for e in epochs) == 0
    assert [e["consumed"] for e in epochs if e["left"]] == [num_sequences % sum(map(len, problem.shards))]


def test_a_sleeping_machine_joins_again_when_it_wakes(tmp_path: Path) -> None:
    """Its monotonic clock stood still and the time of day did not."""

    async def sleep(world: Watched) -> None:
        assert isinstance(world.clock, VirtualClock)
        await at_step(world, 3.5)
        world.clock.epoch += 3600.0
        await world.clock.sleep(4.0)

    expected, _, _ = play(tmp_path / "a", problem_of())
    got, _, world = play(tmp_path / "b", problem_of(), sleep)
    assert torch.equal(got, expected)
    notes = [note for note in world.hosts[w1].notes if "slept" in note]
    assert notes == ["this machine slept for 3600 s; joining again"]
    assert [e.text for e in world.events if e.kind == "joined" and e.detail["worker"] == "w1"] == [
        "w1 joined (cpu)", "w1 is back (cpu)",
    ]  # fmt: skip


def test_a_worker_whose_coordinator_is_away_leaves_at_once(tmp_path: Path) -> None:
    async def leave(world: Watched) -> None:
        await at_step(world, 3.5)
        await world.crash_coordinator()
        await world.clock.sleep(30.0)
        left_at = world.clock.now()
        agent_of(world).leave()
        task = world.hosts[w1].task
        assert task is not None
        await until(world, task.done)
        assert world.clock.now() - left_at <= 0.02
        await world.start()
        world.switch_on(w1)

    _, _, world = play(tmp_path / "b", problem_of(every_steps=2), leave)
    assert world.num_steps["w1"] >= 2 * num_inner_steps
