"""The demo: its figures, and all of it in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.processes import events, potluck
from rich.console import Console

from potluck.cli import demo
from potluck.coordinator.options import RunResult, WorkerResult
from potluck.coordinator.recipe import load_recipe


def result(**changes: object) -> RunResult:
    fields = {
        "run_id": "x", "strategy": "diloco", "model_dir": "m", "rounds": 3, "tokens": 4 * 20_480, "seconds": 61.0,
        "initial_val_loss": 8.25, "final_val_loss": 5.5, "num_parameters": 1000, "run_dir": "r",
        "workers": tuple(
            WorkerResult(id=f"worker-{i}", tokens=20_480, bytes_up=8000, bytes_down=9000) for i in range(4)
        ),
        **changes,
    }  # fmt: skip
    return RunResult(**fields)  # pyright: ignore[reportArgumentType]


def test_what_synchronous_training_would_have_sent() -> None:
    recipe = load_recipe("stdlib-gpt", ["data.seq_len=128", "strategy.inner.batch_size=8"])
    # 20,480 tokens of a worker are 20 steps of 8 x 128, each with 1,000 fp32 gradients.
    assert demo.sync_bytes(recipe, result()) == 20 * 1000 * 4
    assert demo.sync_bytes(load_recipe("stdlib-gpt", ["strategy.inner.accumulation=2"]), result()) == 10 * 1000 * 4


def test_one_worker_alone_is_plain_training_on_a_quarter() -> None:
    recipe = load_recipe("stdlib-gpt", demo.alone_settings(result()))
    settings = recipe.strategy.settings.model_dump()
    assert (settings["outer_lr"], settings["outer_momentum"]) == (1.0, 0.0)
    assert (recipe.budget.tokens, recipe.fleet.min_workers) == (20_480, 1)
    assert (recipe.codec.up, recipe.codec.down) == ("fp32", "fp32")


def test_the_table_compares() -> None:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(demo.results_table(load_recipe("stdlib-gpt"), result(), result(final_val_loss=6.125)))
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert "validation loss at the start 8.250" in lines
    assert "validation loss, 4 workers together 5.500" in lines
    assert "validation loss, one worker alone 6.125" in lines
    assert "worker-2: tokens, up, down 20.5 k, 8.00 kB, 9.00 kB" in lines
    assert "by synchronous data parallelism, fp32 80.0 kB: 10 times as much" in lines


SMALL = [
    "model.config.n_layer=1", "model.config.n_embd=32", "model.config.n_head=2", "data.tokenizer.vocab_size=300",
    "data.seq_len=32", "data.max_bytes=400000", "strategy.num_inner_steps=100", "strategy.inner.batch_size=4",
    "budget.tokens=400000", "fleet.heartbeat_s=0.5", "fleet.reconnect_s=1.0",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_whole_demo_in_small(tmp_path: Path) -> None:
    settings = [word for setting in SMALL for word in ("--set", setting)]
    done = potluck("demo", "--json", *settings, cwd=tmp_path, timeout_s=290)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert told["final_val_loss"] < told["initial_val_loss"] - 0.5
    assert [worker["id"] for worker in told["workers"]] == [f"worker-{i}" for i in range(1, 5)]
    assert told["sync_bytes_per_worker"] > 20 * max(worker["bytes_up"] for worker in told["workers"])
    assert told["alone"]["tokens"] >= told["tokens"] // 4
    parts = [
        "Potluck demo:", "Join line: potluck join potluck://127.0.0.1:", "kill -9", "The round closed without",
        "worker-2 is back, with its optimizer", "Results", "What the model writes", "What to try next",
    ]  # fmt: skip
    for part in parts:
        assert part in done.stderr
    story = events(tmp_path / "runs" / "demo")
    rounds = [event["workers"] for event in story if event["kind"] == "round"]
    without = [number for number, workers in enumerate(rounds) if demo.victim not in workers]
    assert len(without) >= 1
    assert demo.victim in rounds[0] and demo.victim in rounds[-1]
    assert not [e for e in story if "starts afresh" in str(e.get("text"))], "it came back with the state it had"
    assert (Path(tmp_path) / told["model_dir"] / "model.safetensors").exists()
