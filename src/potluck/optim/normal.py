"""Standard normal numbers that are a function of seed and position, the same bits on every device.

    w0 w1 w2 w3 = Philox4x32-10(counter = i, key = seed)       four words of 32 bits, exact in integers
    x = fp32(w0) + 1/2         u = x / 2^32, in (0, 1] with the steps of fp32
    r = sqrt(-2 ln u)          v = fp32(w1 mod 2^29) / 2^29, an angle of pi/4 v, in the octant that w1's top bits say
    z[4i] = r cos, z[4i + 1] = r sin; z[4i + 2] and z[4i + 3] likewise of w2 and w3

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; Box and Muller 1958. All 32 bits of a radius count,
so |z| reaches sqrt(66 ln 2) = 6.76. The generators of PyTorch give one seed other numbers on the CPU than on CUDA.

Libraries differ in the last bits of log, sin and cos. Here these are polynomials, and a normal is made with nothing
but conversions, additions, multiplications and square roots in fp32, each rounded to the nearest as IEEE 754 says, in
the order that is written, with no fused multiply-add; no value on the way is subnormal. So the bits do not depend on
the device, the library or the slice. The polynomials are near minimax over their ranges, fitted for this file; z is
within 3e-7 radii of exact arithmetic on the same x and v.

On the CPU the loops of normal_kernels.py fill a slice; on other devices the same operations run one by one, as PyTorch
does them outside of `torch.compile`, which would fuse them.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

multipliers = (0xD2511F53, 0xCD9E8D57)
key_steps = (0x9E3779B9, 0xBB67AE85)
num_rounds = 10

bits_of_sqrt_half = 0x3F3504F3
"""x = m 2^e with m in [sqrt(1/2), sqrt(2)): e is above these bits' exponent, m is what is left, with it."""
minus_two_ln_2 = float(np.float32(-2 * math.log(2)))
log_terms = (
    -0.5,
    0.33333972096443176,
    -0.250009685754776,
    0.19960610568523407,
    -0.16587978601455688,
    0.14950886368751526,
    -0.14197225868701935,
    0.08506869524717331,
)
"""(ln(1 + f) - f) / f^2 in powers of f, for f in [sqrt(1/2) - 1, sqrt(2) - 1]. All of these are fp32 values."""
sin_terms = (0.7853981852531433, -0.080745629966259, 0.0024903982412070036, -3.61782695108559e-05)
"""sin(pi/4 v) / v in powers of v^2, for v in [0, 1]."""
cos_terms = (1.0, -0.3084244728088379, 0.015850352123379707, -0.0003191295254509896)
"""cos(pi/4 v) in powers of v^2."""

_low = 0xFFFFFFFF
_octant_bits = 29


def normal(seed: int, start: int, stop: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Elements `start` to `stop` of z(seed), fp32 [stop - start], without what comes before.

    seed: 64 bits. Devices other than the CPU need ten times the memory of the result while it is made, and fp64.
    """
    assert 0 <= seed < 1 << 64 and 0 <= start <= stop
    first, last = start // 4, -(-stop // 4)
    on_cpu = torch.device(device).type == "cpu"
    blocks = _compiled(seed, first, last) if on_cpu else op_by_op(seed, first, last, device=device)
    return blocks[start - 4 * first : stop - 4 * first]


def _compiled(seed: int, first: int, last: int) -> Tensor:
    from potluck.optim.normal_kernels import fill  # numba takes half a second to import

    out = np.empty((last - first, 4), np.float32)
    fill(np.uint64(seed), np.uint64(first), out)
    return torch.from_numpy(out).view(-1)


def op_by_op(seed: int, first: int, last: int, *, device: torch.device | str) -> Tensor:
    """Blocks `first` to `last`, fp32 [4 (last - first)], by operations of PyTorch on whole tensors."""
    counters = torch.arange(first, last, dtype=torch.int64, device=device)
    zeros = torch.zeros_like(counters)
    w0, w1, w2, w3 = philox(counters & _low, counters >> 32, zeros, zeros, key=(seed & _low, seed >> 32))
    return torch.stack([*_box_muller(w0, w1), *_box_muller(w2, w3)], dim=1).view(-1)


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, *, key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of counters and to words in [0, 2^32), int64 [n] each.

    A product of 64 bits wraps around in int64; its halves are right all the same.
    """
    k0, k1 = key
    for _ in range(num_rounds):
        p0, p1 = c0 * multipliers[0], c2 * multipliers[1]
        c0, c2 = _high(p1).bitwise_xor_(c1).bitwise_xor_(k0), _high(p0).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = p1 & _low, p0 & _low
        k0, k1 = (k0 + key_steps[0]) & _low, (k1 + key_steps[1]) & _low
    return c0, c1, c2, c3


def _high(product: Tensor) -> Tensor:
    return (product >> 32).bitwise_and_(_low)


def _box_muller(radii: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    x = radii.to(torch.float32) + 0.5
    shifted = x.view(torch.int32) - bits_of_sqrt_half
    exponent = (shifted >> 23) - 32
    f = ((shifted & 0x7FFFFF) + bits_of_sqrt_half).view(torch.float32) - 1.0
    log = _polynomial(log_terms, f) * (f * f) + f
    # PyTorch's fp32 square root on the CPU is off by one bit now and then. Through fp64 it is right, for the root of an
    # fp32 value is never nearer to the middle between two others than fp64 can tell.
    squared_radius = exponent.to(torch.float32) * minus_two_ln_2 + log * -2.0
    radius = squared_radius.to(torch.float64).sqrt_().to(torch.float32)

    v = (angles & ((1 << _octant_bits) - 1)).to(torch.float32) * 2.0**-_octant_bits
    squared = v * v
    sin, cos = _polynomial(sin_terms, squared) * v, _polynomial(cos_terms, squared)
    swaps = (angles & (1 << _octant_bits)) != 0
    first, second = torch.where(swaps, sin, cos), torch.where(swaps, cos, sin)
    return radius * first * _sign(angles, 30), radius * second * _sign(angles, 31)


def _polynomial(terms: tuple[float, ...], x: Tensor) -> Tensor:
    value = x * terms[-1]
    for term in terms[-2:0:-1]:
        value = value.add_(term).mul_(x)
    return value.add_(terms[0])


def _sign(words: Tensor, bit: int) -> Tensor:
    return 1.0 - ((words >> bit) & 1).to(torch.float32) * 2.0
