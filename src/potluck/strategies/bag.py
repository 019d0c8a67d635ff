"""A bag of pieces: pure work that is cut to each device, handed out by the bag itself, and travels inline.

`Fleet.map` hands out whole tasks by itself and writes them down. A bag decides who gets which piece and when, has many
of them on their way at once, may cut a lost piece anew, and checks every reply. Nothing of it is stored: after a
restart of the coordinator the step that it belongs to starts again.

The fleet asks and tells a bag on its event loop, but calls `take` in threads, several at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from potluck.strategies.fleet import WorkerInfo
from potluck.types.ids import WorkerId

STAYS = "stays:"
"""Begins the names of shards that outlive those that only pass: they were planned to be there when asked for again."""


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor of a piece. Two operands of one name have the same values: a device that keeps one is not sent it again.

    `values` may be any view on the head's memory; it is made contiguous, and cast to the piece's wire type, when sent.
    """

    values: Tensor
    name: str = ""  # of a shard that devices may keep, "" for none; the fleet adds the round to it

    @staticmethod
    def stays(name: str) -> bool:
        """Whether a device that needs room gives up all shards but such ones first."""
        return name.startswith(STAYS)


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """One call of a pure task function on one device."""

    task: str
    operands: Mapping[str, Operand]
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])  # numbers and short strings
    wire: str = "fp32"  # how operands travel: fp32, bf16 or int8; told to the function in `arguments` too
    memory_bytes: int = 0  # that a device needs for it, its reply included
    label: str = ""  # for people: which product, which tile


class Bag(Protocol):
    """Times are the clock's seconds."""

    @property
    def is_done(self) -> bool: ...

    @property
    def needs_devices(self) -> bool:
        """Whether nobody else can do it: while no worker is here, the fleet then waits and does not ask."""
        ...

    def issue(self, here: Sequence[WorkerInfo], now: float) -> Sequence[tuple[WorkerId, Piece]]:
        """What is to be sent now. Asked at the start and after everything that happened. `here` may work: healthy.

        RoundFailed where nobody is left to do what is left.
        """
        ...

    def look_at(self) -> float:
        """When to ask `issue` again though nothing has happened (a piece's deadline); inf for not."""
        ...

    def take(self, worker: WorkerId, piece: Piece, reply: Mapping[str, Tensor], now: float) -> None:
        """A reply, in a thread of its own. InvalidUpdate if it is wrong, which counts against the worker."""
        ...

    def lose(self, worker: WorkerId, piece: Piece, reason: str, now: float) -> None:
        """The worker is gone, has failed, or its reply was refused. RoundFailed where that is hopeless."""
        ...

    def dropped(self) -> Sequence[Piece]:
        """Pieces whose replies have become of no use since this was asked last; they are withdrawn."""
        ...
