"""DP-SGD: a step on a sample of records of which no single one can be told from what the step makes public.

    each of N records is in the sample with probability q = L / N, whatever the others are
    g_i <- g_i min(1, S / |g_i|)                       the gradient of record i, its norm over all that is trained
    g   <- (sum_i g_i + N(0, (z S)^2)) / (q N)         what the optimizer is given; q N is L, or N where that is less

Abadi et al. 2016, arXiv:1607.00133, Algorithm 1. The divisor is the expected size of the sample: the size that it has
is as private as its records. Both the sample and the noise come of bits that nobody can foretell: `os.urandom`, unless
a test gives others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

RandomBytes = Callable[[int], bytes]
"""So many bytes that cannot be foretold."""
_rounding = 1e-6
"""By so much of itself a clipped gradient is made shorter than S, so that rounding in fp32 makes none longer."""
_num_summed = 4
_slice_numel = 1 << 18


class PrivacyConfig(BaseModel):
    """Differential privacy of every record of every owner, over a whole run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_epsilon: float = Field(
        gt=0, allow_inf_nan=False, description="epsilon of the run, at most: a worker leaves before it is exceeded"
    )
    delta: float = Field(
        gt=0, lt=1, description="chance with which the guarantee may fail; well below one in the records of an owner"
    )
    noise_multiplier: float = Field(
        gt=0, allow_inf_nan=False, description="standard deviation of the noise, in units of `clip`"
    )
    clip: float = Field(
        gt=0, allow_inf_nan=False,
        description="largest norm of a record's gradient; takes the place of `strategy.inner.clip`",
    )  # fmt: skip


def sampling_rate(batch_size: int, num_records: int) -> float:
    """q, for samples of `batch_size` records on average; 1 where there are no more than that."""
    return min(1.0, batch_size / num_records)


def poisson_sample(num_records: int, rate: float, random_bytes: RandomBytes) -> NDArray[np.int64]:
    """Indices in [0, num_records), ascending: each is there with probability `rate`, independently."""
    return np.flatnonzero(_uniform(num_records, random_bytes) < rate)


def clipped_sum(gradients: Sequence[Tensor], clip: float) -> list[Tensor]:
    """The sum of the clipped gradients of some records. gradients: of each trained tensor, fp32 [records, ...].

    fp64 [...] on the CPU. A record whose gradient is not finite counts as zero, so that nothing else tells of it.
    """
    squares = sum(g.flatten(1).double().square().sum(dim=1) for g in gradients)
    norms = torch.as_tensor(squares).sqrt()
    factors = torch.where(norms > 0, clip / (norms * (1 + _rounding)), 1.0).clamp(max=1.0)
    factors = torch.where(torch.isfinite(norms), factors, 0.0)
    finite = [torch.where(torch.isfinite(norms).view(-1, *[1] * (g.dim() - 1)), g, 0.0) for g in gradients]
    return [torch.tensordot(factors, g.double(), dims=1).cpu() for g in finite]


def noised(summed: Tensor, config: PrivacyConfig, *, expected: float, random_bytes: RandomBytes) -> Tensor:
    """What the optimizer is given of one tensor: fp32. `summed` is fp64 on the CPU, `expected` is q N."""
    scale = config.noise_multiplier * config.clip
    noise = torch.from_numpy(normal(summed.numel(), random_bytes)).view(summed.shape)
    return ((summed + scale * noise) / expected).float()


def normal(numel: int, random_bytes: RandomBytes) -> NDArray[np.float64]:
    """Standard normal numbers, fp64 [numel].

    Each is half the sum of four, so that the numbers near to one that fp64 can hold do not tell what the noise was
    added to (Holohan and Braghin 2021, arXiv:2107.10138).
    """
    found = np.empty(numel)
    for start in range(0, numel, _slice_numel):
        stop = min(start + _slice_numel, numel)
        found[start:stop] = _box_muller(_num_summed * (stop - start), random_bytes).reshape(_num_summed, -1).sum(axis=0)
    return found / math.sqrt(_num_summed)


def _box_muller(numel: int, random_bytes: RandomBytes) -> NDArray[np.float64]:
    """Box and Muller 1958. `numel` is even."""
    u, v = _uniform(numel, random_bytes).reshape(2, -1)
    radius, angle = np.sqrt(-2.0 * np.log1p(-u)), 2.0 * math.pi * v
    return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))


def _uniform(numel: int, random_bytes: RandomBytes) -> NDArray[np.float64]:
    """Multiples of 2^-53 in [0, 1)."""
    words = np.frombuffer(random_bytes(8 * numel), np.uint64)
    return (words >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)
