"""Streaming DiLoCo: the model is synchronised in fragments, and workers go on training while one travels.

Each of P fragments is exchanged every H inner steps, and one of them every h = H / P: segment s is the inner steps
[s h, (s + 1) h), and at its end every worker i sends fragment p = s mod P:

    delta_i,p = theta_p - theta_i,p               theta_p: as worker i last received it, theta_i,p: as it has trained it
    m_p      <- mu m_p + sum_i w_i delta_i,p      w_i = tokens_i / sum of tokens, of segment s
    theta_p  <- theta_p - eta (sum_i w_i delta_i,p + mu m_p)

tau inner steps later it takes up the new theta_p, whatever it has trained since:

    theta_i,p <- alpha theta_i,p + (1 - alpha) theta_p

Douillard et al. 2025, arXiv:2501.18512, Algorithm 2. Between the two each worker trains on: the fragment has tau steps'
time to go up, be averaged and come down, and a link that carries bytes(fragment) / (tau step time) is fast enough. A
committed round is one fragment's outer step. With tau = k h + rest the rounds of k fragments overlap. P = 1, tau = 0,
alpha = 0 is DiLoCo, bit for bit.

Layer l belongs to fragment l mod P; of the tensors outside of layers (embeddings, last norm, head) the largest goes to
the fragment that is smallest so far, then the next. The paper strides over layers too, and leaves the rest open.

A worker's work is a chain of pinned tasks, begun before the rounds that collect them, so that it always has the next
one: at most two for a segment, since a task takes up what it was given when it begins. theta_i and the theta_p of all
fragments are part of its pinned state: a round that is discarded, or a machine that dies in the middle of a window,
goes back to them. Who joins, or has lost its state, is given all fragments and enters where the others are next; where
those who train are too few for the rule of aggregation and with those who enter are not, all enter at once.

Eager updates (Kale et al. 2025, arXiv:2502.12996; here without momentum of the worker's own): when it sends delta_i,p
a worker does not keep theta_i,p while it waits, but takes what it expects theta_p to become,

    theta_i,p <- theta_p - others_p - own_p       own_p = eta (1 + mu) delta_i,p / K
    others_p   = what theta_p last moved by, less the worker's own part in it

K workers, eta (1 + mu) being how much of a fresh delta an outer step takes. The true theta_p then replaces it as above.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from potluck.optim.outer import nesterov
from potluck.strategies import evaluation
from potluck.strategies.fleet import Fleet, Reduction, share_of, weighted_mean
from potluck.strategies.local_steps import STEP_NUMBERS, most_steps, summed_steps
from potluck.strategies.replica import Loss, Replica
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.task import BoundTask, Result, task
from potluck.types.errors import RecipeError, RoundFailed
from potluck.types.ids import WorkerId
from potluck.types.params import Layout, Params, Part
from potluck.types.vector import Vector, slice_numel

_layer = re.compile(r"(?:^|\.)(?:h|layers?|blocks?)\.(\d+)\.")
"""How families of models number their layers in the names of tensors."""


class StreamingDiLoCoConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    num_inner_steps: int = Field(
        default=96, ge=1, le=most_steps, description="H: inner steps between two exchanges of one fragment"
    )
    num_fragments: int = Field(
        default=4, ge=1, description="P: parts of the model that are exchanged in turn; divides H"
    )
    overlap_steps: int = Field(
        default=24,
        ge=0,
        description="tau: inner steps that a fragment may travel, below H; multiples of H / P cost least",
    )
    mixing: float = Field(
        default=0.5, ge=0, lt=1, description="alpha: the worker's own share where it takes up a fragment; 0 replaces it"
    )
    eager: bool = Field(
        default=False, description="while a fragment travels, train on from what it is expected to become"
    )
    outer_lr: float = Field(default=0.7, gt=0, description="eta: size of the outer step")
    outer_momentum: float = Field(
        default=0.9, ge=0, lt=1, description="mu: Nesterov momentum, of each fragment its own"
    )
    min_reply_fraction: float = Field(
        default=0.5, gt=0, le=1, description="a round with fewer replies than this share of its workers is discarded"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.num_inner_steps % self.num_fragments:
            raise ValueError(
                f"num_inner_steps is {self.num_inner_steps} and must be a multiple of num_fragments, which is "
                f"{self.num_fragments}: every fragment has its turn after as many steps"
            )
        if self.overlap_steps >= self.num_inner_steps:
            raise ValueError(
                f"overlap_steps is {self.overlap_steps} and must be below num_inner_steps, which is "
                f"{self.num_inner_steps}: a fragment is taken up before it is sent again"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCoState(State):
    momentum: Params
    members: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Who trains, each with its first segment and the round whose parameters it began with."""
    aggregate: Params | None = None  # the last of each fragment, for the rule of aggregation that starts from it


