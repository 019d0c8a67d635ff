"""One run on the coordinator: its stores, its fleet, and what the main loop does with them.

Knows neither sockets nor the command line: `coordinator.host` gives it a network and `simulator` a modelled one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from potluck.aggregation.report import Report
from potluck.clock import Clock, Lanes
from potluck.coordinator.contributions import Contributions
from potluck.coordinator.deck import Deck
from potluck.coordinator.divergence import Diverged, DivergenceWatch, RoundFigures
from potluck.coordinator.events import Event, OnEvent, progress_of
from potluck.coordinator.kit import Kit
from potluck.coordinator.owners import OwnerLosses, sentence
from potluck.coordinator.past import Past
from potluck.coordinator.plan import Plan
from potluck.coordinator.uploads import Uploads
from potluck.fleet.head import HEAD
from potluck.fleet.intake import Intake
from potluck.fleet.live import LiveFleet
from potluck.fleet.roster import Roster
from potluck.protocol import AHEAD, FLOATING
from potluck.storage.database import Database
from potluck.storage.files import rest
from potluck.storage.ledger import MARK, CommitRow, Ledger, Operation
from potluck.storage.objects import ObjectStore
from potluck.storage.params import ParamStore
from potluck.strategies import evaluation
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import HeadStrategy, OwnValidation
from potluck.transport.connection import Traffic
from potluck.transport.pace import Pacer
from potluck.types.errors import CorruptError, RoundFailed, RunStopped, UnusableUpdates
from potluck.types.ids import WorkerId

last_validation_wait_s = 120.0
tidy_interval_s = 10.0
sampled_numel = 1 << 22
"""Elements by which the norm of a round's step is estimated, where the model has more."""
ROLL_BACK = "roll_back"
VALIDATION_ATTEMPT = 1_000_000
"""Validation works under attempts from this on, one more each time the run goes back: so its tasks never mix with those
of a round, nor with those of a validation whose state is no good."""


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
        self._past = Past(
            strategy=plan.strategy, deck=deck, ledger=ledger, checkpoints=self.checkpoints, params=params, lanes=lanes,
            tell=self.tell,
        )  # fmt: skip
        self.pacer = Pacer(clock, plan.transfer.limits())
        self.roster = Roster(plan.fleet)
        self.fleet = LiveFleet(
            run=facts, config=plan.fleet, roster=self.roster, ledger=ledger, objects=objects, params=params,
            publisher=kit.publisher(facts, params, objects, folder, lanes.compute),
            updates=kit.updates(facts, params, objects), data=deck, clock=clock, lanes=lanes,
            secret=kit.secret,
        )  # fmt: skip
        self.fleet.lost = lambda worker, reason: self.tell("lost", reason, worker=worker, reason=reason)
        self.fleet.spreader.refused = self.fleet.lost
        self.fleet.encoding.told = lambda worker, reason: self.tell("codec", reason, worker=worker, reason=reason)
        self.fleet.waits = lambda text: self.tell("waiting", text, reason=text)
        self.fleet.combined = self._combined
        self.fleet.watching.held_back = self.pacer.held_back
        self.intake = Intake(self.fleet, clock, lanes)
        self.intake.failed = self.fail
        self.intake.noted = lambda worker, text: self.tell("note", f"{worker}: {text}", worker=worker)
        self.state: State | None = None
        self.losses: dict[int, float] = {}  # validation loss by round
        self.owners = OwnerLosses()
        self.operations: list[Operation] = []  # what was done to the run as a whole
        self._watch = DivergenceWatch(plan.divergence)
        self.stop_reason = ""
        self.failure: BaseException | None = None  # what ends the run, such as a full disk here
        self.recovered = asyncio.Event()
        self.uploads = Uploads()
        self.told_of: dict[WorkerId, str] = {}  # what people should know of a worker, for as long as this process lives
        self.traffic: Callable[[str], Traffic] = lambda _: Traffic()  # of this process, by worker; set by the host
        self.seen: Callable[[str], None] = lambda _: None  # blocks; notes in the member book that a worker was here
        self.tidy: Callable[[], None] = lambda: None  # blocks; gives memory that is free back to the system
        self._tidied_at = clock.now()
        self.whole = asyncio.Lock()  # held while a round is committed, discarded or saved: a stop waits for it
        self._resumes = False  # the round under way was begun by an earlier process
        self._given = Contributions()
        self._num_roll_backs = 0
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
            facts = plan.facts(
                initial=params.find("initial", plan.layout.numel) or params.create("initial", plan.initial()),
                zeros=params.zeros("zeros", plan.layout.numel),
            )
            return ledger, params, facts

        ledger, params, facts = await lanes.compute.run(build)
        return Coordinator(
            plan, folder, deck=deck, ledger=ledger, objects=objects, params=params, facts=facts, clock=clock,
            lanes=lanes, on_event=on_event, kit=parts,
        )  # fmt: skip

    # What the main loop does

    async def recover(self) -> State:
        """The state to go on from, with everything that is still open of the round after it."""
        state = await self._past.last(self.facts)
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
        self.owners = await run(OwnerLosses.of, self.ledger)
        self._given.restore(await run(self.ledger.contributions))
        self._num_roll_backs = await run(self.ledger.num_roll_backs)
        self.operations = await run(self.ledger.operations)
        last = DivergenceWatch.num_needed(self.plan.divergence)
        norms = await run(self.ledger.metrics, "step_norm", last)
        losses = dict(await run(self.ledger.metrics, "loss", last))
        figures = [RoundFigures(round=r, loss=losses.get(r), step_norm=x) for r, x in norms]
        self._watch = DivergenceWatch(self.plan.divergence, figures)

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
        await self._discard(state, reason)
        self._num_discarded += 1
        text = f"round {state.round + 1} discarded: {reason}"
        self.tell("discarded", text, round=state.round + 1, reason=str(reason))
        if self._num_discarded >= self.config.max_discarded_rounds:
            raise RunStopped(
                f"{self._num_discarded} rounds in a row were discarded, the last because {reason}; "
                "the run continues from its last committed round with --resume"
            )
        return state

    async def _discard(self, state: State, reason: RoundFailed, operation: Operation | None = None) -> None:
        async with self.whole:
            beyond, withdrawn = [AHEAD], list[str]()
            if operation is not None:  # the run goes back: what is under way came of the state that is no good
                self.fleet.arrivals.drop()
                beyond.append(FLOATING)
            elif isinstance(reason, UnusableUpdates):  # else the next attempt would take the same
                withdrawn = self.fleet.arrivals.withdraw(str(reason))
            deal = self.fleet.settle_data(committed=False)
            discard = partial(self.ledger.discard, beyond=beyond, withdrawn=withdrawn)
            await self.lanes.ledger.run(discard, state.round, self._attempt, str(reason), deal, operation)
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
            await self._discard(state, reason, operation(state.round))
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
        """Take up a state that is old enough. The ledger's one transaction counts."""
        state, deal = await self._past.before(reason.good_round, self.facts)
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
        accepted, cut_short, reported = self.fleet.accepted(), self.fleet.cut_short(), dict(self.fleet.figures)
        figures = await self._figures(state, proposed)
        self._watch.judge(figures)
        proposed = replace(proposed, seconds=state.seconds + self.clock.now() - self._begun_at)
        deal = self.fleet.settle_data(committed=True)
        row = CommitRow(
            round=state.round, attempt=self._attempt, state=proposed.to_json(), deal=deal, accepted=accepted,
            metrics={
                **reported, **({"loss": figures.loss} if figures.loss is not None else {}),
                "step_norm": figures.step_norm,
            },
            over=self.fleet.over(),
        )  # fmt: skip
        await self.lanes.ledger.run(self.ledger.commit, row, self.clock.time())
        self.fleet.end(committed=True)
        self.state = proposed
        self._watch.commit(figures)
        self._num_discarded = 0
        self._given.committed(accepted)
        names = sorted({r.worker for r in accepted} - {HEAD}) or [HEAD]
        seconds = self.clock.now() - self._begun_at
        what = progress_of(proposed.loss, reported)
        left = "".join(f"  {worker} cut short by {steps} steps" for worker, steps in sorted(cut_short.items()))
        self.tell(
            "round", f"round {proposed.round}  {what}  {', '.join(names)}  {seconds:.1f} s{left}",
            round=proposed.round, loss=proposed.loss, workers=names, tokens=proposed.tokens, seconds=seconds,
            cut_short=cut_short, figures=reported,
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
        await self.fleet.begin(state.round, VALIDATION_ATTEMPT + self._num_roll_backs)
        num_parts = 0 if self.plan.spec.data_access == "private" else self.deck.num_held_out
        try:
            if isinstance(self.strategy, HeadStrategy):
                loss = await self.strategy.evaluate(state, self.fleet, self.deck.num_held_out)
            elif isinstance(self.strategy, OwnValidation):
                loss = await self.strategy.validate(state, self.fleet, num_parts=num_parts)
            else:
                loss = await evaluation.of_model(self.fleet, state.params, num_parts)
        except RoundFailed as reason:
            self.tell("note", f"validation after round {state.round} failed: {reason}", round=state.round)
            return
        finally:
            self.fleet.end(committed=False)
        mean = loss.loss_sum / loss.num_tokens
        self.losses[state.round] = mean
        said = loss.owners if isinstance(loss, evaluation.OwnersValidation) else {}
        metrics = {"validation_loss": mean, **self.owners.note(state.round, said)}
        for name, value in metrics.items():
            await self.lanes.ledger.run(self.ledger.metric, state.round, name, value)
        each = f": {sentence(said)}" if said else ""
        detail = {worker: {"loss": own.shared, "personal": own.personal} for worker, own in said.items()}
        self.tell("validation", f"validation loss {mean:.4f}{each}", round=state.round, loss=mean, owners=detail)

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
        may_go_back = self._watch.suspects  # to one that would be removed

        def save() -> Path:
            return self.checkpoints.save(f"round-{state.round:06d}", manifest, handles, prune=not may_go_back)

        path = await self.lanes.compute.run(save)
        self.tell("checkpoint", f"checkpoint of round {state.round} saved", path=str(path), round=state.round)
        return path

    # For everyone

    def adopt(self, plan: Plan) -> None:
        """Go on by a plan that differs in budget, fleet, checkpoints, validation, transfers or divergence."""
        if plan.transfer != self.plan.transfer:
            self.pacer.limit(plan.transfer.limits())
        self.plan, self.config = plan, plan.fleet
        self.facts = plan.facts(initial=self.facts.initial, zeros=self.facts.zeros)
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
        return self._given.rows(self.roster.members, self.traffic)

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
        self.ledger.add_traffic(self._given.write(list(self.roster.members), self.traffic))

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
