"""What a worker has spent of its owner's privacy in a run: a file that only grows.

    STATE/privacy/RUN.json    the budget that the run began with, how many private steps of each kind were taken, and
                              the names of the last states that they made

It lies beside the state of rounds, not in it: a step counts from before its noise is drawn, also where its round was
discarded or is done again, for what it made may have left. A ledger that is lost or cannot be read is never begun anew,
and one that does not know the state which the coordinator names is an older copy, also where the whole folder is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from potluck.optim.accounting import PrivateSteps
from potluck.optim.dp_sgd import PrivacyConfig
from potluck.storage.files import write_atomic
from potluck.types.errors import CorruptError, Refused

num_states = 1024
"""Whose names are kept: a coordinator that goes back names one of before."""


class PrivacyLedger:
    """Of one run on one machine. All methods block."""

    def __init__(
        self, path: Path, config: PrivacyConfig, spent: Sequence[PrivateSteps] = (), states: Sequence[str] | None = ()
    ) -> None:
        """`states` is None of a file that was written before these were kept."""
        self._path, self._config = path, config
        self._spent, self._states = list(spent), states

    @staticmethod
    def path(state_dir: Path, run_id: str) -> Path:
        return state_dir / "privacy" / f"{run_id}.json"

    @staticmethod
    def open(path: Path, config: PrivacyConfig, *, has_begun: bool) -> PrivacyLedger:
        """As it was left; a new one where there is none and no private step `has_begun`.

        CorruptError if it is missing or cannot be read, Refused if the run allows more than it did.
        """
        if not path.exists():
            if has_begun:
                raise CorruptError(
                    f"this worker has trained in the run and {path}, which says what that spent of its owner's "
                    "privacy, is missing; restore it from a copy, or join no more"
                )
            return PrivacyLedger(path, config)
        try:
            budget, spent, states = _parsed(json.loads(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptError(
                f"{path}, which says what the run has spent of its owner's privacy, cannot be read ({error}); restore "
                "it from a copy, or join no more"
            ) from error
        if config.max_epsilon > budget.max_epsilon or config.delta > budget.delta:
            raise Refused(
                f"the run now allows epsilon {config.max_epsilon:g} at delta {config.delta:g} and began with "
                f"{budget.max_epsilon:g} at {budget.delta:g}; a run is not made less private once it has begun"
            )
        return PrivacyLedger(path, config, spent, states)

    @property
    def spent(self) -> Sequence[PrivateSteps]:
        return tuple(self._spent)

    @property
    def num_steps(self) -> int:
        return sum(steps.num_steps for steps in self._spent)

    def add_step(self, *, rate: float, noise_multiplier: float) -> None:
        """One more, on the disk when this returns. ResourceError, and it must not be taken, if it cannot be written."""
        spent = list(self._spent)
        last = spent[-1] if spent else None
        if last is not None and (last.rate, last.noise_multiplier) == (rate, noise_multiplier):
            spent[-1] = PrivateSteps(num_steps=last.num_steps + 1, rate=rate, noise_multiplier=noise_multiplier)
        else:
            spent.append(PrivateSteps(num_steps=1, rate=rate, noise_multiplier=noise_multiplier))
        self._write(spent, self._states)

    def knows(self, state: str) -> bool:
        """Whether that state is one that steps counted here have made."""
        return self._states is None or state in self._states

    def add_state(self, state: str, *, after: str) -> None:
        """Steps have made a state, from the one `after` which they began. As `add_step`."""
        if self._spent:
            states = dict.fromkeys(name for name in (*(self._states or ()), after, state) if name not in ("", after))
            self._write(self._spent, [*states, *([after] if after else [])][-num_states:])

    def _write(self, spent: Sequence[PrivateSteps], states: Sequence[str] | None) -> None:
        rows = [[each.num_steps, each.rate, each.noise_multiplier] for each in spent]
        facts = {"max_epsilon": self._config.max_epsilon, "delta": self._config.delta, "steps": rows, "states": states}
        write_atomic(self._path, json.dumps(facts).encode(), durable=True)
        self._spent, self._states = list(spent), states


def _parsed(facts: Any) -> tuple[PrivacyConfig, list[PrivateSteps], list[str] | None]:
    """What the run began with, as far as it is kept, the steps and the states. ValueError, KeyError or TypeError."""
    budget = PrivacyConfig(
        max_epsilon=facts["max_epsilon"], delta=facts["delta"], noise_multiplier=1.0, clip=1.0
    )  # fmt: skip
    spent: list[PrivateSteps] = []
    for num_steps, rate, noise_multiplier in facts["steps"]:
        if not (isinstance(num_steps, int) and num_steps > 0 and 0 < rate <= 1 and 0 < noise_multiplier < math.inf):
            raise ValueError(f"{num_steps!r} steps at rate {rate!r} and noise {noise_multiplier!r} cannot be")
        spent.append(PrivateSteps(num_steps=num_steps, rate=rate, noise_multiplier=noise_multiplier))
    if not spent:
        raise ValueError("it counts no step, and is written with the first one")
    states = facts.get("states")
    return budget, spent, None if states is None else list(map(str, states))
