"""Each rule against the dense reference, and what they all have in common."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aggregation import dense
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.aggregation import spool as spool_module
from potluck.aggregation.combine import Combined, combine
from potluck.aggregation.config import AggregationConfig
from potluck.codecs.base import codec
from potluck.codecs.bundle import write_flat
from potluck.storage.params import ParamStore
from potluck.types.errors import InvalidUpdate, RoundFailed
from potluck.types.params import Layout

RULES = (
    "mean", "trimmed_mean", "median", "krum", "multi_krum", "geometric_median", "centered_clipping", "norm_clipping",
)  # fmt: skip
ROBUST = tuple(rule for rule in RULES if rule != "mean")
WEIGHTLESS = ("trimmed_mean", "median", "krum")


class Bench:
    """Vectors in, the aggregate out, in a folder of its own."""

    def __init__(self, folder: Path, numel: int) -> None:
        first = numel // 3
        shapes = [("a", (first,)), ("b", (1, numel - first - 1)), ("c", ())] if numel > 2 else [("a", (numel,))]
        self.folder, self.layout = folder, Layout.of(shapes)
        self.store = ParamStore(folder / "params", fragment_numel=max(1, numel // 2))
        self.last: Combined | None = None

    def write(self, name: str, vector: np.ndarray[Any, Any], codec_name: str = "fp32") -> Path:
        path = self.folder / name
        write_flat(path, "delta", torch.from_numpy(vector.astype(np.float32)), self.layout, codec(codec_name))
        return path

    def __call__(
        self, x: np.ndarray[Any, Any], weights: Sequence[float] | None = None, *, mean: bool = True,
        previous: np.ndarray[Any, Any] | None = None, codec_name: str = "fp32", **config: Any,
    ) -> np.ndarray[Any, Any]:  # fmt: skip
        weights = [1.0] * len(x) if weights is None else weights
        paths = [self.write(f"update-{i}", vector, codec_name) for i, vector in enumerate(x)]
        updates = [(path, float(w)) for path, w in zip(paths, weights, strict=True)]
        start = None if previous is None else self.store.create("previous", torch.from_numpy(previous).float())
        self.last = combine(
            self.store, updates, rule=AggregationConfig(**config), name="delta", layout=self.layout, out_name="out",
            mean=mean, previous=start,
        )  # fmt: skip
        return self.store.read(self.last.params).numpy().copy()

    @property
    def factors(self) -> tuple[float, ...]:
        assert self.last is not None
        return self.last.report.factors


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, 501)


def normal(n: int, numel: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(seed).standard_normal((n, numel)).astype(np.float32).astype(np.float64)


def expected(rule: str, x: Any, w: Any, config: AggregationConfig, start: Any) -> Any:
    n = len(x)
    match rule:
        case "mean":
            return dense.mean(x, w)
        case "trimmed_mean":
            return dense.trimmed_mean(x, w, math.ceil(round(config.trim_fraction * n, 6)))
        case "median":
            return dense.median(x, w)
        case "krum":
            return x[dense.krum_order(x, config.max_faulty)[0]]
        case "multi_krum":
            kept = dense.krum_order(x, config.max_faulty)[: n - config.max_faulty - 2]
            return dense.mean(x[kept], w[kept])
        case "geometric_median":
            return dense.geometric_median(x, w, config.iterations or 8, config.smoothing)
        case "centered_clipping":
            return dense.centered_clipping(x, w, start, config.iterations or 3, config.clip_radius)
        case _:
            return dense.norm_clipping(x, w)


cases = st.fixed_dictionaries(
    {
        "n": st.integers(1, 12),
        "numel": st.integers(1, 400),
        "slice_numel": st.integers(1, 450),
        "seed": st.integers(0, 1 << 30),
        "is_weighted": st.booleans(),
        "has_previous": st.booleans(),
        "iterations": st.integers(0, 5),
        "clip_radius": st.sampled_from([0.0, 0.5, 100.0]),
        "trim_fraction": st.sampled_from([0.1, 0.25, 0.4]),
        "max_faulty": st.integers(0, 3),
    }
)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(case=cases)
def test_each_rule_equals_the_dense_reference_wherever_slices_are_cut(rule: str, case: dict[str, Any]) -> None:
    n, numel = case["n"], case["numel"]
    names = ("iterations", "clip_radius", "trim_fraction", "max_faulty")
    config = AggregationConfig(rule=rule, **{name: case[name] for name in names})  # pyright: ignore[reportArgumentType]
    x = normal(n, numel, case["seed"]) * np.random.default_rng(case["seed"]).lognormal(size=(n, 1))
    x = x.astype(np.float32).astype(np.float64)
    w = np.random.default_rng(case["seed"]).integers(1, 5000, n).astype(float) if case["is_weighted"] else np.ones(n)
    start = normal(1, numel, case["seed"] + 1)[0] if case["has_previous"] else None
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(spool_module, "rows_bytes", 4 * case["slice_numel"])
        patch.setattr("potluck.aggregation.aggregation.sum_numel", case["slice_numel"])
        bench = Bench(Path(folder), numel)
        too_few = {
            "trimmed_mean": n <= 2 * math.ceil(round(config.trim_fraction * n, 6)),
            "krum": n < 2 * config.max_faulty + 3,
            "multi_krum": n < 2 * config.max_faulty + 3,
        }
        if too_few.get(rule, False):
            with pytest.raises(RoundFailed, match=rf"{rule} with .* needs \d+ updates and {n} came"):
                bench(x, w, previous=start, **config.model_dump())
            return
        got = bench(x, w, previous=start, **config.model_dump())
    want = expected(rule, x, w, config, np.zeros(numel) if start is None else start)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5 * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("rule", RULES)
def test_threads_and_mapping_change_no_bit(bench: Bench, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(9, 501)
    monkeypatch.setattr(spool_module, "rows_bytes", 4 * 9 * 50)
    monkeypatch.setattr("potluck.aggregation.aggregation.sum_numel", 50)
    results: set[bytes] = set()
    for num_threads, max_open in ((1, 64), (2, 64), (4, 4), (2, 2)):
        monkeypatch.setattr(spool_module, "num_threads", num_threads)
        monkeypatch.setattr(spool_module, "max_open_updates", max_open)
        monkeypatch.setattr(spool_module, "max_mapped_bytes", 1000 * max_open)
        results.add(bench(x, range(1, 10), rule=rule, codec_name="int8").tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("rule", ["trimmed_mean", "median"])
def test_rules_of_ranks_do_not_see_the_order_of_updates(bench: Bench, rule: str) -> None:
    x = normal(8, 501)
    assert bench(x, rule=rule).tobytes() == bench(x[::-1], rule=rule).tobytes()


@pytest.mark.parametrize("rule", RULES)
def test_another_order_of_updates_is_the_same_but_for_rounding(bench: Bench, rule: str) -> None:
    x, w = normal(7, 501), np.arange(1.0, 8.0)
    np.testing.assert_allclose(
        bench(x, w, rule=rule), bench(x[::-1], w[::-1], rule=rule), rtol=1e-4, atol=1e-6
    )  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_equal_updates_are_their_own_aggregate(bench: Bench, rule: str) -> None:
    x = np.repeat(normal(1, 501), 8, axis=0)
    got = bench(x, rule=rule, previous=x[0])
    if rule in WEIGHTLESS:
        assert got.tobytes() == x[0].astype(np.float32).tobytes()
    np.testing.assert_allclose(got, x[0], rtol=3e-7)  # a running sum of eighths rounds


@pytest.mark.parametrize("rule", ["mean", "median", "geometric_median", "centered_clipping", "norm_clipping"])
def test_one_update_is_its_own_aggregate(bench: Bench, rule: str) -> None:
    x = normal(1, 501)
    assert bench(x, [3.7], rule=rule).tobytes() == x[0].astype(np.float32).tobytes()


@pytest.mark.parametrize("rule", ["mean", "median", "geometric_median", "centered_clipping", "norm_clipping"])
def test_zeros_give_zeros(bench: Bench, rule: str) -> None:
    assert not bench(np.zeros((3, 501)), rule=rule).any()


@pytest.mark.parametrize("rule", RULES)
def test_weights_count_where_the_rule_has_them(bench: Bench, rule: str) -> None:
    x = normal(7, 501)
    heavy = np.array([1.0, 900.0, 1.0, 5.0, 700.0, 1.0, 30.0])
    assert (bench(x, rule=rule).tobytes() == bench(x, heavy, rule=rule).tobytes()) == (rule in WEIGHTLESS)


@pytest.mark.parametrize("rule", RULES)
def test_a_sum_over_items_is_the_rule_on_each_ones_mean_times_all_items(bench: Bench, rule: str) -> None:
    means, w = normal(7, 501), np.array([10.0, 20, 30, 40, 50, 60, 70])
    got = bench(means * w[:, np.newaxis], w, rule=rule, mean=False)
    np.testing.assert_allclose(got, bench(means, w, rule=rule) * w.sum(), rtol=1e-4, atol=1e-3)


def test_a_plain_sum_adds_as_it_is(bench: Bench) -> None:
    x, w = normal(3, 501), [7.0, 49.0, 12_345.0]
    f = x.astype(np.float32)
    assert bench(x, w, rule="mean", mean=False).tobytes() == ((f[0] + f[1]) + f[2]).tobytes()


# Attacks


def honest_and(attack: Any, num_honest: int = 8, numel: int = 501) -> Any:
    """Honest updates around a common direction, then the attackers'."""
    return np.vstack([1.0 + 0.3 * normal(num_honest, numel), attack])


