"""What a device reads: batches of sequences, from spans it was dealt or from files of its own.

A source is an `Iterator` of int64 [at most batch_size, seq_len + 1], of pairs [at most batch_size, 2, seq_len + 1]; in
records with answers, tokens that are not to be predicted are complements (records.py). A `SpanSource` ends with
its spans; a `PrivateSource` never ends, and its cursor is all that must be kept to go on where it stopped. A
`PoissonSource` never ends either: a batch of it is the whole sample of a step, of any size, and it has no position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from potluck.codecs.bundle import Bundle
from potluck.data.epoch import epoch_order
from potluck.data.packing import PackedShard, num_sequences_in
from potluck.data.shards import Span
from potluck.data.token_arrays import TokenArray
from potluck.optim.dp_sgd import RandomBytes, poisson_sample
from potluck.types.errors import CorruptError


@dataclass(frozen=True)
class Sequences:
    """Sequences on disk or in memory: integer [num_sequences, seq_len + 1], rows possibly sharing a token.

    A pair counts as one sequence, of two rows: integer [num_sequences, 2, seq_len + 1].
    """

    rows: TokenArray
    keep: Any = None  # what the rows are a view of

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: NDArray[np.int64]) -> Tensor:
        """int64 [len(indices), ...], a copy."""
        return torch.from_numpy(np.asarray(self.rows[indices], dtype=np.int64))


def stream_sequences(tokens: TokenArray, seq_len: int) -> Sequences:
    """Sequences of a flat stream, without copying it."""
    num_sequences = num_sequences_in(len(tokens), seq_len)
    if not num_sequences:
        return Sequences(np.empty((0, seq_len + 1), tokens.dtype))
    windows = np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)
    return Sequences(windows[::seq_len][:num_sequences], tokens)


def open_shard(path: Path, *, seq_len: int, vocab_size: int, rows_per_record: int = 0) -> Sequences:
    """A packed shard that came from elsewhere, mapped into memory and read once to check its tokens.

    CorruptError if it does not hold sequences of this run.
    """
    sequences = _map_shard(path, seq_len, rows_per_record)
    low, high = int(sequences.rows.min()), int(sequences.rows.max())
    if rows_per_record and not (sequences.rows[..., 1:] >= 0).any(axis=-1).all():
        raise CorruptError(f"shard {path.name} holds a record without a token to predict; fetch it again")
    if low < (-vocab_size if rows_per_record else 0) or high >= vocab_size:
        raise CorruptError(
            f"shard {path.name} holds tokens from {low} to {high} and the vocabulary has {vocab_size:,} entries; "
            "fetch it again"
        )
    return sequences


def _map_shard(path: Path, seq_len: int, rows_per_record: int) -> Sequences:
    shape = (2, seq_len + 1) if rows_per_record == 2 else (seq_len + 1,)
    with Bundle.open(path) as bundle:
        if "tokens" not in bundle.entries:
            raise CorruptError(f"{path.name} holds no tokens and is no data shard; fetch it again")
        rows = bundle.tensor("tokens").numpy()  # outlives the bundle
    if not rows.ndim or rows.shape[1:] != shape or rows.dtype.kind not in "iu" or not len(rows):
        raise CorruptError(
            f"shard {path.name} holds {rows.dtype} {list(rows.shape)} and this run needs whole numbers "
            f"[any, {', '.join(map(str, shape))}]; fetch it again"
        )
    return Sequences(rows)


class SpanSource:
    """Batches of the sequences that spans name, in reading order; the last may be short."""

    def __init__(
        self, spans: Sequence[Span], sequences_of: Callable[[Span], Sequences], *, seed: int, batch_size: int
    ) -> None:
        self._spans = tuple(spans)
        self._sequences_of = sequences_of
        self._seed = seed
        self._batch_size = batch_size
        self._taken: dict[str, set[int]] = {}  # by the digest of what they are of
        self._batches = self._read()

    @property
    def num_different(self) -> int:
        """How many sequences it has read, each counted once however often it was dealt."""
        return sum(map(len, self._taken.values()))

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        return next(self._batches)

    def _read(self) -> Iterator[Tensor]:
        waiting: list[Tensor] = []
        num_waiting = 0
        for span in self._spans:
            sequences = self._sequences_of(span)
            if not 0 <= span.start < span.stop <= len(sequences):
                raise CorruptError(
                    f"sequences {span.start} to {span.stop} of {span.shard} were dealt and it holds {len(sequences)}; "
                    "this copy or the manifest is wrong"
                )
            order = _order(self._seed, span.epoch, span.shard, len(sequences))[span.start : span.stop]
            taken = self._taken.setdefault(span.digest or span.shard, set())
            while len(order):
                room = self._batch_size - num_waiting
                waiting.append(sequences.take(order[:room]))
                taken.update(order[:room].tolist())
                num_waiting += len(waiting[-1])
                order = order[room:]
                if num_waiting == self._batch_size:
                    yield torch.cat(waiting)
                    waiting, num_waiting = [], 0
        if waiting:
            yield torch.cat(waiting)


@lru_cache(maxsize=64)
def _order(seed: int, epoch: int, shard: str, num_sequences: int) -> NDArray[np.int64]:
    return epoch_order(seed, epoch, shard, num_sequences)


@dataclass(frozen=True)
class Cursor:
    """A position in private data: `position` sequences of `epoch` are read."""

    epoch: int = 0
    position: int = 0

    def to_json(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Cursor:
        return Cursor(epoch=int(value["epoch"]), position=int(value["position"]))


START = Cursor()


class OwnSequences:
    """A worker's own sequences, which were made and checked on this machine, numbered through its shards."""

    def __init__(self, shards: Sequence[PackedShard], *, seq_len: int, rows_per_record: int = 0) -> None:
        self._shards = tuple(shards)
        self._seq_len, self._rows_per_record = seq_len, rows_per_record
        self._parts: dict[int, Sequences] = {}  # mapped when first read
        self._ends = np.cumsum([s.num_sequences for s in shards])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, indices: NDArray[np.int64]) -> Tensor:
        """int64 [len(indices), ...], a copy."""
        if not len(indices):
            shape = (2, self._seq_len + 1) if self._rows_per_record == 2 else (self._seq_len + 1,)
            return torch.empty((0, *shape), dtype=torch.int64)
        return torch.cat([self._row(int(i)) for i in indices])

    def _row(self, index: int) -> Tensor:
        part = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[part - 1]) if part else 0
        if part not in self._parts:
            self._parts[part] = _map_shard(self._shards[part].path, self._seq_len, self._rows_per_record)
        return self._parts[part].take(np.array([index - start]))


