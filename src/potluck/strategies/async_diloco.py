"""Asynchronous DiLoCo: no barrier. An update counts when it comes, and its worker goes on from the newest model.

    delta_i = theta_then - theta_i           after H_i inner steps from the model as it was when they began
    d       = (1/N) sum_i s(tau_i) delta_i   over the K updates of one commit; tau_i: commits since they began
    b      <- b + d
    theta  <- theta - eta (d + c mu m)       m moves once in a cycle of N updates: m <- mu m + b, b <- 0

N is K ceil(n / K), n the workers here: a cycle is of whole commits, so that b is a mean when m takes it.

Liu et al. 2024, arXiv:2401.09135: delayed Nesterov momentum and dynamic local steps H_i = floor(H v_i / v_max), v the
steps a second, v_max at most 8 times their median (planner/balance.py). The paper's formula was not at hand: this one
is derived from its description, that the momentum of stale updates harms, so that it moves once in N updates, with
their mean, while each update moves theta: c is 0 within a cycle and 1 at its end. So N updates of one model move theta
as one Nesterov step with their mean does. The steps within a cycle may take a share sigma of the momentum, which is
then that of the cycle before: c = sigma K / N within, and what is left of 1 at the end.

The worker whose update completes a commit goes on once it is made and the new model is encoded, the others at once.
With K = 1 that is each of them, each time: the seconds of a commit bound how many updates a second there can be. With
a larger K there are fewer commits.

s(tau) is 1, (1 + tau)^-a, or for tau > b 1 / (a (tau - b) + 1): Xie et al. 2019, arXiv:1903.03934. With K = N and no
momentum, a = 1/2, this is FedBuff (Nguyen et al. 2022, arXiv:2106.06639): one step with the mean of K updates, and no
worker waits for it.

With a quorum a commit takes one update of each worker that has delivered: once so many have, the others are given as
much longer as `grace` says, and whoever is later counts in the next commit. Workers that have delivered wait for it.
Each commit is a cycle of its own then, N the updates in it: DiLoCo's outer step with those who replied.

A rule of aggregation that bears some wrong updates bears some wrong workers only where a commit takes one update of
each: so with any rule but the mean it does, and K is at most n.

Updates count alike, whatever the tokens in them: who took more steps has moved further already. Differences to the
papers: N follows the fleet from cycle to cycle unless n is set, steps are granted by the pace that was measured, and
an update whose tau is above `max_staleness` is dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from potluck.codecs.delta import longest_way
from potluck.optim.outer import delayed_nesterov
from potluck.planner.balance import fastest_s
from potluck.strategies.diloco import inner
from potluck.strategies.fleet import Fleet, WorkerInfo, share_of, summed, weighted_mean
from potluck.strategies.local_steps import most_steps
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.task import BoundTask
from potluck.types.errors import RecipeError
from potluck.types.params import Params

usual_staleness = 8
"""Cycles of which an update may be late, where the recipe does not say it."""
least_weight = 1e-30
"""Of an update, however stale: a mean needs weights above 0."""


class AsyncDiLoCoConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    num_inner_steps: int = Field(
        default=100,
        ge=1,
        le=most_steps,
        description="H: inner steps of an update; where work is balanced, of the fastest worker's",
    )
    outer_lr: float = Field(default=0.7, gt=0, description="eta: size of the outer step")
    outer_momentum: float = Field(default=0.6, ge=0, lt=1, description="mu: delayed Nesterov momentum")
    momentum_every: int = Field(
        default=0, ge=0, le=1_000_000,
        description="n: updates, rounded up to whole commits, after which the momentum moves; 0 for as many as there "
        "are workers; with a quorum it moves with each commit",
    )  # fmt: skip
    momentum_spread: float = Field(
        default=0.0, ge=0, le=1, description="sigma: share of the momentum that the steps within a cycle take"
    )
    updates_per_commit: int = Field(
        default=1, ge=1, le=1_000_000,
        description="K: updates that one commit takes together; with a rule of aggregation other than the mean one of "
        "each worker",
    )  # fmt: skip
    staleness: Literal["none", "polynomial", "hinge"] = Field(
        default="none", description="how an update's weight falls with the commits since it began"
    )
    staleness_rate: float = Field(default=0.5, gt=0, description="a: of polynomial and hinge")
    staleness_free: int = Field(default=4, ge=0, description="b: commits that cost nothing, of hinge")
    max_staleness: int = Field(
        default=0, ge=0,
        description="commits since it began after which an update is dropped and its data dealt again; 0 for as many "
        "as take 8 updates of every worker",
    )  # fmt: skip
    quorum: float = Field(
        default=0.0, ge=0, le=1, description="share of the workers that a commit waits for; 0 for updates as they come"
    )
    grace: float = Field(
        default=0.25, ge=0, le=10, description="how much longer than a usual update those beyond the quorum may take"
    )

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.quorum and self.updates_per_commit > 1:
            raise ValueError("with a `quorum` a commit takes whatever came by then; remove `updates_per_commit`")
        return self


@dataclass(frozen=True, kw_only=True)
class AsyncDiLoCoState(State):
    momentum: Params
    gathered: Params  # b
    num_gathered: int = 0  # updates in it
    cycle: int = 0  # N of the cycle that has begun


class AsyncDiLoCo:
    Config: ClassVar[type[BaseModel]] = AsyncDiLoCoConfig
    State: ClassVar[type[State]] = AsyncDiLoCoState

    def __init__(self, config: AsyncDiLoCoConfig) -> None:
        self.config = config

    def init(self, run: RunFacts) -> AsyncDiLoCoState:
        num_updates = self._num_updates(run, run.min_workers)
        settings = (
            "strategy.updates_per_commit" if self.config.updates_per_commit <= num_updates else "fleet.min_workers"
        )
        if self.config.quorum:
            settings = "fleet.min_workers and strategy.quorum"
        run.check_rule(num_updates, settings=settings)
        num_behind = self._commits_per_cycle(run.min_workers)
        if run.down.is_delta and num_behind > (longest := longest_way(run.layout, run.down_policy)):
            raise RecipeError(
                f"codec.down = {run.down_codec!r} sends {longest} differences in a row at most, and with "
                f"{run.min_workers} workers each goes on {num_behind} commits after the one it began at; set "
                'codec.down to "int8" or "bf16", or raise strategy.updates_per_commit'
            )
        return AsyncDiLoCoState(params=run.initial, momentum=run.zeros, gathered=run.zeros)

    async def run_round(self, state: AsyncDiLoCoState, fleet: Fleet) -> AsyncDiLoCoState:
        """One commit."""
        config, run, workers = self.config, fleet.run, fleet.workers()
        num_updates, one_each = self._num_updates(run, len(workers)), run.aggregation.rule != "mean"
        num_steps = min(config.num_inner_steps, run.steps_left(state, max(len(workers), num_updates)))
        sequences_per_step = run.inner.sequences_per_step
        fastest = fastest_s([w.pace.unit_s for w in workers if w.pace])
        progress = run.progress_span(state, sum(dynamic_steps(num_steps, w, fastest) for w in workers))

        def offer(worker: WorkerInfo) -> BoundTask:
            steps = dynamic_steps(num_steps, worker, fastest)
            task = inner.bind(theta=state.params, num_steps=steps, progress=progress)
            return task.granted(steps * sequences_per_step)

        replies = await fleet.gather(
            offer,
            key="inner",
            min_replies=num_updates,
            expects=weighted_mean("delta", by=""),
            grace=config.grace if config.quorum else 0.0 if one_each else None,
            max_staleness=config.max_staleness or usual_staleness * self._commits_per_cycle(len(workers)),
        )
        weights = {r.key: self.weight(state.round - r.round) for r in replies}
        mean = await fleet.reduce(replies, weighted_mean("delta", by="", factors=weights))
        stepped = await self._step(state, fleet, mean, len(replies), math.fsum(weights.values()))
        num_tokens = int(summed(replies, "num_tokens"))
        return replace(
            stepped,
            round=state.round + 1,
            tokens=state.tokens + num_tokens,
            loss=summed(replies, "loss_sum") / num_tokens,
        )

    async def _step(
        self, state: AsyncDiLoCoState, fleet: Fleet, mean: Params, num_updates: int, weight: float
    ) -> AsyncDiLoCoState:
        """The outer step with the mean of so many updates, which together weigh `weight`."""
        config = self.config
        cycle = state.cycle
        if not state.num_gathered:
            cycle = num_updates * self._commits_per_cycle(config.momentum_every or len(fleet.workers()))
        num_gathered = state.num_gathered + num_updates
        ends_cycle = num_gathered >= cycle
        share = config.momentum_spread * num_updates / cycle
        if ends_cycle:
            share = 1.0 - config.momentum_spread * state.num_gathered / cycle
        params, changed = await fleet.apply(
            delayed_nesterov,
            state.params,
            state.gathered,
            state.momentum,
            mean,
            num_outputs=2,
            lr=config.outer_lr,
            momentum_coefficient=config.outer_momentum,
            momentum_share=share,
            ends_cycle=ends_cycle,
            scale=weight / cycle,
        )
        return replace(
            state,
            params=params,
            gathered=fleet.run.zeros if ends_cycle else changed,
            momentum=changed if ends_cycle else state.momentum,
            num_gathered=0 if ends_cycle else num_gathered,
            cycle=cycle,
        )

    def _num_updates(self, run: RunFacts, num_workers: int) -> int:
        """That a commit takes, with a quorum at least."""
        if self.config.quorum:
            return share_of(self.config.quorum, num_workers)
        most = self.config.updates_per_commit
        return most if run.aggregation.rule == "mean" else min(most, num_workers)

    def _commits_per_cycle(self, num_updates: int) -> int:
        """That so many updates take, or a few more."""
        return 1 if self.config.quorum else math.ceil(num_updates / self.config.updates_per_commit)

    def weight(self, staleness: int) -> float:
        """s(tau), at least `least_weight`."""
        config = self.config
        match config.staleness:
            case "none":
                return 1.0
            case "polynomial":
                return max((1.0 + staleness) ** -config.staleness_rate, least_weight)
            case "hinge":
                late = max(staleness - config.staleness_free, 0)
                return max(1.0 / (config.staleness_rate * late + 1.0), least_weight)

    def estimate(self, run: RunFacts) -> RoundBytes:
        """Of an update. Without a quorum a worker has one in as many rounds as there are workers to an update, and then
        fetches what has changed in all of them."""
        down = run.down_bytes(num_behind=self._commits_per_cycle(run.min_workers))
        return RoundBytes(up=run.up_bytes("delta"), down=down)


def dynamic_steps(num_steps: int, worker: WorkerInfo, fastest: float) -> int:
    """floor(H v_i / v_max), at least 1; H where the worker's pace is not known. `fastest`: 1 / v_max, in seconds."""
    if worker.pace is None:
        return num_steps
    own_s = worker.pace.unit_s
    return max(1, math.floor(num_steps * min(fastest, own_s) / own_s + 1e-9))
