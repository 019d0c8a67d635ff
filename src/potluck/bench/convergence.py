"""How good DiLoCo is at equal tokens: against synchronous training and against one worker alone.

    progress = (L0 - L) / (L0 - L_sync)         L0: the common start's validation loss

Everything runs through the shipping coordinator and workers over the memory transport on a virtual clock; only the
arithmetic takes real time. The corpus is the Python standard library, documents shuffled over the shards.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from potluck.aggregation.config import AggregationConfig
from potluck.bench.watched import Watched
from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.codecs.bundle import Bundle
from potluck.coordinator.deck import Deck
from potluck.coordinator.divergence import DivergenceConfig
from potluck.coordinator.plan import CheckpointConfig, Plan, ValidationConfig
from potluck.data.config import DataConfig, TokenizerConfig
from potluck.data.prepare import prepare_shared
from potluck.data.prepared import PreparedData
from potluck.fleet.config import FleetConfig
from potluck.models.build import build
from potluck.models.flat import FlatModel
from potluck.optim.inner import InnerConfig
from potluck.simulator.exact.world import World
from potluck.storage.objects import ObjectStore
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.run import Budget, RunSpec
from potluck.strategies.strategy import Strategy, kept_vectors
from potluck.strategies.sync_sgd import SyncSGD, SyncSGDConfig
from potluck.transport.memory import Link

num_workers = 4
most_validated = 256
"""Sequences for a point of a curve."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One experiment's sizes."""

    seq_len: int = 256
    batch_size: int = 8
    num_steps: int = 400
    num_warm_steps: int = 400
    num_inner_steps: int = 10
    n_layer: int = 4
    n_embd: int = 96
    vocab_size: int = 1024
    activation: str = "gelu_new"
    outer_lr: float = 0.7
    outer_momentum: float = 0.6
    warm_lr: float = 2e-3
    sync_lrs: tuple[float, ...] = (4e-3, 8e-3)  # after the warm start each method takes the best of its rates
    diloco_lrs: tuple[float, ...] = (4e-3, 2e-3)
    alone_lrs: tuple[float, ...] = (1e-3, 2e-3)
    diloco_codecs: tuple[str, str] = ("int8", "bf16")  # up, down, as in the recipe; synchronous steps go as fp32


@dataclass(frozen=True)
class Absence:
    """A worker's process ends, and starts again later with its disk as it was. Seconds from the start."""

    worker: int
    at_s: float
    away_s: float


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a run is played under, besides its method. The last of `step_s` and of `links` is also for who follows."""

    step_s: tuple[float, ...] = (1.0,)  # an inner step of each worker
    links: tuple[Link, ...] = (Link(),)
    absences: tuple[Absence, ...] = ()
    deadlines: bool = False
    balance: Literal["none", "time"] = "none"
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    num_points: int = 0  # of the curve, evenly over the tokens

    def among(self, workers: int) -> Conditions:
        """The same for a run with the first so many workers."""
        return replace(self, absences=tuple(absence for absence in self.absences if absence.worker < workers))

    def always_here(self, workers: int) -> int:
        """How many of so many workers are never away; 1 where none is, as a run needs one."""
        return max(workers - len({absence.worker for absence in self.among(workers).absences}), 1)

    def of(self, worker: int) -> tuple[float, Link]:
        """Its step in seconds, and its link."""
        return self.step_s[min(worker, len(self.step_s) - 1)], self.links[min(worker, len(self.links) - 1)]


@dataclass(frozen=True)
class Point:
    """Of a curve."""

    seconds: float
    bytes_per_worker: float
    loss: float


@dataclass(frozen=True)
class Trained:
    """What one run ended with. Bytes are those of updates and versions but each worker's first; seconds, modelled."""

    params: Tensor
    loss: float
    first_loss: float
    tokens: int
    bytes_up_per_worker: float
    bytes_down_per_worker: float
    seconds: float = 0.0
    utilisation: float = 0.0  # share of the workers' time in which they train
    counted_utilisation: float = 0.0  # of what a commit used
    curve: tuple[Point, ...] = ()

    @property
    def bytes_per_worker(self) -> float:
        return self.bytes_up_per_worker + self.bytes_down_per_worker


