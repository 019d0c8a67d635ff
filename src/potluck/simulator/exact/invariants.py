"""What must hold whatever happens to a run, checked from outside it: from its ledger, its files and its books.

1. an accepted update counts exactly once, and each that was acknowledged counts
2. a committed state is what the strategy makes of the state before it and the accepted updates, recomputed plainly
3. no task has two first results, and none two workers at once, unless any worker may do it
4. no sequence is trained twice or skipped within an epoch: the deal agrees with what was committed
5. a restart lands on the last commit, with the very parameters
6. files stay bounded: objects, parameter files
7. an accepted update is, bit for bit, what its task makes of its data from the worker's last committed state
   (`reference`), and a run in which the same updates counted ends with the very parameters of the calm one: so inner
   optimizers, error feedback, snapshots and data positions came through every crash
8. the tokens of the state, of the ledger's contributions and of the data are one number
9. nothing is under way, or counts, that follows work which was lost
10. what the ledger has for the next process is whole: who takes part in a round, which states workers hold, which work
   was given up; and nothing is left in anybody's hands of a round that is over

A worker that lost its disk lost its inner optimizer too: its next task may begin afresh.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from potluck.codecs.bundle import Bundle
from potluck.coordinator.core import Coordinator
from potluck.fleet.arrivals import handed_out_in
from potluck.fleet.head import HEAD, read_spans
from potluck.fleet.paces import COHORT, cohort, facts
from potluck.protocol import AHEAD, FLOATING, pb
from potluck.storage.ledger import ReplyRow
from potluck.strategies.bag import Bag
from potluck.strategies.fleet import Head, HeadResult, Op, Reduction, Replies, Reply, WorkerInfo
from potluck.strategies.run import RunFacts
from potluck.strategies.state import State
from potluck.strategies.strategy import Strategy
from potluck.strategies.task import BoundTask, Result
from potluck.types.ids import Digest, LeaseId, WorkerId
from potluck.types.params import Fragment, Params
from potluck.types.vector import Vector

Position = tuple[int, str, int]
"""epoch, shard, sequence"""
Counted = tuple[int, tuple[Position, ...]]
"""How many sequences a task was granted, and those it trained."""
logging_s = 5.0
"""Longer than a coordinator whose steps are delayed takes to write down what it did."""


class Violated(AssertionError):
    """An invariant does not hold."""


class Witness:
    """Looks at a run from outside. `look` after each commit and each restart, `glance` as often as one likes."""

    def __init__(self, num_sequences: int, seq_len: int, *, alone: Strategy | None = None) -> None:
        """`alone`: a method that trains on the head, as it trains without devices; its sums round otherwise."""
        self._num_sequences, self._seq_len, self._alone = num_sequences, seq_len, alone
        self._state: State | None = None  # of the last commit that was seen
        self._values: dict[str, Tensor] = {}  # its vectors by the names of its handles
        self._trained: list[set[Position]] = []  # by round
        self.counted: list[dict[str, Counted]] = []  # by round: what counted, and the data it was made of
        self.num_cut_short = 0  # tasks that ended before all they were granted was trained
        self.num_commits = 0
        self.kept: set[Digest] = set()  # that work beyond rounds was given, and `redo` will need; and `always_kept`
        self.always_kept: frozenset[Digest] = frozenset()
        self._most_workers = 0  # that were ever here at once
        self._versions: dict[str, str] = {}  # the state that each worker should hold
        self._given_up: list[tuple[Coordinator, float, int, int, str]] = []  # run, when, round, attempt, worker
        self.redo: Callable[[Coordinator, pb.Lease, ReplyRow], None] = lambda _run, _lease, _row: None  # or Violated
        self.adopted: Callable[[dict[str, str]], None] = lambda _versions: None

    @property
    def tolerance(self) -> float:
        """Of a difference that is none: sums of other tiles round otherwise, and an optimizer makes more of it."""
        return 1e-5 if self._alone is not None else 0.0

    @property
    def values(self) -> dict[str, Tensor]:
        """The vectors of the last committed state."""
        return self._values

    def start(self, run: Coordinator) -> None:
        """At the run's first start: before any commit."""
        self._note(run, run.strategy.init(run.facts))

    def recovered(self, run: Coordinator) -> None:
        """After a restart."""
        self.look(run)
        assert run.state is not None and self._state is not None
        if run.state.round != self._state.round:
            raise Violated(f"the restart landed on round {run.state.round} and {self._state.round} were committed")
        for name, handle in run.state.named_handles().items():
            if not torch.equal(run.params.read(handle), self._values[name]):
                raise Violated(f"after the restart {name} of round {run.state.round} has other values")

    def told(self, run: Coordinator, num_rounds: int) -> None:
        """The run says that so many rounds are committed."""
        self.look(run)
        if self.num_commits != num_rounds:
            raise Violated(f"{num_rounds} rounds are said to be committed and {self.num_commits} are written down")
        self._check_nothing_is_kept(run, num_rounds - 1)

    def discarded(self, run: Coordinator, round: int) -> None:
        """The run says that an attempt at the round after `round` others was discarded."""
        self.look(run)
        self._check_nothing_is_kept(run, round)

    def lost(self, run: Coordinator, worker: str, now: float) -> None:
        """The run says that it gave up what this worker had."""
        round = run.state.round if run.state else 0
        if (attempt := run.ledger.unfinished_attempt(round)) is not None:
            self._given_up.append((run, now, round, attempt, worker))

    def losses(self, run: Coordinator, now: float) -> None:
        """Work that was given up a while ago is not open any more for the next process."""
        due = [x for x in self._given_up if x[0] is run and now - x[1] > logging_s]
        self._given_up = [x for x in self._given_up if x[0] is run and now - x[1] <= logging_s]
        held = {(x.message.round, x.attempt, x.message.key, x.issue) for x in run.fleet.book.open.values()}
        for _, _, round, attempt, worker in due:
            for place in ((round, attempt), (AHEAD, 0), (FLOATING, 0)):
                for row in run.ledger.leases(*place):
                    is_open = row.worker == worker and row.status == "open"
                    if is_open and (*place, row.key, row.issue) not in held:
                        raise Violated(f"{row.key} of {worker} was given up, and the next process would wait for it")

    def look(self, run: Coordinator) -> None:
        """Check every commit since the last look, and the books."""
        rows = run.ledger.audit("SELECT round, attempt, state, accepted FROM commits ORDER BY round")
        if self._state is None:
            self.start(run)
        for round, attempt, state, accepted in rows[self.num_commits :]:
            self._commit(run, int(round), int(attempt), json.loads(state), json.loads(accepted))
        if run.ledger.num_roll_backs() == 0 and run.ledger.versions() != self._versions:
            raise Violated(f"workers are said to hold {run.ledger.versions()} and should hold {self._versions}")
        self._check_deal(run)
        self._check_files(run)
        self.glance(run)

    def glance(self, run: Coordinator) -> None:
        """Open leases only: cheap."""
        seen: dict[tuple[int, str], LeaseId] = {}
        for lease in run.fleet.book.open.values():
            name = (lease.message.round, lease.message.key)
            if lease.message.kind != "pure" and name in seen:
                raise Violated(f"{lease.message.key} is held under {seen[name]} and under {lease.id}")
            seen[name] = lease.id
        for name, reason in run.fleet.ahead.work.orphans().items():
            raise Violated(f"{name} still counts and follows work which was lost: {reason}")
        self.kept.clear()
        self.kept |= self.always_kept
        self.kept.update(Digest(d) for lease in _beyond_rounds(run) for d in lease.objects)

    # One commit

    def _commit(self, run: Coordinator, round: int, attempt: int, state: Any, accepted: Sequence[Any]) -> None:
        assert self._state is not None
        if round != self._state.round:
            raise Violated(f"round {round} was committed after {self._state.round} rounds")
        rows = {k: ReplyRow(key=k, worker=w, object=o, version=v, scalars=s) for k, w, o, v, s in accepted}
        if len(rows) != len(accepted):
            raise Violated(f"a reply counts twice in round {round}")
        logged = {row.key: row for row in run.ledger.replies(round, attempt)}
        if forgotten := sorted(logged.keys() - rows.keys()):
            raise Violated(f"acknowledged replies do not count in round {round}: {', '.join(forgotten)}")
        done_here = {lease.key for lease in run.ledger.leases(round, attempt) if lease.worker == HEAD}
        if invented := sorted(k for k in rows if k not in logged and k.split("/")[0] not in done_here):
            raise Violated(f"replies count in round {round} that were never logged: {', '.join(invented)}")
        taking_part = run.ledger.decisions(round, attempt).get(COHORT)
        if taking_part is None:
            raise Violated(f"who takes part in round {round} is not written down")
        self._check_data(run, round, attempt, rows)
        proposed = run.strategy.State.from_json(state)
        self.adopted(self._versions)
        tokens = sum(int(row.scalars["num_tokens"]) for row in rows.values())
        if proposed.tokens != self._state.tokens + tokens:
            raise Violated(f"round {round} counts {proposed.tokens - self._state.tokens} tokens of {tokens}")
        self._recompute(run, attempt, rows, proposed)
        self._note(run, proposed)
        self.num_commits += 1
        given = sum(int(t) for (t,) in run.ledger.audit("SELECT tokens FROM contributions"))
        if self.num_commits == proposed.round and given != proposed.tokens:
            raise Violated(f"members are credited with {given} tokens of {proposed.tokens}")

    def _check_data(self, run: Coordinator, round: int, attempt: int, rows: Mapping[str, ReplyRow]) -> None:
        trained: set[Position] = set()
        counted: dict[str, Counted] = {}
        before: set[Position] = set().union(*self._trained)
        for lease in run.ledger.leases(round, attempt):
            row = rows.get(lease.key)
            on_head = lease.worker == HEAD
            if row is None or row.worker != lease.worker or (lease.status != "replied" and not on_head):
                continue
            message = pb.Lease.FromString(lease.lease)
            granted = [(s.epoch, s.shard, i) for s in message.spans for i in range(s.start, s.stop)]
            own = granted
            if message.sequences_per_step:  # it may have been cut short: then only the first of them were trained
                own = granted[: int(row.scalars["num_steps"]) * message.sequences_per_step]
                self.num_cut_short += len(own) < len(granted)
            num_tokens = int(row.scalars["num_tokens"])
            if on_head:  # its devices are credited with some
                num_tokens += sum(
                    int(r.scalars["num_tokens"]) for k, r in rows.items() if k.startswith(f"{lease.key}/")
                )
            if len(own) * self._seq_len != num_tokens:
                raise Violated(f"{lease.key} read {len(own)} sequences and counts {num_tokens} tokens")
            if twice := [p for p in own if p in before or p in trained]:
                raise Violated(f"{lease.key} of round {round} trained {twice[0]} a second time")
            trained.update(own)
            counted[lease.key] = (len(granted), tuple(own))
            if message.kind == "pinned":
                self._check_pinned(run, message, row)
        if sum(int(row.scalars["num_tokens"]) for row in rows.values()) != len(trained) * self._seq_len:
            raise Violated(f"round {round} counts tokens without data")
        self._trained.append(trained)
        self.counted.append(counted)

    def _check_pinned(self, run: Coordinator, lease: pb.Lease, row: ReplyRow) -> None:
        """It began at the state its worker holds, and is what the task makes of it; another one may follow it."""
        held = self._versions.get(row.worker, "")
        if lease.base_version != held:
            raise Violated(
                f"{lease.key} of round {lease.round} begins at {lease.base_version or 'nothing'} and its worker holds "
                f"{held or 'nothing'}"
            )
        self.redo(run, lease, row)
        self._versions[row.worker] = row.version

    def _recompute(self, run: Coordinator, attempt: int, rows: Mapping[str, ReplyRow], proposed: State) -> None:
        assert self._state is not None
        if run.facts.aggregation.rule != "mean":
            return  # robust rules have references of their own in tests/aggregation
        decided = run.ledger.decisions(self._state.round, attempt)
        place = (self._state.round, attempt)
        values = {h: self._values[n] for n, h in self._state.named_handles().items()}
        values.setdefault(run.facts.zeros, torch.zeros(run.facts.layout.numel))
        fleet = PlainFleet(run, place, decided, rows, values)
        expected = plainly((self._alone or run.strategy).run_round(self._state, fleet))
        names = expected.named_handles()
        for name, handle in proposed.named_handles().items():
            got, wanted = run.params.read(handle), fleet.read(names[name])
            if not torch.allclose(got, wanted, rtol=1e-5, atol=self.tolerance or 1e-7):
                raise Violated(
                    f"{name} after round {proposed.round} is off by {(got - wanted).abs().max().item():.2e} from what "
                    "the accepted updates make of the state before"
                )
        if None in (expected.loss, proposed.loss):
            if expected.loss != proposed.loss:
                raise Violated(f"the loss of round {proposed.round} is {proposed.loss} and should be {expected.loss}")
        elif abs(expected.loss - proposed.loss) > self.tolerance:
            raise Violated(f"the loss of round {proposed.round} is {proposed.loss} and should be {expected.loss}")

    def _note(self, run: Coordinator, state: State) -> None:
        self._state = state
        self._values = {name: run.params.read(handle) for name, handle in state.named_handles().items()}

    # The books

    def _check_deal(self, run: Coordinator) -> None:
        deal = run.ledger.deal()
        if deal is None:
            return
        trained: dict[int, int] = {}
        for epoch, _, _ in set().union(*self._trained):
            trained[epoch] = trained.get(epoch, 0) + 1
        under_way: set[int] = set()
        for number, num_begun, held, returned, outstanding, num_consumed in deal["epochs"]:
            under_way.add(number)
            if num_consumed != trained.get(number, 0):
                raise Violated(f"epoch {number} counts {num_consumed} sequences, trained were {trained.get(number, 0)}")
            places = [(s, a, b) for _, s, a, b in held] + [(s, a, b) for s, a, b in (*returned, *outstanding)]
            if num_begun == run.deck.num_shards:
                total = num_consumed + sum(b - a for _, a, b in places)
                if total != self._num_sequences:
                    raise Violated(f"epoch {number} holds {total} of {self._num_sequences} sequences")
            ends: dict[int, int] = {}
            for shard, start, stop in sorted(places):
                if start < ends.get(shard, 0):
                    raise Violated(f"sequence {start} of shard {shard} is in two places")
                ends[shard] = stop
        for number in range(deal["num_done"]):
            if number not in under_way and trained.get(number, 0) != self._num_sequences:
                raise Violated(f"epoch {number} is over with {trained.get(number, 0)} of {self._num_sequences}")

    def _check_nothing_is_kept(self, run: Coordinator, round: int) -> None:
        """When a round ends, all that was handed out for it and not trained has gone back, and nobody works on it."""
        for lease in run.fleet.book.open.values():
            if lease.message.round == round:
                raise Violated(f"{lease.message.key} is in the hands of {lease.worker} and its round is over")
        deal = run.ledger.deal()
        handed_out = sum(b - a for epoch in deal["epochs"] for _, a, b in epoch[4]) if deal else 0
        in_hands = [lease.message for lease in run.fleet.book.open.values() if lease.message.round < AHEAD]
        held = sum(s.stop - s.start for lease in (*in_hands, *_beyond_rounds(run)) for s in lease.spans)
        if handed_out > held:
            raise Violated(f"{handed_out} sequences are handed out and {held} are in somebody's hands")

    def _check_files(self, run: Coordinator) -> None:
        self._most_workers = workers = max(self._most_workers, len(run.roster.members))  # after a start none is known
        objects, data = len(run.objects.digests()), len(run.deck.digests())
        published = max(1, len(run.fleet.publisher.bases()))  # vectors that have versions of their own
        if objects > data + 8 * workers + 8 * published:
            raise Violated(f"{objects} objects are kept, {data} of them data, for {workers} workers")
        files = sum(1 for path in run.params.root.iterdir() if path.is_file())
        if files > 64:
            raise Violated(f"{files} files are kept in {run.params.root}")