ATTACKS = {
    "one huge": lambda: honest_and(1e10 * normal(1, 501, seed=9)),
    "one sign-flipped and large": lambda: honest_and(np.full((1, 501), -50.0)),
    "three that collude": lambda: honest_and(np.repeat(40.0 * normal(1, 501, seed=5), 3, axis=0)),
}


def error(got: Any) -> float:
    """Distance to the honest direction, relative to its length."""
    return float(np.linalg.norm(got - 1.0) / math.sqrt(501))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("rule", ROBUST)
def test_the_mean_fails_where_the_rule_does_not(bench: Bench, rule: str, attack: str) -> None:
    x = ATTACKS[attack]()
    assert error(bench(x, rule="mean")) > 4
    num_attackers = len(x) - 8
    config = {"max_faulty": num_attackers, "trim_fraction": 0.3, "iterations": 60 if rule == "geometric_median" else 0}
    got = bench(x, rule=rule, previous=np.zeros(501), **config)
    # Clipping bounds what an attacker does and still counts it; the others leave it out or nearly so.
    limit = 0.9 if rule in ("norm_clipping", "centered_clipping") else 0.45
    assert error(got) < limit
    assert float(np.dot(got, np.ones(501))) > 0.4 * 501
    if rule in ("krum", "multi_krum"):
        assert not any(bench.factors[8:]) and any(bench.factors[:8])
    if rule in ("geometric_median", "norm_clipping"):
        assert max(bench.factors[8:]) < 0.1 < min(bench.factors[:8])


