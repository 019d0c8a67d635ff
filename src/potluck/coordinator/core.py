"""One run on the coordinator: its stores, its fleet, and what the main loop does with them.

Knows neither sockets nor the command line: `coordinator.host` gives it a network and `simulator` a modelled one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from potluck.aggregation.config import AggregationConfig
from potluck.aggregation.report import Report
from potluck.clock import Clock, Lanes
from potluck.codecs.policy import CodecRule
from potluck.coordinator.deck import Deck
from potluck.coordinator.divergence import Diverged, DivergenceConfig, RoundFigures, Watch
from potluck.coordinator.events import Event, OnEvent
from potluck.coordinator.kit import Kit
from potluck.coordinator.transfer import TransferConfig
from potluck.coordinator.uploads import Uploads
from potluck.fleet.config import FleetConfig
from potluck.fleet.intake import Intake
from potluck.fleet.live import LiveFleet
from potluck.fleet.roster import Roster
from potluck.planner.compression import CompressionConfig
from potluck.storage.database import Database
from potluck.storage.files import rest
from potluck.storage.ledger import MARK, CommitRow, Ledger, Operation
from potluck.storage.objects import ObjectStore
from potluck.storage.params import ParamStore
from potluck.strategies import evaluation
from potluck.strategies.run import Budget, RunFacts, RunSpec
from potluck.strategies.state import State
from potluck.strategies.strategy import Strategy
from potluck.transport.connection import Traffic
from potluck.transport.pace import Pacer
from potluck.types.errors import CorruptError, RoundFailed, RunStopped
from potluck.types.ids import Digest, WorkerId
from potluck.types.params import Layout, Params
from potluck.types.vector import Vector

last_validation_wait_s = 120.0
tidy_interval_s = 10.0
sampled_numel = 1 << 22
"""Elements by which the norm of a round's step is estimated, where the model has more."""
ROLL_BACK = "roll_back"
lost_files = "its files are gone"
VALIDATION_ATTEMPT = 1_000_000
"""Validation works under this attempt, so that its tasks never mix with those of the round that follows."""


