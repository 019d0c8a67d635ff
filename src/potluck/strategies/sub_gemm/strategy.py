"""Sub-GEMM tensor parallelism: the head trains the model, and devices compute tiles of its matrix products.

    g = d(sum of token losses) / d theta over one batch      every product of it in tiles of C = A B
    g <- g min(1, clip / |g|);  theta <- adamw(theta, g)      on the head, as `sync_sgd` takes its step

Xue et al. 2025, arXiv:2512.22142 ("Cleave"). A device holds no model, no optimizer and no activations: it needs memory
for a tile. A round is one optimizer step; one that is not committed is done again, with the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from potluck.optim.inner import InnerConfig
from potluck.planner.tiles.device import Head as HeadMachine
from potluck.strategies.fleet import Fleet, Head
from potluck.strategies.replica import Loss
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.sub_gemm.head import HeadConfig, HeadModel
from potluck.strategies.sub_gemm.multiply import SpreadConfig, SpreadMultiplier
from potluck.strategies.sub_gemm.tally import Tally
from potluck.strategies.sub_gemm.tile import multiply, needed_bytes
from potluck.strategies.sync_sgd import SyncSGDState, check_optimizer, clip_scale, step
from potluck.strategies.task import Result, task
from potluck.types.errors import InvalidUpdate, NotFinite, RoundFailed
from potluck.types.ids import WorkerId

guessed_s_per_flop = 1e-10
timed_side, num_timings = 384, 3
"""The head's speed at the start is that of a product of such matrices; products that it does correct it."""


class SubGEMMConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    wire: Literal["fp32", "bf16", "int8"] = Field(
        default="fp32", description="how factors travel: fp32 exactly, bf16, or int8 with a scale for each row"
    )
    head_computes: bool = Field(
        default=True, description="whether the head does products itself where that is as quick or nobody is left"
    )
    keep_weights: bool = Field(
        default=True, description="whether devices keep parts of weights over the micro-batches of a step"
    )
    split_inner: bool = Field(default=True, description="whether sums may be split over devices (K split)")
    num_tiles: int = Field(default=4, ge=1, le=64, description="parts of a device's share, so that its stages overlap")
    least_side: int = Field(
        default=64, ge=1, le=1 << 20, description="of a tile, on average; small products use fewer devices"
    )
    attention: bool = Field(default=False, description="whether the products of attention are spread too")
    checkpointing: bool = Field(default=False, description="whether activations are computed twice to keep fewer")


@task("sub_gemm.tile", kind="pure", inline=("c",))  # the half that runs on a device
def tile(
    _: object, *, a: Tensor, b: Tensor, wire: str, is_a_transposed: bool, is_b_transposed: bool, most_bytes: int
) -> Result:
    needed = needed_bytes(a, b, wire=wire, is_a_transposed=is_a_transposed, is_b_transposed=is_b_transposed)
    if needed > most_bytes:
        raise InvalidUpdate(f"a product takes {needed:,} bytes and was said to take no more than {most_bytes:,}")
    product = multiply(a, b, wire=wire, is_a_transposed=is_a_transposed, is_b_transposed=is_b_transposed)
    return Result({}, inline={"c": product})


