"""Workers of unequal speed on a virtual clock, with real training: what waiting for the slowest costs, and going on.

Four workers at 1 : 1 : 2 : 4 train on equally many tokens:

`barrier`: DiLoCo, H steps of each worker in a round. `fixed`: asynchronous DiLoCo, H steps an update, each counts when
it comes. `dynamic`: the same with floor(H v / v_max) steps. `quorum`: those steps too, and a commit waits for three of
the four and a little longer. A worker whose pace is not known yet takes H steps.

Utilisation is the share of the workers' time in which they train, all together; counted, that of training which a
commit used. Time to the same loss is until the committed model has first gone 98 % of the way in validation loss that
the run compared with goes in all: what is left is noise of the last steps.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from potluck.bench.watched import Watched
from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.fleet.config import FleetConfig
from potluck.optim.inner import InnerConfig
from potluck.simulator.exact.problem import Problem, vocab_size
from potluck.simulator.exact.world import World
from potluck.strategies.async_diloco import AsyncDiLoCo, AsyncDiLoCoConfig
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.run import Budget
from potluck.strategies.strategy import Strategy
from potluck.transport.memory import Link

step_s = (4.0, 4.0, 2.0, 1.0)
"""Of each worker."""
batch_size = 4
start_nats = math.log(vocab_size)
share_of_way = 0.98
link = Link(up_bytes_per_s=1e5, down_bytes_per_s=4e5, rtt_s=0.02)
"""On which a version and an update together take about 0.4 s."""


@dataclass(frozen=True)
class Curve:
    """What a run came to."""

    losses: list[tuple[float, float]]  # seconds since the first step, validation loss
    utilisation: float
    counted_utilisation: float

    @property
    def seconds(self) -> float:
        return self.losses[-1][0]

    @property
    def loss(self) -> float:
        return self.losses[-1][1]

    def time_to(self, loss: float) -> float:
        """Infinite where it never gets there."""
        return next((at for at, reached in self.losses if reached <= loss), math.inf)


def bench_unequal(
    *, steps: int = 20, dynamic_steps: int = 40, rounds: int = 24, seeds: int = 3, outer_lr: float = 1.0,
    outer_momentum: float = 0.8, stale_outer_lr: float = 0.7, stale_outer_momentum: float = 0.8,
    told: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Means over seeds. `steps` is H where it is fixed, `dynamic_steps` that of the fastest worker, with the same
    mean; `rounds` is what the barrier run takes. The outer step of those whose updates are stale is a smaller one."""
    torch.set_num_threads(1)
    fresh = {"outer_lr": outer_lr, "outer_momentum": outer_momentum}
    stale = {"outer_lr": stale_outer_lr, "outer_momentum": stale_outer_momentum}
    methods: dict[str, tuple[Strategy, bool]] = {
        "barrier": (DiLoCo(DiLoCoConfig.model_validate({"num_inner_steps": steps, **fresh})), False),
        "fixed": (_asynchronous(num_inner_steps=steps, **stale), False),
        "dynamic": (_asynchronous(num_inner_steps=dynamic_steps, **stale), True),
        "quorum": (_asynchronous(num_inner_steps=dynamic_steps, quorum=0.75, **fresh), True),
    }
    rows: list[dict[str, float]] = []
    for seed in range(1, seeds + 1):
        curves = {
            name: _play(seed, len(step_s) * rounds * steps, strategy, is_balanced=is_balanced)
            for name, (strategy, is_balanced) in methods.items()
        }
        rows.append(_figures(curves))
        told(f"seed {seed}: {rows[-1]}")
    figures = {name: round(statistics.fmean(row[name] for row in rows), 4) for name in rows[0]}
    return {
        "workers": len(step_s),
        "steps": steps,
        "dynamic_steps": dynamic_steps,
        "rounds": rounds,
        "seeds": seeds,
    } | figures


def _asynchronous(**settings: float) -> Strategy:
    return AsyncDiLoCo(AsyncDiLoCoConfig.model_validate(settings))


def _figures(curves: dict[str, Curve]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, curve in curves.items():
        figures |= {
            f"{name}_loss_nats": curve.loss,
            f"{name}_s": curve.seconds,
            f"{name}_utilisation": curve.utilisation,
            f"{name}_counted_utilisation": curve.counted_utilisation,
        }
    for name in ("dynamic", "quorum"):
        for other in ("barrier", "fixed"):
            loss = start_nats - share_of_way * (start_nats - curves[other].loss)
            figures[f"{name}_to_{other}_time_ratio"] = curves[name].time_to(loss) / curves[other].time_to(loss)
    return figures


def _play(seed: int, num_steps: int, strategy: Strategy, *, is_balanced: bool) -> Curve:
    """Train on the tokens of so many steps."""
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        return run_virtual(_run(seed, num_steps, strategy, is_balanced, Path(folder)))


async def _run(seed: int, num_steps: int, strategy: Strategy, is_balanced: bool, folder: Path) -> Curve:
    problem = Problem(
        seed=seed, num_shards=16, sequences_per_shard=1024, validate=False,
        inner=InnerConfig(lr=3e-3, batch_size=batch_size, warmup=0.05),
        fleet=FleetConfig(min_workers=len(step_s), balance="time" if is_balanced else "none"),
    )  # fmt: skip
    plan = replace(problem.plan(strategy), budget=Budget(tokens=num_steps * batch_size * problem.seq_len))
    world = World(plan, problem.make_deck, folder, clock=VirtualClock(), make_executor=InlineExecutor)
    losses: list[tuple[float, float]] = []
    watched = Watched(
        world, model=problem.model(), held_out=problem.validation, batch_size=batch_size, seq_len=problem.seq_len,
        on_commit=lambda: losses.append((watched.seconds, watched.loss())),
    )  # fmt: skip
    for i, seconds in enumerate(step_s):
        watched.add(f"w{i + 1}", step_s=seconds, link=link)
    await world.start()
    await world.finish()
    return Curve(losses, watched.utilisation, watched.counted_utilisation)