class Lab:
    """Prepared data and a way to train on it from any start."""

    def __init__(self, setting: Setting, folder: Path, seed: int, *, cache_dir: Path | None = None) -> None:
        self.setting, self.folder, self.seed = setting, folder, seed
        config = DataConfig(
            shared="python-stdlib",
            seq_len=setting.seq_len,
            tokenizer=TokenizerConfig(train="bpe", vocab_size=setting.vocab_size),
        )
        self.data: PreparedData = prepare_shared(
            config, seed=seed, base=folder, cache_dir=cache_dir or folder / "cache"
        )
        self._num_runs = 0

    def config_json(self) -> dict[str, Any]:
        setting = self.setting
        return {
            "model_type": "gpt2", "n_layer": setting.n_layer, "n_embd": setting.n_embd, "n_head": 4,
            "n_positions": setting.seq_len, "vocab_size": self.data.vocab_size, "resid_pdrop": 0.0,
            "activation_function": setting.activation,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
        }  # fmt: skip

    def start(self) -> Tensor:
        return FlatModel(build(self.config_json(), seed=self.seed)).params()

    def train(
        self, strategy: Strategy, initial: Tensor, *, workers: int, num_steps: int, lr: float, data_seed: int,
        codecs: tuple[str, str] = ("fp32", "fp32"), inner: Mapping[str, Any] | None = None,
        conditions: Conditions | None = None,
    ) -> Trained:  # fmt: skip
        """`num_steps` inner steps of each worker. `codecs` are those up and down, as in the recipe; `inner` is more
        of the recipe's section than the rate."""
        setting, conditions = self.setting, (conditions or Conditions()).among(workers)
        up, down = codecs
        optimizer = InnerConfig.model_validate(
            {"lr": lr, "batch_size": setting.batch_size, "warmup": 0.05, **(inner or {})}
        )
        tokens = workers * num_steps * setting.batch_size * setting.seq_len
        fleet = FleetConfig(
            min_workers=conditions.always_here(workers), no_progress_s=1e9, deadlines=conditions.deadlines,
            balance=conditions.balance,
        )  # fmt: skip
        flat = FlatModel(build(self.config_json(), seed=self.seed))
        spec = RunSpec(
            run_id="bench", name="bench", seed=data_seed, strategy=type(strategy).__name__,
            model_config_json=self.config_json(), layout=flat.layout.to_json(), seq_len=setting.seq_len,
            inner=optimizer, data_access="shared", heartbeat_s=fleet.heartbeat_s, kept_vectors=kept_vectors(strategy),
        )  # fmt: skip
        plan = Plan(
            spec=spec, strategy=strategy, layout=flat.layout, initial=lambda: initial, budget=Budget(tokens=tokens),
            fleet=fleet, checkpoint=CheckpointConfig(every_rounds=1 << 20),
            validation=ValidationConfig(every_rounds=0), aggregation=conditions.aggregation, up_codec=up,
            down_codec=down, divergence=DivergenceConfig(watch=False),  # a rate that is too high is an answer
        )  # fmt: skip
        self._num_runs += 1
        folder = self.folder / f"run-{self._num_runs}"
        try:
            return run_virtual(_Play(self, plan, folder, workers, conditions).play())
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def held_out(self, most: int) -> Tensor:
        """Sequences that nobody trains on, at most so many. [sequences, seq_len + 1]"""
        rows: list[Tensor] = []
        for shard in self.data.validation:
            with Bundle.open(shard.path) as bundle:
                rows.append(bundle.tensor("tokens").long())
        return torch.cat(rows)[:most]

    def deck(self, plan: Plan) -> Callable[[ObjectStore], Deck]:
        def make(objects: ObjectStore) -> Deck:
            for shard in (*self.data.shards, *self.data.validation):
                objects.put(shard.path.read_bytes())
            return Deck(self.data.catalogue(), self.data.held_out(), seed=plan.spec.seed, shared=True)

        return make


