"""Zeroth order: workers send slopes of the loss along random directions, and no gradient or parameter ever travels.

    g_ikp = slope of worker i's loss along z(seed_tkp)           K local steps, P seeds each, from theta_t on
    w    <- w - lr mean_p g_ikp z(seed_tkp)                      its own step, forgotten when the round ends
    theta_t+1 = theta_t - sum_k lr mean_p (sum_i a_i g_ikp) z(seed_tkp)         a_i = tokens_i / sum of tokens

Seeds follow from the run's seed, so that a round is K P numbers up and as many down. A worker keeps theta from round to
round and replays the rounds it missed, bit for bit: DeComFL, Li et al. 2024, arXiv:2405.15861, with central differences
unless the recipe says `forward`. Who has missed more than `history_rounds` is given the parameters. So is who is new,
unless the run trains adapters: a worker makes their first values itself, and replays all rounds as long as none is
forgotten.

With `pool_size` seeds come from a pool of so many and theta is known by one sum a seed: who is new is given the run's
first parameters and these sums, however long the run is (FedKSeed, Qin et al. 2023, arXiv:2312.06353). Such a worker's
parameters are those of the others to fp32 tolerance.

Workers keep no gradient, activations or optimizer state, and one vector of the trainable parameters. The loss a worker
reports is the mean of all it has seen, beside theta as well.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from potluck.optim.inner import learning_rate
from potluck.optim.zeroth_order import Difference, SeedPool, Step, accept, most_seeds, projected_gradients, rebuild
from potluck.optim.zeroth_order import replay as take
from potluck.strategies.evaluation import by_members, over
from potluck.strategies.fleet import Fleet, Replies, Reply, WorkerInfo, share_of
from potluck.strategies.replica import Loss, Replica
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.task import Result, task
from potluck.types.errors import InvalidUpdate, RecipeError, RoundFailed
from potluck.types.ids import WorkerId
from potluck.types.params import Params
from potluck.types.vector import Vector

_theta = "theta"
"""Of a worker's pinned state: the parameters before the last round it took part in."""

most_slopes = 8192
"""Of a worker in a round: what the text of its result holds."""
most_replayed = 1 << 20
"""Slopes, each with its seed, that a worker is sent with one task to catch up by: 29 MB of a message's 64."""


class ZerothOrderConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    num_perturbations: int = Field(default=10, ge=1, le=1024, description="P: seeds of a local step")
    num_local_steps: int = Field(default=1, ge=1, le=64, description="K: local steps of each worker in a round")
    epsilon: float = Field(default=1e-3, gt=0, description="how far along a direction the loss is taken")
    difference: Difference = Field(
        default="central", description="`central`: two losses for each seed; `forward`: one, and less exact"
    )
    max_slope: float = Field(default=0.0, ge=0, description="slopes are clipped to this; 0 for no limit")
    pool_size: int = Field(
        default=0, ge=0, le=most_seeds, description="seeds of the whole run (FedKSeed); 0 for new ones in every round"
    )
    history_rounds: int = Field(
        default=256, ge=1, le=10_000, description="rounds that a worker may have missed and still catch up by replaying"
    )
    min_reply_fraction: float = Field(
        default=0.5, gt=0, le=1, description="a round with fewer replies than this share of its workers is discarded"
    )


