"""The rules on dense matrices in fp64, written from the papers and apart from the package; adapters to try."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from potluck.lora.factors import Factors, scale_for

Matrix = npt.NDArray[np.float64]
Updates = list[tuple[float, Factors]]

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def wide(matrix: torch.Tensor) -> Matrix:
    return matrix.double().numpy()


def adapter(
    d: int, k: int, rank: int, *, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Factors:
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, k, generator=draw), torch.randn(d, rank, generator=draw)
    return Factors(a.to(dtype), b.to(dtype), scale)


def change(adapter: Factors) -> Matrix:
    """s B A."""
    return adapter.scale * wide(adapter.b) @ wide(adapter.a)


def mean_change(updates: Updates) -> Matrix:
    """sum_i p_i s_i B_i A_i."""
    return np.average([change(x) for _, x in updates], axis=0, weights=[w for w, _ in updates])


def mean(matrices: Sequence[torch.Tensor], weights: Sequence[float]) -> Matrix:
    return np.average([wide(m) for m in matrices], axis=0, weights=weights)


def size(updates: Updates) -> float:
    """What rounding is measured against: the largest ||s_i B_i|| ||A_i||."""
    return max(x.scale * float(np.linalg.norm(wide(x.b)) * np.linalg.norm(wide(x.a))) for _, x in updates)


def padded(matrix: Matrix, rank: int, axis: int) -> Matrix:
    missing = [(0, 0), (0, 0)]
    missing[axis] = (0, rank - matrix.shape[axis])
    return np.pad(matrix, missing)


@st.composite
def rounds(draw: Any, *, equal: bool = False, max_side: int = 20) -> Updates:
    """The adapters of one layer in one round, of unequal ranks and scales (alpha / r or rsLoRA) unless `equal`."""
    d, k = draw(st.integers(1, max_side)), draw(st.integers(1, max_side))
    seed, num = draw(st.integers(0, 2**31)), draw(st.integers(1, 5))
    ranks = draw(st.lists(st.integers(1, 5), min_size=num, max_size=num))
    alpha, stabilised, dtype = draw(st.floats(0.5, 32)), draw(st.booleans()), draw(st.sampled_from(TYPES))
    weights = draw(st.lists(st.floats(1e-3, 1e6), min_size=num, max_size=num))
    ranks = [ranks[0]] * num if equal else ranks
    return [
        (w, adapter(d, k, r, seed=seed + i, scale=scale_for(alpha, r, rank_stabilised=stabilised), dtype=dtype))
        for i, (w, r) in enumerate(zip(weights, ranks, strict=True))
    ]
