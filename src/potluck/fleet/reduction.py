"""Updates: checked when they come, and made one vector when a round closes, by the run's rule of aggregation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from potluck.aggregation.combine import Combined, accepted, combine, defer_mean
from potluck.aggregation.config import AggregationConfig
from potluck.aggregation.validate import check_update
from potluck.storage.ledger import ReplyRow
from potluck.storage.objects import ObjectStore
from potluck.storage.params import ParamStore
from potluck.strategies.fleet import Reduction
from potluck.strategies.run import RunFacts
from potluck.types.errors import RecipeError
from potluck.types.ids import Digest


class Updates:
    """The values of a run's updates, which lie among its objects. All methods block."""

    def __init__(self, run: RunFacts, params: ParamStore, objects: ObjectStore) -> None:
        self._run, self._params, self._objects = run, params, objects

    def check(self, object: Digest, name: str, max_norm: float, part: Sequence[int] = ()) -> None:
        """InvalidUpdate, with the reason, if the vector `name` of this object, of such a part, must not be used."""
        check_update(self._objects.path(object), name, self._run.layout.part(part), max_norm=max_norm)

    def reduce(self, rows: Sequence[ReplyRow], reduction: Reduction, name: str) -> Combined:
        """The reduction of the replies as the vector `name`."""
        paths = [self._objects.path(Digest(row.object)) for row in rows]
        return reduce_replies(self._params, rows, paths, reduction, self._run, name)


def check_reduction(reduction: Reduction, rule: AggregationConfig) -> None:
    """RecipeError if the rule cannot make this reduction: before any work for it is handed out."""
    if rule.rule != "mean" and not reduction.mean and not reduction.weight:
        raise RecipeError(
            f"the strategy asks for the plain sum of {reduction.name}, which aggregation.rule = {rule.rule!r} cannot "
            "make: it needs to know what each is a sum over, as `total(..., over=...)` says; use aggregation.rule = "
            "'mean'"
        )


def reduce_replies(
    params: ParamStore, rows: Sequence[ReplyRow], paths: Sequence[Path], reduction: Reduction, run: RunFacts, name: str
) -> Combined:
    """The reduction of the replies, whose updates are at `paths`, as the vector `name`. Blocks."""
    weights = [
        (float(row.scalars[reduction.weight]) if reduction.weight else 1.0) * reduction.factor(row.worker, row.key)
        for row in rows
    ]
    updates, layout = list(zip(paths, weights, strict=True)), run.layout.part(reduction.part)
    if run.aggregation.rule == "mean":
        return defer_mean(params, updates, name=reduction.name, layout=layout, out_name=name, mean=reduction.mean)
    with accepted():
        return combine(
            params,
            updates,
            rule=run.aggregation,
            name=reduction.name,
            layout=layout,
            out_name=name,
            mean=reduction.mean,
            previous=reduction.previous,
        )
