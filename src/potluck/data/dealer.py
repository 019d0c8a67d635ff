"""Who trains on what: a pure state machine that deals sequences to workers, each once per epoch.

    deal(state, worker, n)           -> state', n sequences as spans
    settle(state, spans, consumed)   -> state'      consumed: counted; else they are dealt again, to anyone
    release(state, worker)           -> state'      a worker that left gives back the rest of its shard

Each sequence of an epoch is in one place: free (its shard not begun), held (the rest of a worker's shard), returned,
outstanding (dealt and not settled) or consumed. A deal takes returned ranges first, oldest epoch first; then the
worker's own shard, so that a worker downloads few shards; then the next free shard; then the second half of the
longest rest that another worker holds; and when all of that is empty it opens the next epoch. So sequences are
consumed at most once per epoch, and an epoch ends when every one was.

The catalogue (all shards) never changes; the state holds ranges, never sequences, and belongs to the ledger's row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from potluck.data.epoch import shard_order
from potluck.data.shards import Shard, Span

Range = tuple[int, int, int]  # shard (index in the catalogue), start, stop


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch that has begun and is not wholly consumed."""

    number: int
    num_begun: int = 0  # shards that are no longer free, in the order of the epoch
    held: tuple[tuple[str, Range], ...] = ()  # by worker id; each worker holds at most one rest
    returned: tuple[Range, ...] = ()
    outstanding: tuple[Range, ...] = ()
    num_consumed: int = 0


@dataclass(frozen=True)
class DealState:
    """Epochs that are under way, oldest first, and how many are over."""

    epochs: tuple[Epoch, ...] = ()
    num_done: int = 0

    def reclaimed(self) -> DealState:
        """Everything outstanding is returned: for a state that is restored without its leases."""
        epochs = (replace(e, returned=_merged((*e.returned, *e.outstanding)), outstanding=()) for e in self.epochs)
        return DealState(tuple(epochs), self.num_done)

    def to_json(self) -> dict[str, Any]:
        epochs = [
            [e.number, e.num_begun, [[w, *r] for w, r in e.held], list(e.returned), list(e.outstanding), e.num_consumed]
            for e in self.epochs
        ]
        return {"epochs": epochs, "num_done": self.num_done}

    @staticmethod
    def from_json(value: dict[str, Any]) -> DealState:
        return DealState(
            epochs=tuple(
                Epoch(
                    number=int(number),
                    num_begun=int(num_begun),
                    held=tuple((str(w), (int(s), int(a), int(b))) for w, s, a, b in held),
                    returned=tuple((int(s), int(a), int(b)) for s, a, b in returned),
                    outstanding=tuple((int(s), int(a), int(b)) for s, a, b in outstanding),
                    num_consumed=int(num_consumed),
                )
                for number, num_begun, held, returned, outstanding, num_consumed in value["epochs"]
            ),
            num_done=int(value["num_done"]),
        )


@dataclass(frozen=True, kw_only=True)
class EpochCount:
    """Where an epoch's sequences are; the three add up to all of them."""

    epoch: int
    consumed: int
    outstanding: int
    left: int