@dataclass(frozen=True, kw_only=True)
class ZerothOrderState(State):
    initial: Params
    held: Mapping[str, int]  # by worker, the round that its kept parameters begin
    history: tuple[Mapping[str, Any], ...] = ()  # of the last rounds, as `Round.to_json`
    sums: str = ""  # of the pool, fp64


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a committed round did: K steps."""

    number: int
    lr: float
    slopes: tuple[float, ...]  # K P

    def to_json(self) -> dict[str, Any]:
        return {"round": self.number, "lr": self.lr, "slopes": packed(self.slopes)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Round:
        return Round(number=int(value["round"]), lr=float(value["lr"]), slopes=unpacked(value["slopes"]))

    def steps(self, seeds: Sequence[Sequence[int]]) -> list[Step]:
        """`seeds`: P of each local step."""
        num = len(seeds[0])
        return [
            Step(tuple(own), self.slopes[k * num : (k + 1) * num], self.lr) for k, own in enumerate(seeds)
        ]  # fmt: skip


def packed(values: Sequence[float], dtype: str = "<f4") -> str:
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()


def unpacked(text: object, dtype: str = "<f4") -> tuple[float, ...]:
    """InvalidUpdate if it is not what `packed` gives."""
    try:
        return tuple(np.frombuffer(base64.b64decode(str(text), validate=True), dtype).tolist())
    except (ValueError, binascii.Error) as error:
        raise InvalidUpdate(f"the slopes of a worker cannot be read: {error}") from error


# The half that runs on the device.
@task("zeroth_order.inner", kind="pinned", numbers=("num_tokens", "loss_sum"), texts=("slopes",))
def inner(
    replica: Replica, *, theta: Vector | None, is_first: bool, sums: Sequence[Any] | None, missed: Sequence[Any],
    seeds: Sequence[Sequence[int]], lr: float, epsilon: float, difference: Difference, num_sequences: int,
) -> Result:  # fmt: skip
    """Begins with `theta`, or where that is None the run's first parameters (`is_first`) or its own.

    `missed`: [[seeds, slopes, lr], ...] of steps since. `sums`: [seeds, sums] of the pool, since the first.
    """
    kept = _caught_up(replica, theta=theta, is_first=is_first, sums=sums, missed=missed)
    local = kept if len(seeds) == 1 else kept.clone()
    local = local.to(replica.weights.device)
    batches, slopes = replica.batches(), list[float]()
    loss_sum, num_tokens = 0.0, 0
    for number, own in enumerate(seeds):
        tokens, losses = _sequences(batches, num_sequences), list[Loss]()

        def loss(tokens: Tensor = tokens, losses: list[Loss] = losses) -> float:
            losses.append(replica.evaluate(tokens))
            return losses[-1].loss_sum / losses[-1].num_tokens

        found = projected_gradients(loss, replica.weights, local, seeds=own, eps=epsilon, difference=difference)
        slopes += found
        loss_sum += sum(each.loss_sum for each in losses) / len(losses)
        num_tokens += losses[0].num_tokens
        if number + 1 < len(seeds):
            take(local, steps=[Step(tuple(own), found, lr)])
    return Result({"num_tokens": num_tokens, "loss_sum": loss_sum, "slopes": packed(slopes)})


@task("zeroth_order.loss", kind="pinned", numbers=("num_tokens", "loss_sum"))
def held_out_loss(
    replica: Replica, *, theta: Vector | None, is_first: bool, sums: Sequence[Any] | None, missed: Sequence[Any]
) -> Result:
    replica.load(_caught_up(replica, theta=theta, is_first=is_first, sums=sums, missed=missed))
    return over(replica)


def _caught_up(
    replica: Replica, *, theta: Vector | None, is_first: bool, sums: Sequence[Any] | None, missed: Sequence[Any]
) -> Tensor:
    """The worker's own copy of the parameters, as they are now."""
    given = replica.first() if is_first else theta
    if given is None:
        kept = replica.kept[_theta]
    else:
        kept = replica.kept.make(_theta)
        for low, part in given.slices():
            kept[low : low + len(part)] = part
    if sums is not None:
        rebuild(kept, pool=SeedPool(tuple(sums[0]), unpacked(sums[1])))
    take(kept, steps=[Step(tuple(seeds), unpacked(slopes), lr) for seeds, slopes, lr in missed])
    return kept


def _sequences(batches: Any, num: int) -> Tensor:
    """So many of the task's sequences: [num, seq_len + 1]. InvalidUpdate where some that were read would go unused."""
    rows: list[Tensor] = []
    while sum(len(each) for each in rows) < num:
        rows.append(next(batches))
    found = torch.cat(rows)
    if len(found) != num:
        raise InvalidUpdate(f"a step is to take {num} sequences, which are no whole number of batches")
    return found


