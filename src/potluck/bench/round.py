"""One round of a large model with everything on, beside the bare floor: seconds, and memory of both sides.

The shipping coordinator and workers are processes of their own on loopback, with mutual TLS, checksums, digests, spool
and ledger. A worker loads the model, adds a constant to all of it and sends the difference; nothing is trained. Seconds
are from one commit to the next. Memory is the peak above the imported, idle process, without the page cache of files.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from potluck.bench.rig.floor import floor_seconds
from potluck.bench.rig.memory import memory_bytes, peak_memory
from potluck.clock import Lanes, SystemClock
from potluck.codecs.spec import parse_spec
from potluck.coordinator.core import Coordinator
from potluck.coordinator.deck import Deck
from potluck.coordinator.events import Event
from potluck.coordinator.loop import train
from potluck.coordinator.network import Network
from potluck.coordinator.plan import CheckpointConfig, Plan, ValidationConfig
from potluck.fleet.config import FleetConfig
from potluck.models.build import skeleton
from potluck.models.flat import layout_of
from potluck.optim.inner import InnerConfig
from potluck.optim.outer import nesterov
from potluck.storage.objects import ObjectStore
from potluck.strategies.fleet import Fleet, weighted_mean
from potluck.strategies.replica import Replica
from potluck.strategies.run import Budget, RunFacts, RunSpec
from potluck.strategies.state import State
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.task import Result, task
from potluck.types.errors import PotluckError
from potluck.types.params import Layout, Params
from potluck.types.vector import Vector
from potluck.worker.join import work
from potluck.worker.options import JoinOptions

shapes: dict[str, dict[str, Any]] = {
    "tiny": {"model_type": "gpt2", "n_layer": 2, "n_embd": 256, "n_head": 4, "vocab_size": 8192, "n_positions": 256},
    "small": {"model_type": "gpt2", "n_layer": 8, "n_embd": 512, "n_head": 8, "vocab_size": 20000},
    "gpt2": {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257},
    "llama-1b": {
        "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Shapes of models that people train; `--params` takes the nearest."""
patience_s = 600.0


@task("bench.add", kind="pinned", numbers=("weight",))
def add(replica: Replica, *, theta: Vector, amount: float) -> Result:
    replica.load(theta)
    with torch.no_grad():
        for parameter in replica.module.parameters():  # pyright: ignore[reportAttributeAccessIssue]
            parameter.add_(amount)
    return Result({"weight": 1}, {"delta": theta - replica.params()})


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, kw_only=True)
class _MomentumState(State):
    momentum: Params


class AddOne:
    """A round of DiLoCo without its training."""

    Config: ClassVar[type[BaseModel]] = _Config
    State: ClassVar[type[State]] = _MomentumState

    def __init__(self, config: BaseModel | None = None) -> None:
        self.config = config or _Config()

    def init(self, run: RunFacts) -> _MomentumState:
        return _MomentumState(params=run.initial, momentum=run.zeros)

    async def run_round(self, state: _MomentumState, fleet: Fleet) -> _MomentumState:
        workers = fleet.workers()
        bound = add.bind(theta=state.params, amount=0.001 * (state.round + 1))
        got = await fleet.call(
            {w.id: bound for w in workers}, key="add", min_replies=len(workers),
            reduce=weighted_mean("delta", by="weight"),
        )  # fmt: skip
        params, momentum = await fleet.apply(
            nesterov, state.params, state.momentum, got.reduced, num_outputs=2, lr=0.7, momentum_coefficient=0.9
        )
        return replace(state, params=params, momentum=momentum, round=state.round + 1)

    def estimate(self, run: RunFacts) -> RoundBytes:
        return RoundBytes(up=run.up_bytes("delta"), down=run.down_bytes())