class Dealer:
    """The machine for one catalogue. Every method is pure."""

    def __init__(self, shards: Sequence[Shard], *, seed: int) -> None:
        assert shards and all(s.num_sequences > 0 for s in shards), "a dealer needs shards that hold sequences"
        self.shards = tuple(shards)
        self.seed = seed
        self.num_sequences = sum(s.num_sequences for s in shards)
        self._indices = {shard.name: index for index, shard in enumerate(self.shards)}
        assert len(self._indices) == len(self.shards), "two shards have one name"

    def deal(self, state: DealState, worker: str, num_sequences: int) -> tuple[DealState, tuple[Span, ...]]:
        """Exactly `num_sequences` for a worker, in reading order."""
        spans: list[Span] = []
        missing = num_sequences
        while missing > 0:
            state, epoch, taken = self._take(state, worker, missing)
            index, start, stop = taken
            shard = self.shards[index]
            spans.append(Span(shard=shard.name, start=start, stop=stop, epoch=epoch, digest=shard.digest))
            missing -= stop - start
        return state, tuple(spans)

    def settle(self, state: DealState, spans: Iterable[Span], *, consumed: bool) -> DealState:
        """Spans (or parts of them) that were dealt and are outstanding: count them, or take them back."""
        for span in spans:
            epoch = next((e for e in state.epochs if e.number == span.epoch), None)
            assert epoch is not None, f"epoch {span.epoch} is not under way"
            part = (self._indices[span.shard], span.start, span.stop)
            epoch = replace(epoch, outstanding=_without(epoch.outstanding, part))
            if consumed:
                epoch = replace(epoch, num_consumed=epoch.num_consumed + span.num_sequences)
            else:
                epoch = replace(epoch, returned=_merged((*epoch.returned, part)))
            state = self._with(state, epoch)
        return state

    def release(self, state: DealState, worker: str) -> DealState:
        """What a worker still holds goes back. What it was dealt is settled by whoever asked for it."""
        for epoch in state.epochs:
            rests = [r for w, r in epoch.held if w == worker]
            if rests:
                held = tuple(h for h in epoch.held if h[0] != worker)
                state = self._with(state, replace(epoch, held=held, returned=_merged((*epoch.returned, *rests))))
        return state

    def account(self, state: DealState) -> tuple[EpochCount, ...]:
        """One count for each epoch under way, oldest first; epochs before `state.num_done` are wholly consumed."""
        counts: list[EpochCount] = []
        for epoch in state.epochs:
            outstanding = sum(b - a for _, a, b in epoch.outstanding)
            left = self.num_sequences - epoch.num_consumed - outstanding
            counts.append(
                EpochCount(epoch=epoch.number, consumed=epoch.num_consumed, outstanding=outstanding, left=left)
            )
        return tuple(counts)

    def _take(self, state: DealState, worker: str, at_most: int) -> tuple[DealState, int, Range]:
        """One range of at most that many sequences, moved to outstanding."""
        for epoch in state.epochs:
            if epoch.returned:
                taken, rest = _split(epoch.returned[0], at_most)
                epoch = replace(epoch, returned=(*rest, *epoch.returned[1:]))
                return self._handed(state, epoch, taken)
        for epoch in state.epochs:
            found = self._held_for(epoch, worker)
            if found is not None:
                held, whole = found
                taken, rest = _split(whole, at_most)
                held = tuple(sorted((*held, *((worker, r) for r in rest))))
                return self._handed(state, replace(epoch, held=held, num_begun=self._begun(epoch, whole)), taken)
        number = state.epochs[-1].number + 1 if state.epochs else state.num_done
        return self._take(replace(state, epochs=(*state.epochs, Epoch(number=number))), worker, at_most)

    def _held_for(self, epoch: Epoch, worker: str) -> tuple[tuple[tuple[str, Range], ...], Range] | None:
        """What this worker reads on in, and what the others then hold; None if the epoch has nothing left."""
        others = tuple(h for h in epoch.held if h[0] != worker)
        own = [r for w, r in epoch.held if w == worker]
        if own:
            return others, own[0]
        if epoch.num_begun < len(self.shards):
            index = self._order(epoch.number)[epoch.num_begun]
            return others, (index, 0, self.shards[index].num_sequences)
        if not others:
            return None
        longest = max(others, key=lambda h: (h[1][2] - h[1][1], h[0]))
        owner, (index, start, stop) = longest
        middle = start + (stop - start) // 2
        kept = ((owner, (index, start, middle)),) if middle > start else ()
        return (*(h for h in others if h is not longest), *kept), (index, middle, stop)

    def _begun(self, epoch: Epoch, taken: Range) -> int:
        free = epoch.num_begun < len(self.shards) and self._order(epoch.number)[epoch.num_begun] == taken[0]
        return epoch.num_begun + 1 if free else epoch.num_begun

    def _order(self, epoch: int) -> tuple[int, ...]:
        return _cached_order(self.seed, epoch, len(self.shards))

    def _handed(self, state: DealState, epoch: Epoch, taken: Range) -> tuple[DealState, int, Range]:
        epoch = replace(epoch, outstanding=_merged((*epoch.outstanding, taken)))
        return self._with(state, epoch), epoch.number, taken

    def _with(self, state: DealState, epoch: Epoch) -> DealState:
        """The state with this epoch in its place; the oldest ones leave when they are wholly consumed."""
        epochs = tuple(epoch if e.number == epoch.number else e for e in state.epochs)
        num_done = state.num_done
        while epochs and epochs[0].num_consumed == self.num_sequences:
            num_done, epochs = epochs[0].number + 1, epochs[1:]
        return DealState(epochs, num_done)


@lru_cache(maxsize=8)
def _cached_order(seed: int, epoch: int, num_shards: int) -> tuple[int, ...]:
    return tuple(int(i) for i in shard_order(seed, epoch, num_shards))


def _split(whole: Range, at_most: int) -> tuple[Range, tuple[Range, ...]]:
    """The first `at_most` sequences of a range, and the rest if there is one."""
    shard, start, stop = whole
    middle = min(start + at_most, stop)
    return (shard, start, middle), (((shard, middle, stop),) if middle < stop else ())


def _merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sorted, with neighbours joined."""
    merged: list[Range] = []
    for shard, start, stop in sorted(ranges):
        if merged and merged[-1][0] == shard and merged[-1][2] == start:
            merged[-1] = (shard, merged[-1][1], stop)
        else:
            merged.append((shard, start, stop))
    return tuple(merged)


def _without(ranges: Iterable[Range], part: Range) -> tuple[Range, ...]:
    """`ranges` less `part`, which lies within one of them."""
    shard, start, stop = part
    left: list[Range] = []
    found = False
    for s, a, b in ranges:
        if s == shard and a <= start < stop <= b:
            found = True
            left += [r for r in ((s, a, start), (s, stop, b)) if r[1] < r[2]]
        else:
            left.append((s, a, b))
    assert found, f"sequences {start} to {stop} of shard {shard} are not outstanding"
    return tuple(left)
