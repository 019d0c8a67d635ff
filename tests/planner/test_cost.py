"""The cost model on paper: fits, links that are shared, energy, corrections."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from potluck.planner.cost import (
    Calibration,
    Encoding,
    OpCost,
    OpSample,
    Phases,
    correction,
    device_cost,
    energy_j,
    fit,
    nearest,
    starting_cost,
    transfer_s,
)
from potluck.planner.flops import Work
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile, GemmSpeed, Speeds

anna, bert = WorkerId("anna"), WorkerId("bert")


def sample(flops: float, num_bytes: float, cost: OpCost) -> OpSample:
    return OpSample(seconds=cost.seconds(flops=flops, num_bytes=num_bytes), flops=flops, num_bytes=num_bytes)


@pytest.mark.parametrize("truth", [(2e-12, 3e-10, 1e-4), (2e-12, 0.0, 1e-4), (0.0, 3e-10, 0.0), (5e-11, 0.0, 0.0)])
def test_a_fit_finds_what_made_the_samples(truth: tuple[float, float, float]) -> None:
    cost = OpCost(s_per_flop=truth[0], s_per_byte=truth[1], s_per_call=truth[2])
    places = [(1e6, 1e5), (1e9, 1e6), (1e8, 5e7), (1e10, 1e7), (3e9, 2e8)]
    found = fit([sample(flops, num_bytes, cost) for flops, num_bytes in places])
    assert (found.s_per_flop, found.s_per_byte, found.s_per_call) == pytest.approx(truth, rel=1e-6, abs=1e-18)


def test_a_fit_is_never_negative() -> None:
    # A straight line through these would start below 0: 1 s at 1, 3 s at 2, 5 s at 3.
    found = fit([OpSample(seconds=1, flops=1), OpSample(seconds=3, flops=2), OpSample(seconds=5, flops=3)])
    assert found.s_per_call == 0 and found.s_per_byte == 0
    # min over a of sum ((a F - t) / t)^2 is a = sum (F/t) / sum (F/t)^2, with F/t = 1, 2/3, 3/5
    assert found.s_per_flop == pytest.approx((1 + 2 / 3 + 3 / 5) / (1 + 4 / 9 + 9 / 25))


def test_a_fit_of_one_sample_and_of_none() -> None:
    one = fit([OpSample(seconds=2.0, flops=4.0)])
    assert one.seconds(flops=4.0) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="needs a sample"):
        fit([OpSample(seconds=0.0, flops=1.0)])


def test_a_correction_is_the_ratio_to_the_power_of_0_3() -> None:
    assert correction(observed_s=4.0, predicted_s=1.0) == pytest.approx(4**0.3)
    for nonsense in (0.0, -1.0, math.nan, math.inf):
        assert correction(observed_s=nonsense, predicted_s=1.0) == 1.0
    assert correction(observed_s=1e30, predicted_s=1.0) == pytest.approx(1e3**0.3)


def gemm(dtype: str, dim: int, s_per_flop: float) -> GemmSpeed:
    return GemmSpeed(dtype=dtype, dim=dim, s_per_flop=s_per_flop)


def test_a_step_on_a_measured_device() -> None:
    # t = 1e-9 F + 1e-3 at both sizes: 2e6 and 2e9 FLOPs.
    speeds = Speeds(
        gemm=(gemm("fp32", 100, 3e-3 / 2e6), gemm("fp32", 1000, 2.001 / 2e9), gemm("bf16", 100, 1e-10)),
        attention_s_per_flop=1e-8, elementwise_bytes_per_s=1e6, optimizer_bytes_per_s=1e5,
    )  # fmt: skip
    cost = device_cost(speeds)
    assert cost is not None
    assert (cost.gemm.s_per_flop, cost.gemm.s_per_call) == pytest.approx((1e-9, 1e-3))
    work = Work(gemm_flops=2e9, attention_flops=1e8, elementwise_bytes=5e6, optimizer_bytes=4e5, num_gemms=10)
    assert cost.step_s(work) == pytest.approx(2.0 + 0.01 + 1.0 + 5.0 + 4.0)
    fast = device_cost(speeds, "bf16-mixed")
    assert fast is not None and fast.gemm.s_per_flop == pytest.approx(1e-10)
    assert device_cost(Speeds()) is None
    assert device_cost(replace(speeds)) is cost  # fitted once


def machine(device: str, name: str = "", threads: int = 1, *, s_per_flop: float = 0.0) -> DeviceProfile:
    speeds = Speeds(gemm=(gemm("fp32", 256, s_per_flop),)) if s_per_flop else Speeds()
    return DeviceProfile(device=device, device_name=name, num_threads=threads, speeds=speeds)


def test_an_unmeasured_device_starts_from_the_nearest_known_one() -> None:
    known = [
        machine("cuda:0", "card", s_per_flop=1e-14), machine("cpu", "old", 4, s_per_flop=3e-11),
        machine("cpu", "new", 32, s_per_flop=1e-12), machine("cpu", "new", 2, s_per_flop=2e-11), machine("cpu", "mute"),
    ]  # fmt: skip
    assert nearest(machine("cuda:3", "another"), known) is known[0]
    assert nearest(machine("cpu", "new", 24), known) is known[2]
    assert nearest(machine("cpu", "unheard of", 5), known) is known[1]
    assert nearest(machine("cpu"), known[-1:]) is None
    started = starting_cost(machine("cpu", "new", 3), known)
    assert started is not None and started.gemm.s_per_flop == pytest.approx(2e-11)
    own = starting_cost(machine("cpu", "x", s_per_flop=7e-11), known)
    assert own is not None and own.gemm.s_per_flop == pytest.approx(7e-11)
    assert starting_cost(machine("cpu"), []) is None


def test_a_transfer_by_hand() -> None:
    int8 = Encoding(ratio=0.25, bytes_per_s=2e6)
    assert transfer_s(4e6, rate_bytes_per_s=1e6, rtt_s=0.5) == pytest.approx(4.5)
    assert transfer_s(4e6, rate_bytes_per_s=1e6, rtt_s=0.5, encoding=int8) == pytest.approx(0.5 + 1.0 + 2.0)
    assert transfer_s(4e6, rate_bytes_per_s=1e6, num_sharing=3) == pytest.approx(12.0)
    assert transfer_s(1, rate_bytes_per_s=0.0) == math.inf


def test_energy_is_power_times_time_by_phase() -> None:
    phases = Phases(compute_s=10, send_s=2, receive_s=3, wait_s=5)
    assert phases.total_s == 20
    assert energy_j(phases, Speeds(load_w=100, idle_w=10)) == 100 * 10 + 10 * 10
    assert energy_j(phases, Speeds()) is None


def test_a_calibration_learns_each_worker_and_kind() -> None:
    calibration = Calibration()
    for _ in range(12):  # anna takes three times what the model says
        predicted = calibration.predict_s(anna, "inner", 10.0)
        calibration.observe(anna, "inner", predicted_s=predicted, observed_s=30.0)
    assert calibration.predict_s(anna, "inner", 10.0) == pytest.approx(30.0, rel=0.02)
    assert calibration.predict_s(bert, "inner", 10.0) == 10.0
    assert calibration.predict_s(anna, "evaluate", 10.0) == 10.0


def test_the_metric_is_the_median_of_predicted_over_observed() -> None:
    calibration = Calibration()
    assert calibration.observe(anna, "inner", predicted_s=1.0, observed_s=2.0) == 0.5
    assert calibration.observe(bert, "inner", predicted_s=4.0, observed_s=2.0) == 2.0
    assert calibration.observe(bert, "inner", predicted_s=2.0, observed_s=2.0) == 1.0
    assert calibration.observe(bert, "send", predicted_s=3.0, observed_s=2.0) == 1.5
    assert calibration.observe(bert, "send", predicted_s=3.0, observed_s=math.nan) == 0.0
    assert calibration.predicted_over_observed() == {"inner": 1.0, "send": 1.5}
    calibration.forget(bert)
    assert calibration.predicted_over_observed() == {"inner": 0.5}
