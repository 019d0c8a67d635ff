"""What a task function sees of the device it runs on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from potluck.types.errors import StateMissing
from potluck.types.params import Layout
from potluck.types.vector import Vector


@dataclass(frozen=True)
class Step:
    """One pass over a batch: the mean loss per token before the update, and how many tokens it was over.

    Of a private step the loss is nan, and the tokens are those of as many full records as a step takes on average.
    """

    loss: float
    num_tokens: int


@dataclass(frozen=True)
class Loss:
    """A sum of token losses and the number of tokens in it: sums add up where means do not."""

    loss_sum: float
    num_tokens: int


class Mailbox(Protocol):
    """A session's post: results out and inputs in, each named by an inner step."""

    def emit(self, step: int, scalars: Mapping[str, float | int | str], tensors: Mapping[str, Vector | Tensor]) -> None:
        """Send a result; returns at once."""
        ...

    def take(self, step: int) -> Mapping[str, Any]:
        """Wait for the input of that step; its vectors may be read until the next `take`.

        TaskCancelled if the session ends first, or the input cannot be had.
        """
        ...


class Kept:
    """Tensors of a worker's pinned state, by name, each fp32 [numel] on one device: they survive the task that made
    them, and what a task makes of them counts once its result was committed.
    """

    def __init__(self, numel: int, device: torch.device | str = "cpu") -> None:
        self._numel, self._device = numel, device
        self._tensors: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """To be read and changed in place. StateMissing if no task has made it, or this machine has lost it."""
        if name not in self._tensors:
            raise StateMissing(f"this worker's state holds no {name}; it has to be given the model anew")
        return self._tensors[name]

    def make(self, name: str) -> Tensor:
        """The tensor of that name; zeros where no task has made it yet."""
        if name not in self._tensors:
            self._tensors[name] = torch.zeros(self._numel, dtype=torch.float32, device=self._device)
        return self._tensors[name]

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._tensors)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold these and no others."""
        self._tensors = dict(tensors)


class TaskCancelled(Exception):
    """The coordinator no longer wants this task; raised inside the task at its next step."""


class Replica(Protocol):
    """A device's copy of the model, with its data and its inner optimizer.

    The inner optimizer's state and the data position belong to the worker's pinned state: they survive rounds and
    restarts, and a task that is not committed leaves no trace in them.
    """

    @property
    def layout(self) -> Layout: ...

    @property
    def weights(self) -> Tensor:
        """The parameters themselves, flat, as the model has them: [layout.numel], to be written in place."""
        ...

    @property
    def mailbox(self) -> Mailbox:
        """Only in sessions."""
        ...

    @property
    def kept(self) -> Kept:
        """The method's own part of the pinned state."""
        ...

    @property
    def is_cut_short(self) -> bool:
        """Whether the task is to end now, after at least one step, with what it has: nobody else works any more."""
        ...

    @property
    def epsilon(self) -> float | None:
        """In a run with differential privacy what this worker's steps have cost its owner; None in any other."""
        ...

    def batches(self) -> Iterator[Tensor]:
        """The data this task was given, as integer [at most batch_size, seq_len + 1]; ends with a task's validation
        data, and never for training data. Where a run's data is records, tokens that are not to be predicted are
        complements: models.loss says what to give the model."""
        ...

    def first(self) -> Vector:
        """The run's first parameters, where `RunFacts.first_is_known`."""
        ...

    def load(self, theta: Vector | Tensor) -> None:
        """Set every parameter. theta: fp32 [layout.numel], on any device."""
        ...

    def params(self) -> Vector:
        """The parameters, read from the model itself: as they are when they are read."""
        ...

    def steer(
        self, *, anchor: Vector | None = None, pull: float = 0.0, shift: Vector | None = None,
        pressed: Sequence[tuple[int, int]] = (), press: float = 0.0,
    ) -> None:  # fmt: skip
        """In this task's steps, gradients g become clip(g + pull (w - anchor)) + shift, w the parameters; and they are
        those of the loss plus `press` times the sum of ||X|| ||Y|| over the pairs of tensors `pressed`, by place.

        The vectors must not change while it takes them. The loss that a step reports is that of the data alone.
        """
        ...

    def train_only(self, part: Sequence[int]) -> None:
        """In this task's steps only these tensors of the layout change; () for all that a step can change."""
        ...

    def use_rank(self, rank: int) -> None:
        """In this task adapters have the scale of that rank, which is their number of components that are not zero."""
        ...

    def forget_moments(self) -> None:
        """The inner optimizer is as before its first step: what the parameters were is no matter any more."""
        ...

    def prefer(self, *, beta: float) -> None:
        """In this task batches are pairs of answers, integer [at most batch_size, 2, seq_len + 1], and steps and
        `evaluate` take the loss of preference (models/preference.py): a step's is its mean over pairs, and where losses
        add up a pair weighs by its tokens."""
        ...

    def train_step(self, *, progress: float) -> Step:
        """One inner optimizer step on the next batch. `progress` in [0, 1] is the run's, for the schedule."""
        ...

    def gradient(self, *, num_sequences: int) -> tuple[Tensor, Loss]:
        """The gradient of the *sum* of token losses over the next sequences, unclipped.

        Returns fp32 [layout.numel] on the CPU, and the loss. Takes micro-batches of the run's batch size.
        """
        ...

    def evaluate(self, tokens: Tensor) -> Loss:
        """Loss over whole sequences. tokens: integer [num_sequences, seq_len + 1]."""
        ...
