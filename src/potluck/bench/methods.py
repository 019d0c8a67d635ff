"""Every method of pretraining from one start at equal tokens: quality, bytes, time on slow links, utilisation.

    progress = (L0 - L) / (L0 - L_sync)         L0: the common start's validation loss

Four workers; the corpus, the virtual clock and the shipping coordinator and workers are those of `bench convergence`.
A link carries the model in fp32 up in 16 inner steps and down in 4, as 20 and 100 Mbit/s do with GPT-2 and steps of
12 s. Methods for machines of unequal speed have steps of 4, 4, 2 and 1 s, the others of 1 s. A method whose inner
optimizer is plain SGD is compared with synchronous SGD. Each has an inner rate that was the best of a few with the
first seed, as `tune` finds it with half of the steps (of streaming and FedAdam, with all of them: docs/lab.md). Whether
progress rises with length is shown with the first seed. Bytes are those by which its longer run has more, which no
worker's first copy of the model is among.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from pydantic import BaseModel
from safetensors.torch import load_file, save_file

from potluck.aggregation.config import AggregationConfig
from potluck.bench.convergence import Absence, Conditions, Lab, Setting, Trained, num_workers
from potluck.bench.records import Records
from potluck.bench.rig.jobs import job_pool, named_methods, scratch_place
from potluck.coordinator.prepare import sketch
from potluck.coordinator.recipe import load_recipe
from potluck.planner.flops import step_work
from potluck.planner.memory import ModelDims
from potluck.simulator.fleet_files import load_fleet
from potluck.simulator.fleets import machines
from potluck.simulator.large.charts import Chart, Line, charts_svg
from potluck.simulator.large.device_faults import draw_faults
from potluck.strategies.async_diloco import AsyncDiLoCo, AsyncDiLoCoConfig
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.fed_avg import FedAvg, FedAvgConfig
from potluck.strategies.sparse_diloco import SparseDiLoCo, SparseDiLoCoConfig
from potluck.strategies.strategy import Strategy
from potluck.strategies.streaming_diloco import StreamingDiLoCo, StreamingDiLoCoConfig
from potluck.strategies.sync_sgd import SyncSGD, SyncSGDConfig
from potluck.transport.memory import Link
from potluck.types.errors import PotluckError
from potluck.types.ids import WorkerId

sizes = Setting(
    seq_len=64, batch_size=8, num_steps=2560, num_warm_steps=1280, n_layer=2, n_embd=48, vocab_size=512, warm_lr=4e-3,
    activation="gelu_pytorch_tanh",
)  # fmt: skip
unequal_step_s = (4.0, 4.0, 2.0, 1.0)
up_steps, down_steps = 16.0, 4.0
"""Inner steps that the model in fp32 takes to travel."""
num_points = 8
needed_bytes = 1 << 30
stood_for, most_absences = "five_sites", 100
"""The recipe whose steps and bytes those of a fleet's machines are; times that one of them is away."""
reference, plain_reference, alone = "sync_sgd", "sync_sgd, plain SGD", "one worker alone"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A strategy with everything of a recipe that belongs to it."""

    strategy: type[Any]
    config: type[BaseModel]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    lrs: tuple[float, ...] = (4e-3, 2e-3)  # inner rates, the best one first
    inner: Mapping[str, Any] = field(default_factory=dict[str, Any])
    codecs: tuple[str, str] = ("int8", "bf16")  # up, down
    rule: str = "mean"
    is_unequal: bool = False  # machines of unequal speed
    workers: int = num_workers

    @property
    def balances(self) -> bool:
        """Whether slower machines may take fewer steps."""
        if self.strategy is FedAvg:
            return bool(self.options.get("normalised"))
        return self.strategy not in (SyncSGD, StreamingDiLoCo)

    def made(self) -> Strategy:
        return self.strategy(self.config.model_validate(dict(self.options)))

    def conditions(self, model_bytes: float) -> Conditions:
        """Of links that carry the model in `up_steps` and `down_steps`."""
        up, down = model_bytes / up_steps, model_bytes / down_steps
        return Conditions(
            step_s=unequal_step_s if self.is_unequal else (1.0,),
            links=(Link(up_bytes_per_s=up, down_bytes_per_s=down, rtt_s=0.02),),
            balance="time" if self.is_unequal else "none",
            aggregation=AggregationConfig.model_validate({"rule": self.rule}),
            num_points=num_points,
        )


_sync = partial(Method, strategy=SyncSGD, config=SyncSGDConfig, codecs=("fp32", "fp32"))
_diloco = partial(Method, strategy=DiLoCo, config=DiLoCoConfig)
_streaming = partial(
    Method, strategy=StreamingDiLoCo, config=StreamingDiLoCoConfig, codecs=("int4", "int4-delta"),
    options={
        "num_inner_steps": 64, "num_fragments": 2, "overlap_steps": 2, "mixing": 0.5, "outer_lr": 0.7,
        "outer_momentum": 0.6,
    },
    lrs=(4e-3, 2e-3),
)  # fmt: skip
_async = partial(Method, strategy=AsyncDiLoCo, config=AsyncDiLoCoConfig, is_unequal=True, codecs=("int8+ef", "bf16"))
_fed_avg = partial(Method, strategy=FedAvg, config=FedAvgConfig)
_adaptive = {"betas": (0.5, 0.99), "tau": 0.01}
_plain = {"optimizer": "sgd", "weight_decay": 0.0}

methods: dict[str, Method] = {
    reference: _sync(lrs=(4e-3, 8e-3)),
    plain_reference: _sync(lrs=(1.0, 2.0), inner=_plain),
    alone: _sync(lrs=(1e-3, 2e-3), workers=1),
    "diloco": _diloco(options={"num_inner_steps": 20, "outer_lr": 0.7, "outer_momentum": 0.3}),
    "diloco, Muon": _diloco(
        options={"num_inner_steps": 20, "outer_lr": 0.7, "outer_momentum": 0.6},
        inner={"optimizer": "muon"}, lrs=(4e-3, 8e-3),
    ),
    "streaming_diloco, int4": _streaming(),
    "streaming_diloco, int4, Muon": _streaming(inner={"optimizer": "muon"}),
    "sparse_diloco, Muon": Method(
        strategy=SparseDiLoCo, config=SparseDiLoCoConfig, options={"num_inner_steps": 60},
        codecs=("topk(12.5%)+2bit+ef(0.95)", "int4-delta"), rule="norm_clipping", inner={"optimizer": "muon"},
    ),
    "async_diloco, 4 : 4 : 2 : 1": _async(
        options={"num_inner_steps": 20, "outer_lr": 0.7, "outer_momentum": 0.3}
    ),
    "async_diloco with a quorum": _async(
        options={"num_inner_steps": 20, "quorum": 0.75, "outer_lr": 0.7, "outer_momentum": 0.3}
    ),
    "fed_avg": _fed_avg(options={"num_inner_steps": 20}),
    "fed_avg, momentum": _fed_avg(options={"num_inner_steps": 20, "outer_lr": 0.7, "outer_momentum": 0.3}),
    "fed_avg, proximal": _fed_avg(options={"num_inner_steps": 20, "proximal": 0.01}),
    "fed_avg, Adam": _fed_avg(
        options={"num_inner_steps": 16, "outer": "adam", "outer_lr": 0.06, "betas": (0.0, 0.999), "tau": 0.03}
    ),
    "fed_avg, Yogi": _fed_avg(options={"num_inner_steps": 16, "outer": "yogi", "outer_lr": 0.025, **_adaptive}),
    "fed_avg, Adagrad": _fed_avg(options={"num_inner_steps": 20, "outer": "adagrad", "outer_lr": 0.06, **_adaptive}),
    "fed_avg, normalised": _fed_avg(options={"num_inner_steps": 10, "normalised": True}, is_unequal=True),
    "scaffold, plain SGD": _fed_avg(
        options={"num_inner_steps": 20, "control_variates": True}, inner=_plain, lrs=(1.0, 2.0)
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: what a process of its own is given."""

    method: str
    lr: float
    num_steps: int
    seed: int
    folder: Path
    fleet: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """All that its result depends on."""
        on_fleet = f" {load_fleet(self.fleet)!r}" if self.fleet else ""
        whole = f"{methods[self.method]!r} {sizes!r} {up_steps} {down_steps}{on_fleet}".encode()
        return {
            "method": self.method, "lr": self.lr, "steps": self.num_steps, "seed": self.seed, "fleet": self.fleet,
            "of": hashlib.blake2b(whole, digest_size=8).hexdigest(),
        }  # fmt: skip


