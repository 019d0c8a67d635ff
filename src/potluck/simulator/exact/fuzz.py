"""Whole runs under faults from a seed, on a virtual clock, with every invariant checked.

A seed fixes everything: the strategy and its settings, the codecs, the workers with their links and speeds, and the
faults. So a failing seed is replayed by its number alone.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

from potluck.aggregation.config import AggregationConfig
from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.coordinator.core import Coordinator
from potluck.coordinator.events import Event
from potluck.coordinator.plan import CheckpointConfig, ValidationConfig
from potluck.fleet.config import FleetConfig
from potluck.models.config import AdapterConfig
from potluck.optim.inner import InnerConfig
from potluck.protocol import pb
from potluck.simulator.exact.faults import KINDS, Chaos, Fault, Kind, aim, coordinator, draw
from potluck.simulator.exact.invariants import Violated, Witness
from potluck.simulator.exact.lives import own_tasks
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.reference import Reference
from potluck.simulator.exact.world import World
from potluck.storage.ledger import ReplyRow
from potluck.storage.objects import ObjectStore
from potluck.strategies.async_diloco import AsyncDiLoCo, AsyncDiLoCoConfig
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.fed_avg import FedAvg, FedAvgConfig
from potluck.strategies.fed_lora import FedLoRA, FedLoRAConfig, rules
from potluck.strategies.sparse_diloco import SparseDiLoCo, SparseDiLoCoConfig
from potluck.strategies.strategy import Strategy
from potluck.strategies.streaming_diloco import StreamingDiLoCo, StreamingDiLoCoConfig
from potluck.strategies.sub_gemm.strategy import SubGEMM, SubGEMMConfig
from potluck.strategies.sync_sgd import SyncSGD, SyncSGDConfig
from potluck.transport.memory import Link
from potluck.types.errors import PotluckError, RunStopped

most_virtual_s = 4 * 3600.0
most_real_s = 120.0
look_interval_s = 0.25
calm_every = 8
"""Of so many seeds one is played without its faults too."""
_shared_memory = "/dev/shm"
strategies = ("diloco", "sync_sgd")
_local_steps = ("diloco", "fed_avg", "fed_lora", "sparse_diloco")
_adapter = AdapterConfig(rank=2, alpha=4, target_modules=("q_proj", "v_proj"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run to be: all of it follows from the seed."""

    seed: int
    strategy: str
    num_rounds: int
    num_inner_steps: int
    min_workers: int
    up_codec: str
    down_codec: str
    rule: str
    checkpoint_every: int
    validate_every: int
    snapshot_every: int
    balance: Literal["none", "time"]
    links: tuple[Link, ...]  # of each worker
    seconds: tuple[float, ...]  # that each worker takes for four sequences
    faults: tuple[Fault, ...]
    min_reply_fraction: float
    reconnect_s: float = 6.0

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(f"w{i + 1}" for i in range(len(self.links)))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one seed."""

    seed: int
    outcome: str  # "finished", "stopped" with a reason, or "violated"
    detail: str = ""
    virtual_s: float = 0.0
    struck: tuple[Fault, ...] = ()
    num_points: int = 0
    num_cut_short: int = 0  # tasks that ended early because they were late
    history: tuple[str, ...] = field(default=(), repr=False)

    @property
    def is_good(self) -> bool:
        return self.outcome != "violated"


def _in_memory() -> str | None:
    """A folder without a disk behind it, where the system has one: the disks of these worlds need not outlive them."""
    return _shared_memory if os.access(_shared_memory, os.W_OK) else None


def case_of(seed: int, *, only: Sequence[str] = strategies, kinds: Sequence[Kind] = KINDS) -> Case:
    chance = random.Random(f"potluck/{seed}")
    num_workers = chance.choice((1, 2, 2, 3, 3, 4))
    links = tuple(
        Link(
            up_bytes_per_s=10 ** chance.uniform(4.5, 6.5),
            down_bytes_per_s=10 ** chance.uniform(5, 7),
            rtt_s=chance.choice((0.0, 0.02, 0.2)),
        )
        for _ in range(num_workers)
    )
    up, down = chance.choice(
        (("fp32", "fp32"), ("int8+ef", "fp32"), ("int8+ef", "bf16"), ("topk(6.25%)+ef", "int8-delta"), ("bf16", "bf16"))
    )
    case = Case(
        seed=seed,
        strategy=chance.choice(tuple(only)),
        num_rounds=chance.choice((2, 3, 4)),
        num_inner_steps=chance.choice((1, 2, 3)),
        min_workers=chance.randint(1, num_workers),
        up_codec=up,
        down_codec=down,
        rule=chance.choice(("mean", "mean", "mean", "median")),
        checkpoint_every=chance.choice((1, 2, 10)),
        validate_every=chance.choice((0, 1, 2)),
        snapshot_every=chance.choice((0, 1, 2)),
        balance=chance.choice(("none", "none", "time")),
        links=links,
        seconds=tuple(10 ** chance.uniform(-0.5, 1.0) for _ in range(num_workers)),
        faults=draw(
            chance,
            [f"w{i + 1}" for i in range(num_workers)],
            num_faults=chance.choice((1, 1, 2, 3, 4, 6)),
            most_points=chance.choice((60, 200, 500)),
            kinds=kinds,
        ),
        min_reply_fraction=chance.choice((0.5, 0.5, 1.0)),
    )
    case = replace(case, faults=(*case.faults, *aim(chance, case.workers, kinds=kinds)))
    if case.strategy == "sparse_diloco":  # it goes with no other codec and no other rule
        case = replace(case, up_codec="topk(6.25%)+2bit+ef(0.95)", rule="norm_clipping")
    if case.strategy == "async_diloco":
        settings = asynchronous(case)
        if (
            not settings.quorum
            and case.min_workers > 2 * settings.updates_per_commit
            and case.down_codec == "int8-delta"
        ):
            case = replace(case, down_codec="bf16")  # so many differences are more than the whole: that is refused
        return replace(case, rule="mean", num_rounds=3 * case.num_rounds)  # a round takes as little as one update
    if case.strategy == "streaming_diloco":  # rounds overlap: it takes some until all that can be under way is
        case = _with_lost_work(case, chance, kinds) if chance.random() < 0.5 else case
        return replace(case, num_rounds=case.num_rounds + 3, balance="none")
    if case.strategy not in _local_steps:
        return case
    if case.strategy == "fed_avg" and federated(case).control_variates:
        case = replace(case, balance="none")
    if case.strategy == "fed_lora" and not rules[_adapted(case).rule].is_mean:
        case = replace(case, balance="none", rule="mean")
    if case.balance == "none":
        return _with_lost_work(case, chance, kinds) if chance.random() < 0.5 else case
    return _with_late_work(case, chance, kinds)


def asynchronous(case: Case) -> AsyncDiLoCoConfig:
    """One of the ways to count updates; how long a cycle is does not depend on who is here."""
    chance = random.Random(f"asynchronous/{case.seed}")
    quorum = chance.choice((0.0, 0.0, 0.5, 1.0))
    settings = AsyncDiLoCoConfig(
        num_inner_steps=case.num_inner_steps,
        outer_momentum=0.6,
        momentum_every=chance.choice((1, 2, 3, 4)),
        momentum_spread=chance.choice((0.0, 0.0, 0.5, 1.0)),
        updates_per_commit=chance.choice((1, 1, 2, 3)),
        staleness=chance.choice(("none", "polynomial", "hinge")),
        staleness_free=1,
        grace=chance.choice((0.0, 0.5, 2.0)),
    )
    if quorum:  # in place of a number of updates
        settings = settings.model_copy(update={"quorum": quorum, "updates_per_commit": 1})
    return settings


def federated(case: Case) -> FedAvgConfig:
    """FedAvg, or one of its relatives; normalised, which unequal work needs, where work is balanced."""
    relatives: tuple[dict[str, Any], ...] = (
        {}, {"outer_momentum": 0.6}, {"proximal": 0.5}, {"outer": "adam"}, {"outer": "yogi", "normalised": True},
        {"control_variates": True},
    )  # fmt: skip
    chosen = dict(random.Random(f"federated/{case.seed}").choice(relatives))
    if case.balance == "time" and "control_variates" not in chosen:
        chosen["normalised"] = True
    return FedAvgConfig(
        num_inner_steps=case.num_inner_steps, min_reply_fraction=case.min_reply_fraction, **chosen
    )  # fmt: skip


def _adapted(case: Case) -> FedLoRAConfig:
    """One of the rules."""
    return FedLoRAConfig(
        rule=random.Random(f"adapted/{case.seed}").choice(list(rules)), num_inner_steps=case.num_inner_steps,
        min_reply_fraction=case.min_reply_fraction,
    )  # fmt: skip


def _with_lost_work(case: Case, chance: random.Random, kinds: Sequence[Kind]) -> Case:
    """Some lose a task in its middle, of which a snapshot stays, and come back to another one: of a later round, or of
    the same with other data, where one of them stays away."""
    ways: list[Kind] = [kind for kind in ("crash", "hang", "partition") if kind in kinds]
    nth = chance.randint(1, 9)
    lost = chance.sample(case.workers, min(2, len(case.workers))) if ways else []
    faults = tuple(
        Fault(
            machine=worker, kind=chance.choice(ways), point=chance.randint(1, 3), lasts_s=lasts_s,
            after="_perform", nth=nth + chance.randint(0, 1),
        )
        for worker, lasts_s in zip(lost, (8.0, chance.choice((8.0, 60.0))), strict=False)
    )  # fmt: skip
    return replace(
        case, num_rounds=4, num_inner_steps=3, min_workers=1, snapshot_every=1, faults=(*case.faults[:1], *faults),
        seconds=tuple(max(seconds, 2.0) for seconds in case.seconds),
    )  # fmt: skip


def _with_late_work(case: Case, chance: random.Random, kinds: Sequence[Kind]) -> Case:
    """Who is late is known from the third round on, and only work of several steps can end early: so more of both, and
    faults that hold workers up there."""
    holding_up: list[Kind] = [kind for kind in ("crash", "hang", "slow", "partition") if kind in kinds]
    faults = tuple(
        Fault(
            machine=chance.choice(case.workers), kind=chance.choice(holding_up), point=chance.randrange(200, 1000),
            lasts_s=round(10 ** chance.uniform(0.0, 1.5), 2),
        )
        for _ in range(3 if holding_up else 0)
    )  # fmt: skip
    return replace(
        case, num_rounds=case.num_rounds + 2, num_inner_steps=3 * case.num_inner_steps, reconnect_s=30.0,
        faults=(*case.faults, *faults),
    )  # fmt: skip


def play_seed(
    seed: int, *, only: Sequence[str] = strategies, kinds: Sequence[Kind] = KINDS, faults: Sequence[Fault] | None = None
) -> Verdict:
    """Play one seed to its end in a scratch folder; with other `faults` than its own where they are given."""
    case = case_of(seed, only=only, kinds=kinds)
    play = _Play(case, case.faults if faults is None else tuple(faults))
    verdict = play.run()
    is_due = seed % calm_every == 0 and all(f.kind != "wiped" for f in verdict.struck)
    if verdict.outcome == "finished" and verdict.struck and is_due:
        calm = _Play(case, ())
        if not calm.run().is_good:
            return replace(verdict, outcome="violated", detail="the run without faults does not finish")
        if (differs := play.differs(calm)) is not None:
            return replace(verdict, outcome="violated", detail=differs)
    return verdict


@dataclass(frozen=True, kw_only=True)
class Fuzzed:
    """What many seeds came to."""

    num_seeds: int
    outcomes: dict[str, int]
    struck: dict[str, int]  # faults by kind and by where
    num_cut_short: int
    virtual_s: float
    violated: tuple[Verdict, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "seeds": self.num_seeds,
            "outcomes": self.outcomes,
            "faults": self.struck,
            "cut_short": self.num_cut_short,
            "virtual_hours": round(self.virtual_s / 3600.0, 2),
            "violations": [{"seed": v.seed, "violation": v.detail} for v in self.violated],
        }


def fuzz(
    seeds: Sequence[int], *, num_jobs: int = 1, told: Callable[[int, int], None] = lambda _done, _bad: None,
    until_first: bool = True,
) -> Fuzzed:  # fmt: skip
    """Play every seed, in so many processes; up to the first violation unless `until_first` is off."""
    verdicts: list[Verdict] = []
    bad = 0
    for verdict in _verdicts(seeds, num_jobs):
        verdicts.append(verdict)
        bad += not verdict.is_good
        told(len(verdicts), bad)
        if bad and until_first:
            break
    return Fuzzed(
        num_seeds=len(verdicts),
        outcomes=dict(sorted(Counter(v.outcome for v in verdicts).items())),
        struck=dict(sorted(kinds_struck(verdicts).items())),
        num_cut_short=sum(v.num_cut_short for v in verdicts),
        virtual_s=sum(v.virtual_s for v in verdicts),
        violated=tuple(v for v in verdicts if not v.is_good),
    )


def _verdicts(seeds: Sequence[int], num_jobs: int) -> Iterator[Verdict]:
    if num_jobs == 1:
        yield from map(play_seed, seeds)
        return
    with ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn"), initializer=_in_one_thread) as pool:
        try:
            yield from pool.map(play_seed, seeds, chunksize=4)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _in_one_thread() -> None:
    """So small products gain nothing from a second one."""
    torch.set_num_threads(1)


def kinds_struck(verdicts: Sequence[Verdict]) -> Counter[str]:
    return Counter(
        f"{f.kind} {'coordinator' if f.machine == coordinator else 'worker'}" for v in verdicts for f in v.struck
    )


class _Play:
    """One run under faults, watched."""

    def __init__(self, case: Case, faults: Sequence[Fault]) -> None:
        self.case = case
        self._history: list[str] = []
        self.chaos = Chaos(faults, self._history.append)
        self._violation = ""
        self._recovered: Coordinator | None = None  # the process whose start was looked at

    def run(self) -> Verdict:
        with tempfile.TemporaryDirectory(prefix="potluck-fuzz-", dir=_in_memory()) as folder, _at_most(most_real_s):
            return run_virtual(self._run(Path(folder)))

    def differs(self, calm: _Play) -> str | None:
        """How this run's end differs from that of another one in which the same work counted."""
        if self.witness.counted != calm.witness.counted:
            return None
        for name, values in calm.witness.values.items():
            difference = (values - self.witness.values[name]).abs().max().item()
            if difference > 10 * self.witness.tolerance:
                return f"the same work counted as without faults, and {name} differs by {difference:.2e} at the end"
        return None

    async def _run(self, folder: Path) -> Verdict:
        own_tasks(asyncio.get_running_loop())
        case, problem = self.case, self._problem()
        strategy = self._strategy()
        alone = SubGEMM(SubGEMMConfig()) if case.strategy == "sub_gemm" else None
        self.witness = Witness(problem.num_shards * problem.sequences_per_shard, problem.seq_len, alone=alone)
        plan = problem.plan(strategy)
        self.witness.always_kept = frozenset(plan.open_objects)
        self.witness.kept |= self.witness.always_kept
        plan = replace(plan, open_objects=self.witness.kept)
        base = problem.base_files(ObjectStore(folder / "reference-base"))
        reference = Reference(plan.spec, folder / "reference", base=base)
        self.witness.redo = partial(self._redo, reference)
        self.witness.adopted = reference.adopt
        self.world = world = World(
            plan, problem.make_deck, folder, clock=VirtualClock(), make_executor=InlineExecutor, fate=self.chaos
        )
        world.on_event = self._heard
        self.chaos.join(world)
        for name, link, seconds in zip(case.workers, case.links, case.seconds, strict=True):
            world.add(name, link=link, cost_s=_cost(seconds))
        world.restart()
        outcome, detail = "violated", ""
        try:
            outcome, detail = await self._to_the_end()
        except Violated as error:
            detail = str(error)
        virtual_s = world.clock.now()
        await self._let_go()
        return Verdict(
            seed=case.seed, outcome=outcome, detail=detail, virtual_s=virtual_s, struck=tuple(self.chaos.struck),
            num_points=sum(self.chaos.points.values()), num_cut_short=self.witness.num_cut_short,
            history=tuple(self._history),
        )  # fmt: skip

    def _redo(self, reference: Reference, run: Coordinator, lease: pb.Lease, row: ReplyRow) -> None:
        wiped = any(fault.kind == "wiped" and fault.machine == row.worker for fault in self.chaos.struck)
        reference.check(lease, row, run.objects, may_be_fresh=wiped)

    def _problem(self) -> Problem:
        case = self.case
        fleet = FleetConfig(
            min_workers=case.min_workers,
            reconnect_s=case.reconnect_s,
            no_progress_s=60.0,
            quarantine_s=30.0,
            max_discarded_rounds=20,
            snapshot_every_steps=case.snapshot_every,
            balance=case.balance,
        )
        optimizer = "sgd" if case.strategy == "fed_avg" and federated(case).control_variates else "adamw"
        of_adapters: dict[str, Any] = {"family": "llama", "adapter": _adapter}
        return Problem(
            **(of_adapters if case.strategy == "fed_lora" else {}),
            num_rounds=case.num_rounds, seed=case.seed, num_shards=3, sequences_per_shard=16, fleet=fleet,
            inner=InnerConfig(optimizer=optimizer, lr=3e-3, batch_size=4, warmup=0.1),
            up_codec=case.up_codec, down_codec=case.down_codec,
            checkpoint=CheckpointConfig(every_rounds=case.checkpoint_every),
            validating=ValidationConfig(every_rounds=case.validate_every),
            aggregation=AggregationConfig.model_validate({"rule": case.rule}),
        )  # fmt: skip

    def _strategy(self) -> Strategy:
        if self.case.strategy == "sync_sgd":
            return SyncSGD(SyncSGDConfig(min_reply_fraction=self.case.min_reply_fraction))
        if self.case.strategy == "async_diloco":
            return AsyncDiLoCo(asynchronous(self.case))
        if self.case.strategy == "streaming_diloco":
            return StreamingDiLoCo(_streaming(self.case))
        if self.case.strategy == "sub_gemm":
            return SubGEMM(SubGEMMConfig(head_computes=self.case.seed % 6 == 0, least_side=4))
        if self.case.strategy == "fed_avg":
            return FedAvg(federated(self.case))
        if self.case.strategy == "fed_lora":
            return FedLoRA(_adapted(self.case))
        local = {"num_inner_steps": self.case.num_inner_steps, "min_reply_fraction": self.case.min_reply_fraction}
        if self.case.strategy == "sparse_diloco":
            return SparseDiLoCo(SparseDiLoCoConfig.model_validate(local))
        return DiLoCo(DiLoCoConfig.model_validate({"outer_momentum": 0.6, **local}))

    # Watching

    def _heard(self, event: Event) -> None:
        """In the coordinator's own task, so a violation is kept until the next look."""
        self._history.append(f"{self.world.clock.now():9.3f} {event.text}")
        run = self.world.run
        if run is None or self._violation:
            return
        try:
            self._look_at_restart(run)
            if event.kind == "round":
                self.witness.told(run, int(event.detail["round"]))
            elif event.kind == "discarded":
                self.witness.discarded(run, int(event.detail["round"]) - 1)
            elif event.kind == "lost":
                self.witness.lost(run, str(event.detail["worker"]), self.world.clock.now())
            else:
                self.witness.glance(run)
        except Violated as error:
            self._violation = str(error)

    def _look_at_restart(self, run: Coordinator) -> None:
        if run is not self._recovered and run.recovered.is_set():
            self._recovered = run
            self.witness.recovered(run)

    async def _to_the_end(self) -> tuple[str, str]:
        world = self.world
        while world.clock.now() < most_virtual_s:
            await world.clock.sleep(look_interval_s)
            if self._violation:
                raise Violated(self._violation)
            self._look_at_workers()
            run, life = world.run, world.life
            if run is None or life is None or not life.alive or world.training is None:
                self._look_at_boot()
                continue
            if not run.whole.locked():  # in the middle of a commit its state is not what is written down
                self._look_at_restart(run)
            if not self.chaos.stands_still(coordinator):
                self.witness.losses(run, world.clock.now())
            if run.failure is not None:
                self._coordinator_failed(run.failure)
            elif world.training.done() and not world.training.cancelled():
                error = world.training.exception()
                if isinstance(error, RunStopped):
                    return "stopped", str(error)
                if error is None:
                    return self._finished()
                self._coordinator_failed(error)
        raise Violated(f"the run has not ended after {most_virtual_s:.0f} s; it says: {self._phase()}")

    def _finished(self) -> tuple[str, str]:
        run = self.world.run
        assert run is not None and run.state is not None
        self.witness.look(run)
        if run.state.round != self.case.num_rounds:
            raise Violated(f"the run ended after {run.state.round} of {self.case.num_rounds} rounds")
        return "finished", ""

    def _phase(self) -> str:
        return self.world.run.fleet.phase if self.world.run is not None else "the coordinator is down"

    def _look_at_boot(self) -> None:
        booting, life = self.world.booting, self.world.life
        if booting is None or life is None or not life.alive or not booting.done():
            return
        if not booting.cancelled() and (error := booting.exception()) is not None:
            self._coordinator_failed(error)

    def _coordinator_failed(self, error: BaseException) -> None:
        """Only a full disk may end it; it is started again when there is room."""
        if not self.chaos.full_disk(coordinator, error):
            raise Violated(f"the coordinator ended with {type(error).__name__}: {error}") from error
        self._history.append(f"{self.world.clock.now():9.3f} the coordinator ended: {error}")
        self.world.kill_coordinator()
        self.chaos.later(120.0, lambda: self.chaos.revive(coordinator))

    def _look_at_workers(self) -> None:
        for id, host in self.world.hosts.items():
            task, agent = host.task, host.agent
            if task is None or agent is None or not task.done() or task.cancelled() or self.chaos.is_down(id):
                continue
            error = task.exception()
            if error is None and not agent.ended:  # it left
                self.chaos.bring_back(id, 5.0)
                continue
            if error is None or self.chaos.full_disk(id, error) or isinstance(error, PotluckError):
                why = agent.ended or str(error)
                self._history.append(f"{self.world.clock.now():9.3f} {id} ended: {why}")
                self.chaos.bring_back(id, 100.0)
            else:
                raise Violated(f"{id} ended with {type(error).__name__}: {error}") from error

    async def _let_go(self) -> None:
        world = self.world
        for host in world.hosts.values():
            if host.life is not None:
                host.life.end()
                await host.life.gone()
        if world.life is not None:
            world.life.end()
            await world.life.gone()
        if world.last is not None:
            world.last.ledger.close()
        world.network.fail()


def _streaming(case: Case) -> StreamingDiLoCoConfig:
    """Two fragments, and any overlap that this allows."""
    chance = random.Random(f"streaming/{case.seed}")
    num_inner_steps = 2 * case.num_inner_steps
    return StreamingDiLoCoConfig(
        num_inner_steps=num_inner_steps, num_fragments=2, overlap_steps=chance.randrange(num_inner_steps),
        mixing=chance.choice((0.0, 0.5)), eager=chance.random() < 0.25, outer_momentum=0.6,
        min_reply_fraction=case.min_reply_fraction,
    )  # fmt: skip


def _cost(seconds: float) -> Callable[[pb.Lease], float]:
    return lambda lease: seconds * max(lease.num_sequences, 1) / 4.0


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Violated if it takes longer in real time: something spins without the clock moving on."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: object) -> None:
        raise Violated(f"it has not ended after {seconds:.0f} s of real time")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
