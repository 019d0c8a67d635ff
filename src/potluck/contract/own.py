"""The contract on a strategy of your own: `potluck test my_method.py`.

The file's classes that look like a strategy are each checked with their default settings. A plain PyTorch loop to be
held against is optional: a function `reference(problem)` in the file that returns the flat parameters after
`problem.num_rounds` rounds of one worker (see docs/own_method.md).
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from potluck.contract import checks
from potluck.optim.inner import InnerConfig
from potluck.simulator.exact.problem import Problem
from potluck.strategies.registry import STRATEGY_PARTS, load_file
from potluck.strategies.strategy import Strategy
from potluck.types.errors import RecipeError, RunStopped


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one check of one strategy found. `passed` is None where it could not be made."""

    strategy: str
    check: str
    passed: bool | None
    detail: str = ""


def check_file(path: Path, told: Callable[[Verdict], None] = lambda _: None) -> list[Verdict]:
    """Run the five checks on every strategy in a file. RecipeError if it does not load or holds none."""
    module = load_file(path)
    found: list[type[Any]] = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and all(hasattr(value, p) for p in STRATEGY_PARTS)
    ]
    if not found:
        raise RecipeError(f"{path} holds no strategy: a class with {', '.join(STRATEGY_PARTS)}; see docs/own_method.md")
    verdicts: list[Verdict] = []
    for strategy in found:
        for verdict in _check(strategy, getattr(module, "reference", None)):
            verdicts.append(verdict)
            told(verdict)
    return verdicts


def _check(strategy: type[Any], reference: Callable[[Problem], Any] | None) -> Iterator[Verdict]:
    """One verdict after another."""
    try:
        config = strategy.Config()
    except ValidationError as error:
        raise RecipeError(f"{strategy.__name__}.Config needs a default for every setting: {error}") from error

    def make() -> Strategy:
        return strategy(config)

    eager = InnerConfig(lr=1e-2, batch_size=8, warmup=0.1)
    plan: list[tuple[str, Callable[[], None] | None]] = [
        ("one worker equals a plain PyTorch loop", (lambda: _against(make, reference)) if reference else None),
        (
            "converges with 20 % of tasks lost and a worker gone",
            lambda: checks.survives_losses(Problem(num_rounds=24, inner=eager), make),
        ),
        ("stop and resume equals never having stopped", lambda: checks.resumes_exactly(Problem(num_rounds=4), make)),
        ("the same seed gives the same trace", lambda: checks.same_trace(Problem(num_rounds=4), make)),
        ("moves the bytes it says", lambda: checks.moves_what_it_says(Problem(num_rounds=4), make)),
    ]
    for name, check in plan:
        if check is None:
            yield Verdict(
                strategy=strategy.__name__,
                check=name,
                passed=None,
                detail="the file has no function reference(problem)",
            )
            continue
        try:
            check()
        except (checks.Broken, RunStopped) as broken:
            yield Verdict(strategy=strategy.__name__, check=name, passed=False, detail=str(broken))
        except Exception as error:  # the strategy's own mistake, whatever it is
            detail = f"{type(error).__name__}: {error}"
            yield Verdict(strategy=strategy.__name__, check=name, passed=False, detail=detail)
        else:
            yield Verdict(strategy=strategy.__name__, check=name, passed=True)


def _against(make: Callable[[], Strategy], reference: Callable[[Problem], Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="potluck-contract-") as folder:
        problem = Problem(num_rounds=4)
        problem.store_shards(Path(folder))
        checks.equals_reference(problem, make, reference)
