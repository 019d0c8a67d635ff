"""Sub-GEMM on real processes: exact under faults, its cost model on throttled links, caching, K split and recovery.

Coordinator and workers are the shipping commands with TLS, each worker behind a wire of its own. Eight workers share
this machine, so on throttled links their products take a chosen time (`rig.tiles.pace`), as if each had a processor of
its own; what they compute is real. Times and bytes are those that the coordinator writes down for each step.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from potluck.bench.rig import tiles
from potluck.bench.rig.nursery import Nursery, nursery
from potluck.bench.rig.plain import gradient_errors, plain_steps
from potluck.bench.rig.real_run import RealRun, real_run, tiny_recipe, write_corpus
from potluck.bench.rig.wire import Way, WireLoop, wire_loop
from potluck.coordinator.prepare import sketch
from potluck.coordinator.recipe import parse_recipe
from potluck.models.build import build

up_bytes_per_s, down_bytes_per_s, one_way_s = 20e6 / 8, 100e6 / 8, 0.01
s_per_flop = 1e-9
"""Of a paced device: 1 GFLOP/s, a phone's core; eight of them ask less of this machine than it has."""
slow_s_per_flop = 2e-8
"""Where a product is to last long enough to be hit in its middle."""
eight = tuple(f"w{i + 1}" for i in range(8))
warm_steps = 5
most_hits = 4
"""Hits for each that is to be measured: one may come when the device had just sent its last tile."""
start_s = 240.0
"""Eight processes that start at once on two cores."""

models = {
    "gpt2": 'config = { model_type = "gpt2", n_layer = 2, n_embd = 64, n_head = 2, n_positions = 64 }',
    "llama": 'config = { model_type = "llama", hidden_size = 64, intermediate_size = 128, num_hidden_layers = 2, '
    "num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64 }",
}


def bench_sub_gemm(*, only: str = "", steps: int = 6, repeats: int = 5) -> dict[str, Any]:
    """All parts, or `only` one: exact, throttled, caching, split, recovery or checks.

    `steps` are measured after five that warm up; `repeats` are those of each fault.
    """
    parts: dict[str, Callable[[_Bench], dict[str, Any]]] = {
        "exact": exact,
        "throttled": lambda bench: throttled(bench, steps),
        "caching": lambda bench: caching(bench, steps),
        "split": lambda bench: split(bench, steps),
        "recovery": lambda bench: recovery(bench, repeats),
        "checks": lambda bench: checks(bench, steps),
    }
    figures: dict[str, Any] = {}
    with wire_loop() as loop, nursery() as processes:
        bench = _Bench(loop, processes)
        for name in [only] if only else list(parts):
            figures |= {f"{name}_{key}": value for key, value in parts[name](bench).items()}
    return figures


@dataclass(frozen=True)
class _Bench:
    loop: WireLoop
    processes: Nursery

    @contextmanager
    def folder(self, recipe: str) -> Iterator[RealRun]:
        """A run that is not started yet."""
        parent = os.environ.get("POTLUCK_BENCH_DIR")
        with tempfile.TemporaryDirectory(prefix="potluck-bench-", dir=parent) as name, ExitStack() as stack:
            folder = Path(name)
            write_corpus(folder / "texts")
            (folder / "recipe.toml").write_text(recipe)
            speeds = self.processes.speeds
            made = stack.enter_context(real_run(folder, self.loop, start=self.processes.start, speeds=speeds))
            yield made
            self.processes.speeds = made.speeds

    @contextmanager
    def running(self, recipe: str, *, is_throttled: bool, s_per_flop: float = s_per_flop) -> Iterator[RealRun]:
        """Eight paced workers."""

        def way(bytes_per_s: float) -> Callable[[], Way]:
            return lambda: Way(bytes_per_s=bytes_per_s, delay_s=one_way_s) if is_throttled else Way()

        with self.folder(recipe) as run:
            run.start_host(**tiles.before(f"watch({str(run.folder / 'tiles')!r})"))
            paced = tiles.before(f"pace({s_per_flop!r})")
            run.join_all(*eight, up=way(up_bytes_per_s), down=way(down_bytes_per_s), environment=paced)
            yield run


