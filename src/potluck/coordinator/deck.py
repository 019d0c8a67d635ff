"""The run's data as the fleet sees it: deals spans of shards to workers, and keeps the deal for the ledger.

With private data there is nothing to deal: every worker reads on in its own text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from potluck.data.dealer import Dealer, DealState
from potluck.data.shards import Shard, Span, held_out_parts
from potluck.protocol import pb
from potluck.storage.digest import check_digest
from potluck.types.ids import Digest, WorkerId


class Deck:
    """`training` and `held_out` are shards (objects for shared data, files for listed data); empty for private, of
    which `owners_hold_out` some."""

    def __init__(
        self, training: Sequence[Shard], held_out: Sequence[Shard], *, seed: int, shared: bool, private: bool = False,
        owners_hold_out: bool = True,
    ) -> None:  # fmt: skip
        self._dealer = Dealer(training, seed=seed) if training else None
        self._state = DealState()
        self._held_out = held_out_parts(tuple(held_out))
        self._shared = shared
        self._private, self._owners_hold_out = private, owners_hold_out
        self._digests = tuple(check_digest(s.name) for s in (*training, *held_out)) if shared else ()

    @property
    def num_held_out(self) -> int:
        """Parts of the validation data; with private data every worker has one of its own, where any is held out."""
        return int(self._owners_hold_out) if self._private else len(self._held_out)

    @property
    def num_shards(self) -> int:
        return len(self._dealer.shards) if self._dealer else 0

    def deal(self, worker: WorkerId, num_sequences: int) -> list[pb.Span]:
        if self._dealer is None:
            return []
        self._state, spans = self._dealer.deal(self._state, worker, num_sequences)
        return [_to_message(s) for s in spans]

    def settle(self, spans: Sequence[pb.Span], *, consumed: bool) -> None:
        if self._dealer is not None:
            self._state = self._dealer.settle(self._state, map(_from_message, spans), consumed=consumed)

    def release(self, worker: WorkerId) -> None:
        if self._dealer is not None:
            self._state = self._dealer.release(self._state, worker)

    def held_out(self, part: int) -> list[pb.Span]:
        return [] if self._private else [_to_message(self._held_out[part])]

    def objects(self, spans: Sequence[pb.Span]) -> list[Digest]:
        """What a worker must fetch to read the spans."""
        return [check_digest(s.shard) for s in spans] if self._shared else []

    def digests(self) -> tuple[Digest, ...]:
        """Every object of the data."""
        return self._digests

    def account(self) -> list[dict[str, int]]:
        """How much of each epoch under way was consumed."""
        if self._dealer is None:
            return []
        return [
            {"epoch": c.epoch, "consumed": c.consumed, "outstanding": c.outstanding, "left": c.left}
            for c in self._dealer.account(self._state)
        ]

    def to_json(self) -> Any:
        return self._state.to_json()

    def fresh(self) -> Any:
        return DealState().to_json()

    def reclaimed(self, value: Any) -> Any:
        """A stored deal with what was handed out then taken back: nobody has it any more."""
        return DealState.from_json(value).reclaimed().to_json()

    def restore(self, value: Any) -> None:
        self._state = DealState.from_json(value)


def _to_message(span: Span) -> pb.Span:
    return pb.Span(shard=span.shard, start=span.start, stop=span.stop, epoch=span.epoch, digest=span.digest)


def _from_message(span: pb.Span) -> Span:
    return Span(shard=span.shard, start=span.start, stop=span.stop, epoch=span.epoch, digest=span.digest)