def _at_sites(method: Method, fleet: str, *, seed: int, model_bytes: float) -> Conditions:
    """Of the machines of a fleet file, with steps and transfers as long as those of `stood_for`."""
    plan = sketch(load_recipe(stood_for, []))
    dims = ModelDims.of(plan.spec.model_config_json, plan.layout.numel)
    num_tokens = plan.spec.inner.batch_size * plan.spec.inner.accumulation * plan.spec.seq_len
    flops = step_work(dims, seq_len=plan.spec.seq_len, num_tokens=num_tokens).flops
    devices = load_fleet(fleet).devices
    found = machines(devices, seed=seed)
    smaller = model_bytes / (4 * plan.layout.numel)
    numbers = {machine.id: number for number, machine in enumerate(found)}
    struck: dict[WorkerId, float] = {}
    absences: list[Absence] = []
    for fault in islice(draw_faults(devices, seed=seed, per_hour=0.0), 2 * most_absences):
        if fault.kind == "return":
            at_s = struck[fault.device]
            absences.append(Absence(numbers[fault.device], at_s, fault.at_s - at_s))
        else:
            struck[fault.device] = fault.at_s
    return Conditions(
        step_s=tuple(flops / (machine.flops * machine.duty) for machine in found),
        links=tuple(
            Link(
                up_bytes_per_s=machine.up_bytes_per_s * smaller, down_bytes_per_s=machine.down_bytes_per_s * smaller,
                rtt_s=machine.rtt_s,
            )
            for machine in found
        ),
        absences=tuple(absences),
        deadlines=True,
        balance="time" if method.balances else "none",
        aggregation=AggregationConfig.model_validate({"rule": method.rule}),
        num_points=num_points,
    )  # fmt: skip