@pytest.mark.parametrize("huge", [1e12, 1e30, 3e38])
@pytest.mark.parametrize("rule", [rule for rule in ROBUST if rule != "norm_clipping"])
def test_how_huge_an_update_is_makes_no_difference(bench: Bench, rule: str, huge: float) -> None:
    """With the settings that a recipe has by default: steps converge, and fp64 tells small distances from none."""
    x = honest_and(np.full((1, 501), huge))
    expected = bench(honest_and(np.full((1, 501), 1e6)), rule=rule, previous=np.zeros(501))
    got = bench(x, rule=rule, previous=np.zeros(501))
    assert error(got) < 0.45
    assert np.abs(got - expected).max() < 1e-2


def test_a_huge_update_does_not_blur_the_distances_between_the_others(bench: Bench) -> None:
    x = np.vstack([1.0 + 1e-3 * normal(6, 501), 1e15 * normal(1, 501, seed=3)])
    bench(x, rule="multi_krum")
    kept = [i for i, factor in enumerate(bench.factors) if factor]
    assert sorted(dense.krum_order(x[:6], 0)[: len(kept)]) == kept or set(kept) <= set(range(6))


def test_of_equal_scores_the_first_wins(bench: Bench) -> None:
    x = np.repeat(normal(1, 501), 5, axis=0)
    bench(x, rule="krum")
    assert bench.factors == (1, 0, 0, 0, 0)
    x[0] += 1
    bench(x, rule="krum")
    assert bench.factors == (0, 1, 0, 0, 0)


