"""A version of the parameters as a difference to the one before: what the downlink sends to those who hold that one.

    P_t = P_(t-1) + decode(C(theta_t - P_(t-1)))

P_t, not theta_t, is what everyone trains from: the coordinator computes it like every worker does, element by element
in fp32, so all have the same bits, and what C lost in one round is part of the next difference.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from potluck.codecs.base import codec
from potluck.codecs.bundle import Bundle, Chosen, flat_size, write_flat_slices
from potluck.types.errors import CorruptError
from potluck.types.params import Layout

WHOLE = "params"
CHANGE = "change"
max_way = 8
"""Differences in a row that a worker adds up: each is a pass over the whole model."""


def longest_way(layout: Layout, chosen: Chosen) -> int:
    """How many differences in a row together take less than the whole version; one at least, `max_way` at most."""
    whole, change = flat_size(WHOLE, layout, codec("fp32")), flat_size(CHANGE, layout, chosen)
    return max(1, min((whole - 1) // change, max_way))


def write_sum(path: Path, base: Path, change: Path, layout: Layout) -> None:
    """Write the parameters of `base` plus the difference in `change`, as fp32. CorruptError if they are not these."""
    with Bundle.open(base) as before, Bundle.open(change) as difference:
        before.check_layout(WHOLE, layout)
        difference.check_layout(CHANGE, layout)

        def read(start: int, stop: int) -> Tensor:
            values = before.flat_slice(WHOLE, layout, start, stop)
            difference.accumulate(CHANGE, layout, values, start, 1.0)
            return values

        write_flat_slices(path, WHOLE, read, layout, codec("fp32"))


def layout_of(bundle: Bundle, layout: Layout) -> Layout:
    """The layout of the parameters in a bundle: of the model, or of some of its tensors. CorruptError."""
    names = [name.removeprefix(f"{WHOLE}/") for name in bundle.entries if name.startswith(f"{WHOLE}/")]
    try:
        return layout.part(layout.numbers_of(names))
    except KeyError as error:
        raise CorruptError(f"{bundle.path.name} holds {str(error)[:100]}, which this model has not") from error
