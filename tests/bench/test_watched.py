"""What is said of a watched run: worked out by hand for two workers of which one is twice as fast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from potluck.bench.watched import Watched
from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.fleet.config import FleetConfig
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.strategy import Strategy
from potluck.strategies.streaming_diloco import StreamingDiLoCo, StreamingDiLoCoConfig
from potluck.transport.memory import Link


async def watched_to_the_end(
    problem: Problem, strategy: Strategy, folder: Path, *, disturb: Callable[[World], None] = lambda _: None
) -> tuple[World, Watched]:
    """Two workers with steps of a second."""
    plan = problem.plan(strategy)
    world = World(plan, problem.make_deck, folder, clock=VirtualClock(), make_executor=InlineExecutor)
    watched = Watched(
        world, model=problem.model(), held_out=problem.validation, batch_size=4, seq_len=problem.seq_len,
        on_commit=lambda: None,
    )  # fmt: skip
    for name in ("w1", "w2"):
        watched.add(name, step_s=1.0, link=Link(rtt_s=0.01))
    await world.start()
    disturb(world)
    await world.finish()
    return world, watched


def test_work_that_was_broken_off_counts_as_long_as_it_took(tmp_path: Path) -> None:
    """In the first round w2 dies after 4 of 8 steps, is back 2 s later and does them again."""
    problem = Problem(num_rounds=2, validate=False, fleet=FleetConfig(min_workers=2, reconnect_s=20.0))

    def disturb(world: World) -> None:
        world.later(4.0, lambda: world.kill_for("w2", 2.0))

    strategy = DiLoCo(DiLoCoConfig(num_inner_steps=8))
    _, watched = run_virtual(watched_to_the_end(problem, strategy, tmp_path, disturb=disturb))
    assert watched.seconds == pytest.approx(4 + 2 + 8 + 8, abs=1.5)
    assert watched.utilisation == pytest.approx((8 + 4 + 8 + 8 + 8) / (2 * watched.seconds), rel=0.02)
    assert watched.counted_utilisation == pytest.approx(4 * 8 / (2 * watched.seconds), rel=1e-6)


def test_work_that_was_cut_short_counts_up_to_there(tmp_path: Path) -> None:
    """In the fourth round w2 becomes three times as slow: it is told to end after some of its steps."""
    problem = Problem(num_rounds=5, validate=False, fleet=FleetConfig(min_workers=2, balance="time"))

    def disturb(world: World) -> None:
        world.later(3 * 8 + 1.0, lambda: world.slowness.update(w2=3.0))

    strategy = DiLoCo(DiLoCoConfig(num_inner_steps=8))
    world, watched = run_virtual(watched_to_the_end(problem, strategy, tmp_path, disturb=disturb))
    left = [e.detail["cut_short"] for e in world.events if e.kind == "round"]
    assert left[:3] == [{}] * 3 and left[3].keys() == {"w2"}
    assert all(end - begin <= 3.0 + 1e-6 for begin, end in watched._trained)
    assert 0.9 < watched.utilisation <= 1.0


def test_what_is_validated_first_is_no_part_of_the_training(tmp_path: Path) -> None:
    """Nor does who has validated fetch the model a second time to train, in fragments as it comes."""
    problem = Problem(num_rounds=3, fleet=FleetConfig(min_workers=2))
    config = StreamingDiLoCoConfig(num_inner_steps=8, num_fragments=2, overlap_steps=0)
    model_bytes = 4 * problem.plan(StreamingDiLoCo(config)).layout.numel
    _, watched = run_virtual(watched_to_the_end(problem, StreamingDiLoCo(config), tmp_path))
    assert watched.joined_bytes.keys() == {"w1", "w2"}
    assert all(model_bytes < joined < 1.2 * model_bytes for joined in watched.joined_bytes.values())
    assert watched.seconds == pytest.approx(3 * 4, abs=0.5)


def test_a_barrier_leaves_the_faster_of_two_idle_half_of_the_time(tmp_path: Path) -> None:
    problem = Problem(num_rounds=3, fleet=FleetConfig(min_workers=2))
    plan = problem.plan(DiLoCo(DiLoCoConfig(num_inner_steps=8)))
    commits: list[tuple[float, float]] = []

    async def main() -> tuple[World, Watched]:
        world = World(plan, problem.make_deck, tmp_path, clock=VirtualClock(), make_executor=InlineExecutor)
        watched = Watched(
            world, model=problem.model(), held_out=problem.validation, batch_size=4, seq_len=problem.seq_len,
            on_commit=lambda: commits.append((watched.seconds, watched.loss())),
        )  # fmt: skip
        for name, step_s in (("w1", 1.0), ("w2", 2.0)):
            watched.add(name, step_s=step_s, link=Link(rtt_s=0.01))
        await world.start()
        await world.finish()
        return world, watched

    world, watched = run_virtual(main())
    assert [at for at, _ in commits] == pytest.approx([16.0, 32.0, 48.0], abs=1.5)
    assert watched.seconds == commits[-1][0]
    assert watched.utilisation == pytest.approx((24 + 48) / (2 * watched.seconds), rel=1e-6)
    assert watched.counted_utilisation == pytest.approx(watched.utilisation, rel=1e-6)
    assert world.last is not None
    assert commits[-1][1] == pytest.approx(world.last.losses[3], abs=1e-4)  # as the workers have it
    assert set(watched.joined_bytes) == {"w1", "w2"} and min(watched.joined_bytes.values()) > 0