class _Play:
    """One run on a virtual clock."""

    def __init__(self, lab: Lab, plan: Plan, folder: Path, workers: int, conditions: Conditions) -> None:
        self._conditions, self._tokens = conditions, plan.budget.tokens
        self._names = [f"w{i + 1}" for i in range(workers)]
        self._world = World(plan, lab.deck(plan), folder, clock=VirtualClock(), make_executor=InlineExecutor)
        self._watched = Watched(
            self._world, model=build(lab.config_json(), seed=lab.seed), held_out=lab.held_out(most_validated),
            batch_size=lab.setting.batch_size, seq_len=lab.setting.seq_len, on_commit=self._committed,
        )  # fmt: skip
        self._curve: list[Point] = []

    async def play(self) -> Trained:
        world, watched, conditions = self._world, self._watched, self._conditions
        for i, name in enumerate(self._names):
            step_s, link = conditions.of(i)
            watched.add(name, step_s=step_s, link=link)
        for absence in conditions.absences:
            name = self._names[absence.worker]
            world.later(absence.at_s, partial(world.kill_for, name, absence.away_s))
        await world.start()
        state = await world.finish()
        assert world.last is not None
        losses = world.last.losses
        return Trained(
            params=world.last.params.read(state.params),
            loss=losses[max(losses)],
            first_loss=losses[0],
            tokens=state.tokens,
            bytes_up_per_worker=self._bytes_up,
            bytes_down_per_worker=self._bytes_down,
            seconds=watched.seconds,
            utilisation=watched.utilisation,
            counted_utilisation=watched.counted_utilisation,
            curve=tuple(self._curve),
        )

    def _committed(self) -> None:
        """A point of the curve where one is due."""
        run = self._world.run
        assert run is not None and run.state is not None
        if len(self._curve) < self._conditions.num_points * run.state.tokens // self._tokens:
            point = Point(self._watched.seconds, self._bytes_up + self._bytes_down, self._watched.loss())
            self._curve.append(point)

    @property
    def _bytes_up(self) -> float:
        return self._mean(self._world.object_bytes_up)

    @property
    def _bytes_down(self) -> float:
        return self._mean(self._world.object_bytes_down) - self._mean(self._watched.joined_bytes)

    def _mean(self, counts: Mapping[str, int]) -> float:
        return sum(counts.get(name, 0) for name in self._names) / len(self._names)


def diloco(setting: Setting) -> Strategy:
    return DiLoCo(
        DiLoCoConfig(
            num_inner_steps=setting.num_inner_steps,
            outer_lr=setting.outer_lr,
            outer_momentum=setting.outer_momentum,
        )
    )


def bench_convergence(
    *, seeds: Sequence[int] = (1,), setting: Setting | None = None, told: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Losses, progress and bytes, each a mean over seeds; minutes of arithmetic."""
    torch.set_num_threads(1)  # such small products gain little from a second, and lose much where cores are busy
    setting = setting or Setting()
    rows = [_one_seed(seed, setting, told) for seed in seeds]
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def _one_seed(seed: int, setting: Setting, told: Callable[[str], None]) -> dict[str, Any]:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as name:
        lab = Lab(setting, Path(name), seed)

        def run(
            what: str, strategy: Strategy, start: Tensor, workers: int, steps: int, lr: float, data: int
        ) -> Trained:
            codecs = setting.diloco_codecs if isinstance(strategy, DiLoCo) else ("fp32", "fp32")
            done = lab.train(strategy, start, workers=workers, num_steps=steps, lr=lr, data_seed=data, codecs=codecs)
            told(f"seed {seed}: {what}: {done.first_loss:.4f} -> {done.loss:.4f} ({time.monotonic() - begun:.0f} s)")
            return done

        sync, first, second = SyncSGD(SyncSGDConfig()), seed * 10 + 1, seed * 10 + 2
        scratch = lab.start()
        warm = run(
            "synchronous from scratch", sync, scratch, num_workers, setting.num_warm_steps, setting.warm_lr, first
        )
        cold = run(
            "diloco from scratch", diloco(setting), scratch, num_workers, setting.num_warm_steps, setting.warm_lr, first
        )

        def best(what: str, strategy: Strategy, workers: int, rates: tuple[float, ...]) -> Trained:
            runs = [
                run(f"{what}, lr {x:g}", strategy, warm.params, workers, setting.num_steps, x, second) for x in rates
            ]
            return min(runs, key=lambda r: r.loss)

        more = best("synchronous", sync, num_workers, setting.sync_lrs)
        local = best("diloco", diloco(setting), num_workers, setting.diloco_lrs)
        alone = best("one worker alone", sync, 1, setting.alone_lrs)
    base = local.first_loss
    gained = base - more.loss
    return {
        "start_loss_nats": base,
        "sync_loss_nats": more.loss,
        "diloco_loss_nats": local.loss,
        "one_worker_alone_loss_nats": alone.loss,
        "diloco_progress_ratio": (base - local.loss) / gained,
        "one_worker_alone_progress_ratio": (base - alone.loss) / gained,
        "scratch_start_loss_nats": warm.first_loss,
        "scratch_sync_loss_nats": warm.loss,
        "scratch_diloco_loss_nats": cold.loss,
        "scratch_diloco_progress_ratio": (warm.first_loss - cold.loss) / (warm.first_loss - warm.loss),
        "tokens": more.tokens,
        "sync_bytes_per_worker": more.bytes_per_worker,
        "diloco_bytes_per_worker": local.bytes_per_worker,
        "fewer_bytes_ratio": more.bytes_per_worker / local.bytes_per_worker,
        "seconds": time.monotonic() - begun,
    }
