"""What is said of a watched run: worked out by hand for two workers of which one is twice as fast."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.bench.watched import Watched
from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.fleet.config import FleetConfig
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.transport.memory import Link


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
