"""Federated LoRA: workers train adapters on a frozen base for some steps, and a rule joins them. One method, its rules
told apart by what is trained, what travels, and what the coordinator makes of it.

    W = W0 + s B A      p_i = tokens_i / sum of tokens

rule         trained      sent    joined                                              exact
`fed_it`     A, B         A, B    the mean of each factor                             no
`ffa`        B            B       the mean of B; A stays as it was drawn              yes
`ro_lora`    B, A in turn one     the mean of the factor that moved                   yes
`fed_sa`     A, B         A       the mean of A; every worker keeps its own B         personal
`fed_ex`     A, B         A, B    the means, and what they miss goes into the base    yes
`flora`      A, B         A, B    sum_i p_i s_i B_i A_i goes into the base; new A, B  yes
`flex_lora`  A, B         A, B    the best approximation of that sum in each rank     of its rank
`het_lora`   A, B         A, B    means of factors with zeros, weighed by norm        no

lora/ has the rules of the last four with their sources. FedIT: Zhang et al. 2023, arXiv:2305.05644; FFA-LoRA: Sun et
al. 2024, arXiv:2403.12313; RoLoRA: Chen et al. 2025, arXiv:2502.01755; FedSA-LoRA: Guo et al. 2024, arXiv:2410.01463.

What travels up is the difference to what came down. Factors that did not change do not come down again. Where workers
have unequal ranks, one of rank r has the first r components with the scale of r. What goes into the base is a matrix
beside it (`models.adapters.Merged`), which comes down as the factors of each round where these are smaller: merging.py.
The inner optimizer's moments are forgotten where A and B are new.

With `privacy`, for `ffa`, workers take their steps by DP-SGD on their own records (optim/dp_sgd.py; Abadi et al. 2016).
What they send is noised where it is made, so that whatever is done with it costs no more privacy; they tell no losses.
Noise in A and B at once would be multiplied, which is why A stays as it is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from potluck.codecs.delta import WHOLE
from potluck.lora.change import change_of
from potluck.lora.factors import Factors
from potluck.lora.merged import with_products
from potluck.lora.places import AdaptedLayer, Factor, adapted_layers, factors_in, part_of, placed
from potluck.lora.ro_lora import moving
from potluck.lora.stacks import Stack, stacked, with_stacks
from potluck.models.config import AdapterConfig
from potluck.optim.dp_sgd import PrivacyConfig
from potluck.optim.outer import axpy
from potluck.strategies import evaluation, merging
from potluck.strategies.fleet import Fleet, Head, Replies, Reply
from potluck.strategies.local_steps import PRIVATE_STEP_NUMBERS, STEP_NUMBERS, Shares, most_steps, take_steps
from potluck.strategies.merging import MergingState
from potluck.strategies.replica import Loss, Replica
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.task import BoundTask, Result, TaskFunction, task
from potluck.types.errors import InvalidUpdate, RecipeError, Refused, UnusableUpdates
from potluck.types.ids import WorkerId
from potluck.types.params import Layout, Params, Part
from potluck.types.vector import Vector

RuleName = Literal["fed_it", "ffa", "ro_lora", "fed_sa", "fed_ex", "flora", "flex_lora", "het_lora"]
OWN = "own"
"""Of a worker's pinned state, with `fed_sa` and with `personal`: the parameters that it ended its last round with, at
the scale of the run's highest rank. With `fed_sa` B never leaves it."""
_both: tuple[Factor, ...] = ("a", "b")


class FedLoRAConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: RuleName = Field(
        default="fed_it",
        description="how adapters become one: `fed_it`, `ffa`, `ro_lora`, `fed_sa` (B stays with its owner), `fed_ex`, "
        "and for unequal ranks `flora`, `flex_lora`, `het_lora`",
    )
    num_inner_steps: int = Field(
        default=20,
        ge=1,
        le=most_steps,
        description="inner steps of each worker in a round; on average where work is balanced",
    )
    press: float = Field(
        default=0.0, ge=0, description="lambda of `het_lora`: workers press the components above the next lower rank "
        "down, and train that rank from then on where a round made them smaller; 0 for never",
    )  # fmt: skip
    personal: bool = Field(
        default=False,
        description="workers keep the adapters that they end a round with, and validation tells of these too how they "
        "do on their owner's text",
    )
    privacy: PrivacyConfig | None = Field(
        default=None,
        description='with rule "ffa" and private records: differential privacy of each of them by noise that workers '
        "add; `{ max_epsilon = 8.0, delta = 1e-5, noise_multiplier = 1.0, clip = 1.0 }`, see "
        "[fine-tuning](fine_tuning.md#differential-privacy)",
    )
    min_reply_fraction: float = Field(
        default=0.5, gt=0, le=1, description="a round with fewer replies than this share of its workers is discarded"
    )


@dataclass(frozen=True, kw_only=True)
class FedLoRAState(MergingState):
    aggregate: Params | None = None  # of the last updates, for the rule of aggregation that starts from it
    pruned: Mapping[str, int] = field(default_factory=dict[str, int])  # with `het_lora`, the rank that is left of whom


@dataclass(frozen=True)
class Rule:
    """What tells one rule from another. `num` is the number of the round, from 1."""

    is_mean: bool = False  # what is sent is averaged by the run's rule of aggregation; else `_joined` makes more of it
    merges: bool = False
    takes_unequal_ranks: bool = False
    begins_anew: bool = False  # A and B of a round are not those that its workers ended the last one with
    trained: tuple[Factor, ...] = _both
    sent: tuple[Factor, ...] = _both
    takes_turns: bool = False

    def trains(self, num: int) -> tuple[Factor, ...]:
        return (moving(num),) if self.takes_turns else self.trained

    def sends(self, num: int) -> tuple[Factor, ...]:
        return (moving(num),) if self.takes_turns else self.sent

    @property
    def keeps_own(self) -> bool:
        """Whether workers train what they do not send."""
        return not self.takes_turns and self.trained != self.sent


rules: Mapping[RuleName, Rule] = {
    "fed_it": Rule(is_mean=True),
    "ffa": Rule(is_mean=True, trained=("b",), sent=("b",)),
    "ro_lora": Rule(is_mean=True, takes_turns=True),
    "fed_sa": Rule(is_mean=True, sent=("a",)),
    "fed_ex": Rule(merges=True),
    "flora": Rule(merges=True, takes_unequal_ranks=True, begins_anew=True),
    "flex_lora": Rule(takes_unequal_ranks=True, begins_anew=True),
    "het_lora": Rule(takes_unequal_ranks=True),
}


# The half that runs on the device.
@task("fed_lora.inner", kind="pinned", numbers=STEP_NUMBERS, vector="delta")
def inner(
    replica: Replica, *, theta: Sequence[Vector], parts: Sequence[Sequence[int]], keeps: Sequence[int], rank: int,
    trains: Sequence[int], sends: Sequence[int], begins_anew: bool, num_steps: int, progress: tuple[float, float],
    mean_steps: int = 0, beta: float = 0.0, personal: bool = False, own_b: tuple[Sequence[int], float] | None = None,
    stacks: Sequence[Stack] = (),
) -> Result:  # fmt: skip
    """`theta` are the values of the tensors in `parts`; those in `keeps` are the worker's own. `beta` is of pairs. What
    it keeps has the tensors and the factor of `own_b` as their scale, where the run's is another. `stacks` are what
    rounds merged that is not in `theta`."""
    start = _begin(replica, theta=theta, parts=parts, keeps=keeps, rank=rank, stacks=stacks)
    replica.train_only(trains)
    if beta:
        replica.prefer(beta=beta)
    if begins_anew:
        replica.forget_moments()
    if own := {*keeps} & {*(sends or range(len(replica.layout.tensors)))}:
        raise Refused(
            f"{replica.layout.tensors[min(own)].name[:200]} stays with its owner; leave it out of what is sent"
        )
    result = take_steps(replica, theta=start, num_steps=num_steps, progress=progress, mean_steps=mean_steps, part=sends)
    if keeps or personal:
        _keep(replica, replica.params())
    if personal and own_b is not None:
        part, factor = own_b
        for start, stop in replica.layout.ranges(part):
            replica.kept[OWN][start:stop] *= factor
    return result