class PoissonSource:
    """Samples of a worker's own sequences: each is in a sample with probability `rate`, independently of all others."""

    def __init__(self, sequences: OwnSequences, *, rate: float, random_bytes: RandomBytes) -> None:
        self._sequences, self._rate, self._random_bytes = sequences, rate, random_bytes

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        return self._sequences.take(poisson_sample(len(self._sequences), self._rate, self._random_bytes))


class PrivateSource:
    """Full batches of a worker's own sequences for ever: every sequence once per epoch, in the epoch's order."""

    def __init__(
        self,
        shards: Sequence[PackedShard],
        *,
        seq_len: int,
        seed: int,
        batch_size: int,
        cursor: Cursor = START,
        rows_per_record: int = 0,
        num_planted: int = 0,
    ) -> None:
        """`num_planted`: of the sequences, the last so many are not the owner's own (canaries.py)."""
        self._sequences = OwnSequences(shards, seq_len=seq_len, rows_per_record=rows_per_record)
        self.num_sequences = len(self._sequences)
        self._seed = seed
        self._batch_size = batch_size
        self._num_own = self.num_sequences - num_planted
        self._read: set[int] = set()
        self.seek(cursor)

    @property
    def num_different(self) -> int:
        """How many of the owner's own sequences it has read, each counted once however often it was read."""
        return sum(index < self._num_own for index in self._read)

    @property
    def cursor(self) -> Cursor:
        """Where the next batch starts. Unlike the data it is no secret, but it has no use elsewhere."""
        return self._cursor

    def seek(self, cursor: Cursor) -> None:
        """Go on from there. A position past the end (the files changed) starts the next epoch."""
        assert cursor.epoch >= 0 and cursor.position >= 0
        self._cursor = cursor if cursor.position < self.num_sequences else Cursor(cursor.epoch + 1, 0)

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        rows: list[Tensor] = []
        missing = self._batch_size
        while missing:
            epoch, position = self._cursor.epoch, self._cursor.position
            order = _order(self._seed, epoch, "private", self.num_sequences)[position : position + missing]
            rows.append(self._sequences.take(order))
            self._read.update(order.tolist())
            missing -= len(order)
            self.seek(Cursor(epoch, position + len(order)))
        return torch.cat(rows)


def held_out_batches(sequences: Sequences, batch_size: int) -> Iterator[Tensor]:
    """All of it once, in stored order: validation data."""
    for start in range(0, len(sequences), batch_size):
        yield sequences.take(np.arange(start, min(start + batch_size, len(sequences))))
