"""Where a task's data comes from: shards the coordinator dealt, listed files, or the owner's own text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from potluck.data.canaries import Canaries
from potluck.data.config import ReadOptions
from potluck.data.listed import ListedFiles
from potluck.data.prepare import prepare_private
from potluck.data.prepared import PreparedData
from potluck.data.shards import Span
from potluck.data.stream import (
    Cursor,
    OwnSequences,
    PoissonSource,
    PrivateSource,
    Sequences,
    SpanSource,
    held_out_batches,
    open_shard,
)
from potluck.data.tokenizer import TextTokenizer, unpack_tokenizer
from potluck.optim.dp_sgd import RandomBytes, sampling_rate
from potluck.protocol import pb
from potluck.storage.digest import check_digest
from potluck.storage.objects import ObjectStore
from potluck.strategies.run import RunSpec
from potluck.types.errors import DataError, Refused
from potluck.types.ids import Digest

MAX_SPANS = 4096
MAX_SHARDS_KEPT = 256


@dataclass
class Fed:
    """Batches for one task. Dealt data has no position of its own: the coordinator keeps it."""

    batches: Iterator[Tensor]
    private: PrivateSource | None = None
    listed: SpanSource | None = None
    num_sequences: int = 0  # that were read

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.batches:
            self.num_sequences += len(batch)
            yield batch

    @property
    def cursor(self) -> dict[str, Any]:
        return dict(self.private.cursor.to_json()) if self.private else {}

    def seek(self, cursor: dict[str, Any]) -> None:
        if self.private is not None:
            self.private.seek(Cursor.from_json(cursor) if cursor else Cursor())


@dataclass(kw_only=True)
class Sources:
    """Built once for a run (`equip`). `own` is set for private data, `listed` for listed files; `canaries` are trained
    on with `own`."""

    spec: RunSpec
    objects: ObjectStore
    own: PreparedData | None = None
    listed: ListedFiles | None = None
    canaries: Canaries | None = None
    _own_read: Fed | None = None  # what the task opened last reads of the owner's own text
    random_bytes: RandomBytes = os.urandom  # that samples of private records are drawn by
    _shards_read: dict[Digest, None] = field(default_factory=dict[Digest, None])  # the last one read is last

    @property
    def vocab_size(self) -> int:
        return int(self.spec.model_config_json["vocab_size"])

    def digests(self) -> set[Digest]:
        """Objects to keep: the shards it read last, the tokenizer, and the model's frozen base."""
        whole = {Digest(self.spec.tokenizer_object)} if self.spec.tokenizer_object else set[Digest]()
        if self.spec.base is not None:
            whole |= {Digest(each.digest) for each in self.spec.base.objects}
        return whole | set(list(self._shards_read)[-MAX_SHARDS_KEPT:])

    def most_examples(self, lease: pb.Lease) -> int | None:
        """What `num_examples` will be at most, once the task is done."""
        if self.spec.data_access == "shared":
            return None
        if self.own is None:
            return lease.num_sequences
        return self.own.num_sequences if self.spec.privacy else min(lease.num_sequences, self.own.num_sequences)

    def num_examples(self, *, num_unused: int) -> int | None:
        """Of the owner's own text, the different sequences that the last task has read, less those that it read and
        did not use; canaries are none of them. None where it read none of it. With privacy all of it: each could have
        been in a sample, and how many were is not to be known.
        """
        read = self._own_read
        if read is None:
            return None
        if read.listed is not None:  # the owner's too: that others have it is only the coordinator's word
            return read.listed.num_different - num_unused
        if self.spec.privacy is not None and self.own is not None:
            return self.own.num_sequences
        num_read = read.num_sequences if read.private is None else read.private.num_different
        return max(0, num_read - num_unused)

    @contextmanager
    def open(self, lease: pb.Lease) -> Iterator[Fed]:
        """The data of one task. In the compute thread."""
        batch_size = self.spec.inner.batch_size
        self._own_read = None
        if self.spec.data_access == "private" and (lease.held_out or lease.num_sequences):
            self._own_read = self._own(lease, batch_size)
            yield self._own_read
            return
        spans = [_span(s) for s in lease.spans[:MAX_SPANS]]
        if not lease.held_out and sum(s.num_sequences for s in spans) != lease.num_sequences:
            raise Refused(f"{lease.task} asks for {lease.num_sequences} sequences and names others")
        source = SpanSource(spans, self._sequences, seed=self.spec.seed, batch_size=batch_size)
        if self.spec.data_access == "listed":
            self._own_read = Fed(source, listed=source)
            yield self._own_read
            return
        yield Fed(source)

    def _own(self, lease: pb.Lease, batch_size: int) -> Fed:
        if self.own is None:
            raise DataError("this run trains on private text and none was given; start the worker with --data FILE")
        if self.spec.privacy is not None:
            return self._samples(self.own, held_out=lease.held_out)
        if lease.held_out:
            parts = [self._open_shard(s.path) for s in self.own.validation]
            return Fed(batch for part in parts for batch in held_out_batches(part, batch_size))
        planted = self.canaries.shards if self.canaries is not None else ()
        private = PrivateSource(
            (*self.own.shards, *planted), seq_len=self.spec.seq_len, seed=self.spec.seed, batch_size=batch_size,
            rows_per_record=self.spec.rows_per_record, num_planted=sum(shard.num_sequences for shard in planted),
        )  # fmt: skip
        return Fed(private, private)

    def _samples(self, own: PreparedData, *, held_out: bool) -> Fed:
        if held_out:
            raise Refused("the run trains with differential privacy, and losses of this worker's text do not leave it")
        records = OwnSequences(own.shards, seq_len=self.spec.seq_len, rows_per_record=self.spec.rows_per_record)
        rate = sampling_rate(self.spec.inner.sequences_per_step, len(records))
        return Fed(PoissonSource(records, rate=rate, random_bytes=self.random_bytes))

    def _sequences(self, span: Span) -> Sequences:
        if self.listed is not None:
            return self.listed.open(span)
        digest = check_digest(span.shard)
        self._shards_read.pop(digest, None)
        self._shards_read[digest] = None
        if len(self._shards_read) > 2 * MAX_SHARDS_KEPT:
            self._shards_read = dict.fromkeys(list(self._shards_read)[-MAX_SHARDS_KEPT:])
        return self._open_shard(self.objects.path(digest))

    def _open_shard(self, path: Path) -> Sequences:
        spec = self.spec
        return _open_shard(path, spec.seq_len, self.vocab_size, spec.rows_per_record)


