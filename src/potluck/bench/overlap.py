"""Training while updates travel: how busy workers are on links as slow as their computing, with and without overlap.

Real processes on loopback, each worker behind a wire of its own whose rates are such that the encoded bytes of a full
exchange (all of the model up, and down again) take as long as the H inner steps between two of them. Steps are paced,
so that a small machine can stand for several. Reported is the share of the time, from one commit to a later one, that
the inner steps counted between them take at their pace: what a step takes beyond that counts as idle. Where rounds
overlap, commits follow the steps by what is under way: measure many cycles, or a lag that shrinks looks like speed.

The simulator plays the same run on machines of that pace and links of these rates; there the share is that of the whole
run, its start and end included.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from potluck.bench.rig import paced
from potluck.bench.rig.real_run import RealRun, real_run, tiny_recipe, write_corpus
from potluck.bench.rig.wire import Way, WireLoop, wire_loop
from potluck.codecs.base import codec
from potluck.codecs.bundle import flat_size
from potluck.codecs.delta import WHOLE
from potluck.coordinator.prepare import sketch
from potluck.coordinator.recipe import parse_recipe
from potluck.models.build import build, layout_of
from potluck.planner.flops import step_work
from potluck.planner.memory import ModelDims
from potluck.simulator.fleets import Device
from potluck.simulator.large.meta import CoordinatorMachine
from potluck.simulator.large.scale import simulate_scale
from potluck.types.params import Layout

num_fragments = 4
vocab_size, n_embd = 300, 64
up_codec, down_codec = "int8", "bf16"
patience_s = 600.0
simulated_cycles = 50


def bench_overlap(
    *, workers: int = 2, segment_steps: int = 16, step_s: float = 0.1, cycles: int = 6, warm_cycles: int = 2,
    told: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Busy shares. A cycle is H = 4 `segment_steps`; those before the measured ones fill the pipeline. Some minutes."""
    config = {"model_type": "gpt2", "n_layer": num_fragments, "n_embd": n_embd, "n_head": 2, "n_positions": 32}
    layout = layout_of(build({**config, "vocab_size": vocab_size}, seed=1))
    num_inner_steps = num_fragments * segment_steps
    rate = _exchanged(layout) / (num_inner_steps * step_s)
    figures: dict[str, Any] = {
        "workers": workers, "num_inner_steps": num_inner_steps, "step_s": step_s,
        "exchange_bytes": _exchanged(layout), "link_bytes_per_s": round(rate),
    }  # fmt: skip
    contestants = {
        "diloco": ("Paced", num_inner_steps, ""),
        "streaming": (
            "PacedStreaming",
            segment_steps,
            f"num_fragments = {num_fragments}\noverlap_steps = {(num_fragments - 1) * segment_steps}\n",
        ),
    }
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as name, wire_loop() as loop:
        for method, (class_name, steps_per_round, more) in contestants.items():
            folder = Path(name) / method
            folder.mkdir()
            write_corpus(folder / "texts")
            strategy = (
                f'name = "{paced.__file__}:{class_name}"\nnum_inner_steps = {num_inner_steps}\nstep_s = {step_s}\n'
                f"outer_momentum = 0.6\n{more}inner = {{ lr = 2e-3, batch_size = 2, warmup = 0.0 }}"
            )
            per_cycle = num_inner_steps // steps_per_round
            first, last = warm_cycles * per_cycle, (warm_cycles + cycles) * per_cycle
            recipe = tiny_recipe(
                method,
                model="config = { " + ", ".join(f"{k} = {_toml(v)}" for k, v in config.items()) + " }",
                budget=f"rounds = {last + per_cycle}",  # the measured ones are neither the first nor the last
                strategy=strategy,
                codec=f'up = "{up_codec}"\ndown = "{down_codec}"',
                fleet=f"min_workers = {workers}",
                validation="every_rounds = 0",
            )
            (folder / "recipe.toml").write_text(recipe)
            simulated = _simulated(recipe, workers, step_s, rate, per_cycle)
            figures[f"simulated_{method}_busy"] = round(simulated, 4)
            seconds = _played(folder, loop, workers, rate, first, last)
            figures[f"{method}_busy"] = round((last - first) * steps_per_round * step_s / seconds, 4)
            told(f"{method}: workers are busy {figures[f'{method}_busy']:.1%} of the time")
    return figures


def _simulated(recipe: str, workers: int, step_s: float, rate: float, per_cycle: int) -> float:
    """The share of the run in which the workers compute."""
    table = tomllib.loads(recipe)
    given = table["strategy"]
    given["name"] = "streaming_diloco" if "num_fragments" in given else "diloco"
    del given["step_s"]
    table["budget"]["rounds"] = simulated_cycles * per_cycle
    plan = sketch(parse_recipe(table))
    dims = ModelDims.of(plan.spec.model_config_json, plan.layout.numel)
    num_tokens = plan.spec.inner.batch_size * plan.spec.seq_len
    flops = step_work(dims, seq_len=plan.spec.seq_len, num_tokens=num_tokens).flops / step_s
    device = Device(
        name="worker", count=workers, flops=(flops, flops), up_bytes_per_s=(rate, rate), down_bytes_per_s=(rate, rate),
        rtt_s=(0.02, 0.02),
    )  # fmt: skip
    report = simulate_scale(plan, [device], seed=1, coordinator=CoordinatorMachine())
    return fmean(machine.utilisation for machine in report.devices)


def _exchanged(layout: Layout) -> int:
    """Bytes of the whole model up and down, encoded."""
    return flat_size("delta", layout, codec(up_codec)) + flat_size(WHOLE, layout, codec(down_codec))


def _played(folder: Path, loop: WireLoop, workers: int, rate: float, first: int, last: int) -> float:
    """Seconds from the commit of round `first` to that of round `last`, all workers taking part in each between."""
    with real_run(folder, loop) as run:
        run.start_host()
        run.join_all(
            *(f"w{i + 1}" for i in range(workers)),
            up=lambda: Way(bytes_per_s=rate, delay_s=0.01),
            down=lambda: Way(bytes_per_s=rate, delay_s=0.01),
        )
        run.wait(lambda: len(run.rounds()) >= last, f"{last} rounds", timeout_s=patience_s)
        return _between(run, first, last, workers)


def _between(run: RealRun, first: int, last: int, workers: int) -> float:
    rounds = run.rounds()
    counted = rounds[first:last]
    assert all(len(each["workers"]) == workers for each in counted), "a worker missed a round"
    return float(rounds[last - 1]["time"]) - float(rounds[first - 1]["time"])


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
