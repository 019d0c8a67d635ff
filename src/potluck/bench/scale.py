"""How large a fleet the simulator plays: real seconds and memory of DiLoCo with a 1.2 B-parameter model.

Two fleets of home machines, by the shipping coordinator and workers on the virtual clock: 1,000 devices for 20 rounds
(within 60 s and 2 GB is the target) and 4,000 for 5 (within 120 s). Beside them one batch of Llama-2-70B in tiles on
8,192 devices (within 60 s and 4 GB). Memory is the most that a process of its own held.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from potluck.coordinator.plan import CheckpointConfig, Plan, ValidationConfig
from potluck.coordinator.prepare import sketch
from potluck.coordinator.recipe import load_recipe
from potluck.fleet.config import FleetConfig
from potluck.models.build import layout_of, skeleton
from potluck.optim.inner import InnerConfig
from potluck.simulator.fleet_files import load_fleet
from potluck.simulator.fleets import Device
from potluck.simulator.large.comparison import simulate_batch
from potluck.simulator.large.meta import CoordinatorMachine
from potluck.simulator.large.report import ScaleReport
from potluck.simulator.large.scale import simulate_scale
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.run import Budget, RunSpec

gbit = 125e6
num_inner_steps = 500
config: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 21,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 1024,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
"""1.21 B parameters."""


def bench_scale(*, rounds: int = 20, large_rounds: int = 5, tile_devices: int = 8192) -> dict[str, float]:
    """About three minutes."""
    figures: dict[str, float] = {}
    for num_devices, num_rounds in ((1000, rounds), (4000, large_rounds)):
        command = [sys.executable, "-m", "potluck.bench.scale", str(num_devices), str(num_rounds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        played: dict[str, float] = json.loads(done.stdout)
        figures |= {f"{num_devices}_devices_{name}": value for name, value in played.items()}
    return figures | bench_tiles_alone(tile_devices)


def bench_tiles_alone(num_devices: int) -> dict[str, float]:
    """One batch in tiles, in a process of its own, with a single thread."""
    command = [sys.executable, "-m", "potluck.bench.scale", "tiles", str(num_devices)]
    single = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=single)
    played: dict[str, float] = json.loads(done.stdout)
    return {f"tiles_{num_devices}_devices_{name}": value for name, value in played.items()}


def home_machines(count: int) -> list[Device]:
    """Desktops, laptops and a few boards behind home links."""
    boards, desktops = count // 10, 3 * count // 10
    mbit = gbit / 1000
    up, down = (10 * mbit, 50 * mbit), (50 * mbit, 250 * mbit)
    idle_w, busy_w = (5.0, 15.0), (30.0, 90.0)
    return [
        Device(
            name="desktop", count=desktops, flops=(4e12, 4e13), memory_bytes=(32e9, 64e9), up_bytes_per_s=up,
            down_bytes_per_s=down, rtt_s=(0.01, 0.05), idle_w=(40.0, 70.0), busy_w=(200.0, 400.0),
        ),
        Device(
            name="laptop", count=count - desktops - boards, flops=(1e12, 8e12), memory_bytes=(32e9, 32e9),
            up_bytes_per_s=up, down_bytes_per_s=down, rtt_s=(0.01, 0.08), duty=(0.5, 1.0), idle_w=idle_w, busy_w=busy_w,
        ),
        Device(
            name="board", count=boards, flops=(5e11, 2e12), memory_bytes=(32e9, 32e9), up_bytes_per_s=up,
            down_bytes_per_s=down, rtt_s=(0.02, 0.1), idle_w=idle_w, busy_w=busy_w,
        ),
    ]  # fmt: skip


def large_plan(num_devices: int, num_rounds: int) -> Plan:
    """DiLoCo over all devices, int8 both ways."""
    layout = layout_of(skeleton(config))
    spec = RunSpec(
        run_id="scale", name="scale", seed=1, strategy="diloco", model_config_json=config, layout=layout.to_json(),
        seq_len=1024, inner=InnerConfig(batch_size=1, accumulation=4), data_access="private",
    )  # fmt: skip

    def no_values() -> Any:
        raise AssertionError("a large simulation makes no parameters")

    return Plan(
        spec=spec, strategy=DiLoCo(DiLoCoConfig(num_inner_steps=num_inner_steps)), layout=layout, initial=no_values,
        budget=Budget(rounds=num_rounds), fleet=FleetConfig(min_workers=num_devices), checkpoint=CheckpointConfig(),
        validation=ValidationConfig(every_rounds=0), up_codec="int8", down_codec="int8-delta",
    )  # fmt: skip


def play(num_devices: int, num_rounds: int) -> tuple[ScaleReport, dict[str, float]]:
    """One run in this process, and its figures."""
    begun = time.perf_counter()
    plan = large_plan(num_devices, num_rounds)
    made = time.perf_counter()
    machine = CoordinatorMachine(
        up_bytes_per_s=10 * gbit, down_bytes_per_s=10 * gbit, idle_w=100.0, busy_w=200.0
    )  # fmt: skip
    report = simulate_scale(plan, home_machines(num_devices), seed=1, coordinator=machine)
    played = time.perf_counter()
    return report, {
        "real_s": played - begun,
        "model_s": made - begun,
        "peak_memory_mb": peak_memory_mb(),
        "parameters": plan.layout.numel,
        "rounds": report.num_rounds,
        "simulated_hours": report.seconds / 3600,
        "up_tb": report.up_bytes / 1e12,
        "down_tb": report.down_bytes / 1e12,
        "utilisation_mean": sum(d.utilisation for d in report.devices) / len(report.devices),
        "energy_mwh": (report.energy_j or 0.0) / 3.6e9,
    }


def peak_memory_mb() -> float:
    """The most that this process has held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def plan_tiles(num_devices: int, recipe: str = "llama-2-70b") -> dict[str, float]:
    """One batch of a shipped recipe on the fleet `edge`, planned and added up in this process."""
    begun, begun_cpu = time.perf_counter(), time.process_time()
    plan = sketch(load_recipe(recipe))
    made = time.perf_counter()
    case = simulate_batch(plan, load_fleet("edge"), num_devices=num_devices, seed=0)
    return {
        "real_s": time.perf_counter() - begun,
        "cpu_s": time.process_time() - begun_cpu,
        "model_s": made - begun,
        "peak_memory_mb": peak_memory_mb(),
        "plans": len(case.step.plan.planned),
        "kept_share": case.step.plan.kept_share,
        "simulated_s": case.step.plan.seconds,
        "down_gb_per_device": case.step.plan.down_bytes / num_devices / 1e9,
        "up_gb_per_device": case.step.plan.up_bytes / num_devices / 1e9,
    }


if __name__ == "__main__":
    first, second = sys.argv[1:]
    print(json.dumps(plan_tiles(int(second)) if first == "tiles" else play(int(first), int(second))[1]))
