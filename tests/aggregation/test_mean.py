import math
import tracemalloc
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor

from potluck.aggregation import mean as module
from potluck.aggregation.mean import combine
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


def test_the_mean_weighs_and_divides(store: ParamStore, tmp_path: Path) -> None:
    weights = [100, 7, 12_345]
    updates = [(spool(tmp_path, i), float(w)) for i, w in enumerate(weights)]
    got = store.read(combine(store, updates, name="delta", layout=layout, out_name="mean", mean=True))
    exact = sum(update(i).double() * w for i, w in enumerate(weights)) / sum(weights)
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-7)


def test_the_sum_weighs_and_does_not_divide(store: ParamStore, tmp_path: Path) -> None:
    updates = [(spool(tmp_path, i), w) for i, w in enumerate([1.0, 2.0])]
    got = store.read(combine(store, updates, name="delta", layout=layout, out_name="sum", mean=False))
    torch.testing.assert_close(got, update(0) + 2 * update(1), rtol=1e-6, atol=1e-6)


def test_one_update_and_equal_updates_come_out_bit_for_bit(store: ParamStore, tmp_path: Path) -> None:
    path = spool(tmp_path, 0)
    for weights in ([3.7], [5.0] * 4, [1e9] * 2):
        pairs = [(path, w) for w in weights]
        got = store.read(combine(store, pairs, name="delta", layout=layout, out_name="mean", mean=True))
        assert torch.equal(got, update(0))


@pytest.mark.parametrize("codec_name", ["fp32", "bf16", "int8"])
def test_the_result_is_the_same_however_it_is_cut(store: ParamStore, tmp_path: Path, codec_name: str) -> None:
    updates = [(spool(tmp_path, i, codec_name), 1.0 + i) for i in range(5)]
    results: list[bytes] = []
    for chunk_numel in (layout.numel, 1000, 77):
        handle = combine(
            store, updates, name="delta", layout=layout, out_name="mean", mean=True, chunk_numel=chunk_numel
        )
        results.append(store.read(handle).numpy().tobytes())
    assert results[0] == results[1] == results[2]


def test_each_contributor_counts_once_whatever_its_codec(store: ParamStore, tmp_path: Path) -> None:
    basis: list[tuple[Path, float]] = []
    for i, name in enumerate(["fp32", "bf16", "int8"]):
        vector = torch.zeros(layout.numel)
        vector[i] = 1.0
        write_flat(tmp_path / name, "delta", vector, layout, codec(name))
        basis.append((tmp_path / name, float(2**i)))
    got = store.read(combine(store, basis, name="delta", layout=layout, out_name="mean", mean=True))
    expected = torch.zeros(layout.numel)
    expected[:3] = torch.tensor([float(Fraction(2**i, 7)) for i in range(3)])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_more_updates_than_are_mapped_at_once(
    store: ParamStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = [(spool(tmp_path, i), 1.0) for i in range(6)]

    def result() -> bytes:
        handle = combine(store, updates, name="delta", layout=layout, out_name="m", mean=True, chunk_numel=500)
        return store.read(handle).numpy().tobytes()

    expected = result()
    monkeypatch.setattr(module, "max_open_updates", 2)
    assert result() == expected


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_that_is_not_positive_is_refused(store: ParamStore, tmp_path: Path, weight: float) -> None:
    updates = [(spool(tmp_path, 0), 1.0), (spool(tmp_path, 1), weight)]
    for mean in (True, False):
        with pytest.raises(InvalidUpdate, match="update-1 has the weight"):
            combine(store, updates, name="delta", layout=layout, out_name="m", mean=mean)
    assert list(store.root.iterdir()) == []


def test_nothing_to_combine_is_refused(store: ParamStore) -> None:
    with pytest.raises(InvalidUpdate, match="no update"):
        combine(store, [], name="delta", layout=layout, out_name="m", mean=True)


def test_a_sum_that_overflows_fails_the_round_and_leaves_nothing(store: ParamStore, tmp_path: Path) -> None:
    write_flat(tmp_path / "huge", "delta", torch.full((layout.numel,), 3e38), layout, codec("fp32"))
    pair = (tmp_path / "huge", 1.0)
    with pytest.raises(RoundFailed, match="sum of 2 finite updates of delta overflows"):
        combine(store, [pair, pair], name="delta", layout=layout, out_name="m", mean=False)
    assert list(store.root.iterdir()) == []
    assert store.read(combine(store, [pair, pair], name="delta", layout=layout, out_name="m", mean=True)).max() > 2e38


def test_an_update_of_another_layout_is_not_added(store: ParamStore, tmp_path: Path) -> None:
    write_tensors(tmp_path / "other", {"delta/a": torch.zeros(30, 100), "delta/b": torch.zeros(7)})
    updates = [(spool(tmp_path, 0), 1.0), (tmp_path / "other", 1.0)]
    with pytest.raises(CorruptError, match="other does not hold delta/c"):
        combine(store, updates, name="delta", layout=layout, out_name="m", mean=True)
    assert list(store.root.iterdir()) == []


def test_memory_does_not_grow_with_the_number_of_updates(store: ParamStore, tmp_path: Path) -> None:
    paths = [spool(tmp_path, i, "int8") for i in range(40)]

    def peak(num_updates: int) -> int:
        tracemalloc.start()
        pairs = [(path, 1.0) for path in paths[:num_updates]]
        combine(store, pairs, name="delta", layout=layout, out_name="m", mean=True)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(40) < peak(2) + 40 * 4096


def test_every_file_is_let_go(store: ParamStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Bundle] = []
    real = Bundle.open

    def remember(path: Path, *, like: Bundle | None = None) -> Bundle:
        opened.append(real(path, like=like))
        return opened[-1]

    monkeypatch.setattr(Bundle, "open", remember)
    pairs = [(spool(tmp_path, i), 1.0) for i in range(3)]
    combine(store, pairs, name="delta", layout=layout, out_name="m", mean=True)
    assert len(opened) == 3
    assert all(bundle._map is None for bundle in opened)
