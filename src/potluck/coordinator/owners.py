"""What a run's validations said of each owner's own text: of the model that all share, and of the owner's own one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from potluck.storage.ledger import Ledger
from potluck.strategies.evaluation import OwnersLoss
from potluck.types.ids import WorkerId

_shared, _personal = "validation_loss/", "personal_loss/"
"""Before the worker's id, in the names of metrics."""
max_told = 8
"""Owners that a line for people names."""


@dataclass(frozen=True, kw_only=True)
class OwnerResult:
    """Losses per token on one owner's held-out text; None where they are not known."""

    initial: float | None = None
    final: float | None = None
    personal: float | None = None  # of the owner's own model, where the method keeps one


@dataclass
class OwnerLosses:
    """By worker and round."""

    shared: dict[WorkerId, dict[int, float]] = field(default_factory=dict[WorkerId, dict[int, float]])
    personal: dict[WorkerId, dict[int, float]] = field(default_factory=dict[WorkerId, dict[int, float]])

    @staticmethod
    def of(ledger: Ledger) -> OwnerLosses:
        """As they were written down. Blocks."""
        found = OwnerLosses()
        for prefix, into in ((_shared, found.shared), (_personal, found.personal)):
            for name, round, value in ledger.metrics_under(prefix):
                into.setdefault(WorkerId(name.removeprefix(prefix)), {})[round] = value
        return found

    def note(self, round: int, said: Mapping[WorkerId, OwnersLoss]) -> dict[str, float]:
        """Take in what a validation said; the metrics to write down, by name."""
        metrics: dict[str, float] = {}
        for worker, each in said.items():
            for prefix, loss, into in ((_shared, each.shared, self.shared), (_personal, each.personal, self.personal)):
                if loss is not None:
                    into.setdefault(worker, {})[round] = metrics[prefix + worker] = loss
        return metrics

    def result(self, worker: WorkerId) -> OwnerResult:
        shared, personal = self.shared.get(worker, {}), self.personal.get(worker, {})
        return OwnerResult(
            initial=shared.get(0), final=shared[max(shared)] if shared else None,
            personal=personal[max(personal)] if personal else None,
        )  # fmt: skip


def sentence(said: Mapping[WorkerId, OwnersLoss]) -> str:
    """Of a few owners, for people: "clinic-a 2.0112 (its own 1.9020), clinic-b 1.8810"; "" of none."""
    told: list[str] = []
    for worker, each in sorted(said.items()):
        if each.shared is not None:
            own = f" (its own {each.personal:.4f})" if each.personal is not None else ""
            told.append(f"{worker} {each.shared:.4f}{own}")
    more = f" and {len(told) - max_told} more" if len(told) > max_told else ""
    return ", ".join(told[:max_told]) + more
