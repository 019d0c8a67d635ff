"""One training method: explicit state in, explicit state out.

A strategy is one file with both halves of the method: task functions for the devices and a class for the
coordinator. The class names its `Config` (a pydantic model, the `[strategy]` section of a recipe) and its `State`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from pydantic import BaseModel

from potluck.optim.dp_sgd import PrivacyConfig
from potluck.strategies.fleet import Fleet
from potluck.strategies.replica import Loss
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.task import TaskFunction


@dataclass(frozen=True, kw_only=True)
class RoundBytes:
    """What a strategy says one worker moves in one round, as objects: without training data and control messages."""

    up: int
    down: int


class Strategy(Protocol):
    Config: ClassVar[type[BaseModel]]
    State: ClassVar[type[State]]

    def __init__(self, config: Any) -> None: ...

    def init(self, run: RunFacts) -> State:
        """The state before the first round."""
        ...

    async def run_round(self, state: Any, fleet: Fleet) -> State:
        """The proposed next state, or RoundFailed. Never mutates `state`; the same on every replay."""
        ...

    def estimate(self, run: RunFacts) -> RoundBytes: ...


def kept_vectors(strategy: Strategy) -> float:
    """How many fp32 vectors of the model's size its workers hold from round to round (`Replica.kept`).

    Its attribute of this name, 0 without one: a machine without the memory for them is told so before it begins.
    """
    return float(getattr(strategy, "kept_vectors", 0.0))


def takes_pairs(strategy: Strategy) -> bool:
    """Whether its tasks train on pairs, integer [at most batch_size, 2, seq_len + 1]: its attribute of this name."""
    return bool(getattr(strategy, "takes_pairs", False))


def merges_adapters(strategy: Strategy) -> bool:
    """Whether it adds what adapters learned to the frozen base: its attribute of this name. Then the run's layout has
    such a matrix for each adapted layer (models/adapters.py)."""
    return bool(getattr(strategy, "merges_adapters", False))


def takes_unequal_ranks(strategy: Strategy) -> bool:
    """Whether its workers may train adapters of unequal ranks: its attribute of this name."""
    return bool(getattr(strategy, "takes_unequal_ranks", False))


def tasks_given(strategy: Strategy) -> tuple[str, ...] | None:
    """Names of the tasks that it gives as it is set, by its attribute `tasks`; None for all that its module has."""
    tasks: tuple[TaskFunction, ...] | None = getattr(strategy, "tasks", None)
    return None if tasks is None else tuple(task.name for task in tasks)


def privacy(strategy: Strategy) -> PrivacyConfig | None:
    """What it guarantees each record of an owner: its attribute of this name, None without one. Then workers take no
    steps but private ones and tell no loss, so that its states have none."""
    return getattr(strategy, "privacy", None)


@runtime_checkable
class OwnValidation(Protocol):
    """A method that validates its model itself, since its workers have the parameters without being sent them."""

    async def validate(self, state: Any, fleet: Fleet, *, num_parts: int) -> Loss:
        """The loss over all held-out data: so many parts of shared data, or with 0 each worker's own."""
        ...


@runtime_checkable
class HeadStrategy(Protocol):
    """A method whose devices hold no model: it is on the head alone, which validates it too. Shared data only."""

    async def evaluate(self, state: Any, fleet: Fleet, num_held_out_parts: int) -> Loss:
        """The loss over all held-out data."""
        ...