@task("fed_lora.pressed", kind="pinned", numbers=(*STEP_NUMBERS, "has_shrunk"), vector="delta")
def pressed(
    replica: Replica, *, theta: Sequence[Vector], parts: Sequence[Sequence[int]], rank: int,
    last: Sequence[Sequence[int]], press: float, trains: Sequence[int], num_steps: int,
    progress: tuple[float, float], beta: float = 0.0,
) -> Result:  # fmt: skip
    """`last` are the pairs of tensors, A's and B's of a layer, that are pressed down."""
    start = _begin(replica, theta=theta, parts=parts, keeps=(), rank=rank)
    replica.train_only(trains)
    if beta:
        replica.prefer(beta=beta)
    replica.steer(pressed=[(a, b) for a, b in last], press=press)
    result = take_steps(replica, theta=start, num_steps=num_steps, progress=progress, part=trains)
    before, after = (_size(vector, replica.layout, last) for vector in (start, replica.params()))
    return replace(result, scalars={**result.scalars, "has_shrunk": int(after < before)})


def _size(vector: Vector, layout: Layout, pairs: Sequence[Sequence[int]]) -> float:
    """The sum over pairs of the product of their norms."""
    return sum(math.prod(float(vector.part(layout.ranges([i])).tensor().norm()) for i in pair) for pair in pairs)


@task("fed_lora.private_inner", kind="pinned", numbers=PRIVATE_STEP_NUMBERS, vector="delta")
def private_inner(
    replica: Replica, *, theta: Sequence[Vector], parts: Sequence[Sequence[int]], rank: int, trains: Sequence[int],
    num_steps: int, progress: tuple[float, float], mean_steps: int,
) -> Result:  # fmt: skip
    """The same in a run with privacy: what a step is and may tell there is for the replica to see to."""
    start = _begin(replica, theta=theta, parts=parts, keeps=(), rank=rank)
    replica.train_only(trains)
    return take_steps(
        replica, theta=start, num_steps=num_steps, progress=progress, mean_steps=mean_steps, part=trains
    )  # fmt: skip


@task("fed_lora.loss", kind="pinned", numbers=("num_tokens", "loss_sum"))
def held_out_loss(
    replica: Replica, *, theta: Sequence[Vector], parts: Sequence[Sequence[int]], keeps: Sequence[int],
    beta: float = 0.0, stacks: Sequence[Stack] = (),
) -> Result:  # fmt: skip
    if beta:
        replica.prefer(beta=beta)
    replica.load(_begin(replica, theta=theta, parts=parts, keeps=keeps, rank=0, stacks=stacks))
    return evaluation.over(replica)


@task("fed_lora.losses", kind="pinned", numbers=("num_tokens", "loss_sum", "personal_loss_sum"))
def held_out_losses(
    replica: Replica, *, theta: Sequence[Vector], parts: Sequence[Sequence[int]], keeps: Sequence[int],
    beta: float = 0.0, stacks: Sequence[Stack] = (),
) -> Result:  # fmt: skip
    """Also of the parameters that the worker ended its last round with; before its first they are the run's."""
    if beta:
        replica.prefer(beta=beta)
    start = _begin(replica, theta=theta, parts=parts, keeps=keeps, rank=0, stacks=stacks)
    replica.load(start)
    own = replica.kept.tensors().get(OWN)
    return evaluation.over(replica, personal=start if own is None else Vector.of(own))


