"""What a run guarantees the owners of its workers: differential privacy of each record, over a whole run."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.strategies.run import RunSpec


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(epsilon, delta) differential privacy of one record of an owner, of all that leaves the worker in a run."""

    epsilon: float
    delta: float


def guarantee(spec: RunSpec) -> Guarantee | None:
    """None for nothing. Whatever tasks a coordinator gives in a run with privacy, the worker's own code takes private
    steps alone and stops where this is spent (worker/private_training.py)."""
    if spec.privacy is None:
        return None
    return Guarantee(epsilon=spec.privacy.max_epsilon, delta=spec.privacy.delta)
