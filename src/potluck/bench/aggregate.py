"""What combining the updates of a round costs: seconds, rate and memory of each rule, from 2 and 16 spooled updates.

`gb_per_s` counts fp32 values taken in, 4 bytes each, whatever their codec and however often the rule reads them.
`anonymous_mb` is the most memory above that of the idle process, without the page cache of mapped files; `rss_mb` the
same with what of them is mapped. Robust rules and 16 fp32 updates have fewer parameters: `parameters` says how many.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch

from potluck.aggregation.combine import combine
from potluck.aggregation.config import AggregationConfig, Rule
from potluck.bench.rig.memory import memory_bytes, peak_memory
from potluck.codecs.base import codec
from potluck.codecs.bundle import write_flat_slices
from potluck.optim.outer import nesterov
from potluck.storage.params import ParamStore
from potluck.types.params import Layout

gpt2_numel = 124_439_808
most_spooled_bytes = 2 << 30  # of one kind of updates, at once on disk and in the page cache
robust_share = 8


def bench_aggregate(*, numel: int = gpt2_numel, num_runs: int = 5) -> dict[str, float]:
    """About two minutes and 2 GB of disk."""
    figures: dict[str, float] = {"cores": os.cpu_count() or 1}
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as name:
        folder = Path(name)
        _rules(folder, ["mean"], 1 << 18, 2, "fp32", 1, "", (0, 0))  # what is made once is part of the idle process
        gc.collect()
        idle = memory_bytes()
        for codec_name in ("fp32", "int8"):
            for num_updates in (2, 16):
                kind = f"{codec_name}_{num_updates}_updates"
                size = _fitting(numel, num_updates, codec_name)
                figures |= _rules(folder, ["mean"], size, num_updates, codec_name, num_runs, kind, idle)
        robust = [rule for rule in get_args(Rule) if rule != "mean"]
        for codec_name in ("fp32", "int8"):
            kind = f"{codec_name}_16_updates"
            figures |= _rules(folder, robust, numel // robust_share, 16, codec_name, max(1, num_runs // 2), kind, idle)
        figures |= _add_rate(min(numel, 1 << 26), num_runs)
        figures |= _outer_step(folder, numel, num_runs)
    return figures


def _fitting(numel: int, num_updates: int, codec_name: str) -> int:
    """Fewer parameters where the updates would take too much room."""
    return min(numel, most_spooled_bytes * 16 // 15 // (num_updates * codec(codec_name).estimate_bytes(1 << 20) >> 20))


def _rules(
    folder: Path,
    rules: list[Rule],
    numel: int,
    num_updates: int,
    codec_name: str,
    num_runs: int,
    kind: str,
    idle: tuple[int, int],
) -> dict[str, float]:
    layout, store = _layout(numel), ParamStore(folder / "params")
    paths = [folder / f"update-{i}" for i in range(num_updates)]
    generator = torch.Generator().manual_seed(1)

    def values(start: int, stop: int) -> torch.Tensor:
        return torch.randn(stop - start, generator=generator)

    write_flat_slices(paths[0], "delta", values, layout, codec(codec_name))
    for path in paths[1:]:  # files of their own: every update is read from memory, none from a cache
        shutil.copyfile(paths[0], path)
    figures: dict[str, float] = {}
    for rule in rules:
        config = AggregationConfig(rule=rule)

        def run(config: AggregationConfig = config) -> None:
            pairs = [(path, float(1000 + i)) for i, path in enumerate(paths)]
            combine(store, pairs, rule=config, name="delta", layout=layout, out_name="out")

        with peak_memory(idle) as peak:
            seconds = _median_s(run, num_runs)
        stem = f"{rule}_{kind}"
        figures |= {
            f"{stem}_parameters": layout.numel,
            f"{stem}_s": round(seconds, 3),
            f"{stem}_gb_per_s": round(4 * layout.numel * num_updates / seconds / 1e9, 2),
            **{f"{stem}_{name}": value for name, value in peak().items()},
        }
    for path in paths:
        path.unlink()
    shutil.rmtree(store.root)
    return figures


def _outer_step(folder: Path, numel: int, num_runs: int) -> dict[str, float]:
    """DiLoCo's outer step on the mean, and what a step fused with the mean would save: to write that and read it."""
    layout, store = _layout(numel), ParamStore(folder / "params")
    vector = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1))
    theta, momentum, mean = (store.create(name, vector) for name in ("theta", "momentum", "mean"))

    def step() -> None:
        store.apply(
            nesterov, theta, momentum, mean, name="new", layout=layout, num_outputs=2, lr=0.7, momentum_coefficient=0.9
        )

    def write_and_read() -> None:
        for _ in store.slices(store.create("again", vector)):
            pass

    return {
        "outer_step_parameters": layout.numel,
        "outer_step_s": round(_median_s(step, num_runs), 3),
        "outer_step_write_and_read_mean_s": round(_median_s(write_and_read, num_runs), 3),
    }


def _add_rate(numel: int, num_runs: int) -> dict[str, float]:
    """What `into += weight * x` in memory takes, to hold the rate of the fp32 mean against."""
    into, x = torch.zeros(numel), torch.ones(numel)
    seconds = _median_s(lambda: into.add_(x, alpha=0.5), num_runs)
    return {"add_gb_per_s": round(4 * numel / seconds / 1e9, 2), "add_threads": torch.get_num_threads()}


def _layout(numel: int) -> Layout:
    """Matrices of the size of GPT-2's, each with a bias, until there are `numel` parameters."""
    shapes: list[tuple[str, tuple[int, ...]]] = []
    while numel > 3072 * 769:
        shapes += [(f"layers.{len(shapes)}.weight", (768, 3072)), (f"layers.{len(shapes)}.bias", (3072,))]
        numel -= 3072 * 769
    return Layout.of([*shapes, ("rest", (numel,))])


def _median_s(run: Callable[[], object], num_runs: int) -> float:
    run()
    taken: list[float] = []
    for _ in range(num_runs):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
