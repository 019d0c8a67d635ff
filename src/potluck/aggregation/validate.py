"""Whether a worker's update may enter the mean: readable, of this model's layout, finite, not too large."""

from __future__ import annotations

import math
from pathlib import Path

from potluck.codecs.bundle import Bundle
from potluck.types.errors import CorruptError, InvalidUpdate
from potluck.types.params import Layout

most_norm = 1e18
"""Of any update: so that products of two, as rules of adapters make them, and sums of all are finite in fp32."""


def check_update(path: Path, name: str, layout: Layout, *, max_norm: float = math.inf) -> float:
    """The L2 norm of the update `name` in a bundle file. InvalidUpdate, with the reason, if it must not be used."""
    try:
        with Bundle.open(path) as bundle:
            norm = bundle.check_flat(name, layout)
    except (CorruptError, OSError) as error:
        raise InvalidUpdate(f"the update cannot be read: {error}") from error
    if norm > most_norm:
        raise InvalidUpdate(
            f"{name} has the norm {norm:.4g}, and beyond {most_norm:.4g} it cannot be joined with others in fp32; "
            "lower strategy.inner.lr"
        )
    if norm > max_norm:
        raise InvalidUpdate(
            f"{name} has the norm {norm:.4g} and {max_norm:.4g} is the most; `fleet.max_update_norm` sets that"
        )
    return norm
