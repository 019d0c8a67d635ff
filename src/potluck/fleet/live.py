"""`LiveFleet`: the verbs of a strategy, carried out by real workers and recoverable from the ledger.

Within an attempt at a round every verb first looks up its key among the logged replies and leases: what was answered
is returned again, what is open is waited for again, and only what was never issued is issued now. So running the
round again from its top after a restart takes up exactly where the process died.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from potluck.aggregation.report import Report
from potluck.clock import Clock, Lanes
from potluck.fleet.arrivals import Arrivals, Offer, Wanted, given_up
from potluck.fleet.attempt import Attempt, read_attempt
from potluck.fleet.claims import claims_of
from potluck.fleet.config import FleetConfig
from potluck.fleet.cutting import Cutting
from potluck.fleet.data import DataPlane
from potluck.fleet.encoding import UpEncoding
from potluck.fleet.head import HEAD, HeadWork, credit
from potluck.fleet.leases import LeaseBook, Lost, OpenLease, Outcome, wire_attempt
from potluck.fleet.overlap import Overlap
from potluck.fleet.paces import Paces, cohort, facts
from potluck.fleet.publisher import Publisher
from potluck.fleet.reduction import Updates, check_reduction
from potluck.fleet.roster import Roster
from potluck.fleet.sessions import Sessions
from potluck.fleet.spread import Spreader
from potluck.fleet.waiting import until_here
from potluck.fleet.watch import Watch, tick_s
from potluck.protocol import AHEAD, FLOATING, pb
from potluck.storage.ledger import LeaseRow, Ledger, ReplyRow
from potluck.storage.objects import ObjectStore
from potluck.storage.params import ParamStore
from potluck.strategies.fleet import Head, HeadResult, Op, Reduction, Replies, Reply, WorkerInfo
from potluck.strategies.run import RunFacts
from potluck.strategies.task import BoundTask, EncodedArguments, Result, encode_arguments, handles
from potluck.types.errors import RoundFailed
from potluck.types.ids import Digest, LeaseId, WorkerId
from potluck.types.params import Params

max_task_failures = 3


class LiveFleet:
    def __init__(
        self,
        *,
        run: RunFacts,
        config: FleetConfig,
        roster: Roster,
        ledger: Ledger,
        objects: ObjectStore,
        params: ParamStore,
        publisher: Publisher,
        updates: Updates,
        data: DataPlane,
        clock: Clock,
        lanes: Lanes,
        secret: Callable[[], str],
    ) -> None:
        self._run, self.config, self.roster, self.ledger = run, config, roster, ledger
        self.objects, self.params, self.data = objects, params, data
        self._clock, self._lanes = clock, lanes
        self.encoding = UpEncoding(run, roster, lanes.compute)
        self.publisher, self.updates = publisher, updates
        self.book = LeaseBook()
        self.watching = Watch(roster, self.book, clock, lose=self.lose)
        self.spreader = Spreader(roster, clock, lanes.transfers)
        self.spreader.waits = self._waits_for_devices
        self._head = HeadWork(
            spreader=self.spreader, params=params, objects=objects, data=data, ledger=ledger, clock=clock, lanes=lanes,
            secret=secret,
        )  # fmt: skip
        self.floating = Attempt(round=FLOATING)
        self.ahead, self.sessions = Overlap(self, ledger, lanes.ledger), Sessions(self, ledger, lanes.ledger)
        self.arrivals = Arrivals(self, clock, ledger, lanes.ledger)
        self.now = Attempt()
        self.operands: dict[LeaseId, tuple[Tensor, ...]] = {}  # inline tensors of open leases
        self._inline: dict[str, Mapping[str, Tensor]] = {}  # inline tensors of replies, by key
        self.versions: dict[str, str] = {}  # the committed pinned state of each worker
        self.paces = Paces(run, roster)
        self.watching.late = lambda lease, s: self.paces.observe(lease.worker, s, lease.message.num_sequences)
        self.overflowed: set[WorkerId] = set()  # to whom a loss or gradient of this attempt was not finite
        self._num_outputs = 0
        self.figures: dict[str, float] = {}  # that the strategy reported in this attempt
        self.phase = self._usual_phase = "starting"
        self.lost: Callable[[WorkerId, str], None] = lambda _worker, _reason: None  # hears of work that was given up
        self.claimed: Callable[[OpenLease], None] = lambda _lease: None  # hears that a result will be taken now
        self.waits: Callable[[str], None] = lambda _reason: None  # hears what `ready` waits for
        self.combined: Callable[[Report, list[WorkerId]], None] = lambda _report, _workers: None

    @property
    def run(self) -> RunFacts:
        return facts(self._run, self.now.decisions)

    def adopt(self, run: RunFacts, config: FleetConfig) -> None:
        """Go by these from now on; a round that is under way keeps the facts that it began with."""
        self._run, self.config, self.roster.config = run, config, config
        self.paces.adopt(run)
        for member in self.roster.members.values():
            self.watching.reconsider(member)  # its work may be waited for less long now

    # The loop's side: attempts

    async def begin(self, round: int, attempt: int) -> None:
        """Work on this attempt from now on, with whatever the ledger has of it."""
        await self.ready(1)  # whoever was here may have left meanwhile, and a round needs someone
        here = sorted({*(w.id for w in self.roster.here(self._clock.now())), *self.ahead.work.under_way()})
        first = self.paces.first(here, balance=self.config.balance == "time")
        first |= self.ahead.begin(here)
        self.now = await self._lanes.ledger.run(read_attempt, self.ledger, round, attempt, first)
        self._inline.clear()
        self.overflowed.clear()
        self.figures.clear()
        self._num_outputs = 0

    async def recover_floating(self) -> None:
        """After a restart: what was handed out beyond rounds and is still open."""
        self.floating = await self._lanes.ledger.run(read_attempt, self.ledger, FLOATING, 0)
        self.paces.restore(await self._lanes.ledger.run(self.ledger.paces))
        self.versions = await self._lanes.ledger.run(self.ledger.versions)
        for rows in self.floating.leases.values():
            if rows[-1].status == "open":
                lease = self.attach(rows[-1], attempt=0, expects=None)
                lease.is_taken_over, lease.claimed = True, lease.message.kind == "session"
        await self.ahead.recover()

    async def recover_attempt(self, round: int, attempt: int) -> None:
        """After a restart: what the open attempt handed out, so that workers go on with it until it is claimed."""
        self.now = await self._lanes.ledger.run(read_attempt, self.ledger, round, attempt)
        for rows in self.now.leases.values():
            for row in rows:
                if row.status == "open" and row.worker != HEAD and row.key not in self.now.replies:
                    lease = self.attach(row, attempt=attempt, expects=None)
                    lease.claimed, lease.is_taken_over = False, True

    def accepted(self) -> tuple[ReplyRow, ...]:
        """The replies that the verbs of this attempt returned, in the order of their keys."""
        return tuple(self.now.consumed[key] for key in sorted(self.now.consumed))

    def cut_short(self) -> dict[WorkerId, int]:
        """Steps that were granted and not taken, of those whose accepted work ended early."""
        return {WorkerId(worker): left for worker, left in self.now.steps_left().items() if left}

    def adopted_version(self, worker: WorkerId) -> str:
        """The pinned state that the worker's next task starts from: that of its last accepted work, where this is
        beyond rounds or committed; "" for none."""
        return self.floating.last_version(worker) or self.versions.get(worker, "")

    def over(self) -> tuple[str, ...]:
        """Keys of work beyond rounds that nobody asks for again once this attempt is committed."""
        return (*given_up(self.floating), *self.ahead.over())

    def held_versions(self, worker: WorkerId) -> list[str]:
        """Pinned states that a worker must keep, since their round may still be committed."""
        places = (self.now, self.floating, self.ahead.work.attempt)
        committed = {self.versions.get(worker, "")} - {self.adopted_version(worker)}
        return [*committed, *(v for x in places for v in x.versions_of(worker))]

    def settle_data(self, *, committed: bool) -> Any:
        """What accepted replies trained counts as consumed, all other data of the attempt goes back to be dealt.

        Returns the deal, to be written down with the commit or the discard.
        """
        self.now.settle(self.data, committed=committed)
        for key in self.now.consumed if committed else ():
            for row in (*self.floating.leases.get(key, []), *self.ahead.work.attempt.leases.get(key, [])):
                self.data.settle(pb.Lease.FromString(row.lease).spans, consumed=True)
        self.ahead.settle_data(self.now.consumed, committed=committed)
        return self.data.to_json()

    def objects_in_use(self) -> set[Digest]:
        """Those of published versions, of open work and what is sent to it, and of replies beyond rounds."""
        leases = list(self.book.open.values())
        named = {Digest(d) for x in leases for d in x.message.objects}
        sent = {Digest(d) for x in leases for given in self.inputs(x.message.key) for d in given.objects}
        replied = {Digest(r.object) for r in self.floating.replies.values() if r.object}
        return self.publisher.objects() | named | sent | replied | self.ahead.objects()

    def restart(self) -> None:
        """The run goes back: nothing that was handed out counts any more, nor what workers have kept of it."""
        for lease in list(self.book.open.values()):
            self.give_up(lease, "the run went back to an earlier round")
        self.floating, self.now = Attempt(round=FLOATING), Attempt()
        self.ahead = Overlap(self, self.ledger, self._lanes.ledger)
        self.versions.clear()
        self.end(committed=False)

    def end(self, *, committed: bool) -> None:
        """The attempt is over and written down: what is still open of it is not wanted any more."""
        if committed:
            for key in given_up(self.floating):
                self.floating.leases.pop(key, None)
            self.ahead.committed()
            for row in self.accepted():
                key = row.key
                self.floating.leases.pop(key, None)
                self.floating.drop_reply(key)
                if row.version:
                    self.versions[row.worker] = row.version
        self._inline.clear()
        verdict = "the round was committed without it" if committed else "the round was discarded"
        for lease in [x for x in self.book.open.values() if x.message.round == self.now.round]:
            self.give_up(lease, verdict)
        for member in self.roster.members.values():
            member.changed.set()

    # What hosts call

    async def watch(self) -> None:
        """Give up what will not be answered any more. Runs as long as the fleet."""
        await self.watching.run()

    async def lose(self, lease: OpenLease, reason: str) -> None:
        self.give_up(lease, reason)
        self.lost(lease.worker, reason)
        await self.log_loss(lease, reason)

    async def log_loss(self, lease: OpenLease, reason: str) -> None:
        message = lease.message
        if message.round == AHEAD:
            return await self.ahead.lose(lease, reason)
        deal = self.data.to_json() if message.round == FLOATING else None  # of a round it is written when that ends
        if message.round == FLOATING:
            self.floating.lose(message.key, lease.issue, reason)
        await self._lanes.ledger.run(
            self.ledger.settle, message.round, lease.attempt, message.key, lease.issue, "lost", reason, deal,
            self.paces.kept(lease.worker, message.num_sequences),
        )  # fmt: skip

    def _holder(self, round: int) -> Attempt:
        """Where work is kept."""
        return {FLOATING: self.floating, AHEAD: self.ahead.work.attempt}.get(round, self.now)

    def give_up(self, lease: OpenLease, reason: str, *, failed: bool = False) -> None:
        if lease.message.round >= AHEAD and lease.id in self.book.open:
            self.data.settle(lease.message.spans, consumed=False)  # no round's end does it
        self.book.close(lease, Lost(lease.worker, reason, failed))
        self.operands.pop(lease.id, None)
        self.notify(lease.worker)

    async def fail(self, lease: OpenLease, reason: str) -> None:
        """The worker could not do it, or its result was refused."""
        self.give_up(lease, reason, failed=True)
        self.lost(lease.worker, reason)
        await self.log_loss(lease, reason)

    async def accept(
        self, lease: OpenLease, scalars: Mapping[str, Any], object: str, inline: Mapping[str, Tensor]
    ) -> bool:
        """A valid result: logged (but inline ones: their step starts again), then visible. False if not the first."""
        message = lease.message
        row = ReplyRow(
            key=message.key, worker=lease.worker, object=object, scalars=scalars, version=message.next_version
        )
        pace = self.paces.kept(lease.worker, message.num_sequences)
        is_first = bool(inline) or await self._lanes.ledger.run(
            self.ledger.reply, message.round, lease.attempt, row, lease.issue, pace
        )
        if lease.id not in self.book.open:
            return False  # given up while this was written down: its round is over
        holder = self._holder(message.round)
        is_present = holder.round == message.round and holder.attempt == lease.attempt
        if not is_first or (is_present and row.key in holder.replies):
            self.give_up(lease, "another worker was first")
            return False
        if is_present:
            holder.add_reply(row)
        if inline:
            self._inline[row.key] = inline
        self.book.close(lease, row)
        self.operands.pop(lease.id, None)
        self.notify(lease.worker)
        self.roster.signal()
        return True

    def notify(self, worker: WorkerId) -> None:
        member = self.roster.members.get(worker)
        if member is not None:
            member.changed.set()
            member.data_changed.set()

    # Verbs

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Who was here when the attempt began, as it was written down then."""
        return cohort(self.now.decisions, self.roster.members)

    async def ready(self, num_workers: int = 0) -> None:
        """Wait until that many workers are here: `waiting.until_here`."""

        def told(text: str, is_news: bool) -> None:
            self.phase = text
            if is_news:
                self.waits(text)

        await until_here(self.roster, self._clock, num_workers, told)

    async def call(
        self, tasks: Mapping[WorkerId, BoundTask], *, key: str, min_replies: int, reduce: Reduction | None = None,
        expects: Reduction | None = None,
    ) -> Replies:  # fmt: skip
        if reduce:
            check_reduction(reduce, self._run.aggregation)
        await self.publish(tasks.values())
        outcomes = await self._settle_all(
            {f"{key}/{worker}": (worker, tasks[worker]) for worker in sorted(tasks)}, expects=reduce or expects,
            num_needed=max(min_replies, math.ceil(len(tasks) / 2)),
        )  # fmt: skip
        rows = [o for o in outcomes if isinstance(o, ReplyRow)]
        reasons = [o.reason for o in outcomes if isinstance(o, Lost)]
        if len(rows) < max(min_replies, 1):
            raise RoundFailed(
                f"{len(rows)} of {len(tasks)} workers replied and {min_replies} must: {'; '.join(reasons)}"
            )
        replies = tuple(self.reply_of(row) for row in rows)
        for row in rows:
            self.now.consumed[row.key] = row
        value = await self.reduced(rows, reduce) if reduce else None
        return Replies(replies=replies, value=value)

    async def _settle_all(
        self, work: Mapping[str, tuple[WorkerId, BoundTask]], *, expects: Reduction | None, num_needed: int
    ) -> list[Outcome]:
        """Issue what was not issued before and wait for all of it; past `num_needed` replies not for late ones."""
        outcomes: dict[str, Outcome] = {}
        waiting: dict[str, OpenLease] = {}
        fresh: list[tuple[WorkerId, BoundTask, str, int]] = []
        for key, (worker, bound) in work.items():
            if key in self.now.replies:
                outcomes[key] = self.now.replies[key]
            elif rows := self.now.leases.get(key):
                if rows[-1].status == "open":
                    waiting[key] = self.attach(rows[-1], attempt=self.now.attempt, expects=expects)
                else:
                    outcomes[key] = Lost(worker, rows[-1].reason)
            else:
                fresh.append((worker, bound, key, 0))
        for lease in await self.issue(self.now, fresh, expects=expects):
            waiting[lease.message.key] = lease
        num_replied = sum(isinstance(outcome, ReplyRow) for outcome in outcomes.values())
        cutting = Cutting(
            waiting, num_missing=num_needed - num_replied, roster=self.roster, clock=self._clock, notify=self.notify
        )
        outcomes |= await cutting.outcomes()
        return [outcomes[key] for key in work]

    async def enqueue(
        self, tasks: Mapping[WorkerId, BoundTask], *, key: str, reduce: Reduction | None = None,
        afresh: Collection[WorkerId] = (),
    ) -> None:  # fmt: skip
        await self.ahead.enqueue(tasks, key, reduce, afresh)

    async def collect(self, keys: Sequence[str], *, min_replies: int, reduce: Reduction | None = None) -> Replies:
        return await self.ahead.collect(keys, min_replies, reduce)

    async def map(self, tasks: Sequence[BoundTask], *, key: str) -> tuple[Reply, ...]:
        assert all(t.kind == "pure" for t in tasks), "only pure tasks can be done by anyone"
        await self.publish(tasks)
        bag = {f"{key}/{i}": bound for i, bound in enumerate(tasks)}
        running: dict[str, list[OpenLease]] = {}
        failures: dict[str, list[Lost]] = {}
        took: list[float] = []
        for task_key in bag:
            for row in self.now.leases.get(task_key, []):
                if row.status == "open" and task_key not in self.now.replies:
                    running.setdefault(task_key, []).append(self.attach(row, attempt=self.now.attempt, expects=None))
        while missing := [k for k in bag if k not in self.now.replies]:
            for task_key, lease in [(k, x) for k, leases in running.items() for x in leases if x.outcome.done()]:
                running[task_key].remove(lease)
                outcome = lease.outcome.result()
                if isinstance(outcome, ReplyRow):
                    took.append(self._clock.now() - lease.issued_at)
                elif outcome.failed:
                    failures.setdefault(task_key, []).append(outcome)
                    self._refuse_hopeless(bag[task_key].task, failures[task_key])
            await self._hand_out(bag, missing, running, took)
            waiting = [x.outcome for leases in running.values() for x in leases]
            change = asyncio.ensure_future(self.roster.change())
            await asyncio.wait([*waiting, change], return_when=asyncio.FIRST_COMPLETED, timeout=tick_s)
            change.cancel()
        for leases in running.values():
            for lease in leases:
                if not lease.outcome.done():
                    self.give_up(lease, "another worker was first")
        rows = [self.now.replies[k] for k in bag]
        for row in rows:
            self.now.consumed[row.key] = row
        return tuple(self.reply_of(row) for row in rows)

    def _refuse_hopeless(self, task: str, failures: Sequence[Lost]) -> None:
        """RoundFailed when a task failed often enough, and not only in the hands of one worker of several."""
        num_here = len(self.roster.here(self._clock.now()))
        if len(failures) >= max_task_failures and len({f.worker for f in failures}) >= min(2, num_here):
            raise RoundFailed(f"{task} failed {len(failures)} times: {failures[-1].reason}")

    async def _hand_out(
        self,
        bag: Mapping[str, BoundTask],
        missing: Sequence[str],
        running: dict[str, list[OpenLease]],
        took: Sequence[float],
    ) -> None:
        """Give every free worker the next task nobody works on; near the end, a second copy of the slowest."""
        free = self.book.free(self.roster.here(self._clock.now()))
        untouched = [k for k in missing if not running.get(k)]
        now, typical_s = self._clock.now(), statistics.median(took) if took else 0.0
        late = [
            k for k in missing if len(running.get(k, [])) == 1 and now - running[k][0].issued_at > 5 + 2 * typical_s
        ]
        fresh: list[tuple[WorkerId, BoundTask, str, int]] = []
        for worker, task_key in zip(free, [*untouched, *late], strict=False):
            issue = len(self.now.leases.get(task_key, []))
            fresh.append((worker.id, bag[task_key], task_key, issue))
        for lease in await self.issue(self.now, fresh, expects=None):
            running.setdefault(lease.message.key, []).append(lease)

    async def next(self, offer: Offer, *, key: str) -> Reply:
        (reply,) = await self.arrivals.take(Wanted(offer=offer), f"next/{key}")
        return reply

    async def gather(
        self, offer: Offer, *, key: str, min_replies: int, expects: Reduction, grace: float | None = None,
        max_staleness: int | None = None,
    ) -> tuple[Reply, ...]:  # fmt: skip
        wanted = Wanted(offer=offer, min_replies=min_replies, grace=grace, expects=expects, max_staleness=max_staleness)
        return await self.arrivals.take(wanted, f"gather/{key}")

    async def reduce(self, replies: Sequence[Reply], reduction: Reduction) -> Params:
        return await self.reduced([self.now.consumed[key] for key in sorted(r.key for r in replies)], reduction)

    # The head

    def _waits_for_devices(self, text: str) -> None:
        """The spreader waits, or no longer does."""
        if text:
            self._usual_phase = self.phase
            self.waits(text)
        self.phase = text or self._usual_phase

    async def head(
        self, work: Callable[[Head], Result], *, key: str, num_sequences: int = 0, held_out_parts: int = 0
    ) -> HeadResult:
        sizes = {"num_sequences": num_sequences, "held_out_parts": held_out_parts}
        return await self._head.run(work, self.now, self._run, key=key, name=self._output_name, **sizes)

    def credit(self, key: str, num_tokens: Mapping[WorkerId, int]) -> None:
        credit(self.now, key, num_tokens)

    def report(self, figures: Mapping[str, float]) -> None:
        self.figures |= figures

    # Sessions

    async def open(self, worker: WorkerId, task: BoundTask, *, key: str) -> None:
        await self.sessions.open(worker, task, key=key)

    async def send(self, key: str, step: int, arguments: Mapping[str, Any]) -> None:
        await self.sessions.send(key, step, arguments)

    def inputs(self, key: str) -> list[pb.SessionInput]:
        """What was sent to a session and not yet taken."""
        return self.floating.inputs(key)

    async def receive(self, key: str, step: int) -> Reply:
        return await self.sessions.receive(key, step)

    async def close(self, key: str) -> None:
        await self.sessions.close(key)

    # Handles

    async def apply(
        self, op: Op, *handles: Params, num_outputs: int = 1, part: Sequence[int] = (), **scalars: Any
    ) -> tuple[Params, ...]:
        name, layout = self._output_name(getattr(op, "__name__", "op")), self._run.layout.part(part)

        def run() -> tuple[Params, ...]:
            return self.params.apply(op, *handles, name=name, layout=layout, num_outputs=num_outputs, **scalars)

        return await self._lanes.compute.run(run)

    async def norm(self, handle: Params) -> float:
        return await self._lanes.compute.run(self.params.norm, handle)

    def _output_name(self, what: str) -> str:
        self._num_outputs += 1
        return f"r{self.now.round}-a{self.now.attempt}-{self._num_outputs}-{what}"

    async def reduced(self, rows: Sequence[ReplyRow], reduction: Reduction) -> Params:
        name = self._output_name(reduction.name)
        combined = await self._lanes.compute.run(self.updates.reduce, rows, reduction, name)
        self.combined(combined.report, [WorkerId(row.worker) for row in rows])
        return combined.params

    def reply_of(self, row: ReplyRow) -> Reply:
        return Reply(
            worker=WorkerId(row.worker),
            key=row.key,
            scalars=row.scalars,
            object=row.object,
            inline=self._inline.get(row.key, {}),
        )

    # Issuing

    async def publish(self, tasks: Iterable[BoundTask]) -> None:
        await self.publisher.publish(dict.fromkeys(named for bound in tasks for named in handles(bound.arguments)))

    async def issue(
        self, holder: Attempt, work: Sequence[tuple[WorkerId, BoundTask, str, int]], *, expects: Reduction | None,
        bases: Mapping[WorkerId, str] | None = None,
    ) -> list[OpenLease]:  # fmt: skip
        """Deal data, write the leases down, then hand them out. `bases`: states to start from, if not the committed."""
        if not work:
            return []
        rows: list[LeaseRow] = []
        arguments, encoded, value, deltas = None, EncodedArguments(value={}, objects=(), inline=()), "", []
        may_end_early = self.config.balance == "time" and holder is self.now
        starts = bases or {}
        keeps = self.publisher.bases() if holder is self.ahead.work.attempt else []
        units = {worker: float(bound.num_sequences or 1) for worker, bound, _, _ in work}
        specs = await self.encoding.specs(work[0][1].task, units, work[0][1].part) if expects else {}
        for worker, bound, key, issue in work:
            if bound.arguments is not arguments:  # most often all get the same
                arguments, encoded = bound.arguments, encode_arguments(bound.arguments, self.publisher.digests)
                value, deltas = json.dumps(encoded.value), self.publisher.deltas_to(encoded.objects)
            spans = self.data.deal(worker, bound.num_sequences) if bound.num_sequences else []
            if bound.held_out_part >= 0:
                spans = self.data.held_out(bound.held_out_part)
            attempt = wire_attempt(holder.attempt, issue)
            pinned = bound.kind == "pinned"
            message = pb.Lease(
                key=key,
                attempt=attempt,
                round=holder.round,
                task=bound.task,
                kind=bound.kind,
                arguments_json=value,
                objects=list(dict.fromkeys([*encoded.objects, *self.data.objects(spans)])),
                spans=spans,
                base_version=starts.get(worker, self.adopted_version(worker)) if pinned else "",
                next_version=f"r{holder.round}-a{attempt}-{key.replace('/', '.')}" if pinned else "",
                num_inline=len(encoded.inline),
                up_codec=specs.get(worker, self._run.up_codec),
                deltas=deltas,
                held_out=bound.held_out_part >= 0,
                num_sequences=bound.num_sequences,
                sequences_per_step=bound.sequences_per_step if may_end_early else 0,
                part=bound.part,
                keeps=keeps,
            )
            if encoded.inline:
                self.operands[(message.round, message.attempt, message.key)] = encoded.inline
            blob = message.SerializeToString()
            rows.append(LeaseRow(key=key, issue=issue, worker=worker, lease=blob, status="open"))
        await self._lanes.ledger.run(self.ledger.issue, holder.round, holder.attempt, rows, self.data.to_json())
        for row in rows:
            holder.leases.setdefault(row.key, []).append(row)
            if holder is self.ahead.work.attempt:
                self.ahead.work.add(row)
        return [self.attach(row, attempt=holder.attempt, expects=expects) for row in rows]

    def attach(self, row: LeaseRow, *, attempt: int, expects: Reduction | None) -> OpenLease:
        """Hold a lease open, and tell its worker."""
        message = pb.Lease.FromString(row.lease)
        now = self._clock.now()
        lease = OpenLease(
            message=message,
            worker=WorkerId(row.worker),
            attempt=attempt,
            issue=row.issue,
            expects=expects,
            issued_at=now,
            progress_at=now,
            outcome=asyncio.get_running_loop().create_future(),
            claims=claims_of(message, self.objects, self._run.layout),
        )
        if lease.id in self.book.open:
            lease = self.book.open[lease.id]
            lease.expects, lease.claimed = expects, True
            self.claimed(lease)
            return lease
        self.book.add(lease)
        self.watching.look(lease)
        self.notify(lease.worker)
        return lease