def recipe(
    *, model: str = models["gpt2"], batch_size: int = 8, accumulation: int = 1, rounds: int = 100_000,
    num_workers: int = 8, **strategy: Any,
) -> str:  # fmt: skip
    """Micro-batches of `batch_size` sequences of 64 tokens. `strategy` are its options."""
    options = "\n".join(f"{key} = {json.dumps(value)}" for key, value in strategy.items())
    inner = f"lr = 1e-3, batch_size = {batch_size}, accumulation = {accumulation}, warmup = 0.1"
    return tiny_recipe(
        "tiles",
        model=model,
        data='shared = "texts"\ntokenizer = { train = "bpe", vocab_size = 500 }\nseq_len = 64\nvalidation = 0.05',
        budget=f"rounds = {rounds}",
        strategy=f'name = "sub_gemm"\nhead_computes = false\n{options}\ninner = {{ {inner} }}',
        codec="",
        fleet=f"min_workers = {num_workers}\nheartbeat_s = 2.0",
        validation="every_rounds = 0",
    )


def metrics(run: RealRun) -> list[dict[str, float]]:
    """What each step came to, the first one first."""
    found: dict[int, dict[str, float]] = {}
    for round, name, value in run.ledger("SELECT round, name, value FROM metrics ORDER BY round"):
        found.setdefault(round, {})[name] = value
    seconds = {e["round"]: e["seconds"] for e in run.rounds()}
    return [{**found[r], "step_s": s} for r, s in sorted(seconds.items()) if r in found]


def measured(run: RealRun, num_steps: int, *, warm: int = warm_steps) -> list[dict[str, float]]:
    """Steps after the first `warm`."""
    run.wait(lambda: run.rounds(), "first step", timeout_s=start_s)
    limit_s = start_s + 60.0 * (warm + num_steps)
    run.wait(lambda: len(metrics(run)) >= warm + num_steps, f"{warm + num_steps} steps", timeout_s=limit_s, every_s=0.5)
    return metrics(run)[warm : warm + num_steps]


