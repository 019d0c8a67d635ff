"""A run on a virtual clock, watched: when its workers train, and what its commits reach."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters

from potluck.coordinator.events import Event
from potluck.protocol import pb
from potluck.simulator.exact.world import World
from potluck.transport.memory import Link


class Watched:
    """Utilisation is the share of the workers' time in which they train, also what is lost or done again; counted, that
    of training which a commit used.

    `model` takes the parameters of a commit, `held_out` is what it is judged by: [sequences, seq_len + 1]. `on_commit`
    is called after each.
    """

    def __init__(
        self, world: World, *, model: nn.Module, held_out: Tensor, batch_size: int, seq_len: int,
        on_commit: Callable[[], None],
    ) -> None:  # fmt: skip
        self.world = world
        self.joined_bytes: dict[
            str, int
        ] = {}  # that a worker had received when it began its first steps, for these too
        self._model, self._held_out, self._on_commit = model, held_out.long(), on_commit
        self._batch_size, self._step_tokens = batch_size, batch_size * seq_len
        self._step_s: dict[str, float] = {}
        self._trained: list[tuple[float, float]] = []  # from when to when
        self._began = math.inf  # the first step
        self._ended = 0.0  # the last commit
        world.on_event = self._heard

    def add(self, name: str, *, step_s: float, link: Link) -> None:
        """A worker whose inner steps take so long."""
        self._step_s[name] = step_s
        self.world.add(name, link=link, cost_s=self._cost(name), passed=self._passed)

    @property
    def seconds(self) -> float:
        """From the first step that any worker takes to the last commit."""
        return self._ended - self._began

    @property
    def utilisation(self) -> float:
        """Of a run that has ended."""
        return sum(max(min(end, self._ended) - begin, 0.0) for begin, end in self._trained) / self._worker_s

    @property
    def counted_utilisation(self) -> float:
        """Of a run that has ended."""
        assert self.world.last is not None
        given = {row["id"]: row["tokens"] for row in self.world.last.contributions()}
        counted_s = sum(given.get(name, 0) / self._step_tokens * step_s for name, step_s in self._step_s.items())
        return counted_s / self._worker_s

    @property
    def _worker_s(self) -> float:
        return len(self._step_s) * self.seconds

    def loss(self) -> float:
        """Mean validation loss of the model as committed, in nats."""
        run = self.world.run
        assert run is not None and run.state is not None
        vector_to_parameters(run.params.read(run.state.params), self._model.parameters())
        with torch.no_grad():
            logits = self._model(input_ids=self._held_out[:, :-1]).logits
        return float(cross_entropy(logits.flatten(0, 1), self._held_out[:, 1:].flatten()))

    def _heard(self, event: Event) -> None:
        if event.kind == "round" and self.world.run is not None and self.world.run.state is not None:
            self._ended = self.world.clock.now()
            self._on_commit()

    def _cost(self, name: str) -> Callable[[pb.Lease], float]:
        def cost_s(lease: pb.Lease) -> float:
            if lease.num_sequences:  # else it is a validation
                self._began = min(self._began, self.world.clock.now())
                self.joined_bytes.setdefault(name, self.world.object_bytes_down.get(name, 0))
            return self._step_s[name] * lease.num_sequences / self._batch_size

        return cost_s

    def _passed(self, began: float, ended: float) -> None:
        self._trained.append((began, ended))
