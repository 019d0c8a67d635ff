"""Churn and failures on a virtual clock, with real training: what workers that come and go cost in loss and in speed.

`churn`: in every round 30 % of the workers are killed somewhere in their task and start again up to a round later. The
loss after equal tokens is set beside that of the same run undisturbed.

`goodput`: each worker fails on average every third round and is back after `down_s`. Tokens per second and living
worker, beside those of the undisturbed run: with snapshots at most every H/4 steps, and once more with the disks lost.

All with `fleet.balance = "time"`, so that late work is cut short.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.fleet.config import FleetConfig
from potluck.optim.inner import InnerConfig
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.run import Budget
from potluck.transport.memory import Link

step_s = 1.0
batch_size = 4


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    loss: float
    tokens: int
    rounds: int
    seconds: float
    alive_s: float  # of all workers together


def bench_churn(
    *, workers: int = 10, rounds: int = 50, steps: int = 40, seeds: int = 3, down_s: float = 4.0,
    told: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Means over seeds; ratios of the disturbed run to the undisturbed one."""
    torch.set_num_threads(1)
    rows: list[dict[str, float]] = []
    for seed in range(1, seeds + 1):
        calm = _play(seed, workers, rounds, steps, None)
        churned = _play(seed, workers, rounds, steps, partial(_churn, seed=seed, steps=steps))
        failing = _play(seed, workers, rounds, steps, partial(_failures, seed=seed, steps=steps, down_s=down_s))
        diskless = _play(
            seed, workers, rounds, steps, partial(_failures, seed=seed, steps=steps, down_s=down_s, keeps_disk=False)
        )
        rows.append({
            "calm_loss_nats": calm.loss,
            "churn_loss_nats": churned.loss,
            "churn_loss_ratio": churned.loss / calm.loss,
            "churn_rounds": churned.rounds,
            "churn_time_ratio": churned.seconds / calm.seconds,
            "goodput_ratio": _goodput(failing) / _goodput(calm),
            "goodput_disks_lost_ratio": _goodput(diskless) / _goodput(calm),
        })  # fmt: skip
        told(f"seed {seed}: {rows[-1]}")
    figures = {name: round(statistics.fmean(row[name] for row in rows), 4) for name in rows[0]}
    return {"workers": workers, "rounds": rounds, "steps": steps, "seeds": seeds, "down_s": down_s} | figures


def _goodput(outcome: Outcome) -> float:
    """Tokens per second of a living worker."""
    return outcome.tokens / outcome.alive_s


def _play(
    seed: int, workers: int, rounds: int, steps: int, disturb: Callable[[World], Awaitable[None]] | None
) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        return run_virtual(_run(seed, workers, rounds, steps, disturb, Path(folder)))


async def _run(
    seed: int, workers: int, rounds: int, steps: int, disturb: Callable[[World], Awaitable[None]] | None, folder: Path
) -> Outcome:
    problem = Problem(
        seed=seed, num_shards=16, sequences_per_shard=256, num_rounds=rounds,
        inner=InnerConfig(lr=3e-3, batch_size=batch_size, warmup=0.05),
        fleet=FleetConfig(
            min_workers=max(1, workers // 2), snapshot_every_steps=max(1, steps // 4), balance="time"
        ),
    )  # fmt: skip
    plan = problem.plan(DiLoCo(DiLoCoConfig(num_inner_steps=steps, outer_momentum=0.6)))
    plan = replace(plan, budget=Budget(tokens=workers * rounds * steps * batch_size * problem.seq_len))
    world = World(plan, problem.make_deck, folder, clock=VirtualClock(), make_executor=InlineExecutor)
    for i in range(workers):
        world.add(f"w{i + 1}", link=Link(rtt_s=0.02), cost_s=_cost_s)
    await world.clock.sleep(1.0)
    await world.start()
    begun = world.clock.now()
    alive_before_s = world.alive_s()
    if disturb is not None:
        await disturb(world)
    while not world.training_is_over:
        await world.clock.sleep(0.05)
    seconds = world.clock.now() - begun
    alive_s = world.alive_s() - alive_before_s
    state = await world.finish()
    assert world.last is not None
    losses = world.last.losses
    return Outcome(loss=losses[max(losses)], tokens=state.tokens, rounds=state.round, seconds=seconds, alive_s=alive_s)


def _cost_s(lease: pb.Lease) -> float:
    return step_s * max(lease.num_sequences, 1) / batch_size


async def _churn(world: World, *, seed: int, steps: int) -> None:
    """In each round three in ten are killed at some moment of it, and come back within a round."""
    chance = random.Random(seed)
    round = -1
    while not world.training_is_over:
        await world.clock.sleep(0.05)
        if world.run is None or world.run.state is None or world.run.state.round == round:
            continue
        round = world.run.state.round
        for name in chance.sample(sorted(world.hosts), math.ceil(0.3 * len(world.hosts))):
            kill = partial(world.kill_for, name, chance.uniform(0.5, steps * step_s))
            world.later(chance.uniform(0.0, steps * step_s), kill)


async def _failures(world: World, *, seed: int, steps: int, down_s: float, keeps_disk: bool = True) -> None:
    """Each worker fails at exponentially distributed times, on average every three rounds' time."""
    chance = random.Random(seed)
    every_s = 3 * steps * step_s
    due = {name: world.clock.now() + chance.expovariate(1 / every_s) for name in sorted(world.hosts)}
    while not world.training_is_over:
        await world.clock.sleep(0.05)
        for name, at in due.items():
            if world.clock.now() >= at:
                world.kill_for(name, down_s, keeps_disk=keeps_disk)
                due[name] = world.clock.now() + down_s + chance.expovariate(1 / every_s)
