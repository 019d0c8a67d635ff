"""The verbs that drive sessions: tasks that live long, emit results at stated steps and take inputs by stated steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from potluck.fleet.leases import OpenLease
from potluck.fleet.waiting import a_little
from potluck.protocol import FLOATING
from potluck.storage.ledger import Ledger, ReplyRow
from potluck.strategies.fleet import Reply
from potluck.strategies.task import BoundTask, encode_arguments, handles
from potluck.types.errors import RoundFailed
from potluck.types.ids import WorkerId

if TYPE_CHECKING:
    from potluck.clock import Executor
    from potluck.fleet.live import LiveFleet


class Sessions:
    """Of one fleet, whose ledger is written to in a lane of its own."""

    def __init__(self, fleet: LiveFleet, ledger: Ledger, lane: Executor) -> None:
        self._fleet, self._ledger, self._lane = fleet, ledger, lane

    async def open(self, worker: WorkerId, task: BoundTask, *, key: str) -> None:
        assert task.kind == "session", f"{task.task} is {task.kind}, not a session"
        if key not in self._fleet.floating.leases:
            await self._fleet.publish([task])
            await self._fleet.issue(self._fleet.floating, [(worker, task, key, 0)], expects=None)

    async def send(self, key: str, step: int, arguments: Mapping[str, Any]) -> None:
        name = f"input/{key}/{step}"
        if name in self._fleet.floating.decisions:
            return
        await self._fleet.publisher.publish(handles(arguments))
        encoded = encode_arguments(arguments, self._fleet.publisher.digests)
        assert not encoded.inline, "an input of a session holds handles and values, not tensors"
        value = {"arguments": encoded.value, "objects": list(encoded.objects), "acknowledged": False}
        await self._lane.run(self._ledger.decide, FLOATING, 0, name, value)
        self._fleet.floating.decisions[name] = value
        self._fleet.notify(WorkerId(self._fleet.floating.leases[key][-1].worker))

    def acknowledge_input(self, key: str, step: int) -> None:
        value = self._fleet.floating.decisions.get(f"input/{key}/{step}")
        if value is not None:
            value["acknowledged"] = True

    async def receive(self, key: str, step: int) -> Reply:
        name = f"{key}@{step}"
        while name not in self._fleet.floating.replies:
            lease = next((x for x in self._fleet.book.open.values() if x.message.key == key), None)
            if lease is None:
                rows = self._fleet.floating.leases.get(key)
                raise RoundFailed(f"session {key} is gone: {rows[-1].reason if rows else 'it was never opened'}")
            await a_little(self._fleet.roster)
        row = self._fleet.floating.replies[name]
        self._fleet.now.consumed[name] = row
        return self._fleet.reply_of(row)

    async def emitted(self, lease: OpenLease, step: int, scalars: Mapping[str, Any], object: str) -> None:
        """A session sent a result; the session goes on."""
        row = ReplyRow(
            key=f"{lease.message.key}@{step}", worker=lease.worker, object=object, scalars=scalars, version=""
        )
        if row.key not in self._fleet.floating.replies:
            await self._lane.run(self._ledger.reply, FLOATING, 0, row, lease.issue)
            self._fleet.floating.add_reply(row)
            self._fleet.roster.signal()

    async def close(self, key: str) -> None:
        for lease in [x for x in self._fleet.book.open.values() if x.message.key == key]:
            self._fleet.give_up(lease, "the session was closed")
            await self._fleet.log_loss(lease, "the session was closed")