def _begin(
    replica: Replica, *, theta: Sequence[Vector], parts: Sequence[Sequence[int]], keeps: Sequence[int], rank: int,
    stacks: Sequence[Stack] = (),
) -> Vector:  # fmt: skip
    """The parameters to begin with: what came, and what is the worker's own, at first as it was drawn."""
    replica.use_rank(rank)
    layout = replica.layout
    given = [(layout.ranges(part), vector) for part, vector in zip(parts, theta, strict=True)]
    if keeps:
        if OWN not in replica.kept.tensors():
            _keep(replica, replica.first())
        ranges = layout.ranges(keeps)
        given.append((ranges, Vector.of(replica.kept[OWN]).part(ranges)))
    if stacks:
        plain = [{name.removeprefix(f"{WHOLE}/"): tensor for name, tensor in stack.items()} for stack in stacks]
        merged = with_stacks(layout, Vector.joined(layout.numel, given), plain)
        given += [(layout.ranges([place]), vector) for place, vector in merged]
    return Vector.joined(layout.numel, given)


def _keep(replica: Replica, params: Vector) -> None:
    kept = replica.kept.make(OWN)
    for start, part in params.slices():
        kept[start : start + len(part)] = part


# The half that runs on the coordinator.
class FedLoRA:
    Config: ClassVar[type[BaseModel]] = FedLoRAConfig
    State: ClassVar[type[State]] = FedLoRAState

    beta = 0.0
    """Of the loss of preference, for data of pairs; 0 for the likelihood of single answers."""

    def __init__(self, config: FedLoRAConfig) -> None:
        self.config, self.rule = config, rules[config.rule]

    @property
    def merges_adapters(self) -> bool:
        return self.rule.merges

    @property
    def takes_unequal_ranks(self) -> bool:
        return self.rule.takes_unequal_ranks

    @property
    def privacy(self) -> PrivacyConfig | None:
        return self.config.privacy

    @property
    def tasks(self) -> tuple[TaskFunction, ...]:
        """Owners are asked for what these send and for no more."""
        if self.privacy is not None:
            return (private_inner,)
        pressing = (pressed,) if self.config.press else ()
        return (inner, *pressing, held_out_losses if self.config.personal else held_out_loss)

    @property
    def kept_vectors(self) -> float:
        return 1.0 if self.rule.keeps_own or self.config.personal else 0.0

    def init(self, run: RunFacts) -> FedLoRAState:
        if run.adapter is None:
            raise RecipeError(
                "strategy fed_lora trains adapters and the recipe gives none; add "
                'model.adapter = { rank = 8, target_modules = ["q_proj", "v_proj"] }, or use fed_avg for whole weights'
            )
        run.check_rule()
        can_fall = self.config.rule == "het_lora" and run.adapter.lower_ranks and not self.config.personal
        if self.config.press and not can_fall:
            raise RecipeError(
                "strategy.press is of rule het_lora with lower ranks to fall to, and without `personal`; set it to 0, "
                "or give model.adapter.lower_ranks"
            )
        if not self.rule.is_mean and run.aggregation.rule != "mean":
            raise RecipeError(
                f"strategy.rule {self.config.rule} joins whole adapters and aggregation.rule is "
                f'{run.aggregation.rule!r}: set it to "mean", or use strategy.rule "fed_it", "ffa" or "ro_lora"'
            )
        if not self.rule.is_mean:
            run.refuse_balance(f"strategy.rule {self.config.rule}")
        if self.privacy is not None:
            self._check_privacy(run)
        return FedLoRAState(
            params=run.initial, aggregate=run.zeros if run.aggregation.starts_from_previous else None,
            has_mass=not self.rule.merges,
        )  # fmt: skip

    def _check_privacy(self, run: RunFacts) -> None:
        """RecipeError for what does not go with it."""
        if self.config.rule != "ffa":
            raise RecipeError(
                f'strategy.privacy is of strategy.rule "ffa", which trains one factor of each adapter, and the rule is '
                f'"{self.config.rule}": noise in both would be multiplied; set strategy.rule to "ffa"'
            )
        if run.rows_per_record != 1:
            raise RecipeError(
                "strategy.privacy is of single records and the data are not; set data.private = true and data.format "
                'to "instruct" or "chat"'
            )
        if self.config.personal:
            raise RecipeError(
                "strategy.personal is told by losses on owners' text, which strategy.privacy withholds; remove one of "
                "the two"
            )
        run.refuse_balance("strategy.privacy")

    async def run_round(self, state: FedLoRAState, fleet: Fleet) -> FedLoRAState:
        run, rule, num = fleet.run, self.rule, state.round + 1
        adapter, places = _adapters(run)
        ranks = {
            worker.id: min(worker.adapter_rank or adapter.rank, state.pruned.get(worker.id, adapter.rank))
            for worker in fleet.workers()
        }
        starts = {rank: await self._start(state, fleet, rank) for rank in sorted({*ranks.values()})}
        is_private = self.privacy is not None
        shares = Shares.deal(state, fleet, self.config.num_inner_steps, equal=is_private)

        def work(worker: WorkerId, steps: int) -> BoundTask:
            rank = ranks[worker]
            sends, given = part_of(places, rule.sends(num), rank), self._given(state, starts[rank], run, rank)
            if is_private:
                return private_inner.bind(
                    theta=given["theta"], parts=given["parts"], rank=rank, trains=sends, num_steps=steps,
                    progress=shares.progress, mean_steps=shares.mean_steps,
                ).gives(sends)  # fmt: skip
            if self._presses(rank, adapter):
                last = [(layer.a[layer.blocks(rank) - 1], layer.b[layer.blocks(rank) - 1]) for layer in places]
                del given["keeps"], given["stacks"]
                return pressed.bind(
                    **given, rank=rank, last=last, press=self.config.press, trains=sends, num_steps=steps,
                    progress=shares.progress,
                ).gives(sends)  # fmt: skip
            return inner.bind(
                **given, rank=rank, trains=part_of(places, rule.trains(num), rank),
                sends=sends, begins_anew=rule.begins_anew, num_steps=steps, progress=shares.progress,
                personal=self.config.personal, own_b=rescaled(adapter, places, rank),
                mean_steps=shares.mean_steps if rule.is_mean else 0,
            ).gives(sends)  # fmt: skip

        part = part_of(places, rule.sends(num), adapter.rank)
        got = await shares.call(
            fleet, work, min_reply_fraction=self.config.min_reply_fraction, is_normalised=rule.is_mean,
            is_reduced=rule.is_mean, part=part,
            previous=state.aggregate.part(run.layout.ranges(part)) if state.aggregate else None,
        )  # fmt: skip
        if rule.is_mean:
            state = await self._moved(state, fleet, got.reduced, part, scale=shares.stretch(got))
        else:
            sent = [(reply, ranks[reply.worker]) for reply in got.replies]
            total_rank = sum(rank for _, rank in sent)
            is_stacked = rule.merges and merging.comes_as_factors(state, run, total_rank)
            join = partial(
                self._joined, run=run, num=num, params=state.params, starts=starts, sent=sent, is_stacked=is_stacked
            )
            made = (await fleet.head(join, key="join")).handles
            changed = merging.after(state, run, total_rank, made.get("stack")) if rule.merges else {}
            state = replace(state, params=made["params"], **changed)
            shrunk = [
                reply.worker for reply in got.replies
                if self._presses(ranks[reply.worker], adapter) and reply.scalars["has_shrunk"]
            ]  # fmt: skip
            lower = {worker: adapter.ranks[adapter.ranks.index(ranks[worker]) - 1] for worker in shrunk}
            state = replace(state, pruned={**state.pruned, **lower})
        num_tokens = int(got.sum("num_tokens"))
        if is_private:
            fleet.report(_epsilons(got))
        loss = None if is_private else got.sum("loss_sum") / num_tokens
        return replace(state, round=num, tokens=state.tokens + num_tokens, loss=loss)

    def _presses(self, rank: int, adapter: AdapterConfig) -> bool:
        """Whether a worker of that rank has components to press down."""
        return self.config.press > 0 and rank > adapter.ranks[0]

    async def _moved(
        self, state: FedLoRAState, fleet: Fleet, mean: Params, part: Sequence[int], *, scale: float
    ) -> FedLoRAState:
        """Some tensors moved by the mean of their updates."""
        ranges = fleet.run.layout.ranges(part)
        (params,) = await fleet.apply(axpy, mean, state.params.part(ranges), a=-scale, part=part)
        return replace(
            state,
            params=state.params.with_part(ranges, params),
            aggregate=state.aggregate.with_part(ranges, mean) if state.aggregate else None,
        )

    async def _start(self, state: FedLoRAState, fleet: Fleet, rank: int) -> Params:
        """What a worker of that rank begins with: all parameters, its own components of B at its own scale."""
        run = fleet.run
        adapter, places = _adapters(run)
        if rank == adapter.rank:
            return state.params
        part = part_of(places, ("b",), rank)
        ranges = run.layout.ranges(part)
        ratio = adapter.scaling / adapter.scale_of(rank)
        (scaled,) = await fleet.apply(_times, state.params.part(ranges), part=part, factor=ratio)
        return state.params.with_part(ranges, scaled)

    def _given(self, state: FedLoRAState, start: Params, run: RunFacts, rank: int) -> dict[str, Any]:
        """How parameters come to a worker: what changes apart goes apart, and what it keeps itself not at all."""
        mass, stacks = merging.given(state, start, run)
        theta = [*(Part(start.part(run.layout.ranges(part)), part) for part in self._parts(run, rank)), *mass]
        return {
            "theta": theta,
            "parts": [each.tensors for each in theta],
            "keeps": part_of(_adapters(run)[1], ("b",), rank) if self.rule.keeps_own else (),
            "beta": self.beta,
            "stacks": stacks,
        }

    def _parts(self, run: RunFacts, rank: int) -> list[tuple[int, ...]]:
        """The factors that come down apart, by the tensors of each."""
        _, places = _adapters(run)
        rule = self.rule
        is_whole = rule.sends(1) == rule.sends(2) == _both
        factors: list[Sequence[Factor]] = [_both] if is_whole else [("a",)] if rule.keeps_own else [("a",), ("b",)]
        return [part_of(places, each, rank) for each in factors]

    def _joined(
        self, head: Head, *, run: RunFacts, num: int, params: Params, starts: Mapping[int, Params],
        sent: Sequence[tuple[Reply, int]], is_stacked: bool,
    ) -> Result:  # fmt: skip
        """What the rule makes of the adapters: the new parameters, and with `is_stacked` what it merges by itself. In
        the thread of the head's work."""
        adapter, places = _adapters(run)
        layout, before = run.layout, head.vector(params)
        weighed = [
            (float(reply.scalars["num_tokens"]), rank, _ended(head, reply, starts[rank], places, rank, layout))
            for reply, rank in sent
        ]
        fresh = torch.Generator().manual_seed(new_factors_seed(run.seed, num))
        found: dict[int, Vector] = {}
        added: list[Factors] = []
        with combining():
            for layer in places:
                updates = [
                    (weight, Factors(*layer.factors(tensors, rank), adapter.scale_of(rank)))
                    for weight, rank, tensors in weighed
                ]
                held = Factors(*layer.factors(factors_in(before, layout, layer)), adapter.scaling)
                change = change_of(self.config.rule, held, updates, fresh)
                found |= placed(layer, change.adapter)
                if layer.merged is not None:
                    assert change.merged is not None, "a rule with matrices for what is merged merges each round"
                    added.append(change.merged)
                    found[layer.merged] = with_products(before.part(layout.ranges([layer.merged])), change.merged)
        pieces = [(layout.ranges([i]), vector) for i, vector in found.items()]
        made = {"params": Vector.joined(layout.numel, pieces)}
        return Result({}, {**made, "stack": Vector.of(stacked(added))} if is_stacked else made)

    async def validate(self, state: FedLoRAState, fleet: Fleet, *, num_parts: int) -> Loss:
        """With `fed_sa` each worker has its own B: what it validates is its own model."""
        assert fleet.run.adapter is not None
        measure = held_out_losses if self.config.personal else held_out_loss
        work = measure.bind(**self._given(state, state.params, fleet.run, fleet.run.adapter.rank))
        return await evaluation.by_members(fleet, lambda _: work, num_parts)

    def estimate(self, run: RunFacts) -> RoundBytes:
        """Of a worker of the highest rank; the larger of two rounds where factors take turns."""
        merged = self._merged_bytes(run)
        rounds = [self._bytes(run, num, down) for num, down in zip((1, 2), merged, strict=False)]
        return RoundBytes(up=max(each.up for each in rounds), down=max(each.down for each in rounds))

    def total(self, run: RunFacts, num_rounds: int) -> RoundBytes:
        """Of a worker of the highest rank that is there from the first round on: then all comes to it."""
        parts, merged = self._parts(run, _adapters(run)[0].rank), self._merged_bytes(run)
        rounds = [self._bytes(run, num, down) for num, down in zip(range(1, num_rounds + 1), merged, strict=False)]
        return RoundBytes(
            up=sum(each.up for each in rounds),
            down=sum(map(run.down_bytes, parts)) + sum(each.down for each in rounds[:-1]),
        )

    def _merged_bytes(self, run: RunFacts) -> Iterator[int]:
        """What comes down after each round of what is merged, by as many workers as the recipe has a round wait for."""
        return merging.bytes_down(run, _adapters(run)[0].rank * run.min_workers) if self.rule.merges else repeat(0)

    def _bytes(self, run: RunFacts, num: int, merged_bytes: int) -> RoundBytes:
        """What goes up in a round, and what has changed after it."""
        adapter, places = _adapters(run)
        sent = part_of(places, self.rule.sends(num), adapter.rank)
        down = sum(run.down_bytes(part) for part in self._parts(run, adapter.rank) if {*sent} & {*part})
        return RoundBytes(up=run.up_bytes("delta", sent), down=down + merged_bytes)


