"""Adapters on a pretrained model, trained on text that stays with its owners, against all of it in one place.

    progress = (L0 - L) / (L0 - L_pooled)       of validation losses in nats; L0: the untrained adapters'

Five owners hold instructions that are unlike each other's (rig/owners.py), and as many of each; the model is
SmolLM2-135M-Instruct (rig/smollm2.py) or one that is named. `pooled` is one worker with everybody's training records,
`NAME alone` one with those of one owner; in the others the owners train together, each on its own, by a rule of
`fed_lora` (with `fed_sa` each is validated with a B of its own). All read as many records and begin from the same
adapters, and all are validated on what the five hold out, together. Everything runs through the shipping
coordinator and workers over the memory transport; of time, only that of the arithmetic is real.

Each method takes the best of its rates by the first seed, and trains at that with every other. A run is sized to take
four minutes of one core, of which its two validations are one: adapters on 135 million parameters train on some 350
tokens a second of it in bf16.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from potluck.bench.convergence import Trained
from potluck.bench.records import Records
from potluck.bench.rig.jobs import job_pool, named_methods, scratch_place
from potluck.bench.rig.owners import Owner, packages, write_owners
from potluck.bench.rig.smollm2 import make_smollm2
from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.coordinator.prepare import Prepared, prepare
from potluck.coordinator.recipe import Recipe, parse_recipe
from potluck.models.config import AdapterConfig
from potluck.simulator.exact.world import World
from potluck.storage.files import cache_folder
from potluck.storage.objects import ObjectStore
from potluck.strategies.fed_lora import rules
from potluck.types.errors import PotluckError

pooled = "pooled"
usual_adapter = AdapterConfig(rank=8, alpha=16, target_modules=("q_proj", "v_proj"))
needed_bytes = 4 << 30
"""Of two runs at a time: the base, as the coordinator and as the workers have it."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One experiment's sizes. `model` is a model directory."""

    model: Path
    num_records: int = 240  # of each owner
    validation: float = 1 / 15
    seq_len: int = 128  # one record of ten is longer, and loses some of its beginning
    batch_size: int = 4
    num_rounds: int = 8
    num_inner_steps: int = 3  # of each owner in a round
    adapter: AdapterConfig = usual_adapter
    base: str = "bf16"
    precision: str = "bf16-mixed"


@dataclass(frozen=True, kw_only=True)
class Method:
    """`strategy` is the section of a recipe but for its inner optimizer, of which `inner` is what is not usual.

    `reads`: every owner its own records, one worker those of all, or one worker those of the owner of that name.
    """

    strategy: Mapping[str, Any] = field(default_factory=lambda: {"name": "fed_avg"})
    inner: Mapping[str, Any] = field(default_factory=dict[str, Any])
    codecs: tuple[str, str] = ("fp32", "fp32")  # up, down
    lrs: tuple[float, ...] = (2e-3,)
    reads: str = "own"

    @property
    def is_federated(self) -> bool:
        return self.reads == "own"


methods: dict[str, Method] = {
    pooled: Method(reads=pooled, lrs=(4e-3, 2e-3, 8e-3)),
    **{f"{owner} alone": Method(reads=owner, lrs=(4e-3, 2e-3)) for owner in packages},
    **{rule: Method(strategy={"name": "fed_lora", "rule": rule}, lrs=(8e-3, 16e-3)) for rule in rules},
}


class Lab:
    """One seed: its owners, and a way to train on what they have."""

    def __init__(self, setting: Setting, owners: Sequence[Owner], folder: Path, seed: int) -> None:
        self.setting, self.owners, self.folder, self.seed = setting, owners, folder, seed
        self._numbers = count(1)

    def recipe(self, method: Method, lr: float) -> Recipe:
        setting, num_owners = self.setting, len(self.owners)
        data: dict[str, Any] = {"private": True, "validation": setting.validation}
        if not method.is_federated:
            read = [owner.training for owner in self.owners if method.reads in (pooled, owner.name)]
            held_out = [owner.held_out for owner in self.owners]
            data = {"shared": [str(path) for path in read], "validation": [str(path) for path in held_out]}
        return parse_recipe({
            "name": "fine-tuning", "seed": self.seed,
            "model": {
                "path": str(setting.model), "base": setting.base, "precision": setting.precision,
                "adapter": setting.adapter.model_dump(mode="json"),
            },
            "data": {"format": "instruct", "seq_len": setting.seq_len, **data},
            "budget": {"rounds": setting.num_rounds},
            "strategy": {
                **method.strategy,
                "num_inner_steps": setting.num_inner_steps * (1 if method.is_federated else num_owners),
                "inner": {
                    "lr": lr, "batch_size": setting.batch_size, "warmup": 0.1, "weight_decay": 0.0, **method.inner,
                },
            },
            "codec": dict(zip(("up", "down"), method.codecs, strict=True)),
            "fleet": {"min_workers": num_owners if method.is_federated else 1, "no_progress_s": 1e9},
            "validation": {"every_rounds": 0},
            "divergence": {"watch": False},  # a rate that is too high is an answer
        })  # fmt: skip

    def train(self, method: Method, lr: float) -> Trained:
        folder = self.folder / f"run-{next(self._numbers)}"
        world = folder / "world"
        try:
            objects = ObjectStore(world / "coordinator" / "objects")
            recipe = self.recipe(method, lr)
            prepared = prepare(recipe, folder / "run", objects, cache_dir=folder / "cache", tell=lambda _: None)
            files = {owner.name: [owner.everything] for owner in self.owners} if method.is_federated else {pooled: []}
            return run_virtual(_play(prepared, world, files))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


