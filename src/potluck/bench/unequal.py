"""Workers of unequal speed on a virtual clock, with real training: what waiting for the slowest costs, and going on.

Four workers at 1 : 1 : 2 : 4 train on equally many tokens:

`barrier`: DiLoCo, H steps of each worker in a round. `fixed`: asynchronous DiLoCo, H steps an update. `dynamic`: the
same with floor(H v / v_max) steps, for an H with about the same mean.

Utilisation is the share of the workers' time in which they train, all together; counted, that of training which a
commit used. Time to the same loss is until the validation loss of the committed model is first at most what the run
compared with ends with.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters

from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.coordinator.events import Event
from potluck.fleet.config import FleetConfig
from potluck.optim.inner import InnerConfig
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.async_diloco import AsyncDiLoCo, AsyncDiLoCoConfig
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.run import Budget
from potluck.strategies.strategy import Strategy
from potluck.transport.memory import Link

step_s = (4.0, 4.0, 2.0, 1.0)
"""Of each worker."""
batch_size = 4
link = Link(up_bytes_per_s=1e5, down_bytes_per_s=4e5, rtt_s=0.02)
"""On which a version and an update together take about 0.4 s."""


@dataclass(kw_only=True)
class Curve:
    """What a run came to. Times in seconds since its start."""

    losses: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])  # when, validation loss
    trained: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])  # began, took
    counted_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.losses[-1][0]

    @property
    def loss(self) -> float:
        return self.losses[-1][1]

    @property
    def utilisation(self) -> float:
        busy_s = sum(max(min(took_s, self.seconds - began), 0.0) for began, took_s in self.trained)
        return busy_s / (len(step_s) * self.seconds)

    def time_to(self, loss: float) -> float:
        """Infinite where it never gets there."""
        return next((at for at, reached in self.losses if reached <= loss), math.inf)


def bench_unequal(
    *, steps: int = 20, dynamic_steps: int = 40, rounds: int = 40, seeds: int = 3, barrier_lr: float = 0.7,
    barrier_momentum: float = 0.6, async_lr: float = 0.7, async_momentum: float = 0.6,
    told: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Means over seeds. `steps` is H of the runs with fixed steps, `rounds` what the barrier run takes with them."""
    torch.set_num_threads(1)
    rows: list[dict[str, float]] = []

    def asynchronous(num_steps: int) -> Strategy:
        return AsyncDiLoCo(
            AsyncDiLoCoConfig(num_inner_steps=num_steps, outer_lr=async_lr, outer_momentum=async_momentum)
        )

    for seed in range(1, seeds + 1):
        tokens = len(step_s) * rounds * steps
        synchronous = DiLoCo(
            DiLoCoConfig(num_inner_steps=steps, outer_lr=barrier_lr, outer_momentum=barrier_momentum)
        )
        barrier = _play(seed, tokens, synchronous, is_balanced=False)
        fixed = _play(seed, tokens, asynchronous(steps), is_balanced=False)
        dynamic = _play(seed, tokens, asynchronous(dynamic_steps), is_balanced=True)
        rows.append({
            "barrier_loss_nats": barrier.loss,
            "fixed_loss_nats": fixed.loss,
            "dynamic_loss_nats": dynamic.loss,
            "barrier_utilisation": barrier.utilisation,
            "fixed_utilisation": fixed.utilisation,
            "dynamic_utilisation": dynamic.utilisation,
            "dynamic_counted_utilisation": dynamic.counted_s / (len(step_s) * dynamic.seconds),
            "barrier_s": barrier.seconds,
            "fixed_s": fixed.seconds,
            "dynamic_s": dynamic.seconds,
            "dynamic_to_barrier_time_ratio": dynamic.time_to(barrier.loss) / barrier.seconds,
            "dynamic_to_fixed_time_ratio": dynamic.time_to(fixed.loss) / fixed.time_to(fixed.loss),
        })  # fmt: skip
        told(f"seed {seed}: {rows[-1]}")
    figures = {name: round(statistics.fmean(row[name] for row in rows), 4) for name in rows[0]}
    return {"workers": len(step_s), "steps": steps, "dynamic_steps": dynamic_steps, "seeds": seeds} | figures


def _play(seed: int, num_steps: int, strategy: Strategy, *, is_balanced: bool) -> Curve:
    """Train on the tokens of so many steps."""
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        return run_virtual(_run(seed, num_steps, strategy, is_balanced, Path(folder)))


async def _run(seed: int, num_steps: int, strategy: Strategy, is_balanced: bool, folder: Path) -> Curve:
    problem = Problem(
        seed=seed, num_shards=16, sequences_per_shard=256, validate=False,
        inner=InnerConfig(lr=3e-3, batch_size=batch_size, warmup=0.05),
        fleet=FleetConfig(min_workers=len(step_s), balance="time" if is_balanced else "none"),
    )  # fmt: skip
    plan = replace(problem.plan(strategy), budget=Budget(tokens=num_steps * batch_size * problem.seq_len))
    world = World(plan, problem.make_deck, folder, clock=VirtualClock(), make_executor=InlineExecutor)
    curve, begun, model, held_out = Curve(), 0.0, problem.model(), problem.validation.long()

    def cost(seconds: float) -> Callable[[pb.Lease], float]:
        def cost_s(lease: pb.Lease) -> float:
            took_s = seconds * lease.num_sequences / batch_size
            curve.trained.append((world.clock.now() - begun, took_s))
            return took_s

        return cost_s

    def heard(event: Event) -> None:
        if event.kind == "round" and world.run is not None and world.run.state is not None:
            vector_to_parameters(world.run.params.read(world.run.state.params), model.parameters())
            with torch.no_grad():
                logits = model(input_ids=held_out[:, :-1]).logits
            loss = cross_entropy(logits.flatten(0, 1), held_out[:, 1:].flatten())
            curve.losses.append((world.clock.now() - begun, float(loss)))

    world.on_event = heard
    for i, seconds in enumerate(step_s):
        world.add(f"w{i + 1}", link=link, cost_s=cost(seconds))
    await world.clock.sleep(1.0)
    await world.start()
    begun = world.clock.now()
    await world.finish()
    assert world.last is not None
    given = {row["id"]: row["tokens"] for row in world.last.contributions()}
    curve.counted_s = sum(
        seconds * given[f"w{i + 1}"] / (batch_size * problem.seq_len) for i, seconds in enumerate(step_s)
    )
    return curve
