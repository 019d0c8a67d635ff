"""Federated averaging and its relatives: local steps, an average, an outer step. One method, told apart by settings.

    delta = sum_i p_i (theta - theta_i)      p_i = tokens_i / sum of tokens

FedAvg, local SGD        as it is              theta <- theta - eta delta, with eta = 1 the average
FedAvgM                  `outer_momentum`      m <- beta m + delta; theta <- theta - eta m
FedAdam, FedYogi,
FedAdagrad               `outer`               optim/federated.py
FedProx                  `proximal`            workers add mu/2 |w - theta|^2 to their loss
FedNova                  `normalised`          for unequal steps: strategies/local_steps.py
SCAFFOLD                 `control_variates`    below

McMahan et al. 2016, arXiv:1602.05629; Hsu et al. 2019, arXiv:1909.06335; Reddi et al. 2020, arXiv:2003.00295; Li et al.
2018, arXiv:1812.06127; Wang et al. 2020, arXiv:2007.07481. They go together as far as that makes sense.

SCAFFOLD (Karimireddy et al. 2019, arXiv:1910.06378, option II) takes the difference between a worker's text and
everybody's out of its steps. Worker i keeps c_i among its pinned state, the coordinator c; both begin at 0:

    w   <- w - eta_k (g - c_i + c)                      K steps of plain SGD from theta, g clipped
    c_i <- c_i - c + (theta - theta_i) / sum_k eta_k
    c   <- c + |S|/N mean_i (new c_i - c_i)  =  (1 - |S|/N) c + |S|/N delta / sum_k eta_k

S are those who replied, N those who were asked. The last form needs no second vector from the workers, since all take
as many steps at the same rates; here they weigh the same, so delta is the plain mean. Where updates are compressed, c
follows what arrived and c_i what was meant. With AdamW the displacement of a worker says nothing of its gradients:
that is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from potluck.optim.federated import adaptive, blend, heavy_ball
from potluck.optim.inner import learning_rate
from potluck.optim.outer import axpy
from potluck.strategies.fleet import Fleet
from potluck.strategies.local_steps import STEP_NUMBERS, Shares, most_steps, take_steps
from potluck.strategies.replica import Replica
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.task import BoundTask, Result, task
from potluck.types.errors import RecipeError
from potluck.types.ids import WorkerId
from potluck.types.params import Params
from potluck.types.vector import Vector

_own_control = "control"
"""Of a worker's pinned state: c_i."""


class FedAvgConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    num_inner_steps: int = Field(
        default=100,
        ge=1,
        le=most_steps,
        description="inner steps of each worker in a round; on average where work is balanced",
    )
    outer: Literal["sgd", "adam", "yogi", "adagrad"] = Field(
        default="sgd", description="what the coordinator does with the mean: FedAvg and FedAvgM, FedAdam, FedYogi, "
        "FedAdagrad",
    )  # fmt: skip
    outer_lr: float = Field(
        default=0.0, ge=0, description="eta: size of the outer step; 0 for 1 with `sgd` and 0.01 with the others"
    )
    outer_momentum: float = Field(default=0.0, ge=0, lt=1, description="beta of `sgd`: FedAvgM")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.99), description="averaging coefficients of `adam` and `yogi`; the first is `adagrad`'s too"
    )
    tau: float = Field(default=1e-3, ge=1e-12, le=1e6, description="how adaptive the others are: less the bigger it is")
    proximal: float = Field(
        default=0.0, ge=0, description="mu of FedProx, 0.001 to 1: pulls workers to where the round began"
    )
    normalised: bool = Field(
        default=False,
        description="FedNova: an update weighs by its worker's data, not by how many steps it took; needed where work "
        "is balanced",
    )
    control_variates: bool = Field(
        default=False,
        description='SCAFFOLD: corrects every step for what is particular to the worker\'s text; inner optimizer "sgd"',
    )
    min_reply_fraction: float = Field(
        default=0.5, gt=0, le=1, description="a round with fewer replies than this share of its workers is discarded"
    )

    @model_validator(mode="after")
    def _go_together(self) -> FedAvgConfig:
        if self.outer != "sgd" and self.outer_momentum:
            raise ValueError(f'`outer_momentum` belongs to outer = "sgd"; {self.outer} has `betas`')
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`betas` are {self.betas} and must be at least 0 and below 1")
        if self.control_variates and self.proximal:
            raise ValueError("`control_variates` and `proximal` correct the same thing twice; give one of the two")
        if self.control_variates and self.normalised:
            raise ValueError("`control_variates` gives all workers as many steps; remove `normalised`")
        fields = type(self).model_fields
        idle = [name for name in ("betas", "tau") if getattr(self, name) != fields[name].default]
        if self.outer == "sgd" and idle:
            raise ValueError(
                f'`{idle[0]}` belongs to the other outer steps and `outer` is "sgd"; set `outer` or remove it'
            )
        return self

    @property
    def eta(self) -> float:
        return self.outer_lr or (1.0 if self.outer == "sgd" else 0.01)


@dataclass(frozen=True, kw_only=True)
class FedAvgState(State):
    """What a setting does not need is None."""

    momentum: Params | None = None
    second_moment: Params | None = None
    control: Params | None = None  # c
    aggregate: Params | None = None  # of the last round, for the rule of aggregation that starts from it


# The half that runs on the device.
@task("fed_avg.inner", kind="pinned", numbers=STEP_NUMBERS, vector="delta")
def inner(
    replica: Replica,
    *,
    theta: Vector,
    num_steps: int,
    progress: tuple[float, float],
    mean_steps: int = 0,
    proximal: float = 0.0,
) -> Result:
    if proximal:
        replica.steer(anchor=theta, pull=proximal)
    return take_steps(replica, theta=theta, num_steps=num_steps, progress=progress, mean_steps=mean_steps)