def middle(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(step[name] for step in steps)


# Exact


def exact(bench: _Bench) -> dict[str, Any]:
    """Ten steps of four workers, one killed, one stopped and one lying, and a plain loop over the same tokens."""
    return {f"{family}_{key}": value for family in models for key, value in _exact(bench, family).items()}


def _exact(bench: _Bench, family: str) -> dict[str, Any]:
    num_steps = 10
    text = recipe(model=models[family], rounds=num_steps, num_workers=1, batch_size=4, accumulation=2)
    with bench.folder(text) as run:
        kept = run.folder / "steps"
        kept.mkdir()
        run.start_host(**tiles.before(f"keep_steps({str(kept)!r})"))
        run.join_all("w1", "w2", "w4")
        run.join("w3", environment=tiles.before("lie(5)"))
        run.wait(lambda: len(run.rounds()) >= 2, "second step", timeout_s=start_s)
        time.sleep(0.3)
        run.workers["w1"].kill()
        run.wait(lambda: len(run.rounds()) >= 4, "fourth step", timeout_s=start_s)
        time.sleep(0.3)
        run.workers["w2"].send_signal(signal.SIGSTOP)
        run.wait(lambda: len(run.rounds()) >= num_steps, "last step", timeout_s=start_s)
        tallies = metrics(run)
        run.workers["w2"].send_signal(signal.SIGCONT)
        losses = [e["loss"] for e in run.rounds()]
        refused = [e for e in run.events("lost") if "is not the product of its factors" in e["reason"]]
        steps = [load_file(kept / f"{number}.safetensors") for number in range(num_steps)]
    parsed = parse_recipe(tomllib.loads(text))
    plan = sketch(parsed)
    model = build(plan.spec.model_config_json, seed=plan.spec.seed)
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert torch.equal(start, steps[0]["theta"]), "both begin with the same parameters"
    plain = plain_steps(model, [step["tokens"] for step in steps], plan.spec.inner)
    off: list[float] = []
    errors: dict[str, float] = {}
    for step, loss, (right, gradients) in zip(steps, losses, plain, strict=True):
        off.append(abs(loss - right))
        for name, error in gradient_errors(step["gradient"], gradients).items():
            errors[name] = max(error, errors.get(name, 0.0))
    worst = max(errors, key=lambda name: errors[name])
    return {
        "steps": len(losses),
        "loss_error_max": max(off),
        "gradient_error_max": errors[worst],
        "gradient_error_max_of": worst,
        "wrong_tiles_refused": len(refused),
        "tiles_lost": int(sum(step["tiles_lost"] for step in tallies)),
        "tiles_late": int(sum(step["tiles_late"] for step in tallies)),
        "workers_that_lied": sorted({e["worker"] for e in refused}),
    }


# Time


def throttled(bench: _Bench, num_steps: int) -> dict[str, Any]:
    """A step of eight workers over 20 Mbit/s up, 100 down and 20 ms there and back, and what was predicted of it."""
    with bench.running(recipe(model=_wide(128), batch_size=16), is_throttled=True) as run:
        first = measured(run, 1, warm=0)[0]
        steps = measured(run, num_steps)
    own_s = [s["step_s"] - s["offloaded_s"] for s in steps]
    ratios = [s["predicted_over_observed"] for s in steps]
    return {
        "step_s_median": round(middle(steps, "step_s"), 3),
        "products_s_median": round(middle(steps, "offloaded_s"), 3),
        "head_own_s_median": round(statistics.median(own_s), 3),
        "predicted_over_observed_first_step": round(first["predicted_over_observed"], 3),
        "predicted_over_observed": [round(r, 3) for r in ratios],
        "predicted_over_observed_median": round(statistics.median(ratios), 3),
        "predicted_over_observed_of_step": [
            round((own + s["offloaded_s"] * r) / s["step_s"], 3)
            for s, r, own in zip(steps, ratios, _before(own_s), strict=True)
        ],
        **{
            f"predicted_over_observed_{kind}": round(middle(steps, f"predicted_over_observed_{kind}"), 3)
            for kind in ("forward", "input_gradient", "weight_gradient")
        },
        "tiles_copied_share": round(sum(s["tiles_copies"] for s in steps) / sum(s["tiles_issued"] for s in steps), 3),
        "tiles_late_share": round(sum(s["tiles_late"] for s in steps) / sum(s["tiles_issued"] for s in steps), 3),
        "down_mb_per_step": round(middle(steps, "tiles_down_bytes") / 1e6, 2),
        "up_mb_per_step": round(middle(steps, "tiles_up_bytes") / 1e6, 2),
    }


def _before(values: Sequence[float]) -> list[float]:
    """Of each step what the one before came to, which is all that could be known."""
    return [values[0], *values[:-1]]


def _wide(width: int, num_layers: int = 2) -> str:
    return f'config = {{ model_type = "gpt2", n_layer = {num_layers}, n_embd = {width}, n_head = 4, n_positions = 64 }}'


def caching(bench: _Bench, num_steps: int) -> dict[str, Any]:
    """Steps of four micro-batches, with parts of weights kept on devices over them and without, on throttled links."""
    found: dict[str, Any] = {}
    medians: dict[bool, dict[str, float]] = {}
    for keeps in (False, True):
        text = recipe(model=_wide(384, num_layers=1), batch_size=1, accumulation=4, num_tiles=2, keep_weights=keeps)
        with bench.running(text, is_throttled=True) as run:
            steps = measured(run, num_steps)
            names = ("step_s", "offloaded_s", "tiles_down_bytes", "tiles_up_bytes")
            medians[keeps] = {name: middle(steps, name) for name in names}
    for name, with_, without in ((n, medians[True][n], medians[False][n]) for n in medians[True]):
        found |= {f"{name}_kept": round(with_, 3), f"{name}_not_kept": round(without, 3)}
        found[f"{name}_percent"] = round(100 * with_ / without, 1)
    return found


def split(bench: _Bench, num_steps: int) -> dict[str, Any]:
    """Weight gradients of 4,096 tokens, whose sums are split over devices, and the same with no sum split."""
    found: dict[str, Any] = {}
    for may in (True, False):
        text = recipe(model=_wide(64, num_layers=1), batch_size=64, split_inner=may)
        with bench.running(text, is_throttled=True) as run:
            steps = measured(run, num_steps)
        name = "split" if may else "whole"
        observed = [s["offloaded_s_weight_gradient"] for s in steps]
        predicted = [s["predicted_over_observed_weight_gradient"] * x for s, x in zip(steps, observed, strict=True)]
        found |= {
            f"{name}_predicted_s": round(statistics.median(predicted), 3),
            f"{name}_observed_s": round(statistics.median(observed), 3),
            f"{name}_step_s": round(middle(steps, "step_s"), 3),
        }
    return found


def checks(bench: _Bench, num_steps: int) -> dict[str, Any]:
    """What the head spends on checking tiles, of steps of 2,048 and 4,096 tokens on throttled links."""
    sizes = {tokens: _checks(bench, num_steps, tokens) for tokens in (2048, 4096)}
    return {f"{tokens}_tokens_{key}": value for tokens, found in sizes.items() for key, value in found.items()}


def _checks(bench: _Bench, num_steps: int, tokens: int) -> dict[str, Any]:
    with bench.running(recipe(model=_wide(256), batch_size=tokens // 64, num_tiles=2), is_throttled=True) as run:
        steps = measured(run, num_steps, warm=2)
        ended = sorted(e["time"] for e in run.rounds())
        first, last = ended[1], ended[1 + num_steps]
        noted = _told(run, first, most=1_000_000)
        cpu_s = sum(line["cpu_s"] for line in noted if line["what"] == "checked" and line["time"] <= last)
    return {
        "tiles_median": round(middle(steps, "tiles_issued")),
        "checks_s_median": round(middle(steps, "checks_s"), 4),
        "checks_gflop_median": round(middle(steps, "checks_flops") / 1e9, 3),
        "rows_again_median": round(middle(steps, "checks_rows_again")),
        "step_s_median": round(middle(steps, "step_s"), 3),
        "cpu_percent_of_step": round(100 * cpu_s / (last - first), 2),
        "percent_of_step": round(100 * sum(s["checks_s"] for s in steps) / sum(s["step_s"] for s in steps), 2),
    }


# Recovery


def recovery(bench: _Bench, repeats: int) -> dict[str, Any]:
    """One of eight is killed, then one is stopped, while it has tiles of a product of a second or so.

    Detection is the end of its stream, or the first of its tiles that is late; the last tile that was given to somebody
    else is accepted so long after it, copies near the end of the product included.
    """
    found: dict[str, Any] = {}
    text = recipe(model=_wide(128), batch_size=16, num_workers=7)
    with bench.running(text, is_throttled=False, s_per_flop=slow_s_per_flop) as run:
        measured(run, 1, warm=1)
        for what, number, noticed in (("killed", signal.SIGKILL, "lost"), ("stopped", signal.SIGSTOP, "late")):
            hits = (_recovery(run, number, noticed) for _ in range(most_hits * repeats))
            times = list(islice((hit for hit in hits if hit is not None), repeats))
            assert len(times) == repeats, (
                f"{most_hits * repeats} times w2 was {what}, mostly when it had nothing left to do"
            )
            found |= {
                f"{what}_detected_s_max": round(max(detected for detected, _ in times), 3),
                f"{what}_accepted_after_detection_s_max": round(max(accepted for _, accepted in times), 3),
                f"{what}_accepted_after_detection_s": [round(accepted, 3) for _, accepted in times],
            }
    return found


def _recovery(run: RealRun, number: signal.Signals, noticed: str) -> tuple[float, float] | None:
    """Seconds from the signal until it is noticed, and from then until the last tile that was dealt anew is there; None
    where none was.
    """
    at = _hit(run, "w2", number)
    run.wait(lambda: _of_hit(run, at, noticed), "end of the product", timeout_s=60.0)
    told = _of_hit(run, at, noticed)
    first = next(line["time"] for line in told if line["what"] == noticed)
    anew = [line["time"] for line in told if line["what"] == "taken" and line["is_anew"]]
    back = time.time()
    if number == signal.SIGSTOP:
        run.workers["w2"].send_signal(signal.SIGCONT)
    else:
        run.workers["w2"].wait()
        run.join("w2", environment=tiles.before(f"pace({slow_s_per_flop!r})"))
        run.wait(lambda: run.events("joined", since=back), "return of w2", timeout_s=start_s)
    done = len(run.rounds())
    run.wait(lambda: len(run.rounds()) >= done + 2, "two steps", timeout_s=start_s)
    return (first - at, max(anew) - first) if anew else None


def _told(run: RealRun, since: float, *, most: int = 4000) -> list[dict[str, Any]]:
    """Whole lines of what `rig.tiles.watch` has noted, the latest so many."""
    lines = (run.folder / "tiles").read_text().splitlines(keepends=True)
    return [x for x in (json.loads(line) for line in lines[-most:] if line.endswith("\n")) if x["time"] >= since]


def _hit(run: RealRun, name: str, number: signal.Signals) -> float:
    """Send it a signal just when it was given tiles of one of the largest products; when."""
    begun = time.time()

    def is_given() -> bool:
        sent = (line for line in _told(run, begun) if line["what"] == "sent" and line["worker"] == name)
        return any("lm_head" in line["label"] for line in sent)

    run.wait(is_given, "tile", every_s=0.01)
    at = time.time()
    os.kill(run.workers[name].pid, number)
    return at


def _of_hit(run: RealRun, at: float, noticed: str) -> list[dict[str, Any]]:
    """What was noted of the product that was hit, once it has ended; none before."""
    told = _told(run, at)
    hit = [line["product"] for line in told if line["what"] == noticed]
    of_product = [line for line in told if hit and line.get("product") == hit[0]]
    return of_product if any(line["what"] == "ended" for line in of_product) else []
