"""What a round merges, as the factors that it is made of: R (d + k) elements of a layer where the matrix has d k.

    M_t = M_0 + sum_j B_j A_j      A_j [R_j, k], B_j [d, R_j], R_j the sum of the ranks of round j

Who has M_0 and these adds them up: the same sum as `with_products` makes round by round, but for rounding in fp32.

    LAYER.lora_A.stack [R, k]      LAYER.lora_B.stack [d, R]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from potluck.lora.factors import Factors
from potluck.lora.merged import with_products
from potluck.lora.places import adapted_layers
from potluck.types.errors import InvalidUpdate
from potluck.types.params import Layout
from potluck.types.vector import Vector

Stack = Mapping[str, Tensor]
"""The factors of one round by the names of `stack_layout`."""


def stack_layout(layout: Layout, rank: int) -> Layout:
    """Of the factors of a round, for every layer with a matrix for what was merged."""
    return Layout.of([row for name, (d, k) in _shapes(layout) for row in _rows(name, d, k, rank)])


def stacked(changes: Iterable[Factors]) -> Tensor:
    """Factors of scale 1, in the order of the layers: flat fp32, as `stack_layout` has them."""
    factors = list(changes)
    assert all(each.scale == 1.0 for each in factors), "the scale is in the factors"
    return torch.cat([t.float().reshape(-1) for each in factors for t in (each.a, each.b)])


def with_stacks(layout: Layout, before: Vector, stacks: Sequence[Stack]) -> Iterator[tuple[int, Vector]]:
    """By its place, what was merged into each layer: that of `before`, a whole vector, and the rounds in `stacks`.

    InvalidUpdate where a stack is not of this layout.
    """
    places = {name: layer.merged for name, layer in adapted_layers(layout).items() if layer.merged is not None}
    for name, shape in _shapes(layout):
        added = [_factors(stack, name) for stack in stacks]
        if odd := next((each for each in added if each.shape != shape), None):
            raise InvalidUpdate(
                f"what was merged into {name[:200]} is of a weight {list(odd.shape)} and that is {list(shape)}"
            )
        yield places[name], with_products(before.part(layout.ranges([places[name]])), *added)


def _factors(stack: Stack, name: str) -> Factors:
    try:
        return Factors(stack[f"{name}.lora_A.stack"], stack[f"{name}.lora_B.stack"], 1.0)
    except KeyError as error:
        raise InvalidUpdate(f"what a round merged has no {str(error)[:200]}; check the coordinator's version") from None


def _shapes(layout: Layout) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, layer in adapted_layers(layout).items():
        if layer.merged is not None:
            d, k = layout.tensors[layer.merged].shape
            yield name, (d, k)


def _rows(name: str, d: int, k: int, rank: int) -> list[tuple[str, tuple[int, int]]]:
    return [(f"{name}.lora_A.stack", (rank, k)), (f"{name}.lora_B.stack", (d, rank))]
