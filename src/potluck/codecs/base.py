"""Codecs: how a tensor of fp32 becomes bytes, and how those become fp32 again. Recipes name them.

All are deterministic and sum in fp32. A codec is stateless; error feedback is the caller's.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from potluck.codecs.bf16 import Bf16
from potluck.codecs.elementwise import Bytes, Shape, Values
from potluck.codecs.fp32 import Fp32
from potluck.codecs.int8 import Int8
from potluck.types.errors import RecipeError


class Codec(Protocol):
    """Tensors in, buffers out. Both halves see the tensor's shape; values are flat, row-major."""

    @property
    def name(self) -> str:
        """What recipes and bundles call it: `codec(name)` gives it again."""
        ...

    def buffer_sizes(self, shape: Shape) -> tuple[int, ...]:
        """Bytes of each buffer that `encode` gives for a tensor of this shape: a function of the shape alone."""
        ...

    def encode(self, values: Values, shape: Shape) -> Sequence[npt.NDArray[np.generic]]:
        """The buffers for `values`, fp32 [numel]. InvalidUpdate if one of them is NaN or infinite."""
        ...

    def decode(self, buffers: Sequence[Bytes], shape: Shape, start: int, out: Values) -> None:
        """Fill `out` with the elements from `start` on. Buffers have the sizes `buffer_sizes` says, aligned."""
        ...

    def accumulate(self, buffers: Sequence[Bytes], shape: Shape, start: int, into: Values, weight: float) -> None:
        """`into += weight * decoded[start:start + len(into)]` in fp32."""
        ...

    def estimate_bytes(self, numel: int) -> int:
        """Bytes for `numel` elements, without headers and padding."""
        ...


_codecs: Mapping[str, Codec] = {each.name: each for each in (Fp32(), Bf16(), Int8())}


def codec(name: str) -> Codec:
    """The codec a recipe or a bundle names. RecipeError if there is none of that name."""
    found = _codecs.get(name)
    if found is None:
        near = difflib.get_close_matches(name[:64], _codecs, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(_codecs))}"
        raise RecipeError(f"{name[:64]!r} is not a codec; {hint}")
    return found


def codec_names() -> tuple[str, ...]:
    return tuple(_codecs)
