"""Pieces of work on the Data stream: requests down, replies up, as frames of `protocol/frames.py`.

    request    {"piece": 7, "offset": 0, "total": N, "task": …, "arguments": {…}, "kept": ["b"], "memory": M,
                "operands": {"a": "", "b": "w/0:64@3"}}   tensors: all operands but the kept ones, packed
    reply      {"piece": 7, "offset": 0, "total": N, "seconds": 0.02, "down": [n, s]}  the result's tensors
               {"piece": 7, "offset": 0, "total": 0, "missing": ["b"]}                 a shard that is not kept any more
               {"piece": 7, "offset": 0, "total": 0, "error": …, "declined": false}    declined: by the owner's terms
    either     {"piece": 7, "offset": M, "total": N}                                   the frames that follow
    down       {"withdraw": [7, 8]}                                                    nobody waits for these any more
    up         {"resting": true}                                                       no pieces until it is false

`down`: of the request, n bytes came in the s seconds after its first frame was here. So both ends learn the link.
An operand is named by what its values are, or by "" where it is used once; a device that needs room gives up values
named "stays:…" after all others. Pieces live as long as the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from potluck.codecs.bundle import Packing
from potluck.protocol.frames import pack_data
from potluck.types.errors import CorruptError

FRAME_BYTES = 1 << 17
"""So small that a piece of a few hundred kB tells how fast the link is."""
LEAST_FRAME_BYTES = 1 << 14
"""Of a frame that is not the last of its piece: each costs whoever reads it the same."""
MAX_PARTIAL = 4
"""Pieces of one stream that may be here in part."""
MAX_OPERANDS = 16
MAX_NAME_LENGTH = 300
MAX_LISTED = 4096


@dataclass(frozen=True)
class Arrival:
    """So many bytes came in so many seconds, one frame after the other."""

    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PieceRequest:
    """As a device gets it."""

    id: int
    task: str
    arguments: Mapping[str, Any]
    operands: Mapping[str, str]  # to the names of their values
    kept: frozenset[str]  # operands that were not sent
    memory_bytes: int = 0  # that it takes, result included; 0 for not known
    bundle: bytearray = field(default_factory=bytearray)
    arrival: Arrival = field(default_factory=Arrival)

    def head(self) -> dict[str, Any]:
        return {
            "task": self.task, "arguments": dict(self.arguments), "operands": dict(self.operands),
            "kept": sorted(self.kept), "memory": self.memory_bytes,
        }  # fmt: skip

    @staticmethod
    def read(joined: Joined) -> PieceRequest:
        """CorruptError if the head is not one of a request."""
        id = joined.id
        match joined.head:
            case {"task": str(task), "arguments": dict(arguments), "operands": dict(operands), "kept": list(kept),
                  "memory": int(memory)} if 0 <= memory < 1 << 60:  # fmt: skip
                names = {str(k): v for k, v in operands.items() if isinstance(v, str) and len(v) <= MAX_NAME_LENGTH}
                if (
                    not 0 < len(operands) <= MAX_OPERANDS
                    or len(names) != len(operands)
                    or any(not isinstance(k, str) or k not in names for k in kept)
                ):
                    raise CorruptError(f"piece {id} names its operands in no way that can be read")
                given = {str(k): v for k, v in arguments.items() if isinstance(v, int | float | str)}
                if len(given) != len(arguments):
                    raise CorruptError(f"piece {id} has arguments that are neither numbers nor strings")
                return PieceRequest(
                    id=id, task=task, arguments=given, operands=names, kept=frozenset(kept), bundle=joined.data,
                    arrival=joined.arrival, memory_bytes=memory,
                )  # fmt: skip
            case _:
                raise CorruptError(f"piece {id} lacks its task, arguments or operands")


@dataclass(frozen=True, kw_only=True)
class PieceReply:
    """As the coordinator gets it."""

    id: int
    seconds: float = 0.0  # that the device worked on it
    missing: tuple[str, ...] = ()
    error: str = ""
    declined: bool = False
    down: Arrival = field(default_factory=Arrival)
    bundle: bytes | bytearray | Packing = b""  # its tensors, all of one memory as it was read
    arrival: Arrival = field(default_factory=Arrival)  # of the reply itself

    def head(self) -> dict[str, Any]:
        if self.missing:
            return {"missing": list(self.missing)}
        return {"error": self.error, "declined": self.declined} if self.error else {
            "seconds": self.seconds, "down": [self.down.num_bytes, self.down.seconds],
        }  # fmt: skip

    @staticmethod
    def read(joined: Joined) -> PieceReply:
        id, bundle = joined.id, joined.data
        match joined.head:
            case {"missing": list(missing)} if missing and all(isinstance(m, str) for m in missing):
                return PieceReply(id=id, missing=tuple(missing[:MAX_OPERANDS]))
            case {"error": str(error), "declined": bool(declined)} if error:
                return PieceReply(id=id, error=error, declined=declined)
            case {"seconds": int() | float() as seconds, "down": [int(down), int() | float() as down_s]} if (
                len(bundle) and 0 <= seconds < 1e6 and 0 <= down < 1 << 40 and 0 <= down_s < 1e6
            ):
                return PieceReply(
                    id=id, seconds=float(seconds), down=Arrival(down, float(down_s)), bundle=bundle,
                    arrival=joined.arrival,
                )  # fmt: skip
            case _:
                raise CorruptError(f"the reply to piece {id} is neither a result nor an error")


def piece_frames(message: PieceRequest | PieceReply) -> Iterator[bytes]:
    bundle, total = message.bundle, len(message.bundle)
    for offset in range(0, max(total, 1), FRAME_BYTES):
        yield from frames_of(message, bundle[offset : offset + FRAME_BYTES], offset, total)


def frames_of(message: PieceRequest | PieceReply, data: bytes | bytearray, start: int, total: int) -> Iterator[bytes]:
    """Of the part `data` of its bundle, which begins at `start` of `total` bytes."""
    view = memoryview(data)
    for at in range(0, max(len(data), 1), FRAME_BYTES):
        head = {"piece": message.id, "offset": start + at, "total": total}
        yield pack_data(head if start + at else {**head, **message.head()}, view[at : at + FRAME_BYTES])


def withdraw_frame(ids: list[int]) -> bytes:
    return pack_data({"withdraw": ids[:MAX_LISTED]}, b"")


def resting_frame(resting: bool) -> bytes:
    return pack_data({"resting": resting}, b"")


def withdrawn(head: Mapping[str, Any]) -> list[int]:
    """The ids that a `withdraw` frame names. CorruptError."""
    match head.get("withdraw"):
        case list(ids) if len(ids) <= MAX_LISTED and all(isinstance(i, int) for i in ids):
            return ids
        case _:
            raise CorruptError("a withdraw frame names no ids")


@dataclass
class Joined:
    """A piece that is here whole: the head of its first frame, and its bytes."""

    id: int
    head: Mapping[str, Any]
    data: bytearray
    arrival: Arrival


@dataclass
class _Part:
    head: Mapping[str, Any]
    began: float
    num_first: int
    data: bytearray  # as long as the piece will be
    num_bytes: int = 0  # that are here


class PieceJoiner:
    """Puts the frames of pieces together. `most_bytes(id)` bounds a piece; 0 for one that nobody wants."""

    def __init__(self, most_bytes: Callable[[int], int], now: Callable[[], float]) -> None:
        self._most_bytes, self._now = most_bytes, now
        self._open: dict[int, _Part] = {}

    def add(self, head: Mapping[str, Any], data: memoryview) -> Joined | None:
        """The piece once it is here whole. CorruptError on nonsense."""
        match head:
            case {"piece": int(id), "offset": int(offset), "total": int(total)} if 0 <= offset <= total:
                pass
            case _:
                raise CorruptError("the head of a piece lacks its number, offset or total")
        most = self._most_bytes(id)
        if not most:
            self._open.pop(id, None)
            return None
        if total > most:
            raise CorruptError(f"piece {id} claims {total} bytes and {most} are allowed")
        if offset == 0:
            self._open[id] = _Part(head, self._now(), len(data), bytearray(total))
        part = self._open.get(id)
        if part is None or offset != part.num_bytes or offset + len(data) > total or total != len(part.data):
            raise CorruptError(
                f"a frame of piece {id} at offset {offset} of {total} does not continue what came before"
            )
        if len(self._open) > MAX_PARTIAL:
            raise CorruptError(f"more than {MAX_PARTIAL} pieces are here in part")
        if len(data) < min(LEAST_FRAME_BYTES, total - offset):
            raise CorruptError(
                f"a frame of piece {id} at offset {offset} of {total} has no more than {len(data)} bytes"
            )
        part.data[offset : offset + len(data)] = data
        part.num_bytes += len(data)
        if part.num_bytes < total:
            return None
        del self._open[id]
        return Joined(id, part.head, part.data, Arrival(total - part.num_first, max(self._now() - part.began, 0.0)))

    def drop(self, ids: list[int]) -> None:
        for id in ids:
            self._open.pop(id, None)