def bench_round(
    *, params: int = 124_439_808, workers: int = 2, codec: str = "fp32", down: str = "fp32", rounds: int = 12,
    floor: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Seconds are medians without the first round; `times_floor` compares the two."""
    if rounds < 2:
        raise PotluckError(f"--rounds is {rounds} and the first round does not count; give 2 or more")
    parse_spec(codec, "update")
    parse_spec(down, "parameter")
    shape = nearest_shape(params)
    with tempfile.TemporaryDirectory(prefix="potluck-bench-", dir=os.environ.get("POTLUCK_BENCH_DIR")) as name:
        found = _measure(Path(name), shape, workers, codec, down, rounds)
    if floor:
        bare = floor_seconds(found["parameters"], workers, min(rounds, 5))
        found["floor_s"] = round(statistics.median(bare[1:] or bare), 3)
        found["times_floor"] = round(found["round_s"] / found["floor_s"], 2)
    return found


def nearest_shape(num_params: int) -> str:
    """The name in `shapes` whose number of parameters is nearest, by its ratio."""

    def distance(name: str) -> float:
        return abs(math.log(layout_of(skeleton(shapes[name])).numel / num_params))

    return min(shapes, key=distance)


def _measure(folder: Path, shape: str, num_workers: int, up: str, down: str, num_rounds: int) -> dict[str, Any]:
    host, helpers = run_rounds(folder, shape, num_workers, up, down, num_rounds)
    model_mb = 4 * host["parameters"] / 1e6
    return {
        "parameters": host["parameters"],
        "workers": num_workers,
        "up": up,
        "down": down,
        "round_s": round(statistics.median(host["seconds"][1:]), 3),
        "first_round_s": round(host["seconds"][0], 3),
        "model_mb": round(model_mb, 1),
        "coordinator_anonymous_mb": host["anonymous_mb"],
        "coordinator_anonymous_models": round(host["anonymous_mb"] / model_mb, 2),
        "coordinator_rss_mb": host["rss_mb"],
        "coordinator_cpu_s_per_round": round(host["cpu_s"] / num_rounds, 3),
        "worker_anonymous_mb": max(w["anonymous_mb"] for w in helpers),
        "worker_anonymous_models": round(max(w["anonymous_mb"] for w in helpers) / model_mb, 2),
        "worker_rss_mb": max(w["rss_mb"] for w in helpers),
        "worker_cpu_s_per_round": round(max(w["cpu_s"] for w in helpers) / num_rounds, 3),
        "up_mb_per_worker_and_round": round(host["up_bytes"] / num_workers / num_rounds / 1e6, 3),
        "down_mb_per_worker_and_round": round(host["down_bytes"] / num_workers / num_rounds / 1e6, 3),
    }


def run_rounds(
    folder: Path, shape: str, num_workers: int, up: str, down: str, num_rounds: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the coordinator and each worker found, in processes of their own."""
    line, log = folder / "line", folder / "log"
    run = [str(folder), shape, str(num_workers), up, down, str(num_rounds)]
    with log.open("wb") as out:
        children = [_start("coordinator", *run, log=out)]
        try:
            _wait_for(line, children, log)
            children += [_start("worker", str(folder), str(i), log=out) for i in range(num_workers)]
            for child in children:
                if child.wait(patience_s) != 0:
                    raise RuntimeError(f"a process of the bench failed:\n{log.read_text()[-3000:]}")
        finally:
            for child in children:
                child.kill()
                child.wait()
    host = json.loads((folder / "coordinator.json").read_text())
    helpers = [json.loads((folder / f"worker-{i}.json").read_text()) for i in range(num_workers)]
    return host, helpers


def _start(role: str, *arguments: str, log: Any) -> subprocess.Popen[bytes]:
    code = f"import sys; from potluck.bench.round import {role}; {role}(*sys.argv[1:])"
    # The machine has to hold all of them at once: threads that spin for each other would take the others' cores.
    env = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=log, stderr=log, env=env)


