"""Synchronous data parallelism: every step averages the workers' gradients; the optimizer runs on the coordinator.

    g = (sum_i g_i) / (sum_i n_i)       g_i: gradient of the *sum* of token losses of worker i, n_i: its tokens
    g <- g * min(1, clip / |g|)         clipped once, here
    theta <- adamw(theta, g)            or plain SGD, as `inner.optimizer` says

So K workers with batch b take the very step of one machine with batch K b, also when their batches are unequal.
With `fleet.balance = "time"` they are: faster workers get more sequences of the same K b, for the same step.
(Clipping on each worker first would be another algorithm.) A robust rule of aggregation is applied to the g_i / n_i.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from potluck.optim.inner import InnerConfig, learning_rate
from potluck.optim.outer import adamw, sgd
from potluck.planner.balance import balanced
from potluck.strategies.fleet import Fleet, share_of, total
from potluck.strategies.replica import Replica
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.task import Result, task
from potluck.types.errors import RecipeError
from potluck.types.params import Params
from potluck.types.vector import Vector


class SyncSGDConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    min_reply_fraction: float = Field(
        default=0.5, gt=0, le=1, description="a step with fewer replies than this share of its workers is discarded"
    )


@dataclass(frozen=True, kw_only=True)
class SyncSGDState(State):
    first_moment: Params
    second_moment: Params


# Pinned: it moves the data position.
@task("sync_sgd.gradient", kind="pinned", numbers=("num_tokens", "loss_sum"), vector="gradient")
def gradient(replica: Replica, *, theta: Vector, num_sequences: int) -> Result:
    replica.load(theta)
    summed, loss = replica.gradient(num_sequences=num_sequences)
    return Result({"num_tokens": loss.num_tokens, "loss_sum": loss.loss_sum}, {"gradient": summed})


class SyncSGD:
    Config: ClassVar[type[BaseModel]] = SyncSGDConfig
    State: ClassVar[type[State]] = SyncSGDState

    def __init__(self, config: SyncSGDConfig) -> None:
        self.config = config

    def init(self, run: RunFacts) -> SyncSGDState:
        check_optimizer(run.inner, "sync_sgd")
        run.check_rule()
        return SyncSGDState(params=run.initial, first_moment=run.zeros, second_moment=run.zeros)

    async def run_round(self, state: SyncSGDState, fleet: Fleet) -> SyncSGDState:
        run, workers = fleet.run, fleet.workers()
        shares = balanced({w.id: w.pace for w in workers}, mean_units=run.inner.sequences_per_step)
        got = await fleet.call(
            {
                worker: gradient.bind(theta=state.params, num_sequences=num_sequences).granted(num_sequences)
                for worker, num_sequences in shares.items()
            },
            key="gradient",
            min_replies=share_of(self.config.min_reply_fraction, len(workers)),
            reduce=total("gradient", over="num_tokens"),
        )
        num_tokens = int(got.sum("num_tokens"))
        progress, _ = run.progress_span(state, len(workers))
        scale = clip_scale(await fleet.norm(got.reduced) / num_tokens, run.inner.clip) / num_tokens
        stepped = await step(fleet, state, got.reduced, config=run.inner, progress=progress, scale=scale)
        return replace(
            stepped,
            round=state.round + 1,
            tokens=state.tokens + num_tokens,
            loss=got.sum("loss_sum") / num_tokens,
        )

    def estimate(self, run: RunFacts) -> RoundBytes:
        return RoundBytes(up=run.up_bytes("gradient"), down=run.down_bytes())


def check_optimizer(config: InnerConfig, strategy: str) -> None:
    """RecipeError if `step` cannot take it: the optimizer runs here, slice by slice of the flat model."""
    if config.optimizer not in ("adamw", "sgd"):
        raise RecipeError(
            f"strategy {strategy} takes its steps on the coordinator, which has no {config.optimizer}; set "
            'strategy.inner.optimizer to "adamw" or "sgd"'
        )


def clip_scale(norm: float, clip: float) -> float:
    """What `torch.nn.utils.clip_grad_norm_` multiplies by; 1 where clipping is off."""
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0


async def step(
    fleet: Fleet, state: SyncSGDState, summed: Params, *, config: InnerConfig, progress: float, scale: float
) -> SyncSGDState:
    """One optimizer step with the gradient `scale * summed`."""
    lr = learning_rate(config, progress)
    if config.optimizer == "sgd":
        (params,) = await fleet.apply(sgd, state.params, summed, lr=lr, weight_decay=config.weight_decay, scale=scale)
        return replace(state, params=params)
    params, first, second = await fleet.apply(
        adamw,
        state.params,
        state.first_moment,
        state.second_moment,
        summed,
        num_outputs=3,
        lr=lr,
        beta1=config.betas[0],
        beta2=config.betas[1],
        eps=config.eps,
        weight_decay=config.weight_decay,
        step=state.round + 1,
        scale=scale,
    )
    return replace(state, params=params, first_moment=first, second_moment=second)