def bench_methods(
    *, seeds: int = 1, first_seed: int = 1, only: str = "", steps: int = 0, tune: bool = False, fleet: str = "",
    picture: str = "", record: str = "", processes: int = 0, told: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Means over seeds. `only` are names of methods, separated by semicolons; `steps` of each worker, 0 for 2,560;
    with `tune` all inner rates are tried; `fleet` is a fleet file whose machines are the workers, with the steps and
    bytes of the recipe `five_sites`; `picture` is where an SVG is written: loss against time, and against bytes. Runs
    that the file `record` has are not done again, and it takes in those that are done."""
    num_steps, began = steps or sizes.num_steps, time.monotonic()
    if num_steps < 2:
        raise PotluckError("--steps is 1 and runs of half as many are done too; give 2 or more")
    if picture and not Path(picture).parent.is_dir():
        raise PotluckError(f"--picture is {picture}, whose folder is not there; make it, or give another file")
    if fleet:
        load_fleet(fleet)  # what is wrong with it is known before anything is trained
    names = named_methods(only, list(methods), always=(reference, plain_reference, alone))
    best: dict[str, float] = {}
    found: dict[tuple[str, int], list[Trained]] = {}
    records, place = Records(Path(record) if record else None, told=told), scratch_place(needed_bytes)
    with tempfile.TemporaryDirectory(prefix="potluck-bench-", dir=place) as folder, job_pool(processes) as pool:

        def complete(jobs: Sequence[Job]) -> dict[Job, Trained]:
            return records.completed(pool, _run, jobs, told=partial(_say, told), before=partial(warm, jobs[0].seed))

        def warm(seed: int) -> None:
            if not _start(Path(folder), seed).exists():
                loss = pool.submit(_warm, Path(folder), seed).result()
                told(f"seed {seed}: the common start has {loss:.4f} ({time.monotonic() - began:.0f} s)")

        for seed in range(first_seed, first_seed + seeds):
            job = partial(Job, seed=seed, folder=Path(folder), fleet=fleet)
            if seed == first_seed:
                short = [
                    job(method=name, lr=lr, num_steps=num_steps // 2)
                    for name in names for lr in (methods[name].lrs if tune else methods[name].lrs[:1])
                ]  # fmt: skip
                done = complete(short)
                for name in names:
                    tried = [each for each in short if each.method == name]
                    best_one = min(tried, key=lambda each: _or_worst(done[each].loss))
                    best[name], found[name, num_steps // 2] = best_one.lr, [done[best_one]]
            whole = [job(method=name, lr=best[name], num_steps=num_steps) for name in names]
            for each, trained in complete(whole).items():
                found.setdefault((each.method, num_steps), []).append(trained)
    if picture:
        drawn = charts_svg(_charts({name: found[name, num_steps][0] for name in names}))
        try:
            Path(picture).write_text(drawn, encoding="utf-8")
        except OSError as error:
            told(f"{picture} cannot be written ({error.strerror}); the figures follow without it")
    figures: dict[str, Any] = {"seeds": seeds, "steps": num_steps, "seconds": round(time.monotonic() - began)}
    for name in names:
        figures |= {
            f"{name} {key}": value for key, value in _figures(name, found, num_steps, best[name]).items()
        }  # fmt: skip
    return figures


def _say(told: Callable[[str], None], job: Job, trained: Trained) -> None:
    told(f"seed {job.seed}: {job.method}, lr {job.lr:g}, {job.num_steps} steps: {trained.loss:.4f}")


def _lab(folder: Path, seed: int) -> Lab:
    torch.set_num_threads(1)
    own = folder / f"{os.getpid()}-{seed}-{time.monotonic_ns()}"
    own.mkdir()
    return Lab(sizes, own, seed, cache_dir=folder / "cache")


def _start(folder: Path, seed: int) -> Path:
    """Where the common start is kept."""
    return folder / f"start-{seed}"


def _warm(folder: Path, seed: int) -> float:
    """Train the common start; its validation loss."""
    lab = _lab(folder, seed)
    trained = lab.train(
        SyncSGD(SyncSGDConfig()), lab.start(), workers=num_workers, num_steps=sizes.num_warm_steps, lr=sizes.warm_lr,
        data_seed=seed * 10 + 1,
    )  # fmt: skip
    save_file({"params": trained.params}, _start(folder, seed))
    return trained.loss


def _run(job: Job) -> Trained:
    method, lab = methods[job.method], _lab(job.folder, job.seed)
    start = load_file(_start(job.folder, job.seed))["params"]
    model_bytes, workers = 4.0 * start.numel(), method.workers
    if job.fleet:
        conditions = _at_sites(method, job.fleet, seed=job.seed, model_bytes=model_bytes)
        workers = 1 if job.method == alone else len(conditions.links)
    else:
        conditions = method.conditions(model_bytes)
    return lab.train(
        method.made(), start, workers=workers, num_steps=job.num_steps, lr=job.lr, data_seed=job.seed * 10 + 2,
        codecs=method.codecs, inner=method.inner, conditions=conditions,
    )  # fmt: skip


Found = Mapping[tuple[str, int], Sequence[Trained]]
"""By method and steps, of each seed."""


def _figures(name: str, found: Found, num_steps: int, lr: float) -> dict[str, Any]:
    """Of one method; lists are of the seeds."""
    whole, half = found[name, num_steps], found[name, num_steps // 2]
    base = plain_reference if methods[name].inner == _plain else reference
    progress = [_progress(own, best) for own, best in zip(whole, found[base, num_steps], strict=True)]
    before = _progress(half[0], found[base, num_steps // 2][0])
    up, down = (
        _over(_later(found, reference, num_steps, way), _later(found, name, num_steps, way))
        for way in ("bytes_up_per_worker", "bytes_down_per_worker")
    )
    return {
        "lr": lr,
        "loss_nats": round(fmean(w.loss for w in whole), 4),
        "progress": round(fmean(progress), 3),
        "progress_of_seeds": [round(p, 3) for p in progress],
        "progress_of_half_the_steps": round(before, 3),
        "fewer_bytes_up": round(up, 1),
        "fewer_bytes_down": round(down, 1),
        "megabytes": round(fmean(w.bytes_per_worker for w in whole) / 1e6, 2),
        "seconds": round(fmean(w.seconds for w in whole)),
        "utilisation": round(fmean(w.utilisation for w in whole), 3),
        "counted_utilisation": round(fmean(w.counted_utilisation for w in whole), 3),
    }


def _later(found: Found, name: str, num_steps: int, way: str) -> float:
    """Bytes of the steps by which the longer run of the first seed is longer."""
    return getattr(found[name, num_steps][0], way) - getattr(found[name, num_steps // 2][0], way)


def _progress(own: Trained, best: Trained) -> float:
    return _over(own.first_loss - own.loss, best.first_loss - best.loss)


def _or_worst(loss: float) -> float:
    """inf for nan, which compares with nothing: of a run that came apart."""
    return math.inf if math.isnan(loss) else loss


def _over(number: float, other: float) -> float:
    """nan where the other is 0: of runs so short that nothing was sent, or gained, in them."""
    return number / other if other else math.nan


def _charts(trained: Mapping[str, Trained]) -> list[Chart]:
    def line(name: str, of: Callable[[Any], float]) -> Line:
        curve = [p for p in trained[name].curve if of(p) > 0 and math.isfinite(p.loss)]
        return Line(name=name, points=tuple((of(p), p.loss) for p in curve))

    return [
        Chart(
            title="Loss against time on slow links", x_name="seconds", y_name="nats",
            lines=tuple(line(name, lambda p: p.seconds) for name in trained),
        ),
        Chart(
            title="Loss against bytes of one worker, up and down", x_name="bytes", y_name="nats",
            lines=tuple(line(name, lambda p: p.bytes_per_worker) for name in trained),
        ),
    ]  # fmt: skip
