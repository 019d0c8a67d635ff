"""How good DiLoCo is at equal tokens: against synchronous training and against one worker alone.

    progress = (L0 - L) / (L0 - L_sync)         L0: the common start's validation loss

Everything runs through the shipping coordinator and workers over the memory transport on a virtual clock; only the
arithmetic takes real time. The corpus is the Python standard library, documents shuffled over the shards.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.coordinator.deck import Deck
from potluck.coordinator.plan import CheckpointConfig, Plan, ValidationConfig
from potluck.data.config import DataConfig, TokenizerConfig
from potluck.data.prepare import PreparedData, prepare_shared
from potluck.fleet.config import FleetConfig
from potluck.models.build import build
from potluck.models.flat import FlatModel
from potluck.optim.inner import InnerConfig
from potluck.simulator.exact.world import World
from potluck.storage.objects import ObjectStore
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.run import Budget, RunSpec
from potluck.strategies.strategy import Strategy
from potluck.strategies.sync_sgd import SyncSGD, SyncSGDConfig

num_workers = 4


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
    outer_lr: float = 0.7
    outer_momentum: float = 0.6
    warm_lr: float = 2e-3
    sync_lrs: tuple[float, ...] = (4e-3, 8e-3)  # after the warm start each method takes the best of its rates
    diloco_lrs: tuple[float, ...] = (4e-3, 2e-3)
    alone_lrs: tuple[float, ...] = (1e-3, 2e-3)
    diloco_codecs: tuple[str, str] = ("int8", "bf16")  # up, down, as in the recipe; synchronous steps go as fp32


@dataclass(frozen=True)
class Trained:
    """What one run ended with."""

    params: Tensor
    loss: float
    first_loss: float
    tokens: int
    bytes_up_per_worker: float
    bytes_down_per_worker: float

    @property
    def bytes_per_worker(self) -> float:
        return self.bytes_up_per_worker + self.bytes_down_per_worker


class Lab:
    """Prepared data and a way to train on it from any start."""

    def __init__(self, setting: Setting, folder: Path, seed: int) -> None:
        self.setting, self.folder, self.seed = setting, folder, seed
        config = DataConfig(
            shared="python-stdlib",
            seq_len=setting.seq_len,
            tokenizer=TokenizerConfig(train="bpe", vocab_size=setting.vocab_size),
        )
        self.data: PreparedData = prepare_shared(config, seed=seed, base=folder, cache_dir=folder / "cache")
        self._num_runs = 0

    def config_json(self) -> dict[str, Any]:
        setting = self.setting
        return {
            "model_type": "gpt2", "n_layer": setting.n_layer, "n_embd": setting.n_embd, "n_head": 4,
            "n_positions": setting.seq_len, "vocab_size": self.data.vocab_size, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
        }  # fmt: skip

    def start(self) -> Tensor:
        return FlatModel(build(self.config_json(), seed=self.seed)).params()

    def train(
        self, strategy: Strategy, initial: Tensor, *, workers: int, num_steps: int, lr: float, data_seed: int,
        codecs: tuple[str, str] = ("fp32", "fp32"),
    ) -> Trained:  # fmt: skip
        """`num_steps` inner steps of each worker. `codecs` are those up and down, as in the recipe."""
        setting = self.setting
        up, down = codecs
        inner = InnerConfig(lr=lr, batch_size=setting.batch_size, warmup=0.05)
        tokens = workers * num_steps * setting.batch_size * setting.seq_len
        fleet = FleetConfig(min_workers=workers, no_progress_s=1e9, deadlines=False)
        flat = FlatModel(build(self.config_json(), seed=self.seed))
        spec = RunSpec(
            run_id="bench", name="bench", seed=data_seed, strategy=type(strategy).__name__,
            model_config_json=self.config_json(), layout=flat.layout.to_json(), seq_len=setting.seq_len, inner=inner,
            data_access="shared", heartbeat_s=fleet.heartbeat_s,
        )  # fmt: skip
        plan = Plan(
            spec=spec, strategy=strategy, layout=flat.layout, initial=lambda: initial, budget=Budget(tokens=tokens),
            fleet=fleet, checkpoint=CheckpointConfig(every_rounds=1 << 20),
            validation=ValidationConfig(every_rounds=0), up_codec=up, down_codec=down,
        )  # fmt: skip
        self._num_runs += 1
        folder = self.folder / f"run-{self._num_runs}"
        return run_virtual(self._play(plan, folder, workers))

    def _deck(self, plan: Plan) -> Callable[[ObjectStore], Deck]:
        def make(objects: ObjectStore) -> Deck:
            for shard in (*self.data.shards, *self.data.validation):
                objects.put(shard.path.read_bytes())
            return Deck(self.data.catalogue(), self.data.held_out(), seed=plan.spec.seed, shared=True)

        return make

    async def _play(self, plan: Plan, folder: Path, workers: int) -> Trained:
        world = World(plan, self._deck(plan), folder, clock=VirtualClock(), make_executor=InlineExecutor)
        await world.start()
        for i in range(workers):
            world.add(f"w{i + 1}", cost_s=lambda _: 1.0)
        state = await world.finish()
        assert world.last is not None
        names = [f"w{i + 1}" for i in range(workers)]
        losses = world.last.losses
        return Trained(
            params=world.last.params.read(state.params),
            loss=losses[max(losses)],
            first_loss=losses[0],
            tokens=state.tokens,
            bytes_up_per_worker=sum(world.object_bytes_up.get(name, 0) for name in names) / workers,
            bytes_down_per_worker=sum(world.object_bytes_down.get(name, 0) for name in names) / workers,
        )


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
