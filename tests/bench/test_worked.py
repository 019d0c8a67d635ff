"""The published example, and that each change to it goes the way it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from potluck.bench.worked import (
    a100_s,
    num_layers,
    num_tokens,
    plan_batch,
    published,
    published_devices,
    variants,
    whole_layers_s,
)
from potluck.planner.tiles.bound import lower_bound_s
from potluck.planner.tiles.device import Head, rates_of
from potluck.planner.tiles.product import Product


def test_256_devices_as_published() -> None:
    batch = plan_batch(published_devices(256, seed=0), published)
    assert batch.seconds == pytest.approx(1597, rel=0.1)
    assert batch.down_bytes / 256 == pytest.approx(73e9, rel=0.1)
    assert 8 * batch.egress_bytes_per_s == pytest.approx(94e9, rel=0.1)
    assert a100_s() == pytest.approx(79, rel=0.01)
    assert batch.num_devices_used == 256 and sum(batch.bindings.values()) == pytest.approx(1.0)
    assert batch.bindings.get("compute", 0.0) == 0.0  # bound by links only


@pytest.mark.parametrize(("num", "seconds"), [(256, 1597), (1024, 701), (8192, 232)])
def test_the_bound_of_more_devices(num: int, seconds: float) -> None:
    rates = rates_of(published_devices(num, seed=1))
    d, f, tokens = 5120, 20480, num_tokens

    def bound_s(m: int, n: int, q: int) -> float:
        return lower_bound_s(Product(m=m, n=n, q=q, down_bytes=2, up_bytes=2), rates)

    square = 2 * bound_s(tokens, d, d) + bound_s(d, tokens, d)
    wide = bound_s(tokens, d, f) + bound_s(tokens, f, d) + bound_s(d, tokens, f)
    assert num_layers * (4 * square + 2 * wide) == pytest.approx(seconds, rel=0.1)


def test_each_change_goes_its_way() -> None:
    devices = published_devices(16, seed=2)
    shared = "queries, keys and values share their input"
    names = ("published", "4 tiles a device", "inner split", "int8 on the wire", shared)
    seconds = {name: plan_batch(devices, variants[name]).seconds for name in names}
    base = seconds.pop("published")
    assert seconds["int8 on the wire"] == pytest.approx(base / 2, rel=0.02)
    assert seconds["inner split"] < 0.9 * base and seconds[shared] < 0.95 * base
    assert base < seconds["4 tiles a device"] < 1.15 * base
    narrow = plan_batch(devices, replace(published, head=Head(egress_bytes_per_s=3e8)))
    assert narrow.seconds > 1.2 * base and narrow.egress_bytes_per_s <= 3e8


def test_weights_are_kept_where_there_is_memory_for_them() -> None:
    devices = published_devices(16, seed=2)
    names = ("8 micro-batches", "8 micro-batches, weights kept", "8 micro-batches, weights kept in 8 GB")
    bare, all_kept, some_kept = (plan_batch(devices, variants[name]) for name in names)
    assert (bare.kept_share, all_kept.kept_share) == (0.0, 1.0) and 0 < some_kept.kept_share < 1
    assert all_kept.seconds < some_kept.seconds < bare.seconds
    assert (some_kept.kept_bytes() <= 4e9).all()


def test_whole_layers_are_taken_where_they_are_quicker() -> None:
    devices = published_devices(16, seed=2)
    base = plan_batch(devices, published).seconds
    found = whole_layers_s(devices)
    assert set(found) == {"rectangles of layers stay", "MLPs fused"}
    assert all(0.3 * base < seconds <= base * 1.001 for seconds in found.values())
    assert found["MLPs fused"] < 0.95 * base
