"""The run's data as a fleet needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from potluck.protocol import pb
from potluck.types.ids import Digest, WorkerId


class DataPlane(Protocol):
    """Who trains on what: deals spans of the run's data and takes back what was not used."""

    def deal(self, worker: WorkerId, num_sequences: int) -> list[pb.Span]: ...
    def settle(self, spans: Sequence[pb.Span], *, consumed: bool) -> None: ...
    def release(self, worker: WorkerId) -> None: ...
    def held_out(self, part: int) -> list[pb.Span]: ...
    def objects(self, spans: Sequence[pb.Span]) -> list[Digest]: ...
    def to_json(self) -> Any: ...


def num_trained(lease: pb.Lease, scalars: Mapping[str, Any]) -> int:
    """How many of its sequences a task has trained, whose result has these scalars: all unless it was cut short."""
    if not lease.sequences_per_step:
        return lease.num_sequences
    return min(int(scalars["num_steps"]) * lease.sequences_per_step, lease.num_sequences)


def num_steps_left(lease: pb.Lease, scalars: Mapping[str, Any]) -> int:
    """Steps that it was granted and did not take."""
    return (lease.num_sequences - num_trained(lease, scalars)) // max(lease.sequences_per_step, 1)


def parted(spans: Sequence[pb.Span], num_sequences: int) -> tuple[list[pb.Span], list[pb.Span]]:
    """The first so many sequences, as they are read, and the rest."""
    first: list[pb.Span] = []
    rest: list[pb.Span] = []
    for span in spans:
        middle = min(span.start + max(num_sequences, 0), span.stop)
        num_sequences -= span.stop - span.start
        for part, start, stop in ((first, span.start, middle), (rest, middle, span.stop)):
            if start < stop:
                part.append(pb.Span(shard=span.shard, start=start, stop=stop, epoch=span.epoch, digest=span.digest))
    return first, rest
