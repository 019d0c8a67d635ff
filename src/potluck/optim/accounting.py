"""What steps of DP-SGD have spent, and how many more there are in a budget: by the accountant of Opacus.

A step is the Gaussian mechanism with noise multiplier z on a Poisson sample of rate q. Its Rényi divergences of many
orders add up over steps, and the best order gives epsilon at delta (Mironov 2017, arXiv:1702.07476; Mironov et al.
2019, arXiv:1908.10530). The neighbour of a data set has an empty record in the place of one of its records.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.types.errors import PotluckError

most_steps = 1 << 40
orders = (*(1 + x / 10 for x in range(1, 100)), *range(12, 64))
"""Of Rényi divergences: those of Opacus."""


@dataclass(frozen=True, kw_only=True)
class PrivateSteps:
    """Some steps alike."""

    num_steps: int
    rate: float  # q
    noise_multiplier: float  # z


def require_accountant() -> None:
    """PotluckError where Opacus is not installed."""
    _analysis()


def epsilon(spent: Sequence[PrivateSteps], delta: float) -> float:
    """Of all these steps together. PotluckError where Opacus is not installed."""
    taken = [steps for steps in spent if steps.num_steps]
    if not taken:
        return 0.0
    divergences = sum(steps.num_steps * _divergences(steps.rate, steps.noise_multiplier) for steps in taken)
    analysis = _analysis()
    with warnings.catch_warnings():  # that a higher order might give a lower epsilon: this one is right too
        warnings.simplefilter("ignore")
        found, _ = analysis.get_privacy_spent(orders=orders, rdp=divergences, delta=delta)
    return max(float(found), 0.0) if not math.isnan(found) else math.inf


def num_steps_within(
    max_epsilon: float, delta: float, *, spent: Sequence[PrivateSteps], rate: float, noise_multiplier: float
) -> int:
    """How many steps more there are until epsilon would exceed `max_epsilon`."""

    def is_within(num_steps: int) -> bool:
        more = PrivateSteps(num_steps=num_steps, rate=rate, noise_multiplier=noise_multiplier)
        return epsilon([*spent, more], delta) <= max_epsilon

    high = 1
    while high < most_steps and is_within(high):
        high *= 2
    low = high // 2
    while low + 1 < high:  # low is within, high is not
        middle = (low + high) // 2
        low, high = (middle, high) if is_within(middle) else (low, middle)
    return low


@lru_cache(maxsize=64)
def _divergences(rate: float, noise_multiplier: float) -> NDArray[np.float64]:
    """Of one step, for each order; infinite where there is so little noise that they cannot be computed."""
    analysis = _analysis()
    try:
        found = analysis.compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=1, orders=orders)
    except ArithmeticError:
        return np.full(len(orders), math.inf)
    return np.maximum(np.asarray(found, np.float64), 0.0)


@lru_cache(maxsize=1)
def _analysis() -> Any:
    """Opacus' module of Rényi divergences alone: the package around it imports all of distributed training, which takes
    a small machine a minute, and memory that the model needs."""
    try:
        package = importlib.util.find_spec("opacus")
        if package is None or package.origin is None:
            raise ImportError("there is no module opacus")
        path = Path(package.origin).parent / "accountants" / "analysis" / "rdp.py"
        spec = importlib.util.spec_from_file_location("potluck_opacus_rdp", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, ValueError, OSError) as error:
        raise PotluckError(
            "this run trains with differential privacy, which is reckoned by Opacus, and it cannot be imported "
            f"({error}); install it with: pip install 'potluck[privacy]'"
        ) from error
    return module
