"""The bench's figures are those of plans that were verified, and within the limits that it is there to show."""

from __future__ import annotations

import pytest

from potluck.bench import tiles
from potluck.bench.tiles import bench_tiles, fleets, products


def test_a_small_fleet_is_planned_near_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("13b input gradient", "124m weight gradient")
    monkeypatch.setattr(tiles, "products", {name: products[name] for name in names})
    figures = bench_tiles(devices=12, seeds=2)
    assert {name.partition(":")[0] for name in figures if ":" in name} == set(fleets)
    assert 1.0 <= figures["worst_published_ratio"] <= figures["worst_ratio"] <= 1.05
    assert figures["least_mean_side"] >= 64
    assert figures["published: 13b input gradient devices_used"] == 12
    assert 0 < figures["unequal: 124m weight gradient recovery_percent"] < 300


def test_the_worked_example_names_what_each_change_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "variants", {name: tiles.variants[name] for name in ("published", "int8 on the wire")})
    figures = bench_tiles(devices=16, worked=True)
    assert figures["a100_at_40_percent_s"] == pytest.approx(79.3)
    assert figures["int8 on the wire: s"] == pytest.approx(figures["published: s"] / 2, rel=0.02)
    bound = [value for name, value in figures.items() if name.startswith("published: ") and name.endswith("_percent")]
    assert sum(bound) == pytest.approx(100.0, abs=0.2)
