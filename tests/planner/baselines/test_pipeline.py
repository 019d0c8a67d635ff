"""Pipelines by hand: two layers on four devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from potluck.planner.baselines.layered import LayeredModel, held_bytes, overlapped_s, ring_bytes
from potluck.planner.baselines.pipeline import pipeline_time, pipelines, quickest, recovery
from potluck.planner.baselines.single import a100_flops_per_s, alone_s
from potluck.planner.tiles.device import TileDevice
from potluck.types.ids import WorkerId

model = LayeredModel(
    num_layers=2, layer_params=1e6, head_params=0.0, hidden_dim=100, num_heads=2, num_sequences=4, seq_len=10
)  # fmt: skip


def device(number: int, up: float = 1e3, memory: float = 1e9) -> TileDevice:
    return TileDevice(
        id=WorkerId(f"d{number}"), down_bytes_per_s=1e4, up_bytes_per_s=up, s_per_flop=1e-9, memory_bytes=memory
    )


devices = [device(i) for i in range(4)]


def test_what_all_baselines_share() -> None:
    assert model.sequence_bytes == 10 * 100 * 2
    assert model.flops == 6 * 2e6 * 40
    assert overlapped_s(2.0, 3.0, 7.0, num_pieces=1) == 12.0
    assert overlapped_s(2.0, 3.0, 7.0, num_pieces=4, fixed_s=0.5) == 0.5 + 7.0 + 5.0 / 4
    assert ring_bytes(4, 100.0) == 150.0 and ring_bytes(1, 100.0) == 0.0
    assert held_bytes(10.0, 3) == 10 * (4 + 4)
    assert alone_s(124.8e12, a100_flops_per_s) == 1.0


def test_two_rows_of_two_stages() -> None:
    # A border takes 2,000 bytes / 1,000 a second, a stage's work 6 x 1e6 x 10 x 1e-9 = 0.06 s: 4.12 s for the first
    # sequence, 2 s for the second; gradients 2 x 1/2 x 2 MB in 2,000 s.
    time = pipeline_time(pipelines(model, devices))
    assert time is not None and time.fits
    assert time.layout == "2 rows of 2 stages" and time.num_devices_used == 4
    assert time.seconds == pytest.approx(4.12 + 2 + 2000)
    assert time.needs_bytes == 1e6 * (4 + 12 / 2) + 2 * 2000
    assert time.down_bytes_per_device == time.up_bytes_per_device == (2 * 2000 * 4 + 2 * 2 * 2e6) / 4
    single = [p for p in pipelines(model, devices) if len(p.stage_params) == 1]
    assert [p.seconds for p in single] == [pytest.approx(0.12 + 2 * 3 / 4 * 4e6 / 1e3)]


def test_the_head_is_a_stage_and_a_remainder_too() -> None:
    larger = replace(model, num_layers=5, head_params=3e5)
    made = {len(p.stage_params): p for p in pipelines(larger, devices)}
    assert made[4].stage_params == (2e6, 2e6, 1e6, 3e5)
    assert made[3].stage_params == (3e6, 2e6, 3e5)
    assert made[2].stage_params == (5e6, 3e5)
    assert set(made) == {2, 3, 4}  # four devices


def test_slow_rows_get_fewer_sequences() -> None:
    mixed = [device(0, up=4e3), device(1, up=4e3), device(2), device(3)]
    (pipeline,) = [p for p in pipelines(model, mixed) if len(p.stage_params) == 2]
    assert [row.num_sequences for row in pipeline.rows] == [3, 1]
    assert [row.devices[0].id for row in pipeline.rows] == ["d0", "d2"]
    assert [row.seconds for row in pipeline.rows] == [pytest.approx(0.12 + 1 + 2 * 0.5), pytest.approx(4.12)]


def test_devices_without_the_memory_are_told_of() -> None:
    time = pipeline_time(pipelines(model, [device(i, memory=9e6) for i in range(4)]))
    assert time is not None and not time.fits
    assert time.needs_bytes == time.least_bytes == 10_004_000 and time.has_bytes == 9e6
    barely = [device(i, memory=10_004_000) for i in range(4)]
    assert (fitting := pipeline_time(pipelines(model, barely))) is not None and fitting.fits
    assert pipeline_time(pipelines(model, [])) is None
    wide = replace(model, hidden_dim=100_000)  # 2 MB at a border: copies of it all are quicker and take more
    time = pipeline_time(pipelines(wide, [device(i, memory=9e6) for i in range(4)]))
    assert time is not None and time.layout == "4 rows of 1 stages" and not time.fits
    assert time.seconds == pytest.approx(0.12 + 6000)
    assert time.needs_bytes == 2e6 * (4 + 12 / 4) + 2e6
    assert time.least_bytes == 1e6 * (4 + 12 / 2) + 2 * 2e6


def test_a_lost_device_costs_weights_and_half_of_its_row() -> None:
    pipeline = quickest(pipelines(model, devices))
    assert pipeline is not None
    found = recovery(pipeline, {WorkerId("d1")}, reload_bytes_per_s=1e4)
    assert found.reload_s == 2e6 / 1e4 and found.replay_s == pytest.approx(6.12 / 2)
    both = recovery(pipeline, {WorkerId("d1"), WorkerId("d2")}, reload_bytes_per_s=1e4)
    assert both == found  # at the same time
    assert recovery(pipeline, {WorkerId("spare")}, reload_bytes_per_s=1e4).seconds == 0.0
