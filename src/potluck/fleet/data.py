"""The run's data as a fleet needs it."""

from __future__ import annotations

from collections.abc import Sequence
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
