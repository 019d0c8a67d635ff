"""A worker's private steps: DP-SGD on its owner's records, each counted on the disk before its noise is drawn.

This is the one place that gives gradients of records in a run with `privacy`, whatever task asks for them. What a
coordinator may see of them is noise enough: the rest (losses, how large a sample was, why something failed) stays here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from potluck.models.per_record import record_gradients
from potluck.optim import accounting, dp_sgd
from potluck.optim.dp_sgd import PrivacyConfig, RandomBytes
from potluck.strategies.run import RunSpec
from potluck.types.errors import CorruptError, DataError, PrivacySpent, Refused
from potluck.types.untrusted import printable
from potluck.worker.privacy_ledger import PrivacyLedger


class PrivateTraining:
    """Of one run on one machine."""

    def __init__(
        self, config: PrivacyConfig, ledger: PrivacyLedger, *, num_records: int, batch_size: int,
        random_bytes: RandomBytes = os.urandom,
    ) -> None:  # fmt: skip
        """`batch_size` records are in a sample on average, as far as there are so many."""
        self.config, self.ledger, self._random_bytes = config, ledger, random_bytes
        self.rate = dp_sgd.sampling_rate(batch_size, num_records)
        self._expected = self.rate * num_records
        self._known = (-1, 0.0)  # steps, and their epsilon

    @staticmethod
    def open(spec: RunSpec, state_dir: Path, *, num_records: int, has_begun: bool) -> PrivateTraining | None:
        """None in a run without privacy. `has_begun`: this worker has states of the run. Blocks.

        Refused if the run was private before and is not now; PotluckError where Opacus is not installed; and what is
        wrong with the ledger.
        """
        path = PrivacyLedger.path(state_dir, spec.run_id)
        if spec.privacy is None:
            if path.exists():
                raise Refused(
                    f"run {spec.run_id} trained with differential privacy before, as {path} says, and now would "
                    "without; a run is not made less private once it has begun"
                )
            return None
        accounting.require_accountant()
        if not num_records:
            raise DataError("this run trains on private records and none were given; start the worker with --data FILE")
        ledger = PrivacyLedger.open(path, spec.privacy, has_begun=has_begun)
        batch_size = spec.inner.sequences_per_step
        return PrivateTraining(spec.privacy, ledger, num_records=num_records, batch_size=batch_size)

    # What it costs

    @property
    def epsilon(self) -> float:
        """Of all steps so far, those included whose rounds were discarded."""
        if self._known[0] != self.ledger.num_steps:
            self._known = (self.ledger.num_steps, accounting.epsilon(self.ledger.spent, self.config.delta))
        return self._known[1]

    @property
    def num_steps_left(self) -> int:
        return accounting.num_steps_within(
            self.config.max_epsilon, self.config.delta, spent=self.ledger.spent, rate=self.rate,
            noise_multiplier=self.config.noise_multiplier,
        )  # fmt: skip

    @property
    def is_spent(self) -> bool:
        """Whether one step more would cost too much."""
        step = accounting.PrivateSteps(
            num_steps=1, rate=self.rate, noise_multiplier=self.config.noise_multiplier
        )  # fmt: skip
        return not accounting.epsilon([*self.ledger.spent, step], self.config.delta) <= self.config.max_epsilon

    def sentence(self) -> str:
        """For the owner."""
        config = self.config
        return (
            f"privacy: epsilon {self.epsilon:.3f} of {config.max_epsilon:g} at delta {config.delta:g} is spent, in "
            f"{self.ledger.num_steps:,} steps that each took a record with probability {self.rate:.3g}"
        )

    def require_ledger(self, version: str) -> None:
        """CorruptError where a task goes on from a state, which private steps have made, and these are not counted."""
        if version and not self.ledger.num_steps:
            raise CorruptError(
                "this worker is to go on from what it trained and its ledger of spent privacy counts no step; restore "
                "its state folder from a copy, or join no more"
            )
        if version and not self.ledger.knows(version):
            raise CorruptError(
                f"this worker is to go on from its state {printable(version, 100)}, of which its ledger of privacy "
                "knows nothing: it is an older copy; put the newest one back, or join no more"
            )

    def require_counted(self, num_steps: int) -> None:
        """CorruptError where the state at hand has had more private steps than the ledger, an older one, counts."""
        if num_steps > self.ledger.num_steps:
            raise CorruptError(
                f"this worker's state has had {num_steps:,} private steps and its ledger of spent privacy counts "
                f"{self.ledger.num_steps:,}: it is an older copy; put the newest one back, or join no more"
            )

    # A step

    def gradients(
        self, layers: Sequence[nn.Linear], batches: Sequence[Tensor], losses: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """What the optimizer is given of each layer's weight, fp32 on the CPU; `losses` gives [records] of a batch.

        PrivacySpent, and nothing has happened, if that would exceed the budget.
        """
        if self.is_spent:
            raise PrivacySpent(
                f"another step would cost the owner of this worker more privacy than the run's epsilon of "
                f"{self.config.max_epsilon:g} ({self.epsilon:.3f} is spent); the worker leaves the run"
            )
        summed = [torch.zeros(layer.weight.shape, dtype=torch.float64) for layer in layers]
        for batch in batches:
            found = record_gradients(layers, lambda batch=batch: losses(batch), len(batch))
            for into, part in zip(summed, dp_sgd.clipped_sum(found, self.config.clip), strict=True):
                into += part
        self.ledger.add_step(rate=self.rate, noise_multiplier=self.config.noise_multiplier)
        return [
            dp_sgd.noised(each, self.config, expected=self._expected, random_bytes=self._random_bytes)
            for each in summed
        ]

    def fresh_seed(self) -> int:
        """Of chance that must not depend on records, such as what dropout leaves out."""
        return int.from_bytes(self._random_bytes(8), "little") >> 1
