"""What is measured is plausible, bounded in time and kept; what cannot be measured costs nobody the run."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from potluck.models.device import describe
from potluck.types.profile import DeviceProfile, GemmSpeed, Speeds
from potluck.worker import measure as module
from potluck.worker.measure import max_age_s, measured
from potluck.worker.power import PowerMeter

now = 1.7e9
here = describe("cpu")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One repetition of each."""
    monkeypatch.setattr(module, "piece_s", 0.0)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, quick: None) -> list[str]:
    """How often the device was measured; it is only said to have been."""
    calls: list[str] = []

    def measure(profile: DeviceProfile, _: Path, *, now: float) -> Speeds:
        calls.append(profile.device)
        gemm = GemmSpeed(dtype="fp32", dim=256, s_per_flop=1e-11 * len(calls))
        return Speeds(measured_at=now, gemm=(gemm,))

    monkeypatch.setattr(module, "measure", measure)
    return calls


def test_this_machine(tmp_path: Path) -> None:
    begun = time.thread_time()
    said: list[str] = []
    profile = measured(replace(here, precisions=("fp32",)), tmp_path, now=now, told=said.append)
    assert time.thread_time() - begun < 10  # a busy machine, and torch loads its optimizers
    speeds = profile.speeds
    assert (speeds.gemm[0].dtype, speeds.gemm[0].dim) == ("fp32", 256)
    assert len(speeds.gemm) == 2 and speeds.gemm[1].dim in (512, 768, 1024)
    assert all(1e-14 < g.s_per_flop < 1e-6 for g in speeds.gemm)
    assert 1e-14 < speeds.attention_s_per_flop < 1e-5
    for rate in (speeds.elementwise_bytes_per_s, speeds.optimizer_bytes_per_s, speeds.disk_write_bytes_per_s):
        assert 1e5 < rate < 1e13
    assert [c.name for c in speeds.codecs] == ["fp32", "bf16", "int8"]
    assert all(1e6 < c.encode_bytes_per_s < 1e13 and 1e6 < c.decode_bytes_per_s < 1e13 for c in speeds.codecs)
    assert speeds.measured_at == now
    assert profile.num_threads == torch.get_num_threads()
    assert len(said) == 1 and "measuring" in said[0]
    assert [p.name for p in tmp_path.iterdir()] == ["speeds.json"]


def test_it_is_measured_once(tmp_path: Path, counted: list[str]) -> None:
    first = measured(here, tmp_path, now=now)
    again = measured(replace(here, free_memory_bytes=5), tmp_path, now=now + max_age_s)
    assert len(counted) == 1
    assert (again.speeds, again.free_memory_bytes) == (first.speeds, 5)  # what changes by the minute is not kept


@pytest.mark.parametrize("change", ["old", "asked", "torch", "host", "broken", "clock"])
def test_and_again_where_it_may_have_changed(tmp_path: Path, counted: list[str], change: str) -> None:
    measured(here, tmp_path, now=now)
    at, profile = now, here
    match change:
        case "old":
            at = now + max_age_s + 1
        case "torch":
            profile = replace(here, torch_version="9.9")
        case "host":
            profile = replace(here, host_name="another")
        case "broken":
            (tmp_path / "speeds.json").write_text('{"key": 3')
        case "clock":
            at = now - 1
        case _:
            pass
    measured(profile, tmp_path, now=at, refresh=change == "asked")
    assert len(counted) == 2


def test_codecs_that_are_missing_are_added(tmp_path: Path, counted: list[str]) -> None:
    measured(here, tmp_path, now=now, codecs=("fp32",))
    profile = measured(here, tmp_path, now=now, codecs=("int8", "fp32"))
    assert [c.name for c in profile.speeds.codecs] == ["fp32", "int8"]
    assert len(counted) == 1
    kept = json.loads((tmp_path / "speeds.json").read_text())["speeds"]["codecs"]
    assert [c["name"] for c in kept] == ["fp32", "int8"]


def test_what_fails_is_not_known(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> float:
        raise RuntimeError("no kernel, or no memory")

    def full(_: Path) -> float:
        raise OSError(28, "No space left on device")

    for name in ("_attention", "_optimizer", "_gemm_at"):
        monkeypatch.setattr(module, name, fail)
    monkeypatch.setattr(module, "_disk", full)
    speeds = measured(here, tmp_path, now=now).speeds
    assert (speeds.gemm, speeds.attention_s_per_flop, speeds.optimizer_bytes_per_s) == ((), 0.0, 0.0)
    assert speeds.disk_write_bytes_per_s == 0.0
    assert speeds.elementwise_bytes_per_s > 0


# Power


def package(root: Path, number: int, energy_uj: int, range_uj: int = 10_000_000) -> Path:
    folder = root / f"intel-rapl:{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return folder


def test_power_is_energy_over_time_and_counters_wrap(tmp_path: Path) -> None:
    times = iter([10.0, 12.0])
    package(tmp_path, 0, 1_000_000)
    package(tmp_path, 1, 9_000_000)
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of a package, counted in it

    def work() -> None:
        package(tmp_path, 0, 4_000_000)  # 3 J
        package(tmp_path, 1, 2_000_000)  # 3 J, through the end of its range

    assert PowerMeter(tmp_path, now=lambda: next(times)).watts_over(work) == pytest.approx(3.0)


def test_power_that_the_system_does_not_tell_is_0(tmp_path: Path) -> None:
    done: list[int] = []
    assert PowerMeter(tmp_path / "none").watts_over(lambda: done.append(1)) == 0.0
    (package(tmp_path, 0, 1) / "energy_uj").unlink()  # as for a user who may not read it
    assert PowerMeter(tmp_path).watts_over(lambda: done.append(2)) == 0.0
    assert done == [1, 2]
