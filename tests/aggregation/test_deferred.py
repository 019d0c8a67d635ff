"""A mean that is computed where it is read: the same bits as one that was written, and the same failures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from potluck.aggregation.combine import combine, defer_mean
from potluck.aggregation.config import AggregationConfig
from potluck.codecs.base import codec
from potluck.codecs.bundle import write_flat
from potluck.optim.outer import nesterov
from potluck.storage.params import ParamStore
from potluck.types.errors import RoundFailed
from potluck.types.params import Layout, Params

layout = Layout.of([("a", (30, 100)), ("b", (7,)), ("c", (20, 20))])


@pytest.fixture
def store(tmp_path: Path) -> ParamStore:
    return ParamStore(tmp_path / "params", fragment_numel=1000, slice_numel=300)


def spooled(folder: Path, num: int = 3) -> list[tuple[Path, float]]:
    updates: list[tuple[Path, float]] = []
    for i, name in zip(range(num), ("fp32", "int8", "bf16"), strict=False):
        vector = torch.randn(layout.numel, generator=torch.Generator().manual_seed(i))
        write_flat(folder / f"update-{i}", "delta", vector, layout, codec(name))
        updates.append((folder / f"update-{i}", 3.0 + i))
    return updates


def step(store: ParamStore, mean: Params, name: str) -> list[Tensor]:
    theta = store.create("theta", torch.ones(layout.numel))
    momentum = store.create("momentum", torch.ones(layout.numel))
    made = store.apply(
        nesterov, theta, momentum, mean, name=name, layout=layout, num_outputs=2, lr=0.7, momentum_coefficient=0.9
    )
    return [store.read(handle) for handle in made]


@pytest.mark.parametrize("mean", [True, False])
def test_an_outer_step_on_it_has_the_bits_of_one_on_a_written_mean(
    store: ParamStore, tmp_path: Path, mean: bool
) -> None:
    updates = spooled(tmp_path)
    kept = defer_mean(store, updates, name="delta", layout=layout, out_name="mean", mean=mean)
    rule = AggregationConfig()
    written = combine(store, updates, rule=rule, name="delta", layout=layout, out_name="written", mean=mean)
    assert kept.report == written.report
    assert not list(store.root.glob("mean*"))
    for deferred, eager in zip(step(store, kept.params, "d"), step(store, written.params, "e"), strict=True):
        assert torch.equal(deferred, eager)
    assert not list(store.root.glob("mean*"))
    assert torch.equal(store.read(kept.params), store.read(written.params))
    assert store.norm(kept.params) == store.norm(written.params)


def test_it_is_written_when_a_state_keeps_it_and_gone_when_none_does(store: ParamStore, tmp_path: Path) -> None:
    updates = spooled(tmp_path)
    kept = defer_mean(store, updates, name="delta", layout=layout, out_name="mean").params
    lost = defer_mean(store, updates, name="delta", layout=layout, out_name="other").params
    expected = store.read(kept)
    store.settle([kept])
    for path, _ in updates:
        path.unlink()
    store.remove_except([kept])
    assert torch.equal(store.read(kept), expected)
    assert len(list(store.root.glob("*.f32"))) == len(kept.fragments)
    with pytest.raises(Exception, match="is missing"):
        store.read(lost)


def test_what_cannot_be_read_any_more_fails_the_round_and_leaves_nothing(store: ParamStore, tmp_path: Path) -> None:
    updates = spooled(tmp_path)
    kept = defer_mean(store, updates, name="delta", layout=layout, out_name="mean").params
    updates[1][0].write_bytes(b"not a bundle")
    with pytest.raises(RoundFailed, match="an accepted update cannot be read any more"):
        step(store, kept, "d")
    with pytest.raises(RoundFailed, match="an accepted update cannot be read any more"):
        store.settle([kept])
    assert not list(store.root.glob("d-*"))
    assert not list(store.root.glob("mean*"))


def test_one_that_overflows_fails_the_round(store: ParamStore, tmp_path: Path) -> None:
    write_flat(tmp_path / "huge", "delta", torch.full((layout.numel,), 3e38), layout, codec("fp32"))
    pair = [(tmp_path / "huge", 1.0)] * 2
    kept = defer_mean(store, pair, name="delta", layout=layout, out_name="mean", mean=False).params
    with pytest.raises(RoundFailed, match="the mean of 2 finite updates of delta overflows"):
        step(store, kept, "d")
