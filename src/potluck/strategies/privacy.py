"""What a strategy guarantees the owners of its workers: differential privacy of each record, over a whole run."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.strategies.registry import shipped, strategy_type
from potluck.strategies.run import RunSpec


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(epsilon, delta) differential privacy of one record of an owner, of all that leaves the worker in a run."""

    epsilon: float
    delta: float


def guarantee(spec: RunSpec) -> Guarantee | None:
    """What the strategy of a run states in its static method `guarantee(spec)`; None for nothing.

    The code that is installed on the worker is asked, which adds the noise: that a coordinator says so protects nobody
    from it. A strategy in a file of its own states nothing.
    """
    if spec.strategy_digest or spec.strategy not in shipped:
        return None
    stated = getattr(strategy_type(spec.strategy), "guarantee", None)
    return stated(spec) if stated is not None else None