class SubGEMM:  # the half that runs on the head
    Config: ClassVar[type[BaseModel]] = SubGEMMConfig
    State: ClassVar[type[State]] = SyncSGDState

    def __init__(self, config: SubGEMMConfig) -> None:
        self.config = config
        self._model: HeadModel | None = None  # as large as the model, and filled anew in each step
        self._multiplier: SpreadMultiplier | None = None  # what it knows of the devices outlives a step

    def init(self, run: RunFacts) -> SyncSGDState:
        check_optimizer(run.inner, "sub_gemm")
        return SyncSGDState(params=run.initial, first_moment=run.zeros, second_moment=run.zeros)

    async def run_round(self, state: SyncSGDState, fleet: Fleet) -> SyncSGDState:
        run = fleet.run
        num_sequences = run.inner.sequences_per_step

        def work(head: Head) -> Result:
            model, multiplier = self._model_of(run), self._multiplier_on(head, run)
            multiplier.begin_step(head)
            model.load(head.vector(state.params))
            gradient, loss = model.gradient(
                head.batches(), num_sequences=num_sequences, multiplier=multiplier, step=state.round
            )
            return Result({"num_tokens": loss.num_tokens, "loss_sum": loss.loss_sum}, {"gradient": gradient})

        try:
            got = await fleet.head(work, key="step", num_sequences=num_sequences)
        except NotFinite as error:
            raise RoundFailed(str(error)) from error
        num_tokens, loss_sum = int(got.scalars["num_tokens"]), float(got.scalars["loss_sum"])
        assert self._multiplier is not None
        log = self._multiplier.log
        fleet.report(log.metrics())
        fleet.credit("step", shares(log.tally, num_tokens))
        gradient = got.handles["gradient"]
        progress, _ = run.progress_span(state, 1)
        scale = clip_scale(await fleet.norm(gradient) / num_tokens, run.inner.clip) / num_tokens
        stepped = await step(fleet, state, gradient, config=run.inner, progress=progress, scale=scale)
        return replace(
            stepped, round=state.round + 1, tokens=state.tokens + num_tokens, loss=loss_sum / num_tokens
        )  # fmt: skip

    async def evaluate(self, state: SyncSGDState, fleet: Fleet, num_held_out_parts: int) -> Loss:
        run = fleet.run

        def work(head: Head) -> Result:
            model = self._model_of(run)
            model.load(head.vector(state.params))
            losses = [model.evaluate(tokens) for tokens in head.batches()]
            return Result(
                {"num_tokens": sum(x.num_tokens for x in losses), "loss_sum": sum(x.loss_sum for x in losses)}
            )

        got = await fleet.head(work, key="validation", held_out_parts=num_held_out_parts)
        return Loss(float(got.scalars["loss_sum"]), int(got.scalars["num_tokens"]))

    def estimate(self, run: RunFacts) -> RoundBytes:
        """No objects of the model's size move: devices are sent parts of products, inline."""
        return RoundBytes(up=0, down=0)

    def _model_of(self, run: RunFacts) -> HeadModel:
        if self._model is None:
            config = self.config
            self._model = HeadModel(
                dict(run.model_config), run.layout,
                HeadConfig(
                    batch_size=run.inner.batch_size, seq_len=run.seq_len, precision=run.precision,
                    attention=config.attention, checkpointing=config.checkpointing, seed=run.seed,
                ),
            )  # fmt: skip
        return self._model

    def _multiplier_on(self, head: Head, run: RunFacts) -> SpreadMultiplier:
        if self._multiplier is None:
            able = HeadMachine(s_per_flop=seconds_per_flop(head.now)) if self.config.head_computes else HeadMachine()
            self._multiplier = SpreadMultiplier(spread_config(self.config, run.inner), head=able, secret=head.secret())
        return self._multiplier


def spread_config(config: SubGEMMConfig, inner: InnerConfig) -> SpreadConfig:
    """How products of a run are spread."""
    return SpreadConfig(
        wire=config.wire,
        num_tiles=config.num_tiles,
        num_micro_batches=-(-inner.sequences_per_step // inner.batch_size),
        may_keep_weights=config.keep_weights,
        may_split_inner=config.split_inner,
        least_side=config.least_side,
    )


def seconds_per_flop(now: Callable[[], float]) -> float:
    """Of this machine now, by the quickest of a few products; a guess on a clock that stands still meanwhile."""
    a, b = torch.ones(timed_side, timed_side), torch.ones(timed_side, timed_side)
    times: list[float] = []
    for _ in range(1 + num_timings):
        begun = now()
        torch.mm(a, b)
        times.append(now() - begun)
    return min(times[1:]) / (2 * timed_side**3) or guessed_s_per_flop


def shares(tally: Tally, num_tokens: int) -> Mapping[WorkerId, int]:
    """What each device did of a step's tokens, by the elements of results that it brought."""
    total = sum(tally.up_bytes.values())
    return {worker: int(num_tokens * number / total) for worker, number in tally.up_bytes.items()} if total else {}
