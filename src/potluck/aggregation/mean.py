"""The weighted mean or sum of spooled updates, in memory that does not grow with their number.

    mean   y = sum_i p_i x_i      p_i = w_i / sum_j w_j
    sum    y = sum_i w_i x_i

Chunk by chunk of the flat vector, contributors in the order given, one fp32 accumulator of a chunk: y is a function of
the accepted set, bit for bit, whenever and in whatever order they arrived. p_i is computed in fp64 and rounded once, so
the mean of equal updates of equal weight is that update where the weights divide evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from potluck.codecs.bundle import Bundle
from potluck.storage.params import ParamStore
from potluck.types.errors import InvalidUpdate, RoundFailed
from potluck.types.params import Layout, Params

max_open_updates = 64  # mapped at once; more are mapped anew for each chunk


def combine(
    store: ParamStore,
    updates: Sequence[tuple[Path, float]],
    *,
    name: str,
    layout: Layout,
    out_name: str,
    mean: bool,
    chunk_numel: int = 1 << 22,
) -> Params:
    """Sum up the flat vector `name` of each `(bundle file, weight)`. InvalidUpdate if a weight is not positive.

    RoundFailed if the result is not finite.
    """
    weights = _weights(updates, mean=mean)
    bundles: list[Bundle] = []
    try:
        for path, _ in updates:
            bundles.append(Bundle.open(path, like=bundles[0] if bundles else None))
        with store.writer(out_name, layout.numel) as writer:
            for start in range(0, layout.numel, chunk_numel):
                total = torch.zeros(min(chunk_numel, layout.numel - start), dtype=torch.float32)
                for number, (bundle, weight) in enumerate(zip(bundles, weights, strict=True)):
                    bundle.accumulate(name, layout, total, start, weight)
                    if number >= max_open_updates:
                        bundle.close()
                if not bool(total.isfinite().all()):
                    raise RoundFailed(f"the sum of {len(updates)} finite updates of {name} overflows fp32")
                writer.write(total)
    finally:
        for bundle in bundles:
            bundle.close()
    return writer.params


def _weights(updates: Sequence[tuple[Path, float]], *, mean: bool) -> list[float]:
    weights = [weight for _, weight in updates]
    for path, weight in updates:
        if not (math.isfinite(weight) and weight > 0):
            raise InvalidUpdate(f"the update {path.name} has the weight {weight}, which must be finite and above 0")
    if not weights:
        raise InvalidUpdate("there is no update to combine")
    if not mean:
        return weights
    total = math.fsum(weights)
    return [weight / total for weight in weights]
