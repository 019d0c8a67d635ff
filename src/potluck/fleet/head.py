"""Work on the head: this machine trains by itself, with data of its own and the fleet's devices at hand.

The data is dealt and written down as for a worker, so that after a restart the step begins again with the same
sequences. What the work computed is not written down: a step that was not committed is done again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from potluck.clock import Clock
from potluck.clock.conversation import Ask
from potluck.data.shards import Span
from potluck.data.stream import Sequences, SpanSource, open_shard
from potluck.fleet.spread import Spreader
from potluck.protocol import pb
from potluck.storage.digest import check_digest
from potluck.storage.ledger import LeaseRow
from potluck.storage.objects import ObjectStore
from potluck.storage.params import ParamStore
from potluck.strategies.bag import Bag
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.run import RunFacts
from potluck.types.ids import WorkerId
from potluck.types.params import Params
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
    clock: Clock
    data: Iterator[Tensor]

    def batches(self) -> Iterator[Tensor]:
        return self.data

    def vector(self, handle: Params) -> Vector:
        return Vector(handle.numel, lambda start, stop: self.params.read_slice(handle, start, stop))

    def workers(self) -> tuple[WorkerInfo, ...]:
        return self.spreader.here()

    def now(self) -> float:
        return self.clock.now()

    def holds(self, worker: WorkerId, name: str) -> bool:
        return self.spreader.holds(worker, name, scope=self.scope)

    def spread(self, bag: Bag) -> None:
        self.ask(self.spreader.spread(bag, scope=self.scope))


def head_lease(key: str, round: int, spans: Sequence[pb.Span], num_sequences: int) -> LeaseRow:
    """The line of the ledger that keeps what data the head was dealt."""
    message = pb.Lease(
        key=key, round=round, task="head", kind="head", arguments_json=json.dumps({}), spans=spans,
        num_sequences=num_sequences,
    )  # fmt: skip
    return LeaseRow(key=key, issue=0, worker=HEAD, lease=message.SerializeToString(), status="open")


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
