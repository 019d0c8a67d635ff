"""`demo`: the main job on one machine, told as it happens.

One coordinator and four workers, separate processes on loopback with TLS, train a small GPT with DiLoCo. On the way
one worker is killed with `kill -9` in the middle of a round and comes back. Then one worker alone trains on its share,
for comparison: DiLoCo with one worker, eta = 1 and mu = 0 is plain training without any averaging.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from potluck.cli.quiet import quiet_libraries
from potluck.cli.running import Running
from potluck.cli.runs import free_run
from potluck.cli.units import format_bytes, format_count, format_seconds
from potluck.cli.view import View
from potluck.coordinator.events import Event
from potluck.coordinator.options import HostOptions, RunResult
from potluck.coordinator.recipe import Recipe, load_recipe
from potluck.storage.files import cache_folder
from potluck.types.errors import RunStopped

num_workers = 4
victim = "worker-2"
kill_after = 0.4  # of the budget
pause_s = 2.0
BYTES_PER_PARAMETER = 4
PROMPT = "def read_lines(path):\n"

STORY = f"""Potluck demo: a coordinator and {num_workers} workers, each a process of its own, talk over TLS on
loopback and train a small GPT on the source code of Python's standard library. On the way {victim} is killed and
comes back. It takes about 4 minutes on 2 cores. In everyday use the workers are other people's machines."""