def test_multi_krum_keeps_no_more_than_it_may(bench: Bench) -> None:
    x = normal(9, 501)
    for wanted, kept in ((0, 6), (1, 1), (4, 4), (9, 6)):
        bench(x, rule="multi_krum", num_kept=wanted)
        assert sum(bench.factors) == kept
        assert bench.last is not None and bench.last.report.num_passes == pytest.approx(1 + kept / 9)
    assert bench(x, rule="multi_krum", num_kept=1).tobytes() == bench(x, rule="krum").tobytes()


# Refusals and reports


@pytest.mark.parametrize(
    ("config", "n", "sentence"),
    [
        (
            {"rule": "krum"},
            4,
            "krum with aggregation.max_faulty = 1 needs 5 updates and 4 came; set fleet.min_workers to 5 or more, "
            "aggregation.max_faulty to 0, or choose another aggregation.rule",
        ),
        ({"rule": "krum"}, 2, "needs 5 updates and 2 came; set fleet.min_workers to 5 or more, or choose another"),
        ({"rule": "multi_krum", "max_faulty": 2}, 6, "multi_krum with .* = 2 needs 7 updates and 6 came"),
        ({"rule": "trimmed_mean"}, 2, "trimmed_mean with aggregation.trim_fraction = 0.1 needs 3 updates and 2 came"),
    ],
)
def test_too_few_updates_fail_the_round(bench: Bench, config: dict[str, Any], n: int, sentence: str) -> None:
    with pytest.raises(RoundFailed, match=sentence):
        bench(normal(n, 501), **config)
    assert list(bench.store.root.glob("*.f32*")) == []


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_that_is_not_positive_is_refused(bench: Bench, rule: str, weight: float) -> None:
    for mean in (True, False):
        with pytest.raises(InvalidUpdate, match="update-1 has the weight"):
            bench(normal(2, 501), [1.0, weight], rule=rule, mean=mean)


@pytest.mark.parametrize("rule", RULES)
def test_a_result_that_overflows_fails_the_round_and_leaves_nothing(bench: Bench, rule: str) -> None:
    with pytest.raises(RoundFailed, match=f"the {rule} of 9 finite updates of delta overflows"):
        bench(np.full((9, 501), 3e38), [3.0] * 9, rule=rule, mean=False)
    assert list(bench.store.root.glob("*.f32*")) == []


def test_what_it_decided_is_said(bench: Bench) -> None:
    x = normal(4, 501)
    x[2] *= 1000
    bench(x, rule="norm_clipping")
    assert bench.last is not None
    report = bench.last.report
    assert report.scaled[0] == 2 and report.left_out == ()
    norms = np.linalg.norm(x, axis=1)
    assert report.factors[2] == pytest.approx(np.median(norms) / norms[2])
    assert report.sentence(["w1", "w2", "w3", "w4"]).startswith("norm_clipping scaled w3 by 0.00")
    bench(normal(5, 501), rule="krum")
    said = bench.last.report.sentence([f"w{i}" for i in range(5)])
    assert said.startswith("krum left out w") and said.count("w") == 4
    bench(x, rule="mean")
    assert bench.last.report.sentence(["w1", "w2", "w3", "w4"]) == ""
