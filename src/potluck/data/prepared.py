"""Data that is ready: shards in a folder, and `prepared.json` with the facts about them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.data.packing import PackedShard
from potluck.data.readers import ReadReport
from potluck.data.shards import Shard
from potluck.types.ids import Digest


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Shards on disk and the facts about them. Token counts are of the streams, dropped tails included.

    Where data is records, these are the documents, and the tokens counted are those of their answers.
    """

    digest: Digest  # of everything the result depends on
    corpus_digest: Digest  # of the training files' names and contents
    folder: Path
    seq_len: int
    vocab_size: int  # the tokenizer's
    highest_token: int  # that occurs
    shards: tuple[PackedShard, ...]
    validation: tuple[PackedShard, ...]
    num_documents: int
    num_validation_documents: int
    num_tokens: int
    num_validation_tokens: int
    num_dropped_tokens: int  # of both, at the end of the streams
    report: ReadReport

    @property
    def tokenizer_dir(self) -> Path | None:
        """The tokenizer in Hugging Face form; None for arrays of tokens that came without one."""
        folder = self.folder / "tokenizer"
        return folder if folder.is_dir() else None

    @property
    def num_sequences(self) -> int:
        return sum(s.num_sequences for s in self.shards)

    @property
    def num_validation_sequences(self) -> int:
        return sum(s.num_sequences for s in self.validation)

    def catalogue(self) -> tuple[Shard, ...]:
        """What the dealer deals from."""
        return tuple(Shard(name=s.digest, num_sequences=s.num_sequences) for s in self.shards)

    def held_out(self) -> tuple[Shard, ...]:
        return tuple(Shard(name=s.digest, num_sequences=s.num_sequences) for s in self.validation)


def facts_of(
    shards: Sequence[PackedShard], held_out: Sequence[PackedShard], report: ReadReport, **numbers: int
) -> dict[str, Any]:
    """What prepared.json says of them. `numbers` are the whole numbers of `PreparedData`."""
    parts = {"shards": shards, "validation": held_out}
    listed = {k: [[s.path.name, s.digest, s.num_sequences, s.num_bytes] for s in v] for k, v in parts.items()}
    return {**listed, "report": report.to_json(), **numbers}


def open_prepared(folder: Path, digest: Digest) -> PreparedData | None:
    """What was prepared before, or None if it is not there or not whole."""
    try:
        facts: dict[str, Any] = json.loads((folder / "prepared.json").read_text(encoding="utf-8"))
        if facts["digest"] != digest:
            return None
        facts["report"] = ReadReport.from_json(facts["report"])
        for part, place in (("shards", "training"), ("validation", "validation")):
            facts[part] = tuple(
                PackedShard(path=folder / place / name, digest=Digest(d), num_sequences=n, num_bytes=size)
                for name, d, n, size in facts[part]
            )
            if any(s.path.stat().st_size != s.num_bytes for s in facts[part]):
                return None
        return PreparedData(folder=folder, **facts)
    except (OSError, ValueError, KeyError, TypeError):
        return None
