"""DiLoCo: every worker takes H local steps, then the coordinator takes one outer step.

    delta_i = theta - theta_i                        pseudo-gradient of worker i after H inner steps
    m      <- mu m + sum_i w_i delta_i               w_i = tokens_i / sum of tokens
    theta  <- theta - eta (sum_i w_i delta_i + mu m)

Douillard et al. 2023, arXiv:2311.08105, Algorithm 1. Two differences: contributions weigh by tokens, and a worker
that is lost leaves the average; the recipe may put a robust rule in the place of the average. The inner AdamW state and
the data position stay on the worker across rounds.

With `fleet.balance = "time"` worker i takes H_i steps, H on average over the fleet, and the merge is that of FedNova
(Wang et al. 2020, arXiv:2007.07481), so that speed is not counted twice, once in delta_i and once in its tokens:

    theta moves as by the pseudo-gradient   (sum_j p_j H_j) sum_i p_i delta_i / H_i      p_i ~ tokens_i / H_i

A worker sends (H / H_i) delta_i: residuals, norms and robust rules compare like with like. Equal H_i give plain DiLoCo,
bit for bit. With AdamW inside, H_i for the weight of H_i steps is a heuristic.

Who takes longer than its past says while all others are done is cut short, after H_i < G_i of the G_i steps it was
granted. Then p_i ~ tokens_i / G_i: its few steps count as so much less than those of a whole share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from potluck.optim.outer import nesterov
from potluck.planner.balance import balanced
from potluck.strategies.fleet import Fleet, Replies, weighted_mean
from potluck.strategies.replica import Replica, Step
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.task import Result, task
from potluck.types.ids import WorkerId
from potluck.types.params import Params
from potluck.types.vector import Vector


class DiLoCoConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    num_inner_steps: int = Field(
        default=100, ge=1, description="H: inner steps of each worker in a round; on average where work is balanced"
    )
    outer_lr: float = Field(default=0.7, gt=0, description="eta: size of the outer step")
    outer_momentum: float = Field(
        default=0.9, ge=0, lt=1, description="mu: Nesterov momentum; 0.6 suits runs of few rounds"
    )
    min_reply_fraction: float = Field(
        default=0.5, gt=0, le=1, description="a round with fewer replies than this share of its workers is discarded"
    )


@dataclass(frozen=True, kw_only=True)
class DiLoCoState(State):
    momentum: Params
    aggregate: Params | None = None  # of the last round, for the rule of aggregation that starts from it


# The half that runs on the device.
@task("diloco.inner", kind="pinned", numbers=("num_tokens", "loss_sum", "num_steps"))
def inner(
    replica: Replica, *, theta: Vector, num_steps: int, progress: tuple[float, float], mean_steps: int = 0
) -> Result:
    replica.load(theta)
    start, stop = progress
    steps: list[Step] = []
    while len(steps) < num_steps and not (steps and replica.is_cut_short):
        steps.append(replica.train_step(progress=start + (stop - start) * len(steps) / num_steps))
    num_tokens = sum(s.num_tokens for s in steps)
    loss_sum = sum(s.loss * s.num_tokens for s in steps)
    delta = theta - replica.params()
    if mean_steps not in (0, len(steps)):  # the fleet's mean; 0 where all take as many
        delta = (mean_steps / len(steps)) * delta
    return Result({"num_tokens": num_tokens, "loss_sum": loss_sum, "num_steps": len(steps)}, {"delta": delta})


# The half that runs on the coordinator.
class DiLoCo:
    Config: ClassVar[type[BaseModel]] = DiLoCoConfig
    State: ClassVar[type[State]] = DiLoCoState

    def __init__(self, config: DiLoCoConfig) -> None:
        self.config = config

    def init(self, run: RunFacts) -> DiLoCoState:
        return DiLoCoState(params=run.initial, momentum=run.zeros)

    async def run_round(self, state: DiLoCoState, fleet: Fleet) -> DiLoCoState:
        config, run, workers = self.config, fleet.run, fleet.workers()
        num_steps = min(config.num_inner_steps, run.steps_left(state, len(workers)))
        sequences_per_step = run.inner.sequences_per_step
        paces = {w.id: w.pace.of_units(sequences_per_step) if w.pace else None for w in workers}
        steps = balanced(paces, mean_units=num_steps)
        progress = run.progress_span(state, num_steps * len(workers))
        work = {
            worker: inner.bind(
                theta=state.params, num_steps=own_steps, mean_steps=num_steps, progress=progress
            ).granted(own_steps * sequences_per_step, per_step=sequences_per_step)
            for worker, own_steps in steps.items()
        }
        per_step = {worker: num_steps / own_steps for worker, own_steps in steps.items()}  # H / G_i
        got = await fleet.call(
            work,
            key="inner",
            min_replies=math.ceil(config.min_reply_fraction * len(workers)),
            reduce=weighted_mean("delta", by="num_tokens", previous=state.aggregate, factors=per_step),
        )
        params, momentum = await fleet.apply(
            nesterov,
            state.params,
            state.momentum,
            got.reduced,
            num_outputs=2,
            lr=config.outer_lr,
            momentum_coefficient=config.outer_momentum,
            scale=stretch(got, steps, per_step),
        )
        num_tokens = int(got.sum("num_tokens"))
        return replace(
            state,
            params=params,
            momentum=momentum,
            aggregate=got.reduced if run.aggregation.starts_from_previous else None,
            round=state.round + 1,
            tokens=state.tokens + num_tokens,
            loss=got.sum("loss_sum") / num_tokens,
        )

    def estimate(self, run: RunFacts) -> RoundBytes:
        return RoundBytes(up=run.up_bytes("delta"), down=run.down_bytes())


def stretch(got: Replies, granted: Mapping[WorkerId, int], per_step: Mapping[WorkerId, float]) -> float:
    """(sum_j p_j H_j) / H over those who replied; `granted` holds G_j, `per_step` H / G_j."""
    weights: list[float] = []  # tokens_j / G_j, times H
    steps: list[float] = []  # each times H_j / H
    for reply in got.replies:
        num_tokens, most = float(reply.scalars["num_tokens"]), granted[reply.worker]
        weights.append(num_tokens * per_step[reply.worker])
        steps.append(num_tokens * min(max(float(reply.scalars["num_steps"]), 1.0), most) / most)
    return math.fsum(steps) / math.fsum(weights)