@lru_cache(maxsize=64)
def _open_shard(path: Path, seq_len: int, vocab_size: int, rows_per_record: int) -> Sequences:
    return open_shard(path, seq_len=seq_len, vocab_size=vocab_size, rows_per_record=rows_per_record)


def _span(message: pb.Span) -> Span:
    return Span(shard=message.shard, start=message.start, stop=message.stop, epoch=message.epoch, digest=message.digest)


def prepare_sources(
    spec: RunSpec, objects: ObjectStore, *, data: Sequence[Path], cache_dir: Path, tokenizer: bytes | None,
    told: Callable[[str], None] = lambda _: None,
) -> Sources:  # fmt: skip
    """Read and tokenise what the owner brings. Blocks; DataError if it cannot be used. `told` hears what is for the
    owner only, then and later."""
    if spec.data_access == "shared":
        return Sources(spec=spec, objects=objects)
    try:
        options = ReadOptions.model_validate(spec.data_options)
    except ValueError as error:
        raise Refused(f"how the coordinator wants text to be read cannot be understood: {error}") from error
    folder = cache_dir / "tokenizer"
    if tokenizer is not None:
        unpack_tokenizer(tokenizer, folder)
    vocab_size = int(spec.model_config_json["vocab_size"])
    if not data:
        raise DataError(f"this run trains on {spec.data_access} text and none was given; start the worker with --data")
    if spec.data_access == "listed":
        if len(data) != 1 or not data[0].is_dir():
            raise DataError("a run on listed files needs --data FOLDER: the folder that holds this machine's copies")
        loaded = TextTokenizer.open(folder) if tokenizer is not None else None
        listed = ListedFiles(
            data[0], options=options, vocab_size=vocab_size, cache_dir=cache_dir, tokenizer=loaded, told=told
        )
        return Sources(spec=spec, objects=objects, listed=listed)
    own = prepare_private(
        [str(p) for p in data], options, seed=spec.seed, base=Path.cwd(), cache_dir=cache_dir,
        tokenizer_dir=folder if tokenizer is not None else None, vocab_size=vocab_size,
    )  # fmt: skip
    return Sources(spec=spec, objects=objects, own=own)
