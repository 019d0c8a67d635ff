"""Numbers for a seed and a position, against Random123's answers and a reference in plain Python."""

import hashlib
import math
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch

from potluck.optim import normal as module
from potluck.optim import normal_kernels
from potluck.optim.normal import normal, op_by_op

seeds = [0, 1, 0x0123456789ABCDEF, (1 << 64) - 1]

# Counter, key and words of `philox4x32 10` in Random123's tests/kat_vectors.
known = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def reference_words(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = counter
    for number in range(10):
        k0, k1 = ((k + number * step) % 2**32 for k, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        (high0, low0), (high1, low1) = divmod(0xD2511F53 * c0, 2**32), divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return [c0, c1, c2, c3]


def block_words(seed: int, block: int) -> list[int]:
    return reference_words([block % 2**32, block >> 32, 0, 0], [seed % 2**32, seed >> 32])


def fp32(value: float) -> float:
    """To the nearest. Python's fp64 sums, products and roots of fp32 values are right once rounded to it."""
    return struct.unpack("f", struct.pack("f", value))[0]


def polynomial(terms: tuple[float, ...], x: float) -> float:
    value = terms[-1]
    for term in reversed(terms[:-1]):
        value = fp32(fp32(value * x) + term)
    return value


def reference_pair(w0: int, w1: int) -> tuple[float, float]:
    fraction, exponent = math.frexp(fp32(fp32(w0) + 0.5))
    if fraction < struct.unpack("f", struct.pack("I", 0x3F3504F3))[0]:
        fraction, exponent = 2 * fraction, exponent - 1
    f = fraction - 1
    log = fp32(fp32(polynomial(module.log_terms, f) * fp32(f * f)) + f)
    radius = fp32(math.sqrt(fp32(fp32((exponent - 32) * module.minus_two_ln_2) + -2 * log)))
    v = fp32(w1 % 2**29) / 2**29
    y = fp32(v * v)
    along, across = polynomial(module.cos_terms, y), fp32(polynomial(module.sin_terms, y) * v)
    if w1 >> 29 & 1:
        along, across = across, along
    return fp32(radius * along) * (-1) ** (w1 >> 30 & 1), fp32(radius * across) * (-1) ** (w1 >> 31)


def reference(seed: int, first: int, last: int) -> torch.Tensor:
    """Blocks `first` to `last`."""
    values: list[float] = []
    for block in range(first, last):
        w0, w1, w2, w3 = block_words(seed, block)
        values += [*reference_pair(w0, w1), *reference_pair(w2, w3)]
    return torch.tensor(values)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize(("counter", "key", "words"), known)
def test_philox_gives_the_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    tensors = module.philox(*(torch.tensor([c]) for c in counter), key=(key[0], key[1]))
    assert [int(t) for t in tensors] == words
    assert [int(w) for w in normal_kernels.philox(*map(np.uint32, [*counter, *key]))] == words
    assert reference_words(counter, key) == words


@pytest.mark.parametrize("seed", seeds)
@pytest.mark.parametrize("first", [0, (1 << 32) - 300, (1 << 40) + 1])
def test_both_ways_have_the_bits_of_the_reference(seed: int, first: int) -> None:
    expected = reference(seed, first, first + 600)
    assert same_bits(normal(seed, 4 * first, 4 * first + 2400), expected)
    assert same_bits(op_by_op(seed, first, first + 600, device="cpu"), expected)


def test_both_ways_have_the_same_bits_over_a_million_elements() -> None:
    assert same_bits(normal(77, 0, 1 << 20), op_by_op(77, 0, 1 << 18, device="cpu"))


@pytest.mark.parametrize("w0", [0, 1, 2, 0x7FFFFF80, 0xB504F333, 0xB504F2FF, 0xFFFFFF7F, 0xFFFFFF80, 0xFFFFFFFF])
@pytest.mark.parametrize("w1", [0, 1, 0x1FFFFFFF, 0x20000000, 0x5FFFFFF0, 0x80000000, 0xFFFFFFFF])
def test_words_at_the_edges(w0: int, w1: int) -> None:
    expected = torch.tensor(reference_pair(w0, w1))
    assert same_bits(torch.cat(module._box_muller(torch.tensor([w0]), torch.tensor([w1]))), expected)
    compiled = [float(value) for value in normal_kernels._box_muller(np.uint32(w0), np.uint32(w1))]
    assert same_bits(torch.tensor(compiled), expected)
    assert bool((expected.abs() <= math.sqrt(66 * math.log(2)) + 1e-6).all())


def test_the_bits_stay_those_of_earlier_versions() -> None:
    """A worker and a coordinator of two versions must mean the same z, and so must a run that is resumed."""
    assert normal(2026, 0, 4).view(torch.int32).tolist() == [1067739984, -1103507551, -1085403541, 1048058721]
    digest = hashlib.sha256(normal(2026, 5, 5 + (1 << 20)).numpy().tobytes()).hexdigest()
    assert digest == "b6a0875b8fede2bb46890109b237e507582ecf29a8552c7f8c1f2404c85dedf2"


def test_values_are_those_of_box_muller() -> None:
    """Within 3e-7 radii of exact arithmetic from x on, which is u in fp32."""
    z = normal(3, 0, 40_000).double()
    words = torch.tensor([block_words(3, block) for block in range(10_000)], dtype=torch.float64)
    x = (words[:, 0::2].float() + 0.5).double()
    radius = torch.sqrt(-2 * torch.log(x / 2**32)).flatten()
    pairs = z.view(-1, 2)
    folded = words[:, 1::2].flatten() % 2**29 * (math.pi / 4 / 2**29)
    low, high = pairs.abs().min(dim=1).values, pairs.abs().max(dim=1).values
    assert float(((low - radius * folded.sin()).abs() / radius).max()) < 3e-7
    assert float(((high - radius * folded.cos()).abs() / radius).max()) < 3e-7


@pytest.mark.parametrize("start", [0, 1, 3, 2047, 4 * (1 << 33) - 5])
def test_any_cut_gives_the_same_bits(start: int) -> None:
    whole = normal(11, start, start + 10_000)
    cuts = [0, 1, 2, 7, 8, 8, 511, 2048, 2051, 9_999, 10_000]
    parts = [normal(11, start + low, start + high) for low, high in pairwise(cuts)]
    assert same_bits(torch.cat(parts), whole)


def test_moments_and_tails() -> None:
    num = 1 << 22
    z = normal(5, 0, num).double()
    spread = 1 / math.sqrt(num)
    assert abs(float(z.mean())) < 4 * spread
    assert abs(float(z.square().mean()) - 1) < 4 * math.sqrt(2) * spread
    assert abs(float(z.pow(3).mean())) < 4 * math.sqrt(15) * spread
    assert abs(float(z.pow(4).mean()) - 3) < 4 * math.sqrt(96) * spread
    for bound in (1.0, 2.0, 3.0, 4.0, 4.5):
        expected = num * math.erfc(bound / math.sqrt(2)) / 2
        for count in (int((z > bound).sum()), int((z < -bound).sum())):
            assert abs(count - expected) < 4 * math.sqrt(expected)
    steps = torch.arange(1, num + 1) / num
    furthest = float((torch.special.ndtr(z.sort().values) - steps).abs().max())
    assert furthest < 1.95 / math.sqrt(num)  # Kolmogorov-Smirnov at 0.1 %


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def test_neighbours_are_uncorrelated() -> None:
    """Of seeds, also where the upper half of the key changes, and of positions; values and squares."""
    num = 1 << 19
    limit = 4.5 / math.sqrt(num)
    z = normal(8, 0, num + 8)
    for other in (9, 10, 8 + (1 << 32), 8 + (1 << 63)):
        there = normal(other, 0, num)
        assert abs(correlation(z[:num], there)) < limit
        assert abs(correlation(z[:num].square(), there.square())) < limit
    for lag in range(1, 9):
        assert abs(correlation(z[:num], z[lag : num + lag])) < limit
        assert abs(correlation(z[:num].square(), z[lag : num + lag].square())) < limit


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("seed", seeds)
def test_a_gpu_gives_the_same_bits(seed: int) -> None:
    assert same_bits(normal(seed, 3, 1 << 20, device="cuda").cpu(), normal(seed, 3, 1 << 20))