# The half that runs on the device.
@task("streaming_diloco.inner", kind="pinned", numbers=STEP_NUMBERS, vector="delta")
def inner(
    replica: Replica, *, theta: Sequence[Vector], parts: Sequence[Sequence[int]], starts: bool, mixing: float,
    num_steps: int, progress: tuple[float, float], sends: Sequence[int] | None, own_share: float,
) -> Result:  # fmt: skip
    """`theta`: new values of the tensors in `parts`. `sends`: the fragment to send at the end, None for none."""
    take = replica.kept.make if starts else replica.kept.__getitem__
    local, common = take("local"), take("common")
    others = take("others") if own_share else None
    for vector, part in zip(theta, parts, strict=True):
        for low, high, new in pieces(vector, replica.layout, part):
            if others is not None:
                others[low:high] = 0.0 if starts else common[low:high] - new - others[low:high]
            common[low:high] = new
            local[low:high] = mixing * local[low:high] + (1.0 - mixing) * new if mixing and not starts else new
    replica.load(local)
    sums = summed_steps(replica, num_steps=num_steps, progress=progress)
    for low, trained in replica.params().slices():
        local[low : low + len(trained)] = trained
    if sends is None:
        return Result(sums)
    ranges = replica.layout.ranges(sends)
    delta = Vector.of(common).part(ranges) - Vector.of(local).part(ranges)
    if others is not None:
        delta = Vector.of(delta.tensor())  # before `local` becomes what is expected
        for low, high, mine in pieces(delta, replica.layout, sends):
            local[low:high] = common[low:high] - others[low:high] - own_share * mine
            others[low:high] = own_share * mine
    return Result(sums, {"delta": delta})