@task("fed_avg.corrected", kind="pinned", numbers=STEP_NUMBERS, vector="delta")
def corrected(
    replica: Replica,
    *,
    theta: Vector,
    control: Vector,
    num_steps: int,
    progress: tuple[float, float],
    rate_sum: float,
) -> Result:
    """SCAFFOLD; `rate_sum` is sum_k eta_k."""
    replica.steer(shift=control - replica.kept.make(_own_control))
    result = take_steps(replica, theta=theta, num_steps=num_steps, progress=progress)
    if rate_sum > 0:
        own = replica.kept[_own_control]
        change = (1.0 / rate_sum) * (theta - replica.params()) - control
        for start, part in change.slices():
            own[start : start + len(part)] += part
    return result


# The half that runs on the coordinator.
class FedAvg:
    Config: ClassVar[type[BaseModel]] = FedAvgConfig
    State: ClassVar[type[State]] = FedAvgState

    def __init__(self, config: FedAvgConfig) -> None:
        self.config = config

    @property
    def kept_vectors(self) -> float:
        """SCAFFOLD's c_i."""
        return 1.0 if self.config.control_variates else 0.0

    def init(self, run: RunFacts) -> FedAvgState:
        config = self.config
        if config.control_variates and run.inner.optimizer != "sgd":
            raise RecipeError(
                f"strategy.control_variates needs workers that take plain steps and strategy.inner.optimizer is "
                f'{run.inner.optimizer}; set it to "sgd"'
            )
        run.check_rule()
        if config.control_variates:
            run.refuse_balance("strategy.control_variates")
        elif run.balances and not config.normalised:
            raise RecipeError(
                'fleet.balance = "time" gives faster workers more steps, and fed_avg would count these twice, in their '
                "updates and in the tokens by which those weigh: set strategy.normalised to true, or fleet.balance to "
                '"none"'
            )
        is_adaptive = config.outer != "sgd"
        return FedAvgState(
            params=run.initial,
            momentum=run.zeros if is_adaptive or config.outer_momentum else None,
            second_moment=run.zeros if is_adaptive else None,
            control=run.zeros if config.control_variates else None,
        )

    async def run_round(self, state: FedAvgState, fleet: Fleet) -> FedAvgState:
        config, run, control = self.config, fleet.run, state.control
        shares = Shares.deal(state, fleet, config.num_inner_steps, equal=control is not None)
        rate_sum = self._rate_sum(shares, run)

        def work(_: WorkerId, steps: int) -> BoundTask:
            if control is not None:
                return corrected.bind(
                    theta=state.params, control=control, num_steps=steps, progress=shares.progress, rate_sum=rate_sum
                )
            return inner.bind(
                theta=state.params, num_steps=steps, progress=shares.progress, proximal=config.proximal,
                mean_steps=shares.mean_steps if config.normalised else 0,
            )  # fmt: skip

        got = await shares.call(
            fleet,
            work,
            min_reply_fraction=config.min_reply_fraction,
            by="num_tokens" if control is None else "",
            is_normalised=config.normalised,
            may_end_early=control is None,
            previous=state.aggregate,
        )
        stepped = await self._step(state, fleet, got.reduced, scale=shares.stretch(got) if config.normalised else 1.0)
        if control is not None and rate_sum > 0:
            share = len(got.replies) / len(shares.granted)
            (control,) = await fleet.apply(blend, got.reduced, control, a=share / rate_sum, b=1.0 - share)
        num_tokens = int(got.sum("num_tokens"))
        return replace(
            stepped,
            control=control,
            aggregate=got.reduced if run.aggregation.starts_from_previous else None,
            round=state.round + 1,
            tokens=state.tokens + num_tokens,
            loss=got.sum("loss_sum") / num_tokens,
        )

    async def _step(self, state: FedAvgState, fleet: Fleet, mean: Params, *, scale: float) -> FedAvgState:
        """The outer step."""
        config = self.config
        if state.momentum is None:
            (params,) = await fleet.apply(axpy, mean, state.params, a=-config.eta * scale)
            return replace(state, params=params)
        if config.outer == "sgd":
            params, momentum = await fleet.apply(
                heavy_ball, state.params, state.momentum, mean, num_outputs=2, lr=config.eta,
                momentum_coefficient=config.outer_momentum, scale=scale,
            )  # fmt: skip
            return replace(state, params=params, momentum=momentum)
        assert state.second_moment is not None
        params, momentum, second_moment = await fleet.apply(
            adaptive, state.params, state.momentum, state.second_moment, mean, num_outputs=3, rule=config.outer,
            lr=config.eta, beta1=config.betas[0], beta2=config.betas[1], tau=config.tau, is_first=state.round == 0,
            scale=scale,
        )  # fmt: skip
        return replace(state, params=params, momentum=momentum, second_moment=second_moment)

    def _rate_sum(self, shares: Shares, run: RunFacts) -> float:
        """The learning rates of a worker's steps in this round, added up."""
        (start, stop), steps = shares.progress, shares.mean_steps
        return math.fsum(learning_rate(run.inner, start + (stop - start) * k / steps) for k in range(steps))

    def estimate(self, run: RunFacts) -> RoundBytes:
        versions = 2 if self.config.control_variates else 1
        return RoundBytes(up=run.up_bytes("delta"), down=versions * run.down_bytes())