def _wait_for(path: Path, children: list[subprocess.Popen[bytes]], log: Path) -> None:
    deadline = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > deadline or any(child.poll() is not None for child in children):
            raise RuntimeError(f"the coordinator of the bench does not listen:\n{log.read_text()[-3000:]}")
        time.sleep(0.05)


# The processes


def coordinator(folder: str, shape: str, num_workers: str, up: str, down: str, num_rounds: str) -> None:
    gc.collect()
    idle = memory_bytes()
    with peak_memory(idle) as peak:
        found = asyncio.run(_coordinate(Path(folder), shape, int(num_workers), up, down, int(num_rounds)))
        found |= peak() | {"cpu_s": time.process_time() - found.pop("cpu_before_s")}
    (Path(folder) / "coordinator.json").write_text(json.dumps(found))


async def _coordinate(
    folder: Path, shape: str, num_workers: int, up: str, down: str, num_rounds: int
) -> dict[str, Any]:
    layout = layout_of(skeleton(shapes[shape]))
    fleet = FleetConfig(min_workers=num_workers, deadlines=False)
    spec = RunSpec(
        run_id="bench", name="bench", seed=1, strategy="bench", model_config_json=shapes[shape],
        layout=layout.to_json(), seq_len=16, inner=InnerConfig(optimizer="sgd", batch_size=1), data_access="shared",
        heartbeat_s=fleet.heartbeat_s,
    )  # fmt: skip
    plan = Plan(
        spec=spec, strategy=AddOne(), layout=layout, initial=lambda: _noise(layout), budget=Budget(rounds=num_rounds),
        fleet=fleet, checkpoint=CheckpointConfig(every_rounds=1 << 20), validation=ValidationConfig(every_rounds=0),
        up_codec=up, down_codec=down,
    )  # fmt: skip
    committed: list[float] = []
    memory_mb: list[float] = []
    cpu_before_s = 0.0
    lanes = Lanes.threads()

    def heard(event: Event) -> None:
        if event.kind == "round":
            committed.append(time.monotonic())
            memory_mb.append(memory_bytes()[0] / 1e6)

    run = await Coordinator.open(
        plan, folder / "run", deck=Deck([], [], seed=1, shared=True), objects=ObjectStore(folder / "run" / "objects"),
        clock=SystemClock(), lanes=lanes, on_event=heard,
    )  # fmt: skip
    network = Network(run)
    try:
        line = await network.open()
        scratch = folder / "line.tmp"
        scratch.write_text(line)
        scratch.replace(folder / "line")
        watching = asyncio.create_task(run.fleet.watch())
        training = asyncio.create_task(train(run))
        await run.recovered.wait()
        await run.fleet.ready(num_workers)
        begun, cpu_before_s = time.monotonic(), time.process_time()
        await training
        watching.cancel()
        traffic = [run.traffic(id) for id in run.roster.members]
    finally:
        run.stop("the bench is over")
        await network.close()
        await run.close()
        lanes.close()
    marks = [begun, *committed]
    return {
        "parameters": layout.numel,
        "seconds": [after - before for before, after in itertools.pairwise(marks)],
        "memory_mb": memory_mb,
        "up_bytes": sum(t.total_up for t in traffic),
        "down_bytes": sum(t.total_down for t in traffic),
        "cpu_before_s": cpu_before_s,
    }


def _noise(layout: Layout) -> Vector:
    def read(start: int, stop: int) -> Tensor:
        return torch.randn(stop - start, generator=torch.Generator().manual_seed(start)) * 0.02

    return Vector(layout.numel, read)


def worker(folder: str, number: str) -> None:
    gc.collect()
    idle = memory_bytes()
    state = Path(folder) / f"worker-{number}"
    options = JoinOptions(link=str(Path(folder) / "line"), state_dir=state, name=f"w{number}", device="cpu")
    with peak_memory(idle) as peak:
        asyncio.run(work(options, told=_say))
        found = peak() | {"cpu_s": time.process_time()}
    (Path(folder) / f"worker-{number}.json").write_text(json.dumps(found))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
