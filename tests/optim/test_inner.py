import math

import pytest

from potluck.optim.inner import InnerConfig, learning_rate


def test_the_rate_rises_then_falls_along_a_cosine() -> None:
    config = InnerConfig(lr=1.0, warmup=0.1, min_lr_fraction=0.2)
    assert learning_rate(config, 0.0) == 0.0
    assert learning_rate(config, 0.05) == pytest.approx(0.5)
    assert learning_rate(config, 0.1) == pytest.approx(1.0)
    assert learning_rate(config, 0.55) == pytest.approx(0.2 + 0.8 * 0.5)
    assert learning_rate(config, 0.325) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert learning_rate(config, 1.0) == pytest.approx(0.2)
    assert learning_rate(config, 7.0) == pytest.approx(0.2)


def test_a_constant_rate_still_warms_up() -> None:
    config = InnerConfig(lr=0.5, warmup=0.5, schedule="constant")
    assert [learning_rate(config, p) for p in (0.25, 0.5, 1.0)] == [0.25, 0.5, 0.5]


def test_without_warmup_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(InnerConfig(lr=0.3, warmup=0.0), 0.0) == pytest.approx(0.3)
