"""What all rules stand on: sums slice by slice, whatever the codec, in bounded memory, files let go."""

import gc
import tracemalloc
import weakref
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from potluck.aggregation import spool as spool_module
from potluck.aggregation.combine import combine
from potluck.aggregation.config import AggregationConfig, Rule
from potluck.codecs.base import codec
from potluck.codecs.bundle import Bundle, write_flat, write_tensors
from potluck.storage.params import ParamStore
from potluck.types.errors import CorruptError, InvalidUpdate, RoundFailed
from potluck.types.params import Layout

layout = Layout.of([("a", (30, 100)), ("b", (7,)), ("c", (20, 20))])


@pytest.fixture
def store(tmp_path: Path) -> ParamStore:
    return ParamStore(tmp_path / "params", fragment_numel=1000)


def update(seed: int) -> Tensor:
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed))


def spool(folder: Path, seed: int, codec_name: str = "fp32") -> Path:
    path = folder / f"update-{seed}"
    write_flat(path, "delta", update(seed), layout, codec(codec_name))
    return path


def combined(
    store: ParamStore, updates: Sequence[tuple[Path, float]], *, mean: bool = True, rule: Rule = "mean"
) -> Tensor:
    config = AggregationConfig(rule=rule)
    got = combine(store, updates, rule=config, name="delta", layout=layout, out_name="m", mean=mean)
    return store.read(got.params)


def test_the_mean_weighs_and_divides(store: ParamStore, tmp_path: Path) -> None:
    weights = [100, 7, 12_345]
    updates = [(spool(tmp_path, i), float(w)) for i, w in enumerate(weights)]
    got = combined(store, updates)
    exact = sum(update(i).double() * w for i, w in enumerate(weights)) / sum(weights)
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-7)


def test_one_update_and_equal_updates_come_out_bit_for_bit(store: ParamStore, tmp_path: Path) -> None:
    path = spool(tmp_path, 0)
    for weights in ([3.7], [5.0] * 4, [1e9] * 2):
        pairs = [(path, w) for w in weights]
        got = combined(store, pairs)
        assert torch.equal(got, update(0))


@pytest.mark.parametrize("codec_name", ["fp32", "bf16", "int8"])
def test_a_mean_is_the_same_however_it_is_cut(
    store: ParamStore, tmp_path: Path, codec_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = [(spool(tmp_path, i, codec_name), 1.0 + i) for i in range(5)]
    results: list[bytes] = []
    for slice_numel in (layout.numel, 1000, 77):
        monkeypatch.setattr("potluck.aggregation.aggregation.sum_numel", slice_numel)
        results.append(combined(store, updates).numpy().tobytes())
    assert results[0] == results[1] == results[2]


def test_each_contributor_counts_once_whatever_its_codec(store: ParamStore, tmp_path: Path) -> None:
    basis: list[tuple[Path, float]] = []
    for i, name in enumerate(["fp32", "bf16", "int8"]):
        vector = torch.zeros(layout.numel)
        vector[i] = 1.0
        write_flat(tmp_path / name, "delta", vector, layout, codec(name))
        basis.append((tmp_path / name, float(2**i)))
    got = combined(store, basis)
    expected = torch.zeros(layout.numel)
    expected[:3] = torch.tensor([float(Fraction(2**i, 7)) for i in range(3)])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_nothing_to_combine_is_refused(store: ParamStore) -> None:
    with pytest.raises(InvalidUpdate, match="no update"):
        combined(store, [])


def test_a_sum_that_overflows_fails_the_round_and_leaves_nothing(store: ParamStore, tmp_path: Path) -> None:
    write_flat(tmp_path / "huge", "delta", torch.full((layout.numel,), 3e38), layout, codec("fp32"))
    pair = (tmp_path / "huge", 1.0)
    with pytest.raises(RoundFailed, match="mean of 2 finite updates of delta overflows"):
        combined(store, [pair, pair], mean=False)
    assert list(store.root.glob("*.f32*")) == []
    assert combined(store, [pair, pair]).max() > 2e38


def test_an_update_of_another_layout_is_not_added(store: ParamStore, tmp_path: Path) -> None:
    write_tensors(tmp_path / "other", {"delta/a": torch.zeros(30, 100), "delta/b": torch.zeros(7)})
    updates = [(spool(tmp_path, 0), 1.0), (tmp_path / "other", 1.0)]
    with pytest.raises(CorruptError, match="other does not hold delta/c"):
        combined(store, updates)
    assert list(store.root.glob("*.f32*")) == []


@pytest.mark.parametrize("rule", get_args(Rule))
def test_memory_does_not_grow_with_the_number_of_updates(
    tmp_path: Path, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = Layout.of([("a", (1000, 400))])
    store = ParamStore(tmp_path / "params")
    monkeypatch.setattr(spool_module, "rows_bytes", 1 << 20)
    monkeypatch.setattr(spool_module, "num_threads", 1)  # whether two peaks coincide is chance
    paths = [tmp_path / f"update-{i}" for i in range(32)]
    for i, path in enumerate(paths):
        values = torch.randn(large.numel, generator=torch.Generator().manual_seed(i))
        write_flat(path, "delta", values, large, codec("int8"))

    def peak_bytes(num_updates: int) -> int:
        config = AggregationConfig(rule=rule, max_faulty=0)
        pairs = [(path, 1.0) for path in paths[:num_updates]]
        tracemalloc.start()
        combine(store, pairs, rule=config, name="delta", layout=large, out_name="m")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak_bytes(4)  # what is made once and kept
    few, many = peak_bytes(4), peak_bytes(32)
    assert many < 1.1 * few
    assert many < 4 * large.numel * 4  # of the 32 there are


def test_every_file_is_let_go(store: ParamStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Bundle] = []
    real = Bundle.open

    def remember(path: Path, *, like: Bundle | None = None) -> Bundle:
        opened.append(real(path, like=like))
        return opened[-1]

    monkeypatch.setattr(Bundle, "open", remember)
    pairs = [(spool(tmp_path, i), 1.0) for i in range(3)]
    combined(store, pairs)
    assert len(opened) == 3 * spool_module.num_threads
    assert all(bundle._map is None for bundle in opened)


@pytest.mark.parametrize("rule", ["mean", "median", "geometric_median"])
def test_buffers_go_with_the_call_and_not_with_the_garbage_collector(
    store: ParamStore, tmp_path: Path, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[spool_module.Reader]] = []

    class Watched(spool_module.Reader):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made.append(weakref.ref(self))

    monkeypatch.setattr(spool_module, "Reader", Watched)
    gc.disable()
    try:
        combined(store, [(spool(tmp_path, i), 1.0) for i in range(3)], rule=rule)
        assert len(made) == spool_module.num_threads
        assert [reference() for reference in made] == [None] * len(made)
    finally:
        gc.enable()