def _beyond_rounds(run: Coordinator) -> list[pb.Lease]:
    """Work that was handed out beyond rounds: open, or done and not yet used by a commit."""
    given = [*run.fleet.floating.leases.values(), *run.fleet.ahead.work.attempt.leases.values()]
    return [pb.Lease.FromString(rows[-1].lease) for rows in given if rows[-1].status != "lost"]


class PlainFleet:
    """Gives a strategy the replies that were accepted, and does its arithmetic on whole tensors in memory."""

    def __init__(
        self,
        run: Coordinator,
        place: tuple[int, int],
        decided: Mapping[str, Any],
        rows: Mapping[str, ReplyRow],
        values: Mapping[Params, Tensor],
    ) -> None:
        self._coordinator, self._decided, self._rows = run, decided, rows
        self._round, self._attempt = place
        self._files: dict[str, Tensor] = {}
        for handle, vector in values.items():
            self._hold(handle, vector)

    @property
    def run(self) -> RunFacts:
        return facts(self._coordinator.facts, self._decided)

    def workers(self) -> tuple[WorkerInfo, ...]:
        return cohort(self._decided, self._coordinator.roster.members)

    async def call(
        self, tasks: Mapping[WorkerId, BoundTask], *, key: str, min_replies: int, reduce: Reduction | None = None,
        expects: Reduction | None = None,
    ) -> Replies:  # fmt: skip
        rows = [self._rows[name] for name in (f"{key}/{w}" for w in sorted(tasks)) if name in self._rows]
        if len(rows) < min_replies:
            raise Violated(f"{key} was committed with {len(rows)} replies and needs {min_replies}")
        replies = tuple(Reply(worker=WorkerId(r.worker), key=r.key, scalars=r.scalars, object=r.object) for r in rows)
        return Replies(replies=replies, value=self._reduced(rows, reduce) if reduce else None)

    async def gather(
        self, offer: Callable[[WorkerInfo], BoundTask | None], *, key: str, min_replies: int, expects: Reduction,
        grace: float | None = None, max_staleness: int | None = None,
    ) -> tuple[Reply, ...]:  # fmt: skip
        rows = [self._rows[name] for name in self._decided[f"gather/{key}"]]
        return tuple(
            Reply(worker=WorkerId(r.worker), key=r.key, scalars=r.scalars, round=handed_out_in(r.key)) for r in rows
        )

    async def reduce(self, replies: Sequence[Reply], reduction: Reduction) -> Params:
        return self._reduced([self._rows[reply.key] for reply in replies], reduction)

    async def enqueue(
        self, tasks: Mapping[WorkerId, BoundTask], *, key: str, reduce: Reduction | None = None,
        afresh: Collection[WorkerId] = (),
    ) -> None:  # fmt: skip
        pass

    async def collect(self, keys: Sequence[str], *, min_replies: int, reduce: Reduction | None = None) -> Replies:
        under = [[r for n, r in sorted(self._rows.items()) if n.startswith(f"{key}/")] for key in keys]
        if len(under[-1]) < min_replies:
            raise Violated(f"{keys[-1]} was committed with {len(under[-1])} replies and needs {min_replies}")
        if odd := {r.worker for rows in under for r in rows} - {r.worker for r in under[-1]}:
            raise Violated(f"of {sorted(odd)} only a part of {', '.join(keys)} counts")
        rows = [row for each in under for row in each]
        replies = tuple(Reply(worker=WorkerId(r.worker), key=r.key, scalars=r.scalars, object=r.object) for r in rows)
        parts = {row.key: [r for r in rows if r.worker == row.worker] for row in under[-1]}
        return Replies(replies=replies, value=self._reduced(under[-1], reduce, parts) if reduce else None)

    def _reduced(
        self, rows: Sequence[ReplyRow], reduction: Reduction, parts: Mapping[str, Sequence[ReplyRow]] | None = None
    ) -> Params:
        """`parts`: by key what a reply weighs, where this is not the row itself."""
        layout = self.run.layout.part(reduction.part)
        total, weights = torch.zeros(layout.numel, dtype=torch.float64), 0.0
        for row in rows:
            weight = 1.0
            if reduction.weight and reduction.mean:
                weight = math.fsum(r.scalars[reduction.weight] for r in (parts or {}).get(row.key, [row]))
            weight *= reduction.factor(row.worker, row.key)
            with Bundle.open(self._coordinator.objects.path(Digest(row.object))) as bundle:
                total += weight * bundle.flat_slice(reduction.name, layout, 0, layout.numel).double()
            weights += weight
        return self._new((total / weights if reduction.mean else total).float())

    def _new(self, values: Tensor) -> Params:
        handle = Params((Fragment(f"plain-{len(self._files)}", values.numel()),))
        self._hold(handle, values)
        return handle

    def _hold(self, handle: Params, values: Tensor) -> None:
        """By files, as handles of parts name them."""
        at = 0
        for f in handle.fragments:
            whole = self._files.setdefault(f.name, torch.full((f.in_file,), torch.nan))
            whole[f.start : f.start + f.numel] = values[at : at + f.numel]
            at += f.numel

    def read(self, handle: Params) -> Tensor:
        return torch.cat([self._files[f.name][f.start : f.start + f.numel] for f in handle.fragments])

    async def apply(
        self, op: Op, *handles: Params, num_outputs: int = 1, part: Sequence[int] = (), **scalars: Any
    ) -> tuple[Params, ...]:
        made = op(*(self.read(h) for h in handles), layout=self.run.layout.part(part), offset=0, **scalars)
        assert len(made) == num_outputs
        return tuple(self._new(values.clone()) for values in made)

    async def head(
        self, work: Callable[[Head], Result], *, key: str, num_sequences: int = 0, held_out_parts: int = 0
    ) -> HeadResult:
        """The same work with the same data, and no devices."""
        assert not held_out_parts, "validation is no part of a round"
        run, spans = self._coordinator, list[pb.Span]()
        if num_sequences:
            (lease,) = run.ledger.leases(self._round, self._attempt)
            spans = list(pb.Lease.FromString(lease.lease).spans)
        result = work(PlainHead(read_spans(spans, run.objects, run.facts), self.read, self._update))
        return HeadResult(
            scalars=result.scalars, handles={k: self._new(Vector.of(v).tensor()) for k, v in result.tensors.items()}
        )

    def _update(self, reply: Reply, name: str, part: Sequence[int] = ()) -> Tensor:
        layout = self.run.layout.part(part)
        with Bundle.open(self._coordinator.objects.path(Digest(reply.object))) as bundle:
            return bundle.flat_slice(name, layout, 0, layout.numel)

    def credit(self, key: str, num_tokens: Mapping[WorkerId, int]) -> None:
        pass

    def report(self, figures: Mapping[str, float]) -> None:
        pass

    async def norm(self, handle: Params) -> float:
        return float(self.read(handle).double().norm())

    async def next(self, offer: Callable[[WorkerInfo], BoundTask | None], *, key: str) -> Reply:
        raise _unplayed(key)

    async def map(self, tasks: Sequence[BoundTask], *, key: str) -> tuple[Reply, ...]:
        raise _unplayed(key)

    async def open(self, worker: WorkerId, task: BoundTask, *, key: str) -> None:
        raise _unplayed(key)

    async def send(self, key: str, step: int, arguments: Mapping[str, Any]) -> None:
        raise _unplayed(key)

    async def receive(self, key: str, step: int) -> Reply:
        raise _unplayed(key)

    async def close(self, key: str) -> None:
        raise _unplayed(key)


class PlainHead:
    """The head without devices."""

    def __init__(self, data: Iterator[Tensor], read: Callable[[Params], Tensor], update: Callable[..., Tensor]) -> None:
        self._data, self._read, self._update = data, read, update

    def batches(self) -> Iterator[Tensor]:
        return self._data

    def vector(self, handle: Params) -> Vector:
        return Vector.of(self._read(handle))

    def update(self, reply: Reply, name: str, part: Sequence[int] = ()) -> Tensor:
        return self._update(reply, name, part)

    def workers(self) -> tuple[WorkerInfo, ...]:
        return ()

    def wait(self) -> None:
        pass

    def now(self) -> float:
        return 0.0

    def secret(self) -> str:
        return ""

    def blame(self, worker: WorkerId, reason: str) -> None:
        pass

    def spread(self, bag: Bag) -> None:
        raise AssertionError("nobody is here to take a piece")


def _unplayed(key: str) -> Exception:
    return NotImplementedError(f"{key}: rounds with this verb are not recomputed; teach PlainFleet the verb")


def plainly(round: Any) -> Any:
    """The result of a coroutine that never waits."""
    try:
        round.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a plain fleet never waits")
