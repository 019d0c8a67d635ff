"""The seam between the hosts and the network: unary calls and streams of byte messages.

The worker holds a `Connection`; the coordinator implements a `Service`. The gRPC transport joins them over mutual
TLS, the memory transport in one process over a modelled link. Neither host knows which.

Errors cross the seam as themselves: `Refused` and its kin raised by the service arrive at the caller with the same
sentence. A broken link is `ConnectionLost` on either side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from potluck.types.ids import WorkerId

WORKER_CALLS = frozenset({"Welcome", "Renew"})
OPERATOR_CALLS = frozenset({"Status", "Admin"})
STREAMS = frozenset({"Control", "Data", "GetObject", "PutObject"})


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Who is at the other end, as its certificate says (never as it says itself)."""

    id: WorkerId
    role: str = "worker"  # or "operator"
    serial: int = 0  # of its certificate
    address: str = ""


@dataclass
class Traffic:
    """Message bytes that passed, by method. Counted at the seam, before TLS and HTTP/2 framing."""

    up: dict[str, int] = field(default_factory=dict[str, int])  # worker to coordinator
    down: dict[str, int] = field(default_factory=dict[str, int])

    def add_up(self, method: str, num_bytes: int) -> None:
        self.up[method] = self.up.get(method, 0) + num_bytes

    def add_down(self, method: str, num_bytes: int) -> None:
        self.down[method] = self.down.get(method, 0) + num_bytes

    @property
    def total_up(self) -> int:
        return sum(self.up.values())

    @property
    def total_down(self) -> int:
        return sum(self.down.values())


class Channel(Protocol):
    """One stream, both ways. Messages arrive whole and in order, or the stream is lost."""

    async def send(self, message: bytes) -> None:
        """Returns when the message may be reused and the link has room (back-pressure). ConnectionLost."""
        ...

    async def receive(self) -> bytes | None:
        """The next message; None when the other side ended the stream in good order. ConnectionLost, Refused."""
        ...

    async def close(self) -> None:
        """Worker: say that nothing more will be sent and give the stream up. Idempotent; never raises."""
        ...


class Connection(Protocol):
    """A worker's (or operator's) way to its coordinator."""

    @property
    def traffic(self) -> Traffic: ...

    async def call(self, method: str, request: bytes, *, timeout_s: float = 30.0) -> bytes:
        """A unary call. ConnectionLost if nobody answers; Refused with the other side's sentence."""
        ...

    async def open(self, method: str) -> Channel: ...

    async def close(self) -> None: ...


class Service(Protocol):
    """What a coordinator offers. Both methods may raise `Refused`; its sentence reaches the caller."""

    async def call(self, peer: Peer, method: str, request: bytes) -> bytes: ...

    async def open(self, peer: Peer, method: str, channel: Channel) -> None:
        """Serve one stream; it ends in good order when this returns."""
        ...
