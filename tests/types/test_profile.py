"""Profiles from the network: what is kept, what is dropped, what is bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from potluck.types.profile import (
    MAX_MEASURED,
    MAX_PROFILE_BYTES,
    CodecSpeed,
    DeviceProfile,
    GemmSpeed,
    LinkRates,
    Speeds,
)

speeds = Speeds(
    measured_at=1.7e9, gemm=(GemmSpeed(dtype="fp32", dim=256, s_per_flop=1e-11),), attention_s_per_flop=2e-11,
    elementwise_bytes_per_s=1e10, optimizer_bytes_per_s=5e9, disk_write_bytes_per_s=2e8, idle_w=3.5, load_w=40.0,
    codecs=(CodecSpeed(name="int8", encode_bytes_per_s=3e9, decode_bytes_per_s=9e9),),
)  # fmt: skip
profile = DeviceProfile(
    device="cuda:0", device_name="card", num_threads=4, free_memory_bytes=1000, precisions=("fp32", "bf16-mixed"),
    duty=0.5, speeds=speeds, link=LinkRates(up_bytes_per_s=1e6, down_bytes_per_s=1e7, rtt_s=0.03),
)  # fmt: skip


def test_a_profile_comes_back_equal_from_its_json() -> None:
    assert DeviceProfile.parse(json.dumps(profile.to_json())) == profile
    assert DeviceProfile.parse("") == DeviceProfile(device="cpu")


def test_a_plan_counts_on_85_percent_of_what_is_free() -> None:
    assert profile.usable_memory_bytes == 850


def test_an_older_worker_s_profile_has_no_speeds() -> None:
    old = {"device": "cpu", "num_threads": 2, "total_memory_bytes": 5, "something_new": [1, 2]}
    assert DeviceProfile.from_json(old) == DeviceProfile(device="cpu", num_threads=2, total_memory_bytes=5)


def test_codec_speeds_are_found_by_name() -> None:
    assert speeds.codec("int8") is speeds.codecs[0]
    assert speeds.codec("fp32") is None


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e19, 1e-19, 10**400, "1", True, None, [1]])
def test_a_number_out_of_bounds_is_not_known(value: Any) -> None:
    given = {"elementwise_bytes_per_s": value, "gemm": [{"dtype": "fp32", "dim": 256, "s_per_flop": value}]}
    assert Speeds.from_json(given) == Speeds()
    assert LinkRates.from_json({"up_bytes_per_s": value, "rtt_s": value}) == LinkRates()


@pytest.mark.parametrize("value", [None, 3, "x", [], {"gemm": 3, "codecs": {"name": 1}}, {"gemm": [3, None, "x"]}])
def test_what_is_not_of_the_form_is_dropped(value: Any) -> None:
    assert DeviceProfile.from_json({"device": "cpu", "speeds": value, "link": value}) == DeviceProfile(device="cpu")


def test_lists_and_texts_are_bounded() -> None:
    codec = {"name": "n\x1b" * 100, "encode_bytes_per_s": 1, "decode_bytes_per_s": 1}
    gemm = {"dtype": "t" * 100, "dim": 1e17, "s_per_flop": 1e-9}
    found = Speeds.from_json({"codecs": [codec] * 1000, "gemm": [gemm] * 1000})
    assert len(found.codecs) == len(found.gemm) == MAX_MEASURED
    assert len(found.codecs[0].name) == 64 and "\x1b" not in found.codecs[0].name
    assert (len(found.gemm[0].dtype), found.gemm[0].dim) == (32, 1 << 20)


@pytest.mark.parametrize(
    "text",
    ["{", "[" * 60_000, '{"num_threads": "many"}', '{"num_threads": 1e999}', '{"precisions": 3}', " " * 70_000],
    ids=["broken", "deep", "text", "infinite", "number", "long"],
)
def test_what_cannot_be_a_profile_is_a_value_error(text: str) -> None:
    assert MAX_PROFILE_BYTES == 65536
    with pytest.raises(ValueError, match=r"^it (cannot be read|takes 70000 bytes)"):
        DeviceProfile.parse(text)
