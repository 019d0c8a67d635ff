"""The verbs `enqueue` and `collect`, and what the rest of the fleet does about work that was begun early (ahead.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from potluck.fleet.ahead import Ahead, name_of
from potluck.fleet.attempt import Attempt, read_attempt
from potluck.fleet.leases import Lost, OpenLease, Outcome
from potluck.fleet.paces import HOLDING, UNDER_WAY
from potluck.fleet.reduction import check_reduction
from potluck.protocol import AHEAD, pb
from potluck.storage.ledger import LeaseRow, Ledger, ReplyRow
from potluck.strategies.fleet import Reduction, Replies, Reply, summed
from potluck.strategies.task import BoundTask
from potluck.types.errors import RoundFailed
from potluck.types.ids import Digest, WorkerId

if TYPE_CHECKING:
    from potluck.clock import Executor
    from potluck.fleet.live import LiveFleet


class Overlap:
    """Of one fleet, whose ledger is written to in a lane of its own."""

    def __init__(self, fleet: LiveFleet, ledger: Ledger, lane: Executor) -> None:
        self._fleet, self._ledger, self._lane = fleet, ledger, lane
        self.work = Ahead()
        self._keys: list[str] = []  # that were collected in this attempt

    # The verbs

    async def enqueue(
        self, tasks: Mapping[WorkerId, BoundTask], key: str, reduce: Reduction | None, afresh: Collection[WorkerId]
    ) -> None:
        fleet, work = self._fleet, self.work
        if reduce:
            check_reduction(reduce, fleet.run.aggregation)
        assert all(t.kind == "pinned" for t in tasks.values()), "only pinned tasks follow one another"
        begun = work.begun(key)
        for name in begun.values():
            if work.row(name).status == "open" and name not in work.attempt.replies:
                fleet.attach(work.row(name), attempt=0, expects=reduce)
        place = (fleet.now.round, fleet.now.attempt)
        fresh = [(w, tasks[w], name_of(key, w, *place), 0) for w in sorted(tasks) if w not in begun]
        await fleet.publish(bound for _, bound, _, _ in fresh)
        chains = {w: chain for w, chain in work.chains.items() if w not in afresh}
        lost = [
            LeaseRow(key=name, issue=0, worker=w, status="lost", reason=chains[w].broken, lease=_unsent(name, bound))
            for w, bound, name, _ in fresh
            if w in chains and chains[w].broken
        ]
        if lost:
            await self._lane.run(self._ledger.issue, AHEAD, 0, lost, fleet.data.to_json())
            for row in lost:
                work.attempt.leases[row.key] = [row]
                work.add(row)
        gone = {row.worker for row in lost}
        await fleet.issue(
            work.attempt,
            [x for x in fresh if x[0] not in gone],
            expects=reduce,
            bases={w: chain.tip for w, chain in chains.items()},
        )
        await self._lose_orphans()  # what it follows may have been lost while this was written down

    async def collect(self, keys: Sequence[str], min_replies: int, reduce: Reduction | None) -> Replies:
        outcomes: dict[str, dict[WorkerId, Outcome]] = {}
        for key in keys:
            expects = reduce if key == keys[-1] else None
            outcomes[key] = {w: await self._outcome(name, expects) for w, name in self.work.begun(key).items()}
        self._keys += keys
        last = outcomes[keys[-1]]
        whole = [w for w in last if all(isinstance(x.get(w), ReplyRow | None) for x in outcomes.values())]
        if len(whole) < max(min_replies, 1):
            reasons = [o.reason for o in last.values() if isinstance(o, Lost)]
            raise RoundFailed(f"{len(whole)} of {len(last)} replied and {min_replies} must: {'; '.join(reasons)}")
        rows = [row for x in outcomes.values() for w in whole if isinstance(row := x.get(w), ReplyRow)]
        for row in rows:
            self._fleet.now.consumed[row.key] = row
        final = [row for w in whole if isinstance(row := last[w], ReplyRow)]
        replies = tuple(self._fleet.reply_of(row) for row in rows)
        value = await self._fleet.reduced(final, _of_all_parts(reduce, replies)) if reduce else None
        return Replies(replies=replies, value=value)

    async def _outcome(self, name: str, expects: Reduction | None) -> Outcome:
        """Of one task, once it is there."""
        if name in self.work.attempt.replies:
            return self.work.attempt.replies[name]
        row = self.work.row(name)
        if row.status != "open":
            return Lost(WorkerId(row.worker), row.reason)
        return await self._fleet.attach(row, attempt=0, expects=expects).outcome

    # What happens to it

    async def recover(self) -> None:
        """As the ledger has it, after a restart."""
        self.work = Ahead.of(await self._lane.run(read_attempt, self._ledger, AHEAD, 0))
        for rows in self.work.attempt.leases.values():
            if rows[-1].status == "open":
                lease = self._fleet.attach(rows[-1], attempt=0, expects=None)
                lease.claimed, lease.is_taken_over = False, True
        await self._lose_orphans()

    def begin(self, here: Sequence[WorkerId]) -> dict[str, Any]:
        """An attempt begins, with these workers: what is decided for it."""
        self._keys.clear()
        versions, lacking = self._fleet.versions, self.work.attempt.decisions
        holding = [w for w in here if (v := versions.get(w)) and lacking.get(f"lacks/{w}") != v]
        return {UNDER_WAY: self.work.under_way(), HOLDING: holding}

    async def lose(self, lease: OpenLease, reason: str) -> None:
        """A task is lost, and with it what was begun after it, answered or not: seen at once, then written down."""
        self.work.lose(lease.message.key, reason)
        await self._write_losses({lease.message.key: reason, **self._drop_orphans(lease.worker)}, lease)

    async def _lose_orphans(self) -> None:
        """What was handed out while the task before it was lost, or whose loss an earlier process did not write."""
        if lost := self._drop_orphans():
            await self._write_losses(lost)

    def _drop_orphans(self, worker: WorkerId | None = None) -> dict[str, str]:
        """Take back what follows lost work, of one worker or of all, and give the reasons by name."""
        under_way = {x.message.key: x for x in self._fleet.book.open.values() if x.message.round == AHEAD}
        orphans = self.work.orphans(worker)
        self._return_data(orphans)
        for name, reason in orphans.items():
            if name in under_way:
                self._fleet.give_up(under_way[name], reason)
            self.work.lose(name, reason)
        return orphans

    async def _write_losses(self, reasons: Mapping[str, str], late: OpenLease | None = None) -> None:
        """`late`: the task whose loss tells something of its worker's pace."""
        pace = self._fleet.paces.kept(late.worker, late.message.num_sequences) if late else {}
        deal = self._fleet.data.to_json()
        await self._lane.run(self._ledger.withdraw, AHEAD, 0, reasons, deal, pace)

    async def lacks_state(self, worker: WorkerId) -> None:
        """Its machine has not what its last committed task left there."""
        name, version = f"lacks/{worker}", self._fleet.versions.get(worker, "")
        self.work.attempt.decisions[name] = version
        await self._lane.run(self._ledger.decide, AHEAD, 0, name, version)

    def over(self) -> tuple[str, ...]:
        """Names of work that nobody asks for again once this attempt is committed."""
        return tuple(self.work.names(self._keys))

    def settle_data(self, consumed: Mapping[str, ReplyRow], *, committed: bool) -> None:
        """The attempt ends. The data of results that came and do not count is dealt again; a discard drops all work."""
        if committed:
            self._return_data(name for name in self.over() if name not in consumed)
            return
        self._return_data(list(self.work.attempt.leases))
        for lease in [x for x in self._fleet.book.open.values() if x.message.round == AHEAD]:
            self._fleet.give_up(lease, "the round was discarded")
        self.work = Ahead(Attempt(round=AHEAD, decisions=self.work.attempt.decisions))

    def _return_data(self, names: Iterable[str]) -> None:
        for name in names:
            row = self.work.row(name)
            if row.status != "lost" and name in self.work.attempt.replies:
                self._fleet.data.settle(pb.Lease.FromString(row.lease).spans, consumed=False)

    def committed(self) -> None:
        self.work.collected(self._keys)

    def objects(self) -> set[Digest]:
        """Results of all that no committed round has taken out."""
        return {Digest(row.object) for row in self.work.attempt.replies.values() if row.object}


def _of_all_parts(reduction: Reduction, replies: Sequence[Reply]) -> Reduction:
    """The same mean of the last replies of their workers, where each weighs what all of its worker's do together."""
    if not reduction.mean or not reduction.weight:
        return reduction
    by_worker: dict[WorkerId, list[Reply]] = {}
    for reply in replies:
        by_worker.setdefault(reply.worker, []).append(reply)
    factors = {
        parts[-1].key: reduction.factor(worker, parts[-1].key)
        * (summed(parts, reduction.weight) / summed(parts[-1:], reduction.weight))
        for worker, parts in by_worker.items()
    }
    return replace(reduction, factors=factors)


def _unsent(name: str, bound: BoundTask) -> bytes:
    """A lease that nobody gets."""
    return pb.Lease(key=name, round=AHEAD, task=bound.task, kind=bound.kind).SerializeToString()