def pieces(vector: Vector, layout: Layout, part: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
    """Elements [low, high) of the model with their values in `vector`, which holds this part of it."""
    at = 0
    for start, stop in layout.ranges(part):
        for low in range(start, stop, slice_numel):
            high = min(low + slice_numel, stop)
            yield low, high, vector.read(at, at + high - low)
            at += high - low


# The half that runs on the coordinator.
class StreamingDiLoCo:
    Config: ClassVar[type[BaseModel]] = StreamingDiLoCoConfig
    State: ClassVar[type[State]] = StreamingDiLoCoState

    def __init__(self, config: StreamingDiLoCoConfig) -> None:
        self.config = config
        self._segment = config.num_inner_steps // config.num_fragments  # h
        self._num_behind, self._rest = divmod(config.overlap_steps, self._segment)  # k, rest

    @property
    def kept_vectors(self) -> float:
        """`local` and `common`; eager also `others`, and the delta that is sent."""
        return 3.0 + 1.0 / self.config.num_fragments if self.config.eager else 2.0

    def init(self, run: RunFacts) -> StreamingDiLoCoState:
        fragments(run.layout, self.config.num_fragments)
        run.check_rule()
        run.refuse_balance("strategy streaming_diloco")
        return StreamingDiLoCoState(params=run.initial, momentum=run.zeros)

    async def run_round(self, state: StreamingDiLoCoState, fleet: Fleet) -> StreamingDiLoCoState:
        config, run, now = self.config, fleet.run, state.round
        members = self._members(state, fleet)
        for segment, is_end in self._due(state, run, len(members)):
            await self._begin(state, fleet, members, segment, is_end=is_end)
        here = [worker for worker, (first, _) in members.items() if first <= now]
        got = await fleet.collect(
            [_key(now, is_end=False), _key(now, is_end=True)] if self._rest else [_key(now, is_end=True)],
            min_replies=share_of(config.min_reply_fraction, len(here)),
            reduce=self._mean(state, run, now),
        )
        part = self._fragment(run, now)
        ranges = run.layout.ranges(part)
        params, momentum = await fleet.apply(
            nesterov,
            state.params.part(ranges),
            state.momentum.part(ranges),
            got.reduced,
            num_outputs=2,
            part=part,
            lr=config.outer_lr,
            momentum_coefficient=config.outer_momentum,
        )
        replied = {reply.worker for reply in got.replies}
        num_tokens = int(got.sum("num_tokens"))
        return replace(
            state,
            params=state.params.with_part(ranges, params),
            momentum=state.momentum.with_part(ranges, momentum),
            members={w: place for w, place in members.items() if place[0] > now or w in replied},
            aggregate=self._aggregate(state, run).with_part(ranges, got.reduced)
            if run.aggregation.starts_from_previous
            else None,
            round=now + 1,
            tokens=state.tokens + num_tokens,
            loss=got.sum("loss_sum") / num_tokens,
        )

    def _members(self, state: StreamingDiLoCoState, fleet: Fleet) -> dict[WorkerId, tuple[int, int]]:
        """Who trains in this round and after it: those who go on, and those who enter."""
        now, cohort = state.round, fleet.workers()
        going_on: dict[WorkerId, tuple[int, int]] = {}
        for worker in cohort:
            place = state.members.get(worker.id)
            if place is not None and (worker.under_way or (place[0] < now and worker.holds_state)):
                going_on[worker.id] = (place[0], place[1])
        num_training = sum(first <= now for first, _ in going_on.values())
        if going_on and not num_training:
            raise RoundFailed("none of those who were training is here any more")
        rule = fleet.run.aggregation
        if rule.fails_with(num_training) and not rule.fails_with(len(cohort)):  # there are enough if all begin at once
            if any(worker.under_way for worker in cohort):
                raise RoundFailed(f"{num_training} of {len(cohort)} workers are training, too few for {rule.rule}")
            going_on, num_training = {}, 0
        at_once = not num_training
        enters = now if at_once else now + self._num_behind + (self._rest > 0)
        return {w.id: going_on.get(w.id, (enters, now)) for w in cohort}

    def _due(self, state: StreamingDiLoCoState, run: RunFacts, num_workers: int) -> Iterator[tuple[int, bool]]:
        """What workers should have before them: segments, each its beginning and its end apart."""
        now = state.round
        for segment in range(now, now + self._num_behind + 1 + (self._rest > 0)):
            if segment > now and run.progress(self._later(state, run, segment, num_workers)) >= 1.0:
                return
            if self._rest:
                yield segment, False
            if segment <= now + self._num_behind:
                yield segment, True

    def _later(
        self, state: StreamingDiLoCoState, run: RunFacts, segment: int, num_workers: int
    ) -> StreamingDiLoCoState:
        """The state before a segment that is begun early, as far as it can be foreseen."""
        num_rounds = segment - state.round
        per_round_s = state.seconds / state.round if state.round else 0.0
        return replace(
            state,
            round=segment,
            tokens=state.tokens + num_rounds * run.tokens_per_step(self._segment * num_workers),
            seconds=state.seconds + num_rounds * per_round_s,
        )

    async def _begin(
        self, state: StreamingDiLoCoState, fleet: Fleet, members: Mapping[WorkerId, tuple[int, int]], segment: int, *,
        is_end: bool,
    ) -> None:  # fmt: skip
        run = fleet.run
        at_work = {worker: place for worker, place in members.items() if place[0] <= segment}
        num_steps, (start, stop) = self._steps(state, run, segment, len(members))
        middle = start + (stop - start) * min(self._rest, num_steps) / num_steps
        num_steps = max(1, num_steps - self._rest) if is_end else min(self._rest, num_steps)
        span = (middle, stop) if is_end else (start, middle)
        is_first = not (is_end and self._rest)
        starting = [worker for worker, (first, _) in at_work.items() if first == segment and is_first]
        everything = [self._fragment(run, number) for number in range(self.config.num_fragments)]
        back = segment - 1 - self._num_behind  # the round whose fragment is taken up here
        tasks: dict[WorkerId, BoundTask] = {}
        for worker, (_, since) in at_work.items():
            starts = worker in starting
            parts = everything if starts else [self._fragment(run, back)] if is_end and back >= since else []
            tasks[worker] = (
                inner.bind(
                    theta=[Part(state.params.part(run.layout.ranges(part)), part) for part in parts],
                    parts=parts,
                    starts=starts,
                    mixing=self.config.mixing,
                    num_steps=num_steps,
                    progress=span,
                    sends=self._fragment(run, segment) if is_end else None,
                    own_share=self._own_share(len(at_work)),
                )
                .granted(num_steps * run.inner.sequences_per_step)
                .gives(self._fragment(run, segment) if is_end else ())
            )
        reduce = self._mean(state, run, segment) if is_end else None
        await fleet.enqueue(tasks, key=_key(segment, is_end=is_end), reduce=reduce, afresh=starting)

    def _steps(
        self, state: StreamingDiLoCoState, run: RunFacts, segment: int, num_workers: int
    ) -> tuple[int, tuple[float, float]]:
        """How many inner steps a segment has, and the run's progress before and after it."""
        before = self._later(state, run, segment, num_workers)
        num_steps = min(self._segment, run.steps_left(before, num_workers))
        return num_steps, run.progress_span(before, num_steps * num_workers)

    def _own_share(self, num_workers: int) -> float:
        if not self.config.eager:
            return 0.0
        return self.config.outer_lr * (1.0 + self.config.outer_momentum) / num_workers

    def _mean(self, state: StreamingDiLoCoState, run: RunFacts, segment: int) -> Reduction:
        part = self._fragment(run, segment)
        previous = self._aggregate(state, run).part(run.layout.ranges(part)) if state.aggregate else None
        return weighted_mean("delta", by="num_tokens", previous=previous, part=part)

    def _aggregate(self, state: StreamingDiLoCoState, run: RunFacts) -> Params:
        return state.aggregate or run.zeros

    def _fragment(self, run: RunFacts, segment: int) -> tuple[int, ...]:
        dealt = fragments(run.layout, self.config.num_fragments)
        return dealt[segment % len(dealt)]

    async def validate(self, state: StreamingDiLoCoState, fleet: Fleet, *, num_parts: int) -> Loss:
        """In fragments, of which workers have what they train from."""
        pieces = fragments(fleet.run.layout, self.config.num_fragments)
        return await evaluation.of_model(fleet, state.params, num_parts, pieces=pieces)

    def estimate(self, run: RunFacts) -> RoundBytes:
        """Of a round in the middle of a run, on average over the fragments."""
        dealt = fragments(run.layout, self.config.num_fragments)
        up, down = (sum(size(part) for part in dealt) / len(dealt) for size in _sizes(run))
        return RoundBytes(up=math.ceil(up), down=math.ceil(down))

    def total(self, run: RunFacts, num_rounds: int) -> RoundBytes:
        """Of a whole run: all fragments at its start, and none that would be taken up after its end."""
        dealt = fragments(run.layout, self.config.num_fragments)
        up, down = _sizes(run)
        taken_up = [dealt[r % len(dealt)] for r in range(num_rounds - 1 - self._num_behind)]
        return RoundBytes(
            up=sum(up(dealt[r % len(dealt)]) for r in range(num_rounds)),
            down=sum(down(part) for part in (*dealt, *taken_up)),
        )


@lru_cache(maxsize=16)
def fragments(layout: Layout, num_fragments: int) -> tuple[tuple[int, ...], ...]:
    """The tensors of each fragment, by their places in the layout; () for all of them. RecipeError for too many."""
    if num_fragments == 1:
        return ((),)
    if num_fragments > len(layout.tensors):
        raise RecipeError(
            f"strategy.num_fragments is {num_fragments} and this model has layers for {len(layout.tensors)} at most; "
            "lower it"
        )
    dealt: list[list[int]] = [[] for _ in range(num_fragments)]
    outside: list[int] = []
    for number, tensor in enumerate(layout):
        found = _layer.search(tensor.name)
        (dealt[int(found[1]) % num_fragments] if found else outside).append(number)
    sizes = [sum(layout.tensors[i].numel for i in part) for part in dealt]
    for number in sorted(outside, key=lambda i: (-layout.tensors[i].numel, i)):
        least = sizes.index(min(sizes))
        dealt[least].append(number)
        sizes[least] += layout.tensors[number].numel
    if not all(dealt):
        raise RecipeError(
            f"strategy.num_fragments is {num_fragments} and this model has layers for {sum(map(bool, dealt))}; lower it"
        )
    return tuple(tuple(sorted(part)) for part in dealt)


def _key(segment: int, *, is_end: bool) -> str:
    return f"{segment}{'b' if is_end else 'a'}"


def _sizes(run: RunFacts) -> tuple[Callable[[Sequence[int]], int], Callable[[Sequence[int]], int]]:
    """What a fragment takes on the way up, and down."""
    return (lambda part: run.up_bytes("delta", part)), (lambda part: run.down_bytes(part))
