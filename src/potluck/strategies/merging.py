"""How what was merged into the base comes to workers: as matrices once in a while, and as the factors of rounds since.

Who was there has all but the last round's factors, which are small; who comes later gets what is there. Once the
factors would be more than `max_share` of the matrices, these come down instead and are what the next ones add to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from potluck.lora.places import adapted_layers, merged_part
from potluck.lora.stacks import stack_layout
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.types.params import Layout, Params, Part, Tensors

max_share = 0.5
"""Of the matrices' elements. A worker has both in memory while it adds them up."""


@dataclass(frozen=True, kw_only=True)
class MergingState(State):
    """With what was merged into the base. `params` has all of it."""

    has_mass: bool = True  # whether there was anything before `stacks`
    mass: Params | None = None  # that, as matrices; None for those of `params`
    stacks: tuple[Params, ...] = ()  # what rounds added since, as factors
    stack_ranks: tuple[int, ...] = ()


def given(state: MergingState, start: Params, run: RunFacts) -> tuple[list[Part], list[Tensors]]:
    """What a worker that begins with `start` needs of it: the matrices, if there are any, and the factors of rounds."""
    part = merged_of(run)
    if not part:
        return [], []
    mass = state.mass or start.part(run.layout.ranges(part))
    stacks = zip(state.stacks, state.stack_ranks, strict=True)
    return (
        [Part(mass, part)] if state.has_mass else [],
        [Tensors(stack, stack_layout(run.layout, rank)) for stack, rank in stacks],
    )


def comes_as_factors(state: MergingState, run: RunFacts, rank: int) -> bool:
    """Whether a round that merges factors of that rank in all goes to workers as these."""
    return _fits([*state.stack_ranks, rank], run)


def after(before: MergingState, run: RunFacts, rank: int, stack: Params | None) -> dict[str, Any]:
    """The fields of the state after a round that came as factors of that rank, or with None as matrices."""
    if stack is None:
        return {"has_mass": True, "mass": None, "stacks": (), "stack_ranks": ()}
    mass = before.mass
    if mass is None and before.has_mass:
        mass = before.params.part(run.layout.ranges(merged_of(run)))
    return {"mass": mass, "stacks": (*before.stacks, stack), "stack_ranks": (*before.stack_ranks, rank)}


def bytes_down(run: RunFacts, rank: int) -> Iterator[int]:
    """What comes down of it after each round of a run from its beginning, each of factors of that rank in all."""
    ranks: list[int] = []
    matrices = merged_of(run)
    next_bytes = run.tensors_bytes(run.layout.part(matrices))  # the first ones are no difference to any before
    while True:
        if _fits([*ranks, rank], run):
            ranks.append(rank)
            yield run.tensors_bytes(stack_layout(run.layout, rank))
        else:
            ranks = []
            yield next_bytes
            next_bytes = run.down_bytes(matrices)


def merged_of(run: RunFacts) -> tuple[int, ...]:
    return merged_part(adapted_layers(run.layout).values())


def _fits(ranks: Sequence[int], run: RunFacts) -> bool:
    matrices: Layout = run.layout.part(merged_of(run))
    return sum(stack_layout(run.layout, rank).numel for rank in ranks) <= max_share * matrices.numel
