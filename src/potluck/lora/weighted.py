"""Weighted means of adapters' matrices.

    p_i = w_i / sum_j w_j        mean = sum_i p_i X_i

p_i in fp64, sums in fp32 and in the order given: callers who sort their workers get the same bits each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from potluck.lora.factors import Factors, require_matrix
from potluck.types.errors import InvalidUpdate

Updates = Sequence[tuple[float, Factors]]
"""`(w_i, adapter)` of each worker, for one layer."""


def shares(weights: Sequence[float]) -> list[float]:
    """p_i. InvalidUpdate if there is none, or one is not finite and above 0."""
    if not weights:
        raise InvalidUpdate("there is no adapter to combine and at least one is needed; wait for a worker's update")
    for i, weight in enumerate(weights, 1):
        if not (math.isfinite(weight) and weight > 0):
            raise InvalidUpdate(
                f"adapter {i} of {len(weights)} has the weight {weight}, which must be finite and above 0; "
                "leave out a worker that trained on nothing"
            )
    largest = max(weights)
    parts = [weight / largest for weight in weights]
    total = math.fsum(parts)
    return [part / total for part in parts]


def mean(name: str, sent: Sequence[tuple[float, Tensor]], *, shape: Sequence[int] | None = None) -> Tensor:
    """The mean of matrices `(w_i, X_i)`, fp32. They must be of `shape`, or like the first; InvalidUpdate if not."""
    parts = shares([weight for weight, _ in sent])
    wanted = list(sent[0][1].shape if shape is None else shape)
    total = torch.zeros(wanted, device=sent[0][1].device)
    for i, (part, (_, matrix)) in enumerate(zip(parts, sent, strict=True), 1):
        if list(matrix.shape) != wanted:
            raise InvalidUpdate(
                f"{name} of adapter {i} of {len(sent)} is {list(matrix.shape)} and {wanted} is needed for a mean; "
                "give all workers one rank, or use a rule for unequal ranks: flora, flex_lora or het_lora"
            )
        require_matrix(name, matrix)
        total.add_(matrix.float(), alpha=part)
    return total


def common_scale(updates: Updates) -> float:
    """s of all of them. InvalidUpdate if they have no common one."""
    scales = [adapter.scale for _, adapter in updates]
    for i, scale in enumerate(scales, 1):
        if scale != scales[0]:
            raise InvalidUpdate(
                f"adapter {i} of {len(scales)} has the scale {scale:g} and the first {scales[0]:g}, and a mean of "
                "factors needs one; give all workers one rank and alpha, or use flora, flex_lora or het_lora"
            )
    return scales[0]


def require_one_layer(updates: Updates) -> None:
    """InvalidUpdate unless all are for a weight of the same shape."""
    shapes = [adapter.shape for _, adapter in updates]
    for i, shape in enumerate(shapes, 1):
        if shape != shapes[0]:
            raise InvalidUpdate(
                f"adapter {i} of {len(shapes)} is for a weight {list(shape)} and the first for {list(shapes[0])}; "
                "send adapters of one layer of this run's model"
            )
