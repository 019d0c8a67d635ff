"""The one way from spooled updates to their aggregate, by the rule of the run.

    mean   y = R(x, w)                       R the rule, w the updates' weights
    sum    y = (sum_i w_i) R(x_i / w_i, w)   x_i is itself a sum over w_i items; sum_i x_i where R is the mean

Slice by slice of the flat vector, updates in the order given, sums in fp32: y is a function of the accepted set, bit
for bit, whenever and in whatever order they arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from potluck.aggregation.aggregation import Aggregation, add_all, require_finite
from potluck.aggregation.centered_clipping import centered_clipping
from potluck.aggregation.config import AggregationConfig
from potluck.aggregation.geometric_median import geometric_median
from potluck.aggregation.krum import krum, multi_krum
from potluck.aggregation.mean import mean as plain_mean
from potluck.aggregation.mean import mean_report
from potluck.aggregation.median import median
from potluck.aggregation.norm_clipping import norm_clipping
from potluck.aggregation.report import Report
from potluck.aggregation.spool import Spool, Values
from potluck.aggregation.trimmed_mean import trimmed_mean
from potluck.storage.params import Deferred, Fill, ParamStore
from potluck.types.errors import CorruptError, InvalidUpdate, UnusableUpdates
from potluck.types.params import Layout, Params

_rules: Mapping[str, Callable[[Aggregation], Report]] = {
    "mean": plain_mean,
    "trimmed_mean": trimmed_mean,
    "median": median,
    "krum": krum,
    "multi_krum": multi_krum,
    "geometric_median": geometric_median,
    "centered_clipping": centered_clipping,
    "norm_clipping": norm_clipping,
}


@dataclass(frozen=True, kw_only=True)
class Combined:
    """The aggregate, fp32 [layout.numel], and what the rule decided."""

    params: Params
    report: Report


def combine(
    store: ParamStore,
    updates: Sequence[tuple[Path, float]],
    *,
    rule: AggregationConfig,
    name: str,
    layout: Layout,
    out_name: str,
    mean: bool = True,
    previous: Params | None = None,
) -> Combined:
    """Combine the flat vector `name` of each `(bundle file, weight)`. `previous` is where `centered_clipping` starts.

    InvalidUpdate if a weight is not finite and above 0 or there is no update; RoundFailed if there are too few for the
    rule; UnusableUpdates if the result is not finite; CorruptError if a file is not a bundle of the layout.
    """
    weights = _weights(updates)
    total = math.fsum(weights)
    scales = [1.0] * len(weights) if mean else [1 / weight for weight in weights]
    with (
        Spool([path for path, _ in updates], scales, name=name, layout=layout) as spool,
        store.writer(out_name, layout.numel) as writer,
    ):
        given = Aggregation(
            spool=spool,
            store=store,
            writer=writer,
            config=rule,
            previous=previous,
            shares=tuple(weight / total for weight in weights),
            factor=1.0 if mean else total,
        )
        report = _rules[rule.rule](given)
    return Combined(params=writer.params, report=report)


def defer_mean(
    store: ParamStore,
    updates: Sequence[tuple[Path, float]],
    *,
    name: str,
    layout: Layout,
    out_name: str,
    mean: bool = True,
) -> Combined:
    """`combine` by the mean, computed slice by slice within what reads it: an outer step never sees it on the disk.

    Who reads it gets UnusableUpdates if it is not finite, or if a file is no longer a bundle of the layout.
    """
    weights = _weights(updates)
    total = math.fsum(weights)
    paths = [path for path, _ in updates]
    scales = [1.0] * len(weights) if mean else [1 / weight for weight in weights]
    factors = [weight / total * (1.0 if mean else total) for weight in weights]

    @contextmanager
    def reading() -> Iterator[Fill]:
        def fill(start: int, out: Values) -> None:
            with accepted():
                out.fill(0)
                add_all(spool.reader, start, out, factors)
                require_finite(out, "mean", spool)

        with accepted(), Spool(paths, scales, name=name, layout=layout, num_readers=1) as spool:
            yield fill

    def make() -> Params:
        with accepted():
            return combine(
                store, updates, rule=AggregationConfig(), name=name, layout=layout, out_name=out_name, mean=mean
            ).params

    params = store.defer(out_name, layout.numel, Deferred(reading, make))
    return Combined(params=params, report=mean_report(len(updates)))


@contextmanager
def accepted() -> Iterator[None]:
    """Updates that were checked when they came: where one cannot be read, the disk has lost it since."""
    try:
        yield
    except (InvalidUpdate, CorruptError, OSError) as error:
        raise UnusableUpdates(f"an accepted update cannot be read any more: {error}") from error


def _weights(updates: Sequence[tuple[Path, float]]) -> list[float]:
    if not updates:
        raise InvalidUpdate("there is no update to combine")
    for path, weight in updates:
        if not (math.isfinite(weight) and weight > 0):
            raise InvalidUpdate(f"the update {path.name} has the weight {weight}, which must be finite and above 0")
    return [weight for _, weight in updates]
