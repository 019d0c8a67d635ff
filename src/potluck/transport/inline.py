"""Inline tensors on the Data stream: operands and results of one task attempt, cut into frames and put together.

The tensors of one lease travel as one packed bundle, which hosts pack and unpack in an executor
(`codecs.bundle.pack_tensors`, `unpack_tensors`). Nothing is stored; after a broken link they are sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from potluck.protocol.frames import CHUNK_BYTES, pack_data, unpack_data
from potluck.types.errors import CorruptError

LeaseName = tuple[int, int, str]
"""(round, attempt on the wire, key)."""

MAX_BUNDLE_BYTES = 1 << 31
MAX_OPEN = 64


def frames(name: LeaseName, bundle: bytes | bytearray) -> Iterator[bytes]:
    """The frames that carry a lease's inline tensors, packed."""
    data = memoryview(bundle)
    for offset in range(0, len(data), CHUNK_BYTES):
        head = {"lease": list(name), "offset": offset, "total": len(data)}
        yield pack_data(head, data[offset : offset + CHUNK_BYTES])


class Assembler:
    """Puts frames together; holds at most `limit_bytes` of unfinished bundles, and only of leases that are `wanted`."""

    def __init__(
        self, limit_bytes: int = MAX_BUNDLE_BYTES, *, wanted: Callable[[LeaseName], bool] = lambda _: True
    ) -> None:
        self._limit_bytes, self._wanted = limit_bytes, wanted
        self._open: dict[LeaseName, bytearray] = {}

    def add(self, frame: bytes) -> tuple[LeaseName, bytearray] | None:
        """Take a frame in; the lease and its packed tensors once they are complete. CorruptError on nonsense."""
        return self.join(*unpack_data(frame))

    def join(self, head: dict[str, Any], data: memoryview) -> tuple[LeaseName, bytearray] | None:
        """`add` of a frame that was taken apart."""
        name, offset, total = _read_head(head)
        if not 0 < total <= self._limit_bytes:
            raise CorruptError(f"an inline bundle claims {total} bytes and {self._limit_bytes} are allowed")
        if not self._wanted(name):
            self._open.pop(name, None)
            return None
        if offset == 0:
            self._open[name] = bytearray()
        part = self._open.get(name)
        if part is None or offset != len(part) or offset + len(data) > total:
            raise CorruptError(f"an inline frame at offset {offset} of {total} does not continue what came before")
        part += data
        if len(self._open) > MAX_OPEN or sum(map(len, self._open.values())) > self._limit_bytes:
            raise CorruptError("too many inline bundles are unfinished at once")
        if len(part) < total:
            return None
        return name, self._open.pop(name)


def _read_head(head: dict[str, Any]) -> tuple[LeaseName, int, int]:
    match head:
        case {"lease": [int(round), int(attempt), str(key)], "offset": int(offset), "total": int(total)}:
            return (round, attempt, key), offset, total
        case _:
            raise CorruptError("the head of an inline frame lacks lease, offset or total")
