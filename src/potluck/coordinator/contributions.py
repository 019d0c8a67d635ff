"""What each worker gave and moved, over all processes of a run: rows of the ledger, and what it has not of this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from potluck.storage.ledger import ReplyRow
from potluck.transport.connection import Traffic

TrafficOf = Callable[[str], Traffic]
"""Of this process, by worker."""


class Contributions:
    """Rows have a worker's `id`, `tokens`, `rounds`, `bytes_up` and `bytes_down`."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        self._written: dict[str, tuple[int, int]] = {}  # bytes up and down of this process that are in the rows

    def restore(self, rows: Iterable[dict[str, Any]]) -> None:
        """Go on with those of the ledger."""
        self._rows = {row["id"]: row for row in rows}

    def committed(self, accepted: Iterable[ReplyRow]) -> None:
        """A round counts, with these replies."""
        for reply in accepted:
            row = self._row(reply.worker)
            row["tokens"] += int(reply.scalars.get("num_tokens", 0))
            row["rounds"] += 1

    def rows(self, workers: Iterable[str], traffic: TrafficOf) -> list[dict[str, Any]]:
        """In the order of ids: these workers, and all that ever gave something."""
        found: list[dict[str, Any]] = []
        for id in sorted({*self._rows, *workers}):
            row, (up, down) = self._rows.get(id, _nothing(id)), self._unwritten(id, traffic)
            found.append({**row, "bytes_up": row["bytes_up"] + up, "bytes_down": row["bytes_down"] + down})
        return found

    def write(self, workers: Iterable[str], traffic: TrafficOf) -> dict[str, tuple[int, int]]:
        """Bytes up and down that moved since the last call, to be added in the ledger."""
        moved: dict[str, tuple[int, int]] = {}
        for id in workers:
            moved[id] = up, down = self._unwritten(id, traffic)
            total = traffic(id)
            self._written[id] = (total.total_up, total.total_down)
            row = self._row(id)
            row["bytes_up"] += up
            row["bytes_down"] += down
        return moved

    def _unwritten(self, id: str, traffic: TrafficOf) -> tuple[int, int]:
        total, (up, down) = traffic(id), self._written.get(id, (0, 0))
        return total.total_up - up, total.total_down - down

    def _row(self, id: str) -> dict[str, Any]:
        return self._rows.setdefault(id, _nothing(id))


def _nothing(id: str) -> dict[str, Any]:
    return {"id": id, "tokens": 0, "rounds": 0, "bytes_up": 0, "bytes_down": 0}
