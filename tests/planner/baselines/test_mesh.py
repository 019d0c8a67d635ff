"""Meshes by hand: two layers on four devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from potluck.planner.baselines.layered import LayeredModel
from potluck.planner.baselines.mesh import mesh_time
from potluck.planner.tiles.device import TileDevice
from potluck.types.ids import WorkerId

model = LayeredModel(
    num_layers=2, layer_params=1e6, head_params=0.0, hidden_dim=100, num_heads=2, num_sequences=4, seq_len=10
)  # fmt: skip


def devices(count: int, *, up: float = 1e3, memory: float = 1e9) -> list[TileDevice]:
    return [
        TileDevice(
            id=WorkerId(f"d{i}"), down_bytes_per_s=1e4, up_bytes_per_s=up, s_per_flop=1e-9, memory_bytes=memory
        )
        for i in range(count)
    ]  # fmt: skip


def test_few_tokens_are_summed_rather_than_gradients() -> None:
    # T = 2, D = 1: 4 sums of 40 x 100 x 2 = 8,000 bytes, 2 x 1/2 of each: 32 s up, 3.2 s down, 0.12 s of work.
    time = mesh_time(model, devices(4), num_pieces=4)
    assert time is not None and time.fits
    assert time.layout == "batch in 1, features in 2" and time.num_devices_used == 2
    assert time.seconds == pytest.approx(2 * (32 + (3.2 + 0.12) / 4))
    assert time.up_bytes_per_device == 2 * 32_000
    assert time.needs_bytes == 2e6 / 2 * 16 + 8000


def test_the_batch_is_cut_where_there_is_one_head() -> None:
    small = replace(model, layer_params=100.0, head_params=50.0, num_heads=1)
    time = mesh_time(small, devices(4), num_pieces=4)
    assert time is not None and time.layout == "batch in 2, features in 1"
    ring = 2 * 1 / 2 * 250 * 2
    work = 6 * 250 * 20 * 1e-9
    assert time.seconds == pytest.approx(work + ring / 1e3)
    assert time.down_bytes_per_device == ring


def test_the_slowest_device_in_use_binds() -> None:
    slow = [*devices(3), replace(devices(1)[0], id=WorkerId("slow"), up_bytes_per_s=10.0)]
    with_it = mesh_time(model, slow, num_pieces=4)
    assert with_it is not None and with_it.num_devices_used == 2
    without = mesh_time(model, devices(3), num_pieces=4)
    assert without is not None and with_it == replace(without, least_bytes=with_it.least_bytes)


def test_devices_without_the_memory_are_told_of() -> None:
    time = mesh_time(model, devices(4, memory=9e6), num_pieces=4)
    assert time is not None and not time.fits and time.has_bytes == 9e6
    assert time.layout == "batch in 1, features in 2" and time.needs_bytes == 2e6 / 2 * 16 + 8000
    assert time.least_bytes == 1e6 * (4 + 12 / 2) + 4000  # T = 2, D = 2
    assert mesh_time(model, [], num_pieces=4) is None