async def _play(prepared: Prepared, folder: Path, files: Mapping[str, Sequence[Path]]) -> Trained:
    """The run. `files` are those of each worker's own."""
    world = World(
        prepared.plan, lambda _: prepared.deck, folder, clock=VirtualClock(), make_executor=InlineExecutor,
        base_share_dir=folder / "shared",
    )  # fmt: skip
    for name, own in files.items():
        world.add(name, cost_s=lambda _: 1.0, data=own)
    await world.start()
    state = await world.finish()
    assert world.last is not None
    losses = world.last.losses
    return Trained(
        params=world.last.params.read(state.params), loss=losses[max(losses)], first_loss=losses[0],
        tokens=state.tokens,
        bytes_up_per_worker=fmean(world.object_bytes_up.get(name, 0) for name in files),
        bytes_down_per_worker=fmean(world.object_bytes_down.get(name, 0) for name in files),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: what a process of its own is given."""

    method: str
    lr: float
    seed: int
    setting: Setting
    owners: tuple[Owner, ...]
    folder: Path

    @property
    def settings(self) -> dict[str, Any]:
        """All that its result depends on."""
        method = replace(methods[self.method], lrs=())
        whole = f"{method!r} {replace(self.setting, model=Path(self.setting.model.name))!r}".encode()
        return {
            "method": self.method, "lr": self.lr, "seed": self.seed, "rounds": self.setting.num_rounds,
            "of": hashlib.blake2b(whole, digest_size=8).hexdigest(),
        }  # fmt: skip


def bench_fine_tuning(
    *, seeds: int = 1, first_seed: int = 1, only: str = "", lrs: str = "", rounds: int = Setting.num_rounds,
    inner_steps: int = Setting.num_inner_steps, model: str = "", record: str = "", processes: int = 0,
    told: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Means over seeds. `only` are names of methods and `lrs` rates to try in place of theirs, separated by semicolons;
    `inner_steps` of each owner in one of the `rounds`; `model` is a model directory, "" for SmolLM2, which is
    downloaded the first time. Runs that the file `record` has are not done again, and it takes in those that are done.
    """
    records = Records(Path(record) if record else None, told=told)
    names, began = named_methods(only, list(methods), always=(pooled,)), time.monotonic()
    setting = Setting(model=smol_model(model, told), num_rounds=rounds, num_inner_steps=inner_steps)
    found: dict[str, list[Trained]] = {name: [] for name in names}
    rates = {name: _rates(lrs) or methods[name].lrs for name in names}
    place = scratch_place(needed_bytes)
    with tempfile.TemporaryDirectory(prefix="potluck-bench-", dir=place) as scratch, job_pool(processes) as pool:
        for seed in range(first_seed, first_seed + seeds):
            folder = Path(scratch) / f"seed-{seed}"
            owners = tuple(
                write_owners(folder, num_records=setting.num_records, validation=setting.validation, seed=seed)
            )
            jobs = [
                Job(method=name, lr=lr, seed=seed, setting=setting, owners=owners, folder=folder)
                for name in names for lr in rates[name]
            ]  # fmt: skip
            done = records.completed(pool, _run, jobs, told=lambda job, trained: told(_line(job, trained)))
            for name in names:
                best = min((job for job in jobs if job.method == name), key=lambda job: done[job].loss)
                found[name].append(done[best])
                rates[name] = (best.lr,)
    figures: dict[str, Any] = {"seeds": seeds, "rounds": setting.num_rounds, "seconds": round(time.monotonic() - began)}
    for name in names:
        figures |= {
            f"{name} {key}": value for key, value in _figures(found[name], found[pooled], rates[name][0]).items()
        }  # fmt: skip
    return figures


def _rates(given: str) -> tuple[float, ...]:
    try:
        return tuple(float(rate) for rate in given.split(";")) if given else ()
    except ValueError as error:
        raise PotluckError(f"--lrs is {given!r} and not rates between semicolons; give some, as 1e-3;2e-3") from error


def smol_model(given: str, told: Callable[[str], None]) -> Path:
    """The model directory that is given, or that of SmolLM2, which is made the first time."""
    if given:
        return Path(given).absolute()
    target = cache_folder() / "models" / "smollm2-135m-instruct"
    make_smollm2(target, told=told)
    return target


def _line(job: Job, trained: Trained) -> str:
    return f"seed {job.seed}: {job.method}, lr {job.lr:g}: {trained.first_loss:.4f} -> {trained.loss:.4f}"


def _run(job: Job) -> Trained:
    torch.set_num_threads(1)  # the cores are taken by other runs
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        return Lab(job.setting, job.owners, Path(folder), job.seed).train(methods[job.method], job.lr)


def _figures(own: Sequence[Trained], best: Sequence[Trained], lr: float) -> dict[str, Any]:
    """Of one method; lists are of the seeds."""
    progress = [(o.first_loss - o.loss) / (b.first_loss - b.loss) for o, b in zip(own, best, strict=True)]
    return {
        "lr": lr,
        "first_loss_nats": round(fmean(o.first_loss for o in own), 4),
        "loss_nats": round(fmean(o.loss for o in own), 4),
        "loss_nats_of_seeds": [round(o.loss, 4) for o in own],
        "progress": round(fmean(progress), 3),
        "progress_of_seeds": [round(p, 3) for p in progress],
        "predicted_tokens": round(fmean(o.tokens for o in own)),
        "megabytes_up": round(fmean(o.bytes_up_per_worker for o in own) / 1e6, 2),
        "megabytes_down": round(fmean(o.bytes_down_per_worker for o in own) / 1e6, 2),
    }