class CheckpointConfig(BaseModel):
    """The `[checkpoint]` section of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every_rounds: int = Field(
        default=10, ge=1, description="rounds between checkpoints; the last round is always saved"
    )
    keep: int = Field(default=2, ge=1, description="how many checkpoints are kept")
    durability: Literal["process", "power"] = Field(
        default="process",
        description="what a committed round survives: the death of the process, or a power cut (an fsync each round)",
    )


class ValidationConfig(BaseModel):
    """The `[validation]` section of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every_rounds: int = Field(
        default=5, ge=0, description="rounds between validations; 0 for only the first and the last"
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run as it was prepared from a recipe: everything that is the same each time the run is started."""

    spec: RunSpec
    strategy: Strategy
    layout: Layout
    initial: Callable[[], Vector | Tensor]  # makes the first parameters, fp32 [layout.numel]; blocks
    budget: Budget
    fleet: FleetConfig
    checkpoint: CheckpointConfig
    validation: ValidationConfig
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    divergence: DivergenceConfig = field(default_factory=DivergenceConfig)
    up_codec: str = "fp32"
    down_codec: str = "fp32"
    up_rules: tuple[CodecRule, ...] = ()
    down_rules: tuple[CodecRule, ...] = ()
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    open_objects: tuple[Digest, ...] = ()  # what any member may fetch: the tokenizer


class Coordinator:
    """A run. Build it with `Coordinator.open`."""

    def __init__(
        self, plan: Plan, folder: Path, *, deck: Deck, ledger: Ledger, objects: ObjectStore, params: ParamStore,
        facts: RunFacts, clock: Clock, lanes: Lanes, on_event: OnEvent, kit: Kit,
    ) -> None:  # fmt: skip
        self.plan, self.folder, self.deck = plan, folder, deck
        self.config, self.strategy = plan.fleet, plan.strategy
        self.ledger, self.objects, self.params, self.facts = ledger, objects, params, facts
        self.clock, self.lanes, self._on_event = clock, lanes, on_event
        self.checkpoints = kit.checkpoints(folder / "checkpoints", params, keep=plan.checkpoint.keep)
        self.pacer = Pacer(clock, plan.transfer.limits())
        self.roster = Roster(plan.fleet)
        self.fleet = LiveFleet(
            run=facts, config=plan.fleet, roster=self.roster, ledger=ledger, objects=objects, params=params,
            publisher=kit.publisher(facts, params, objects, folder, lanes.compute),
            updates=kit.updates(facts, params, objects), data=deck, clock=clock, lanes=lanes,
        )  # fmt: skip
        self.fleet.lost = lambda worker, reason: self.tell("lost", reason, worker=worker, reason=reason)
        self.fleet.encoding.told = lambda worker, reason: self.tell("codec", reason, worker=worker, reason=reason)
        self.fleet.waits = lambda text: self.tell("waiting", text, reason=text)
        self.fleet.combined = self._combined
        self.fleet.watching.held_back = self.pacer.held_back
        self.intake = Intake(self.fleet, clock, lanes)
        self.intake.failed = self.fail
        self.intake.noted = lambda worker, text: self.tell("note", f"{worker}: {text}", worker=worker)
        self.state: State | None = None
        self.losses: dict[int, float] = {}  # validation loss by round
        self.operations: list[Operation] = []  # what was done to the run as a whole
        self._watch = Watch(plan.divergence)
        self.stop_reason = ""
        self.failure: BaseException | None = None  # what ends the run, such as a full disk here
        self.recovered = asyncio.Event()
        self.uploads = Uploads()
        self.traffic: Callable[[str], Traffic] = lambda _: Traffic()  # of this process, by worker; set by the host
        self.seen: Callable[[str], None] = lambda _: None  # blocks; notes in the member book that a worker was here
        self.tidy: Callable[[], None] = lambda: None  # blocks; gives memory that is free back to the system
        self._tidied_at = clock.now()
        self.whole = asyncio.Lock()  # held while a round is committed, discarded or saved: a stop waits for it
        self._resumes = False  # the round under way was begun by an earlier process
        self._given: dict[str, dict[str, Any]] = {}  # by worker: tokens, rounds, bytes of earlier processes
        self._written: dict[str, tuple[int, int]] = {}  # bytes up and down that the ledger has of this process
        self._attempt = 0
        self._begun_at = 0.0
        self._num_discarded = 0
        self._started_at = clock.now()

    @staticmethod
    async def open(
        plan: Plan, folder: Path, *, deck: Deck, objects: ObjectStore, clock: Clock, lanes: Lanes,
        on_event: OnEvent, kit: Kit | None = None,
    ) -> Coordinator:  # fmt: skip
        """Open the run's stores in its folder, new or as they were left."""
        parts = kit or Kit()

        def build() -> tuple[Ledger, ParamStore, RunFacts]:
            durable = plan.checkpoint.durability == "power"
            ledger = open_ledger(folder, durable=durable)
            params = parts.params(folder / "params", durable=durable)
            facts = RunFacts(
                seed=plan.spec.seed,
                layout=plan.layout,
                initial=params.find("initial", plan.layout.numel) or params.create("initial", plan.initial()),
                zeros=params.zeros("zeros", plan.layout.numel),
                seq_len=plan.spec.seq_len,
                inner=plan.spec.inner,
                budget=plan.budget,
                up_codec=plan.up_codec,
                down_codec=plan.down_codec,
                up_rules=plan.up_rules,
                down_rules=plan.down_rules,
                compression=plan.compression,
                aggregation=plan.aggregation,
            )
            return ledger, params, facts

        ledger, params, facts = await lanes.compute.run(build)
        return Coordinator(
            plan, folder, deck=deck, ledger=ledger, objects=objects, params=params, facts=facts, clock=clock,
            lanes=lanes, on_event=on_event, kit=parts,
        )  # fmt: skip

    # What the main loop does

    async def recover(self) -> State:
        """The last committed state whose files are whole, else the one of a checkpoint, else the first."""
        stored = await self.lanes.ledger.run(self.ledger.last_state)
        state = self.strategy.init(self.facts)
        if stored is not None:
            try:
                committed = self.strategy.State.from_json(stored)
                await self.lanes.compute.run(self._verify, committed)
                state = committed
            except CorruptError as error:
                state = await self._from_checkpoint(state, str(error))
        elif await self.lanes.compute.run(self.checkpoints.names):
            state = await self._from_checkpoint(state, "the ledger knows no round")
        deal = await self.lanes.ledger.run(self.ledger.deal)
        if deal is not None:
            self.deck.restore(deal)
        await self._read_records()
        await self.fleet.recover_floating()
        unfinished = await self.lanes.ledger.run(self.ledger.unfinished_attempt, state.round)
        self._resumes = unfinished is not None
        if unfinished is not None:
            await self.fleet.recover_attempt(state.round, unfinished)
        self.state = state
        self.recovered.set()  # from now on workers can be told what to do
        if state.round:
            self.tell("note", f"continuing after round {state.round}, {state.tokens:,} tokens", round=state.round)
        return state

    async def _read_records(self) -> None:
        """What the ledger has of the rounds so far."""
        run = self.lanes.ledger.run
        self.losses = dict(await run(self.ledger.metrics, "validation_loss"))
        self._given = {row["id"]: row for row in await run(self.ledger.contributions)}
        self.operations = await run(self.ledger.operations)
        last = Watch.num_needed(self.plan.divergence)
        norms = dict(await run(self.ledger.metrics, "step_norm", last))
        losses = await run(self.ledger.metrics, "loss", last)
        figures = [RoundFigures(round=r, loss=x, step_norm=norms.get(r, 0.0)) for r, x in losses]
        self._watch = Watch(self.plan.divergence, figures)

    def _verify(self, state: State) -> None:
        for handle in state.handles():
            self.params.check(handle)

    async def _from_checkpoint(self, first: State, reason: str) -> State:
        found = await self.lanes.compute.run(self.checkpoints.load_latest)
        for skipped in self.checkpoints.skipped:
            self.tell("note", skipped)
        if found is None:
            self.tell("note", f"{reason}; there is no checkpoint, so the run starts again")
            await self.lanes.ledger.run(self.ledger.roll_back, 0, self.deck.fresh(), lost_files)
            return first
        state, deal = self._state_of(*found)
        await self.lanes.ledger.run(self.ledger.roll_back, state.round, deal, lost_files)
        self.tell("note", f"{reason}; going back to the checkpoint of round {state.round}", round=state.round)
        return state

    def _state_of(self, manifest: dict[str, Any], handles: dict[str, Params]) -> tuple[State, Any]:
        """The state of a checkpoint that was read, and the deal of the data then."""
        state = self.strategy.State.from_json(manifest["state"])
        named = state.named_handles()
        state = state.moved({named[name]: handle for name, handle in handles.items() if name in named})
        return state, self.deck.reclaimed(manifest["deal"])

    def finished(self, state: State) -> bool:
        return bool(self.stop_reason) or self.facts.progress(state) >= 1.0

    @property
    def num_needed(self) -> int:
        """Workers to wait for, 0 for the recipe's: a round that an earlier process began goes on with anyone."""
        return 1 if self._resumes and self.fleet.workers() else 0

    async def begin(self, state: State) -> None:
        self._attempt = await self.lanes.ledger.run(self.ledger.open_attempt, state.round, self.clock.time())
        self._resumes = False
        self._begun_at = self.clock.now()
        await self.fleet.begin(state.round, self._attempt)
        self.fleet.phase = f"round {state.round + 1}"

    async def discard(self, state: State, reason: RoundFailed) -> State:
        """The round leaves no trace but the log; the state to go on from. RunStopped after too many in a row."""
        if self.plan.divergence.watch and 2 * len(self.fleet.overflowed) > len(self.fleet.workers()):
            reason = Diverged(str(reason), self._watch.good_round(state.round + 1, is_loss=True))
        if isinstance(reason, Diverged):
            return await self._roll_back(state, reason)
        await self._discard(state, str(reason))
        self._num_discarded += 1
        text = f"round {state.round + 1} discarded: {reason}"
        self.tell("discarded", text, round=state.round + 1, reason=str(reason))
        if self._num_discarded >= self.config.max_discarded_rounds:
            raise RunStopped(
                f"{self._num_discarded} rounds in a row were discarded, the last because {reason}; "
                "the run continues from its last committed round with --resume"
            )
        return state

    async def _discard(self, state: State, reason: str, operation: Operation | None = None) -> None:
        async with self.whole:
            deal = self.fleet.settle_data(committed=False)
            await self.lanes.ledger.run(self.ledger.discard, state.round, self._attempt, reason, deal, operation)
            self.fleet.end(committed=False)

    async def _roll_back(self, state: State, reason: Diverged) -> State:
        """Back to a state that nothing speaks against: the last committed one, or that of a checkpoint, or the first.

        RunStopped where the run has gone back as often as it may; it then goes on from that state with --resume.
        """
        num_before = sum(operation.kind == ROLL_BACK for operation in self.operations)

        def operation(round: int) -> Operation:
            return Operation(kind=ROLL_BACK, at=self.clock.time(), round=state.round,
                             value={"to_round": round, "reason": str(reason)})  # fmt: skip

        if reason.good_round >= state.round:
            await self._discard(state, str(reason), operation(state.round))
            self.operations = await self.lanes.ledger.run(self.ledger.operations)
        else:
            async with self.whole:
                state = await self._return_to(reason, operation)
        text = f"{reason}; going back to round {state.round}"
        self.tell("rolled_back", text, round=state.round, reason=str(reason))
        if num_before >= self.plan.divergence.max_roll_backs:
            raise RunStopped(
                f"{reason}, after {num_before} times that the run went back by itself; it stands at round "
                f"{state.round}: look for what is wrong (a worker's data, the learning rate), then go on with --resume"
            )
        return state

    async def _return_to(self, reason: Diverged, operation: Callable[[int], Operation]) -> State:
        """Take up the newest checkpoint that is old enough, else the oldest one. The ledger's one transaction counts.

        Checkpoints that are no good go first: a process that dies before the transaction finds out once more.
        """

        def read() -> tuple[dict[str, Any], dict[str, Params]] | None:
            self.checkpoints.remove_where(lambda content: content["state"]["round"] > reason.good_round)
            return self.checkpoints.load_latest()

        found = await self.lanes.compute.run(read)
        state, deal = self._state_of(*found) if found else (self.strategy.init(self.facts), self.deck.fresh())
        self.fleet.restart()
        go_back = partial(
            self.ledger.roll_back, state.round, deal, str(reason), state=state.to_json(),
            operation=operation(state.round),
        )  # fmt: skip
        await self.lanes.ledger.run(go_back)
        self.deck.restore(deal)
        self.state = state
        self.uploads.keep(())
        await self._read_records()
        await self._collect(state)
        return state

    async def settle(self, proposed: State) -> None:
        """Have on the disk what a proposed state keeps. RoundFailed if that cannot be made."""
        await self.lanes.compute.run(self.params.settle, proposed.handles())

    async def commit(self, state: State, proposed: State) -> State:
        """The round counts, from the ledger's transaction on."""
        async with self.whole:
            return await self._commit(state, proposed)

    async def _commit(self, state: State, proposed: State) -> State:
        accepted, cut_short = self.fleet.accepted(), self.fleet.cut_short()
        figures = await self._figures(state, proposed)
        self._watch.judge(figures)
        proposed = replace(proposed, seconds=state.seconds + self.clock.now() - self._begun_at)
        deal = self.fleet.settle_data(committed=True)
        row = CommitRow(
            round=state.round, attempt=self._attempt, state=proposed.to_json(), deal=deal, accepted=accepted,
            metrics={"loss": figures.loss, "step_norm": figures.step_norm},
        )  # fmt: skip
        await self.lanes.ledger.run(self.ledger.commit, row, self.clock.time())
        self.fleet.end(committed=True)
        self.state = proposed
        self._watch.commit(figures)
        self._num_discarded = 0
        for reply in accepted:
            given = self._given.setdefault(reply.worker, _nothing(reply.worker))
            given["tokens"] += int(reply.scalars.get("num_tokens", 0))
            given["rounds"] += 1
        names = sorted({r.worker for r in accepted})
        seconds = self.clock.now() - self._begun_at
        left = "".join(f"  {worker} cut short by {steps} steps" for worker, steps in sorted(cut_short.items()))
        self.tell(
            "round", f"round {proposed.round}  loss {proposed.loss:.4f}  {', '.join(names)}  {seconds:.1f} s{left}",
            round=proposed.round, loss=proposed.loss, workers=names, tokens=proposed.tokens, seconds=seconds,
            cut_short=cut_short,
        )  # fmt: skip
        await self.lanes.ledger.run(self._write_traffic)
        await self._collect(proposed)
        return proposed

    async def _figures(self, state: State, proposed: State) -> RoundFigures:
        norm = 0.0
        if self.plan.divergence.watch and proposed.params != state.params:

            def distance() -> float:
                return self.params.distance(state.params, proposed.params, at_most=sampled_numel)

            norm = await self.lanes.compute.run(distance)
        return RoundFigures(round=state.round + 1, loss=proposed.loss, step_norm=norm)

    def _combined(self, report: Report, workers: Sequence[WorkerId]) -> None:
        """Tell which updates did not count whole."""
        if text := report.sentence(workers):
            self.tell(
                "aggregation", text, rule=report.rule, left_out=[workers[i] for i in report.left_out],
                scaled={workers[i]: report.factors[i] for i in report.scaled},
            )  # fmt: skip

    async def _collect(self, state: State) -> None:
        """Remove what neither this state, the run's beginning nor a checkpoint needs."""
        handles = {*state.handles(), self.facts.initial, self.facts.zeros}
        self.fleet.publisher.forget(handles)
        self.uploads.keep(self.fleet.book.open)
        keep = {*self.fleet.objects_in_use(), *self.deck.digests(), *self.plan.open_objects}

        is_due = self.clock.now() - self._tidied_at >= tidy_interval_s
        if is_due:
            self._tidied_at = self.clock.now()

        def remove() -> None:
            if is_due:
                self.tidy()
            self.params.remove_except(handles)
            self.objects.collect(lambda digest: digest in keep or digest in self.uploads)  # some begin meanwhile

        await self.lanes.compute.run(remove)

    async def validate(self, state: State) -> None:
        """The loss on held-out text where it is due: at the start, every so many rounds, at the end."""
        every = self.plan.validation.every_rounds
        due = state.round == 0 or self.finished(state) or (every and state.round % every == 0)
        if not due or state.round in self.losses or self.deck.num_held_out == 0 or self.stop_reason:
            return
        if self._resumes:
            return  # it was tried before the round began whose work is still in the workers' hands
        try:
            wait_s = last_validation_wait_s if self.finished(state) else None
            async with asyncio.timeout(wait_s):
                await self.fleet.ready()
        except TimeoutError:  # the training is done and saved: nobody has to come back for a number
            self.tell("note", f"nobody was here to validate round {state.round}", round=state.round)
            return
        self.fleet.phase = "validating"
        await self.fleet.begin(state.round, VALIDATION_ATTEMPT)
        try:
            if self.plan.spec.data_access == "private":
                loss = await evaluation.on_private_data(self.fleet, state.params)
            else:
                loss = await evaluation.on_shared_data(self.fleet, state.params, self.deck.num_held_out)
        except RoundFailed as reason:
            self.tell("note", f"validation after round {state.round} failed: {reason}", round=state.round)
            return
        finally:
            self.fleet.end(committed=False)
        mean = loss.loss_sum / loss.num_tokens
        self.losses[state.round] = mean
        await self.lanes.ledger.run(self.ledger.metric, state.round, "validation_loss", mean)
        self.tell("validation", f"validation loss {mean:.4f}", round=state.round, loss=mean)

    async def save(self, state: State) -> None:
        """A checkpoint where it is due, and the state is not suspected; the last round is always saved."""
        is_due = state.round % self.plan.checkpoint.every_rounds == 0 and not self._watch.suspects
        if not is_due and not self.finished(state):
            return
        async with self.whole:
            await self.checkpoint(state)

    async def checkpoint(self, state: State) -> Path:
        handles = state.named_handles()
        manifest = {"state": state.to_json(), "deal": self.deck.to_json(), "run_id": self.plan.spec.run_id}
        path = await self.lanes.compute.run(self.checkpoints.save, f"round-{state.round:06d}", manifest, handles)
        self.tell("checkpoint", f"checkpoint of round {state.round} saved", path=str(path), round=state.round)
        return path

    # For everyone

    def adopt(self, plan: Plan) -> None:
        """Go on by a plan that differs in budget, fleet, checkpoints, validation, transfers or divergence."""
        if plan.transfer != self.plan.transfer:
            self.pacer.limit(plan.transfer.limits())
        self.plan, self.config = plan, plan.fleet
        self.facts = replace(self.facts, budget=plan.budget)
        self.fleet.adopt(self.facts, plan.fleet)
        self.checkpoints.keep = plan.checkpoint.keep
        self._watch.config = plan.divergence
        self.roster.signal()

    def stop(self, reason: str) -> None:
        """End the run at the next chance; the open round is taken up again by --resume."""
        self.stop_reason = self.stop_reason or reason
        for member in self.roster.members.values():
            member.changed.set()
        self.roster.signal()

    def fail(self, error: BaseException) -> None:
        """End the run because of what is wrong on this machine, before its workers are blamed for it."""
        self.failure = self.failure or error
        self.roster.signal()

    def contributions(self) -> list[dict[str, Any]]:
        """What each worker gave and moved, over all processes of the run."""
        rows: list[dict[str, Any]] = []
        for id in sorted({*self._given, *self.roster.members}):
            row, traffic = self._given.get(id, _nothing(id)), self.traffic(id)
            up, down = self._written.get(id, (0, 0))  # are in the row
            moved = {
                "bytes_up": row["bytes_up"] + traffic.total_up - up,
                "bytes_down": row["bytes_down"] + traffic.total_down - down,
            }
            rows.append({**row, **moved})
        return rows

    async def close(self) -> None:
        """Write down what moved and let the files go. The run can be opened again."""
        await self.intake.close()
        await self.lanes.ledger.run(self._close)

    def _close(self) -> None:
        self._write_traffic()
        self.ledger.close()
        for store in (self.objects, self.params):
            store.spares.clear()
            if not store.durable:
                rest(store.root)

    def _write_traffic(self) -> None:
        """What moved since it was last written down."""
        moved: dict[str, tuple[int, int]] = {}
        for id in list(self.roster.members):
            traffic = self.traffic(id)
            up, down = self._written.get(id, (0, 0))
            moved[id] = (traffic.total_up - up, traffic.total_down - down)
            self._written[id] = (traffic.total_up, traffic.total_down)
            given = self._given.setdefault(id, _nothing(id))
            given["bytes_up"] += traffic.total_up - up
            given["bytes_down"] += traffic.total_down - down
        self.ledger.add_traffic(moved)

    def tell(self, kind: str, text: str, **detail: Any) -> None:
        self._on_event(Event(kind=kind, at=self.clock.time(), text=text, detail=detail))


def open_ledger(folder: Path, *, durable: bool) -> Ledger:
    """The run's ledger. CorruptError says what is lost with a damaged one: never what a checkpoint covers."""
    path = folder / MARK
    try:
        return Ledger(Database(path, durable=durable))
    except CorruptError as error:
        saved = sorted(folder.glob("checkpoints/round-*/state.json"))
        if not saved:
            raise
        last = int(saved[-1].parent.name.rpartition("-")[2])
        raise CorruptError(
            f"the database {path} is damaged; restore it from a copy, or move it away and start the run again, which "
            f"then goes on from the checkpoint of round {last}"
        ) from error


def _nothing(id: str) -> dict[str, Any]:
    return {"id": id, "tokens": 0, "rounds": 0, "bytes_up": 0, "bytes_down": 0}
