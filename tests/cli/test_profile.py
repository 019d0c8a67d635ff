"""`potluck profile`, as a process and as a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.processes import potluck

from potluck.cli.profiling import profile_machine, profile_text
from potluck.types.profile import CodecSpeed, DeviceProfile, GemmSpeed, Speeds


def test_it_measures_prints_one_object_and_keeps_it(tmp_path: Path) -> None:
    done = potluck("profile", "--device", "cpu", "--threads", "1", "--state", "state", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    profile = DeviceProfile.parse(line)
    assert json.loads(line)["num_threads"] == profile.num_threads == 1
    assert {g.dtype for g in profile.speeds.gemm} >= {"fp32"}
    assert profile.speeds.elementwise_bytes_per_s > 0
    assert done.stderr.startswith("measuring ")
    again = potluck("profile", "--device", "cpu", "--threads", "1", "--state", "state", cwd=tmp_path)
    assert again.returncode == 0 and again.stderr == ""  # nothing is measured twice
    assert "matrix product, fp32, 256" in again.stdout


def test_it_says_why_it_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("potluck.worker.measure.measure", lambda *_, **__: Speeds(measured_at=1.7e9))
    (tmp_path / "file").touch()
    found = profile_machine(device="cpu", num_threads=0, state_dir=tmp_path / "file" / "state", refresh=False)
    assert found.speeds.codecs
    said = "".join(capsys.readouterr().err.split())  # as it is broken into lines, also within a word
    assert "speeds.jsoncannotbewritten(Notadirectory),soallismeasuredagainnexttime;chooseanotherfolder" in said


def test_the_table_says_what_is_not_known() -> None:
    speeds = Speeds(
        measured_at=1.7e9, gemm=(GemmSpeed(dtype="fp32", dim=256, s_per_flop=2e-11),), elementwise_bytes_per_s=1.5e10,
        codecs=(CodecSpeed(name="int8", encode_bytes_per_s=3e9, decode_bytes_per_s=9e9),),
    )  # fmt: skip
    profile = DeviceProfile(device="cpu", device_name="a processor", free_memory_bytes=10**9, speeds=speeds)
    rows = dict(line.split("  ", 1) for line in profile_text(profile).splitlines()[1:])
    found = {name: text.strip() for name, text in rows.items()}
    assert found["memory"] == "1.00 GB of 0 B free, 850 MB to plan with"
    assert found["matrix product, fp32, 256"] == "50 GFLOP/s"
    assert found["attention, fp32"] == found["optimizer step"] == found["power"] == "not known"
    assert found["element-wise"] == "15.0 GB/s"
    assert found["codec int8"] == "3.00 GB/s encoding, 9.00 GB/s decoding"