# The half that runs on the coordinator.
class ZerothOrder:
    Config: ClassVar[type[BaseModel]] = ZerothOrderConfig
    State: ClassVar[type[State]] = ZerothOrderState
    kept_vectors = 1.0

    def __init__(self, config: ZerothOrderConfig) -> None:
        self.config = config

    def init(self, run: RunFacts) -> ZerothOrderState:
        config, inner_config = self.config, run.inner
        run.check_rule()
        run.refuse_balance("strategy zeroth_order")
        if run.aggregation.rule not in _rules:
            raise RecipeError(
                f"strategy zeroth_order joins slopes by {', '.join(_rules)}; aggregation.rule is "
                f"{run.aggregation.rule!r}"
            )
        if inner_config.optimizer != "sgd" or inner_config.weight_decay:
            raise RecipeError(
                "strategy zeroth_order takes plain steps along its directions: set strategy.inner.optimizer to 'sgd' "
                "and strategy.inner.weight_decay to 0"
            )
        if run.down_codec != "fp32":
            raise RecipeError(
                f"workers of zeroth_order replay steps from parameters that are exact; codec.down is "
                f"{run.down_codec!r}: set it to 'fp32'"
            )
        num_slopes = config.num_perturbations * config.num_local_steps
        if num_slopes > most_slopes:
            raise RecipeError(
                f"strategy.num_perturbations times num_local_steps is {num_slopes} and a worker may send {most_slopes} "
                "slopes a round: lower one of the two"
            )
        if num_slopes * config.history_rounds > most_replayed:
            raise RecipeError(
                f"a worker that missed {config.history_rounds} rounds of {num_slopes} slopes would be sent more than "
                f"the {most_replayed} that a message holds: set strategy.history_rounds to "
                f"{most_replayed // num_slopes} or less"
            )
        if 0 < config.pool_size < config.num_perturbations:
            raise RecipeError(
                f"strategy.pool_size is {config.pool_size} and a step takes {config.num_perturbations} seeds: raise it"
            )
        sums = packed([0.0] * config.pool_size, "<f8") if config.pool_size else ""
        return ZerothOrderState(params=run.initial, initial=run.initial, held={}, sums=sums)

    async def run_round(self, state: ZerothOrderState, fleet: Fleet) -> ZerothOrderState:
        config, run, now = self.config, fleet.run, state.round
        workers = fleet.workers()
        num_steps = min(config.num_local_steps, run.steps_left(state, len(workers)))
        seeds = self.seeds(run, now)[:num_steps]
        lr = learning_rate(run.inner, run.progress(state))
        per_step = run.inner.sequences_per_step
        got = await fleet.call(
            {
                worker.id: inner.bind(
                    **self._catching_up(state, run, worker), seeds=seeds, lr=lr, epsilon=config.epsilon,
                    difference=config.difference, num_sequences=per_step,
                ).granted(num_steps * per_step)
                for worker in workers
            },
            key="inner",
            min_replies=share_of(config.min_reply_fraction, len(workers)),
        )  # fmt: skip
        caught_up = {reply.worker for reply in got.replies}  # also whose slopes are of no use
        got, slopes = self.joined(got, run, num_steps, num_needed=share_of(config.min_reply_fraction, len(workers)))
        round = Round(number=now, lr=lr, slopes=slopes)
        try:
            steps = round.steps(seeds)
            sums = self._sums(state, run, steps)
        except InvalidUpdate as error:
            raise RoundFailed(f"no step can be taken: {error}") from error
        (params,) = await fleet.apply(take, state.params, steps=steps)
        num_tokens = int(got.sum("num_tokens"))
        return replace(
            state,
            params=params,
            held=self._held(state, caught_up),
            history=(*state.history, round.to_json())[-config.history_rounds :],
            sums=sums,
            round=now + 1,
            tokens=state.tokens + num_tokens,
            loss=got.sum("loss_sum") / num_tokens,
        )

    async def validate(self, state: ZerothOrderState, fleet: Fleet, *, num_parts: int) -> Loss:
        """Without sending the parameters."""
        run = fleet.run
        return await by_members(
            fleet, lambda worker: held_out_loss.bind(**self._catching_up(state, run, worker)), num_parts
        )

    def _held(self, state: ZerothOrderState, replied: set[WorkerId]) -> dict[str, int]:
        """The round that every worker's kept parameters begin, as far as its rounds are not forgotten."""
        least = state.round + 1 - self.config.history_rounds
        held = {worker: round for worker, round in state.held.items() if round >= least}
        return held | dict.fromkeys(sorted(replied), state.round)

    def _catching_up(self, state: ZerothOrderState, run: RunFacts, worker: WorkerInfo) -> dict[str, Any]:
        """Arguments that bring a worker's parameters to what they are now."""
        known: dict[str, Any] = {"theta": None, "is_first": False, "sums": None, "missed": []}
        since = state.held.get(worker.id) if worker.holds_state else None
        if since is None and run.first_is_known and len(state.history) == state.round:
            since, known["is_first"] = 0, True
        if since is not None:
            rounds = [Round.from_json(each) for each in state.history if int(each["round"]) >= since]
            steps = [step for each in rounds for step in each.steps(self._taken(run, each))]
            return known | {"missed": [[list(step.seeds), packed(step.scalars), step.lr] for step in steps]}
        if not state.sums:
            return known | {"theta": state.params}
        pool = self.pool(state, run)
        first = {"is_first": True} if run.first_is_known else {"theta": state.initial}
        return known | {**first, "sums": [list(pool.seeds), packed(pool.sums)]}

    def joined(
        self, got: Replies, run: RunFacts, num_steps: int, *, num_needed: int
    ) -> tuple[Replies, tuple[float, ...]]:
        """The replies whose slopes can be used, and the slope along each seed. RoundFailed if these are too few."""
        num, limit = num_steps * self.config.num_perturbations, self.config.max_slope or math.inf
        usable: list[tuple[Reply, tuple[float, ...]]] = []
        refused = ""
        for reply in got.replies:
            try:
                usable.append((reply, accept(unpacked(reply.scalars.get("slopes")), num=num, limit=limit)))
            except InvalidUpdate as error:
                refused = f"; {reply.worker}: {error}"
        if len(usable) < num_needed:
            raise RoundFailed(f"{len(usable)} workers sent slopes that can be used and {num_needed} must{refused}")
        weights = [float(reply.scalars["num_tokens"]) for reply, _ in usable]
        rule = _rules[run.aggregation.rule]
        slopes = tuple(rule(column, weights, run) for column in zip(*(own for _, own in usable), strict=True))
        return Replies(replies=tuple(reply for reply, _ in usable)), slopes

    def seeds(self, run: RunFacts, round: int) -> list[list[int]]:
        """P of each local step of a round."""
        config = self.config
        if not config.pool_size:
            return [
                [_seed(run, f"{round}/{k}/{p}") for p in range(config.num_perturbations)]
                for k in range(config.num_local_steps)
            ]
        pool = self._pool_seeds(run)
        chance = np.random.default_rng(_seed(run, f"{round}"))
        drawn = (
            chance.choice(len(pool), config.num_perturbations, replace=False) for _ in range(config.num_local_steps)
        )
        return [[pool[int(place)] for place in places] for places in drawn]

    def _taken(self, run: RunFacts, round: Round) -> list[list[int]]:
        return self.seeds(run, round.number)[: len(round.slopes) // self.config.num_perturbations]

    def _pool_seeds(self, run: RunFacts) -> tuple[int, ...]:
        return tuple(_seed(run, f"pool/{place}") for place in range(self.config.pool_size))

    def _sums(self, state: ZerothOrderState, run: RunFacts, steps: Sequence[Step]) -> str:
        if not state.sums:
            return ""
        pool = self.pool(state, run)
        for step in steps:
            pool = pool.after(step)
        return packed(pool.sums, "<f8")

    def pool(self, state: ZerothOrderState, run: RunFacts) -> SeedPool:
        return SeedPool(self._pool_seeds(run), unpacked(state.sums, "<f8"))

    def estimate(self, run: RunFacts) -> RoundBytes:
        """No object travels once a worker has the parameters, and with adapters none at all."""
        return RoundBytes(up=0, down=0)

    def total(self, run: RunFacts, num_rounds: int) -> RoundBytes:
        return RoundBytes(up=0, down=0 if run.first_is_known else run.down_bytes())


def _seed(run: RunFacts, what: str) -> int:
    """64 bits."""
    return int.from_bytes(hashlib.blake2b(f"{run.seed}/{what}".encode(), digest_size=8).digest(), "little")


def _mean(values: Sequence[float], weights: Sequence[float], run: RunFacts) -> float:
    return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)


def _median(values: Sequence[float], weights: Sequence[float], run: RunFacts) -> float:
    return statistics.median(values)


def _trimmed_mean(values: Sequence[float], weights: Sequence[float], run: RunFacts) -> float:
    num = run.aggregation.num_trimmed(len(values))
    kept = sorted(values)[num : len(values) - num]
    if not kept:
        raise RoundFailed(f"trimmed_mean leaves none of {len(values)} slopes; set fleet.min_workers higher")
    return statistics.fmean(kept)


_rules = {"mean": _mean, "median": _median, "trimmed_mean": _trimmed_mean}
"""Of `aggregation.rule`: those that work on one number at a time."""