def _epsilons(got: Replies) -> dict[str, float]:
    """What the run has cost each owner, as its worker says, and the most of these."""
    found = {f"epsilon/{reply.worker}": float(reply.scalars["epsilon"]) for reply in got.replies}
    return {"epsilon": max(found.values()), **found}


def _adapters(run: RunFacts) -> tuple[AdapterConfig, list[AdaptedLayer]]:
    assert run.adapter is not None
    return run.adapter, list(adapted_layers(run.layout).values())


def rescaled(adapter: AdapterConfig, places: Sequence[AdaptedLayer], rank: int) -> tuple[tuple[int, ...], float] | None:
    """The factors B of a worker of that rank, and what they are multiplied by for the scale of the highest one."""
    if rank == adapter.rank:
        return None
    return part_of(places, ("b",), rank), adapter.scale_of(rank) / adapter.scaling


def _ended(
    head: Head, reply: Reply, start: Params, places: Sequence[AdaptedLayer], rank: int, layout: Layout
) -> dict[int, Tensor]:
    """The factors that a worker ended a round with, by their places: where it began, less its delta."""
    part = part_of(places, _both, rank)
    ended = head.vector(start).part(layout.ranges(part)).tensor() - head.update(reply, "delta", part)
    own = layout.part(part)
    return {i: ended[spec.offset : spec.stop].view(spec.shape) for i, spec in zip(part, own, strict=True)}


@contextmanager
def combining() -> Iterator[None]:
    """Updates that were checked one by one when they came, and that do not go together."""
    try:
        yield
    except InvalidUpdate as error:
        raise UnusableUpdates(f"the adapters of this round cannot be joined: {error}") from error


def new_factors_seed(seed: int, num: int) -> int:
    """Of the factors that a run with that seed begins after a round."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{num}".encode(), digest_size=8).digest(), "little") >> 1


def _times(x: Tensor, *, factor: float, layout: Layout, offset: int) -> tuple[Tensor]:
    return (x.mul_(factor),)
