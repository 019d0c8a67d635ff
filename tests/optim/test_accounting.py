"""What private steps cost, against Opacus' own accountant."""

from __future__ import annotations

import math
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from potluck.optim import accounting
from potluck.optim.accounting import PrivateSteps, epsilon, num_steps_within
from potluck.types.errors import PotluckError


def of_opacus(*histories: tuple[int, float, float], delta: float) -> float:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for num_steps, rate, noise_multiplier in histories:
        accountant.history.append((noise_multiplier, rate, num_steps))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))


def steps(num_steps: int, rate: float, noise_multiplier: float) -> PrivateSteps:
    return PrivateSteps(num_steps=num_steps, rate=rate, noise_multiplier=noise_multiplier)


@pytest.mark.parametrize(
    "history",
    [[(1, 0.01, 1.0)], [(1000, 0.01, 1.0)], [(50, 1.0, 8.0)], [(30, 0.2, 0.6), (500, 0.002, 0.9)], [(1, 0.5, 0.01)]],
)
@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_epsilon_is_that_of_opacus(history: list[tuple[int, float, float]], delta: float) -> None:
    got = epsilon([steps(*each) for each in history], delta)
    assert got == pytest.approx(of_opacus(*history, delta=delta), rel=1e-9)


def test_a_known_figure() -> None:
    """1,000 steps at q = 0.01 and z = 1: epsilon 2.10 at delta 1e-5."""
    assert epsilon([steps(1000, 0.01, 1.0)], 1e-5) == pytest.approx(2.1014, abs=1e-3)


def test_epsilon_grows_with_each_step_and_is_nothing_before_the_first() -> None:
    assert epsilon([], 1e-5) == 0.0
    found = [epsilon([steps(n, 0.05, 1.1)], 1e-5) for n in (1, 2, 10, 100, 1000)]
    assert found == sorted(found) and found[0] > 0
    assert epsilon([steps(3, 0.05, 1.1), steps(7, 0.05, 1.1)], 1e-5) == pytest.approx(found[2])
    assert epsilon([steps(1, 0.5, 1e-200)], 1e-5) == math.inf


@pytest.mark.parametrize("spent", [[], [steps(100, 0.02, 1.2)]])
def test_as_many_steps_are_left_as_the_budget_pays_for(spent: list[PrivateSteps]) -> None:
    left = num_steps_within(2.0, 1e-5, spent=spent, rate=0.02, noise_multiplier=1.0)
    assert left > 10
    assert epsilon([*spent, steps(left, 0.02, 1.0)], 1e-5) <= 2.0 < epsilon([*spent, steps(left + 1, 0.02, 1.0)], 1e-5)
    assert num_steps_within(0.1, 1e-5, spent=[], rate=1.0, noise_multiplier=0.5) == 0


def test_orders_are_those_of_opacus() -> None:
    from opacus.accountants import RDPAccountant

    assert list(accounting.orders) == list(RDPAccountant.DEFAULT_ALPHAS)


def test_without_opacus_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def require() -> None:
        accounting._analysis.cache_clear()
        accounting.require_accountant()

    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(PotluckError, match=r"reckoned by Opacus.*pip install 'potluck\[privacy\]'"):
            require()
        other = ModuleSpec("opacus", None, origin=str(tmp_path / "__init__.py"))  # a version without it
        patch.setattr("importlib.util.find_spec", lambda _: other)
        with pytest.raises(PotluckError, match=r"pip install"):
            require()
    require()
