"""What a rule is given, and how it writes its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from potluck.aggregation.config import AggregationConfig, Rule
from potluck.aggregation.spool import Reader, Spool, Values, sum_numel
from potluck.storage.params import ParamStore, ParamWriter
from potluck.types.errors import RoundFailed, UnusableUpdates
from potluck.types.params import Params


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """The updates of a round, what each is worth, and where the aggregate goes."""

    spool: Spool
    store: ParamStore
    writer: ParamWriter
    config: AggregationConfig
    shares: tuple[float, ...]  # p_i = w_i / sum_j w_j
    factor: float  # what the rule's result is multiplied by
    previous: Params | None

    def require(self, num_updates: int, why: str, *, instead: str = "") -> None:
        """RoundFailed unless that many updates came.

        `why` names the rule and the setting that asks for them, `instead` what else than more workers would help.
        """
        if len(self.spool) < num_updates:
            raise RoundFailed(
                f"{why} needs {num_updates} updates and {len(self.spool)} came; set fleet.min_workers to {num_updates} "
                f"or more, {instead}or choose another aggregation.rule"
            )

    def write_sum(self, coefficients: Sequence[float], *, of_previous: float = 0.0) -> None:
        """`factor (of_previous * previous + sum_i c_i x_i)`; an update whose coefficient is 0 is not read."""
        spool = self.spool
        weights = [c * self.factor for c in coefficients]

        def add(reader: Reader, start: int, stop: int, out: Values) -> None:
            out.fill(0)
            if self.previous is not None and of_previous != 0:
                values = self.store.read_slice(self.previous, start, stop).numpy()
                np.multiply(values, np.float32(of_previous * self.factor), out=out)
            add_all(reader, start, out, weights)

        spool.walk(sum_numel, add, lambda out, _: self.write(out))

    def write(self, values: Values) -> None:
        """The next elements of the result. UnusableUpdates if they are not finite."""
        require_finite(values, self.config.rule, self.spool)
        self.writer.write(torch.from_numpy(values))


def add_all(reader: Reader, start: int, out: Values, weights: Sequence[float]) -> None:
    """`out += sum_i weights_i x_i`, in the order of the updates; one whose weight is 0 is not read."""
    for number, weight in enumerate(weights):
        if weight != 0:
            reader.add(number, start, out, weight)


def require_finite(values: Values, rule: Rule, spool: Spool) -> None:
    """UnusableUpdates if an element of the result is not finite."""
    if not np.isfinite(values).all():
        raise UnusableUpdates(f"the {rule} of {len(spool)} finite updates of {spool.name} overflows fp32")
