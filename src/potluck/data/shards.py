"""What data is called once it is packed: shards of sequences, and spans of them that are handed to workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Sequences that are kept together: an object (shared data) or a file that workers have (listed data)."""

    name: str  # the object's digest, or the file's path in the manifest
    num_sequences: int
    digest: str = ""  # listed: what a worker's own copy must hash to


@dataclass(frozen=True, kw_only=True)
class Span:
    """Positions [start, stop) in the order of a shard's sequences in an epoch (epoch.py)."""

    shard: str
    start: int
    stop: int
    epoch: int
    digest: str = ""

    @property
    def num_sequences(self) -> int:
        return self.stop - self.start


def held_out_parts(shards: tuple[Shard, ...], max_sequences: int = 64) -> tuple[Span, ...]:
    """Validation data as a bag of spans of at most `max_sequences`, each sequence in exactly one."""
    return tuple(
        Span(shard=s.name, start=start, stop=min(start + max_sequences, s.num_sequences), epoch=0, digest=s.digest)
        for s in shards
        for start in range(0, s.num_sequences, max_sequences)
    )
