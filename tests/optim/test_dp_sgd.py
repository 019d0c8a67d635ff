"""Samples, clipped sums and noise of DP-SGD, with bits that a seed gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from potluck.optim.dp_sgd import PrivacyConfig, clipped_sum, noised, normal, poisson_sample, sampling_rate


def seeded(seed: int) -> Callable[[int], bytes]:
    return np.random.default_rng(seed).bytes


def some_gradients(num_records: int, seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = scale * torch.rand(num_records, 1, 1, generator=generator).exp() ** 3
    return [sizes * torch.randn(num_records, *shape, generator=generator) for shape in ((6, 2), (3, 4))]


def whole(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.double().reshape(-1) for t in tensors])


def test_noise_is_standard_normal() -> None:
    z = np.sort(normal(200_001, seeded(3)))
    assert abs(z.mean()) < 4 / math.sqrt(len(z))
    assert z.var() == pytest.approx(1.0, abs=4 * math.sqrt(2 / len(z)))
    wanted = np.array([NormalDist().cdf(x) for x in z[::50]])
    assert np.abs(wanted - np.arange(0, len(z), 50) / len(z)).max() < 1.95 / math.sqrt(len(z))  # Kolmogorov, 0.1 %
    assert len(np.unique(z)) == len(z)


def test_noise_is_of_the_bits_that_are_given_and_of_nothing_else() -> None:
    assert np.array_equal(normal(1000, seeded(1)), normal(1000, seeded(1)))
    assert not np.array_equal(normal(1000, seeded(1)), normal(1000, seeded(2)))
    asked: list[int] = []

    def random_bytes(size: int) -> bytes:
        asked.append(size)
        return seeded(4)(size)

    assert abs(np.corrcoef(normal(4000, random_bytes).reshape(2, -1))[0, 1]) < 4 / math.sqrt(2000)
    assert sum(asked) == 4 * 8 * 4000  # 64 bits for each of the four that are summed


@pytest.mark.parametrize("rate", [0.0, 0.03, 0.4, 1.0])
def test_samples_are_poisson(rate: float) -> None:
    num_records, num_samples, random_bytes = 50, 4000, seeded(5)
    taken = np.zeros((num_samples, num_records))
    for row in taken:
        sample = poisson_sample(num_records, rate, random_bytes)
        assert np.array_equal(sample, np.unique(sample))
        row[sample] = 1
    deviation = math.sqrt(rate * (1 - rate) / num_samples)
    assert np.abs(taken.mean(axis=0) - rate).max() <= 4.5 * deviation
    sizes = taken.sum(axis=1)
    assert sizes.var() == pytest.approx(num_records * rate * (1 - rate), rel=0.12)
    if rate == 0.03:
        assert (sizes == 0).mean() == pytest.approx((1 - rate) ** num_records, abs=0.03)
        pairs = (taken.T @ taken) / num_samples
        assert np.abs(pairs[np.triu_indices(num_records, 1)] - rate**2).max() < 5.5 * rate / math.sqrt(num_samples)


def test_the_rate_gives_so_many_on_average() -> None:
    assert sampling_rate(8, 1000) == 0.008
    assert sampling_rate(8, 8) == sampling_rate(8, 3) == 1.0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_a_clipped_sum_is_that_of_a_plain_loop(scale: float) -> None:
    gradients, clip = some_gradients(9, 1, scale), 1.5
    wanted = torch.zeros(24, dtype=torch.float64)
    for record in range(9):
        own = whole([g[record] for g in gradients])
        wanted += own * min(1.0, clip / float(own.norm()))
    got = clipped_sum(gradients, clip)
    assert [list(g.shape) for g in got] == [[6, 2], [3, 4]]
    torch.testing.assert_close(whole(got), wanted, rtol=2e-6, atol=0)
    if scale == 1e-3:
        torch.testing.assert_close(whole(got), whole([g.sum(dim=0) for g in gradients]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e6, 1e18])
def test_one_record_moves_the_sum_by_no_more_than_the_clip(scale: float) -> None:
    for seed in range(20):
        gradients, clip = some_gradients(5, seed, scale), 0.7
        if seed % 4 == 1:
            gradients[0][2] = math.nan
        if seed % 4 == 2:
            gradients[1][2, 0, 0] = math.inf
        without = [torch.cat([g[:2], g[3:]]) for g in gradients]
        empty = [g.clone() for g in gradients]
        for g in empty:
            g[2] = 0.0
        whole_sum = whole(clipped_sum(gradients, clip))
        assert torch.isfinite(whole_sum).all()
        for neighbour in (without, empty):
            assert float((whole_sum - whole(clipped_sum(neighbour, clip))).norm()) <= clip


def test_what_is_not_finite_counts_as_nothing() -> None:
    gradients = some_gradients(3, 1)
    gradients[1][1, 0, 0] = math.nan
    rest = [g[[0, 2]] for g in gradients]
    torch.testing.assert_close(whole(clipped_sum(gradients, 1.0)), whole(clipped_sum(rest, 1.0)))


def test_noise_has_the_size_of_multiplier_times_clip_over_the_expected_number() -> None:
    config = PrivacyConfig(max_epsilon=8.0, delta=1e-5, noise_multiplier=1.3, clip=0.5)
    summed = torch.full((300, 200), 7.0, dtype=torch.float64)
    got = noised(summed, config, expected=4.0, random_bytes=seeded(8)).double()
    assert float(got.mean()) == pytest.approx(7.0 / 4, abs=4 * 1.3 * 0.5 / 4 / math.sqrt(got.numel()))
    assert float(got.std()) == pytest.approx(1.3 * 0.5 / 4, rel=0.012)
    noise = torch.from_numpy(normal(summed.numel(), seeded(8))).view(summed.shape)
    torch.testing.assert_close(got, (summed + 1.3 * 0.5 * noise) / 4.0, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["max_epsilon", "delta", "noise_multiplier", "clip"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_settings_without_meaning_are_refused(name: str, value: float) -> None:
    good = {"max_epsilon": 8.0, "delta": 1e-5, "noise_multiplier": 1.0, "clip": 1.0}
    assert PrivacyConfig.model_validate(good).clip == 1.0
    with pytest.raises(ValidationError, match=name):
        PrivacyConfig.model_validate({**good, name: value})
    with pytest.raises(ValidationError, match="delta"):
        PrivacyConfig.model_validate({**good, "delta": 1.0})
