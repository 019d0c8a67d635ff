"""Work on the head: this machine trains by itself, with data of its own and the fleet's devices at hand.

The data is dealt and written down as for a worker, so that after a restart the step begins again with the same
sequences. What the work computed is not written down: a step that was not committed is done again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from potluck.aggregation.combine import accepted
from potluck.clock import Clock, Lanes
from potluck.clock.conversation import Ask
from potluck.codecs.bundle import Bundle
from potluck.data.shards import Span
from potluck.data.stream import Sequences, SpanSource, open_shard
from potluck.fleet.attempt import Attempt
from potluck.fleet.data import DataPlane
from potluck.fleet.spread import Spreader
from potluck.protocol import pb
from potluck.storage.digest import check_digest
from potluck.storage.ledger import LeaseRow, Ledger, ReplyRow
from potluck.storage.objects import ObjectStore
from potluck.storage.params import ParamStore
from potluck.strategies.bag import Bag
from potluck.strategies.fleet import Head, HeadResult, Reply, WorkerInfo
from potluck.strategies.run import RunFacts
from potluck.strategies.task import Result
from potluck.types.ids import Digest, WorkerId
from potluck.types.params import Layout, Params
from potluck.types.vector import Vector

HEAD = WorkerId("(head)")
"""In the ledger, in the place of a worker; no member can have that name."""


@dataclass(frozen=True, kw_only=True)
class HeadDesk:
    """`strategies.fleet.Head`: what one piece of work on the head has before it."""

    ask: Ask
    spreader: Spreader
    scope: str
    params: ParamStore
    objects: ObjectStore
    layout: Layout
    clock: Clock
    data: Iterator[Tensor]
    secret: Callable[[], str]

    def batches(self) -> Iterator[Tensor]:
        for batch in self.data:
            self.ask(_nothing())  # work that asks for nothing else ends here where it is not wanted any more
            yield batch

    def vector(self, handle: Params) -> Vector:
        return Vector(handle.numel, lambda start, stop: self.params.read_slice(handle, start, stop))

    def update(self, reply: Reply, name: str, part: Sequence[int] = ()) -> Tensor:
        with accepted(), Bundle.open(self.objects.path(Digest(reply.object))) as bundle:
            return bundle.decode_flat(name, self.layout.part(part))

    def workers(self) -> tuple[WorkerInfo, ...]:
        return self.ask(self._workers())

    async def _workers(self) -> tuple[WorkerInfo, ...]:
        return self.spreader.looked()

    def wait(self) -> None:
        self.ask(self.spreader.somebody())

    def now(self) -> float:
        return self.clock.now()

    def blame(self, worker: WorkerId, reason: str) -> None:
        self.ask(self._blame(worker, reason))

    async def _blame(self, worker: WorkerId, reason: str) -> None:
        self.spreader.refused(worker, reason)

    def spread(self, bag: Bag) -> None:
        self.ask(self.spreader.spread(bag, scope=self.scope))


@dataclass(frozen=True, kw_only=True)
class HeadWork:
    """Does work on the head, for attempts at rounds."""

    spreader: Spreader
    params: ParamStore
    objects: ObjectStore
    data: DataPlane
    ledger: Ledger
    clock: Clock
    lanes: Lanes
    secret: Callable[[], str]

    async def run(
        self, work: Callable[[Head], Result], attempt: Attempt, run: RunFacts, *, key: str, num_sequences: int,
        held_out_parts: int, name: Callable[[str], str],
    ) -> HeadResult:  # fmt: skip
        """As `Fleet.head` says. `name` gives vectors that are made names of their own."""
        spans = [span for part in range(held_out_parts) for span in self.data.held_out(part)]
        if num_sequences:
            spans = await self._dealt(attempt, key, num_sequences)

        def perform(ask: Ask) -> HeadResult:
            desk = HeadDesk(
                ask=ask, spreader=self.spreader, scope=f"{attempt.round}.{attempt.attempt}", params=self.params,
                objects=self.objects, layout=run.layout, clock=self.clock, data=read_spans(spans, self.objects, run),
                secret=self.secret,
            )  # fmt: skip
            result = work(desk)
            handles = {what: self.params.create(name(what), vector) for what, vector in result.tensors.items()}
            return HeadResult(scalars=result.scalars, handles=handles)

        result = await self.lanes.compute.converse(perform)
        if num_sequences:
            attempt.consumed[key] = ReplyRow(key=key, worker=HEAD, object="", scalars=result.scalars, version="")
        return result

    async def _dealt(self, attempt: Attempt, key: str, num_sequences: int) -> list[pb.Span]:
        """What it was dealt for this piece of work, now or before a restart."""
        rows = attempt.leases.get(key)
        if rows is None:
            spans = self.data.deal(HEAD, num_sequences)
            message = pb.Lease(
                key=key, round=attempt.round, task="head", kind="head", spans=spans, num_sequences=num_sequences
            )
            row = LeaseRow(key=key, issue=0, worker=HEAD, lease=message.SerializeToString(), status="open")
            rows = attempt.leases[key] = [row]
            deal = self.data.to_json()
            await self.lanes.ledger.run(self.ledger.issue, attempt.round, attempt.attempt, rows, deal)
        return list(pb.Lease.FromString(rows[-1].lease).spans)


async def _nothing() -> None:
    pass


def credit(attempt: Attempt, key: str, num_tokens: Mapping[WorkerId, int]) -> None:
    """As `Fleet.credit` says: the tokens of the head's work, in part its devices'."""
    of_head = attempt.consumed[key]
    left = max(int(of_head.scalars.get("num_tokens", 0)) - sum(num_tokens.values()), 0)
    attempt.consumed[key] = dataclasses.replace(of_head, scalars={**of_head.scalars, "num_tokens": left})
    for worker, number in num_tokens.items():
        name = f"{key}/{worker}"
        attempt.consumed[name] = ReplyRow(
            key=name, worker=worker, object="", scalars={"num_tokens": number}, version=""
        )


def read_spans(spans: Sequence[pb.Span], objects: ObjectStore, run: RunFacts) -> Iterator[Tensor]:
    """Batches of the run's micro-batch size. Shared data only."""

    def sequences(span: Span) -> Sequences:
        path = objects.path(check_digest(span.shard))
        return _open_shard(path, run.seq_len, int(run.model_config["vocab_size"]))

    named = [Span(shard=s.shard, start=s.start, stop=s.stop, epoch=s.epoch, digest=s.digest) for s in spans]
    return SpanSource(named, sequences, seed=run.seed, batch_size=run.inner.batch_size)


@lru_cache(maxsize=64)
def _open_shard(path: Path, seq_len: int, vocab_size: int) -> Sequences:
    return open_shard(path, seq_len=seq_len, vocab_size=vocab_size)