async def run_demo(folder: Path | None, overrides: list[str]) -> dict[str, Any]:
    """The whole demo; what `demo --json` prints."""
    quiet_libraries()
    view = View(Console(stderr=True, highlight=False))
    recipe = load_recipe("stdlib-gpt", [f"fleet.min_workers={num_workers}", *overrides])
    run_dir = free_run(folder or Path("runs") / "demo")
    tell(view, STORY)
    together = await _Demo(recipe, run_dir, view).run()
    if together.stopped:
        raise RunStopped(f"the demo was {together.stopped} after {together.rounds} rounds; start it again")
    tell(view, f"For comparison, one worker alone with its share of the work ({format_count(share(together))} tokens):")
    alone_recipe = load_recipe("stdlib-gpt", [*overrides, *alone_settings(together)])
    options = HostOptions(recipe=alone_recipe, run_dir=run_dir / "alone", cache_dir=cache_folder())
    num_threads = max(1, (os.cpu_count() or 1) // num_workers)  # no more of this machine than it had before
    alone = await Running(options, view, num_local=1, num_threads=num_threads).run()
    if alone.stopped:
        raise RunStopped(f"the demo was {alone.stopped}; the model it trained before is in {together.model_dir}")
    text = await asyncio.to_thread(write_lines, Path(together.model_dir))
    view.console.print(results_table(recipe, together, alone))
    tell(view, "What the model writes (it is tiny and has trained for two minutes; it has learnt how code looks):")
    view.say(text)
    tell(view, f"The model: {together.model_dir}, for AutoModelForCausalLM.from_pretrained")
    view.say(next_commands(together))
    return {**together.to_json(), "sync_bytes_per_worker": sync_bytes(recipe, together), "alone": alone.to_json()}


def tell(view: View, text: str) -> None:
    view.say(f"\n{text}", "bold")


class _Demo:
    """The run with its four workers and the one that is killed."""

    def __init__(self, recipe: Recipe, run_dir: Path, view: View) -> None:
        options = HostOptions(recipe=recipe, run_dir=run_dir, cache_dir=cache_folder())
        self.view, self.recipe = view, recipe
        self.running = Running(options, view, num_local=num_workers, heard=self._heard)
        self._round_closed = asyncio.Event()
        self._is_back = asyncio.Event()
        self._killed = False

    async def run(self) -> RunResult:
        return await self.running.run()

    def _heard(self, event: Event) -> None:
        if event.kind == "listening":
            self.view.say(f"Join line: potluck join {event.detail['join_line']}")
            self.view.say("(this one is for this machine; `potluck host` prints one for others)", "dim")
            self.running.begin(self._kill_and_bring_back())
        elif event.kind == "round" and self._killed and victim not in event.detail["workers"]:
            self._round_closed.set()
        elif event.kind == "joined" and self._killed and event.detail["worker"] == victim:
            self._is_back.set()

    async def _kill_and_bring_back(self) -> None:
        workers = self.running.workers
        while not self._is_amid_a_round():
            await asyncio.sleep(0.05)
        self._killed = True
        self._say(f"kill -9 {workers.pid(victim)}: {victim} dies in the middle of a round; the others only wait a bit.")
        await workers.kill(victim)
        await self._round_closed.wait()
        self._say(f"The round closed without {victim}. It starts again in {pause_s:.0f} seconds.")
        await asyncio.sleep(pause_s)
        await workers.start(victim)
        await self._is_back.wait()
        self._say(f"{victim} is back, with its optimizer state and its place in the data.")

    def _is_amid_a_round(self) -> bool:
        """Late enough in the run, and the victim has done some steps of its round but not most of them."""
        if self.running.listening is None or victim not in self.running.workers.running:
            return False
        status = self.running.listening.status()
        row = next((row for row in status["workers"] if row["id"] == victim), None)
        if row is None or status["progress"] < kill_after or row["state"] != "training":
            return False
        num_steps = getattr(self.recipe.strategy.settings, "num_inner_steps", 1)
        return 0.2 * num_steps <= row["step"] <= 0.7 * num_steps

    def _say(self, text: str) -> None:
        self.view.say(text, "bold magenta")


def share(result: RunResult) -> int:
    """The tokens of one of the workers."""
    return result.tokens // num_workers


def alone_settings(together: RunResult) -> list[str]:
    """Overrides that make the recipe one worker's plain training on its share of the tokens."""
    return [
        "name=one-worker-alone", f"budget.tokens={share(together)}", "strategy.outer_lr=1.0",
        "strategy.outer_momentum=0.0", "codec.up=fp32", "codec.down=fp32", "fleet.min_workers=1",
    ]  # fmt: skip


def sync_bytes(recipe: Recipe, result: RunResult) -> int:
    """What each worker would have sent with synchronous data parallelism, on average: a gradient for every step."""
    tokens_per_step = recipe.strategy.inner.sequences_per_step * recipe.data.seq_len
    return round(result.tokens / num_workers / tokens_per_step * result.num_parameters * BYTES_PER_PARAMETER)


def results_table(recipe: Recipe, together: RunResult, alone: RunResult) -> Table:
    """What came of it."""
    table = Table(
        title="Results", title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2)
    )
    mean_up = sum(worker.bytes_up for worker in together.workers) / max(1, len(together.workers))
    would = sync_bytes(recipe, together)
    times = would / max(1.0, mean_up)
    rows = [
        ("parameters", format_count(together.num_parameters)),
        ("validation loss at the start", loss(together.initial_val_loss)),
        (f"validation loss, {num_workers} workers together", loss(together.final_val_loss)),
        ("validation loss, one worker alone", loss(alone.final_val_loss)),
        ("tokens, rounds, time in rounds", f"{format_count(together.tokens)}, {together.rounds}, "
         f"{format_seconds(together.seconds)}"),
        *((f"{w.id}: tokens, up, down", f"{format_count(w.tokens)}, {format_bytes(w.bytes_up)}, "
           f"{format_bytes(w.bytes_down)}") for w in together.workers),
        ("sent by a worker, on average", format_bytes(mean_up)),
        ("by synchronous data parallelism, fp32", f"{format_bytes(would)}: {times:.0f} times as much"),
    ]  # fmt: skip
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def loss(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def write_lines(model_dir: Path) -> str:
    from potluck.models.generate import generate

    return generate(model_dir, PROMPT, max_new_tokens=80, temperature=0.7, top_p=0.9, seed=1, device="cpu")


def next_commands(result: RunResult) -> str:
    return f"""
What to try next:
  potluck generate {result.model_dir} --prompt "class "
  potluck run stdlib-gpt --local 2 --set data.shared=FOLDER      train on text of your own
  potluck host stdlib-gpt                                        let other machines join
"""
