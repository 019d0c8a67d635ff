"""DiLoCo: every worker takes H local steps, then the coordinator takes one outer step.

    delta_i = theta - theta_i                        pseudo-gradient of worker i after H inner steps
    m      <- mu m + sum_i w_i delta_i               w_i = tokens_i / sum of tokens
    theta  <- theta - eta (sum_i w_i delta_i + mu m)

Douillard et al. 2023, arXiv:2311.08105, Algorithm 1. Two differences: contributions weigh by tokens, and a worker
that is lost leaves the average; the recipe may put a robust rule in the place of the average. The inner AdamW state and
the data position stay on the worker across rounds.

With `fleet.balance = "time"` worker i takes H_i steps, H on average over the fleet, and the merge is that of FedNova
(strategies/local_steps.py). Equal H_i give plain DiLoCo, bit for bit; with AdamW inside, H_i for the weight of H_i
steps is a heuristic. Who takes longer than its past says while all others are done is cut short: its few steps count as
so much less than those of a whole share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from potluck.optim.outer import nesterov
from potluck.strategies.fleet import Fleet
from potluck.strategies.local_steps import STEP_NUMBERS, Shares, most_steps, take_steps
from potluck.strategies.replica import Replica
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.task import Result, task
from potluck.types.params import Params
from potluck.types.vector import Vector


class DiLoCoConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    num_inner_steps: int = Field(
        default=100,
        ge=1,
        le=most_steps,
        description="H: inner steps of each worker in a round; on average where work is balanced",
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
@task("diloco.inner", kind="pinned", numbers=STEP_NUMBERS, vector="delta")
def inner(
    replica: Replica, *, theta: Vector, num_steps: int, progress: tuple[float, float], mean_steps: int = 0
) -> Result:
    return take_steps(replica, theta=theta, num_steps=num_steps, progress=progress, mean_steps=mean_steps)


# The half that runs on the coordinator.
class DiLoCo:
    Config: ClassVar[type[BaseModel]] = DiLoCoConfig
    State: ClassVar[type[State]] = DiLoCoState

    def __init__(self, config: DiLoCoConfig) -> None:
        self.config = config

    def init(self, run: RunFacts) -> DiLoCoState:
        run.check_rule()
        return DiLoCoState(params=run.initial, momentum=run.zeros)

    async def run_round(self, state: DiLoCoState, fleet: Fleet) -> DiLoCoState:
        config, run = self.config, fleet.run
        shares = Shares.deal(state, fleet, config.num_inner_steps)
        got = await shares.call(
            fleet,
            lambda _, steps: inner.bind(
                theta=state.params, num_steps=steps, mean_steps=shares.mean_steps, progress=shares.progress
            ),
            min_reply_fraction=config.min_reply_fraction,
            previous=state.aggregate,
        )
        params, momentum = await fleet.apply(
            nesterov,
            state.params,
            state.momentum,
            got.reduced,
            num_outputs=2,
            lr=config.outer_lr,
            momentum_coefficient=config.outer_momentum,
            scale=shares.stretch(got),
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
