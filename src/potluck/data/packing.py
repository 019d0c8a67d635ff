"""Documents to sequences: divide into training and validation, tokenise, shuffle, and cut one continuous stream.

    stream      d_1 EOS d_2 EOS ...                 documents in an order drawn from the seed
    sequence i  stream[i L : i L + L + 1]           L = seq_len; neighbours share one token, so each has L losses

One stream fills shard after shard, so only the last, incomplete sequence of all is dropped, and counted. Tokens pass
through a file on the way: memory holds one batch of documents or one shard, never the corpus.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from potluck.codecs.bundle import write_tensors
from potluck.data.epoch import permutation
from potluck.data.token_arrays import TokenArray, token_type_for
from potluck.data.tokenizer import TextTokenizer
from potluck.storage.digest import digest_file
from potluck.types.ids import Digest

_batch_chars = 4 << 20
_likely_shards = 128  # enough that 16 workers have 8 each
_max_shard_sequences = 512


@dataclass(frozen=True)
class Division:
    """Which documents are held out for validation, by position.

    Where whole documents do not come near the wanted share, the end of the data is held out instead: documents after
    `cut_document`, and that one from position `cut_at` on.
    """

    held_out: frozenset[int] = frozenset()
    cut_document: int | None = None
    cut_at: int = 0

    def is_held_out(self, document: int) -> bool:
        """For any document but the one that is cut."""
        return document in self.held_out or (self.cut_document is not None and document > self.cut_document)

    def held_out_records(self, num_records: int) -> NDArray[np.bool_]:
        """Which are held out of so many documents that cannot be cut: one that would be is. [num_records]"""
        return np.array([self.is_held_out(i) or i == self.cut_document for i in range(num_records)], bool)


def divide(lengths: Sequence[int], fraction: float, seed: int) -> Division:
    """Hold out about `fraction` of the data, by whole documents where possible. Lengths in any unit."""
    total = sum(lengths)
    target = fraction * total
    if target == 0:
        return Division()
    held: set[int] = set()
    size = 0
    for document in permutation(f"{seed}/validation", len(lengths)):
        if size + lengths[document] <= target:
            held.add(int(document))
            size += lengths[document]
    if size >= target / 2:
        return Division(frozenset(held))
    boundary, before = min(int(total - target), total - 1), 0
    for document, length in enumerate(lengths):
        if before + length > boundary:
            return Division(cut_document=document, cut_at=boundary - before)
        before += length
    raise AssertionError("the boundary lies within the data")


def divided_texts(documents: Iterable[str], division: Division) -> Iterator[tuple[str, bool]]:
    """Each text with whether it is held out; a document that is cut comes as two, cut at a line if it has one."""
    for number, text in enumerate(documents):
        if number != division.cut_document:
            yield text, division.is_held_out(number)
            continue
        line = text.find("\n", division.cut_at)
        cut = line + 1 if 0 <= line < len(text) - 1 else division.cut_at
        for part, held_out in ((text[:cut], False), (text[cut:], True)):
            if part:
                yield part, held_out


@dataclass(frozen=True)
class TokenDocuments:
    """Tokens of many documents in a few flat arrays. Document i is arrays[which[i]][starts[i]:stops[i]]."""

    arrays: Sequence[TokenArray]
    which: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @staticmethod
    def of(arrays: Sequence[TokenArray], stops: Sequence[NDArray[np.int64]]) -> TokenDocuments:
        """From arrays and where documents end in each."""
        starts = [np.concatenate((np.zeros(1, np.int64), s))[:-1] for s in stops]
        which = [np.full(len(s), i, np.int64) for i, s in enumerate(stops)]
        return TokenDocuments(arrays, np.concatenate(which), np.concatenate(starts), np.concatenate(stops))

    def __len__(self) -> int:
        return len(self.stops)

    def __getitem__(self, document: int) -> TokenArray:
        array = self.arrays[int(self.which[document])]
        return array[int(self.starts[document]) : int(self.stops[document])]

    def lengths(self) -> NDArray[np.int64]:
        return self.stops - self.starts

    def divided(self, division: Division) -> tuple[TokenDocuments, TokenDocuments]:
        """Training and validation documents."""
        number = np.arange(len(self))
        held = np.isin(number, np.fromiter(division.held_out, np.int64, len(division.held_out)))
        training, validation = ~held, held
        starts, stops = self.starts.copy(), self.stops.copy()
        if division.cut_document is not None:
            training, validation = number <= division.cut_document, number >= division.cut_document
            stops[division.cut_document] = starts[division.cut_document] + division.cut_at
            starts[division.cut_document] = stops[division.cut_document]
        return (
            TokenDocuments(self.arrays, self.which[training], self.starts[training], stops[training]),
            TokenDocuments(self.arrays, self.which[validation], starts[validation], self.stops[validation]),
        )


def tokenise(texts: Iterable[str], tokenizer: TextTokenizer, path: Path) -> TokenDocuments:
    """Encode texts in batches into one file at `path`, each followed by the end-of-text token."""
    token_type = token_type_for(tokenizer.vocab_size)
    lengths: list[int] = []
    batch: list[str] = []
    with path.open("wb") as file:

        def flush() -> None:
            for tokens in tokenizer.encode(batch):
                file.write(np.append(tokens, tokenizer.eos_id).astype(token_type).tobytes())
                lengths.append(len(tokens) + 1)
            batch.clear()

        num_chars = 0
        for text in texts:
            batch.append(text)
            num_chars += len(text)
            if num_chars >= _batch_chars:
                flush()
                num_chars = 0
        flush()
    if not lengths:
        return TokenDocuments.of([np.zeros(0, token_type)], [np.zeros(0, np.int64)])
    return TokenDocuments.of([np.memmap(path, dtype=token_type, mode="r")], [np.cumsum(lengths, dtype=np.int64)])


@dataclass(frozen=True, kw_only=True)
class PackedShard:
    """A file that holds a bundle: `tokens`, uint16 or int32 [num_sequences, seq_len + 1]; of pairs [..., 2, ...]."""

    path: Path
    digest: Digest
    num_sequences: int
    num_bytes: int


def num_sequences_in(num_tokens: int, seq_len: int) -> int:
    """Whole sequences in a stream."""
    return max(0, (num_tokens - 1) // seq_len)


def shard_size(num_sequences: int) -> int:
    """Sequences in a shard: so few that many workers find work, so many that a shard is worth a download."""
    at_least = min(8, -(-num_sequences // 8))
    return max(1, at_least, min(-(-num_sequences // _likely_shards), _max_shard_sequences))


def pack(
    documents: TokenDocuments, order: Iterable[int], *, seq_len: int, token_type: np.dtype[np.integer], folder: Path
) -> tuple[PackedShard, ...]:
    """Cut the stream of `documents` in that `order` into shards, written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    size = shard_size(num_sequences_in(int(documents.lengths().sum()), seq_len))
    shards: list[PackedShard] = []
    waiting: list[TokenArray] = []
    num_waiting = 0

    def write(num_sequences: int) -> None:
        """One shard from what waits; its last token stays, as the next one's first."""
        nonlocal waiting, num_waiting
        stream = np.concatenate(waiting)
        rows = np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)[::seq_len][:num_sequences]
        shards.append(_written(folder, len(shards), rows.copy()))
        waiting = [stream[num_sequences * seq_len :]]
        num_waiting = len(waiting[0])

    for document in order:
        tokens = documents[document].astype(token_type)
        waiting.append(tokens)
        num_waiting += len(tokens)
        while num_sequences_in(num_waiting, seq_len) >= size:
            write(size)
    if left := num_sequences_in(num_waiting, seq_len):
        write(left)
    return tuple(shards)


def pack_records(records: TokenArray, order: NDArray[np.int64], *, folder: Path) -> tuple[PackedShard, ...]:
    """Records that are rows already (records.py), in that `order`: integer [num_records, ...]."""
    folder.mkdir(parents=True, exist_ok=True)
    if not len(order):
        return ()
    size = shard_size(len(order))
    return tuple(
        _written(folder, number, records[order[start : start + size]])
        for number, start in enumerate(range(0, len(order), size))
    )


def _written(folder: Path, number: int, rows: TokenArray) -> PackedShard:
    path = folder / f"{number:06d}.bundle"
    # The number makes each shard's bytes, hence its name, its own, also where text repeats.
    tensors = {"tokens": torch.from_numpy(rows), "number": torch.tensor([number], dtype=torch.int32)}
    write_tensors(path, tensors)
    return PackedShard(path=path, digest=digest_file(path), num_sequences=len(rows), num_bytes=path.stat().st_size)
