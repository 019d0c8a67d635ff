"""Work that is begun before what it follows has been collected: rounds that overlap.

A worker's tasks are a chain: each starts from the state that the one before it leaves, whether that is committed yet or
not. A chain breaks where one of its tasks is lost; what follows that task is lost with it, also what was answered
already. Everything here belongs to no round: a round that is committed takes out what it collected, and one that is
discarded drops all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from potluck.fleet.attempt import Attempt
from potluck.protocol import AHEAD, pb
from potluck.storage.ledger import LeaseRow
from potluck.types.ids import WorkerId


@dataclass
class Chain:
    """One worker's: the state that its last task leaves, and why it goes on no longer ("" while it does)."""

    tip: str
    broken: str = ""


@dataclass
class Ahead:
    attempt: Attempt = field(default_factory=lambda: Attempt(round=AHEAD))
    chains: dict[WorkerId, Chain] = field(default_factory=dict[WorkerId, Chain])
    _names: dict[str, dict[WorkerId, str]] = field(default_factory=dict[str, dict[WorkerId, str]])

    @staticmethod
    def of(attempt: Attempt) -> Ahead:
        """As the ledger has it."""
        found = Ahead(attempt)
        by_worker: dict[WorkerId, list[tuple[LeaseRow, pb.Lease]]] = {}
        for rows in attempt.leases.values():
            lease = found._note(rows[-1])
            by_worker.setdefault(WorkerId(rows[-1].worker), []).append((rows[-1], lease))
        for worker, given in by_worker.items():
            found.chains[worker] = _chain_of(given)
        return found

    def begun(self, key: str) -> Mapping[WorkerId, str]:
        """Under which names work of this key was handed out, in the order of workers."""
        names = self._names.get(key, {})
        return {worker: names[worker] for worker in sorted(names)}

    def row(self, name: str) -> LeaseRow:
        return self.attempt.leases[name][-1]

    def add(self, row: LeaseRow) -> None:
        """Work was handed out. It is the end of its worker's chain now."""
        lease = self._note(row)
        if row.status != "lost":
            self.chains[WorkerId(row.worker)] = Chain(lease.next_version)

    def lose(self, name: str, reason: str) -> None:
        """This work does not count, answered or not. Of a round that is over it is known no more."""
        if name in self.attempt.leases:
            row = self.row(name)
            self.attempt.lose(name, row.issue, reason)
            self.attempt.drop_reply(name)
            if row.worker in self.chains:
                self.chains[WorkerId(row.worker)].broken = reason

    def orphans(self, worker: WorkerId | None = None) -> dict[str, str]:
        """Names of work, open or answered, that follows work which was lost, each with the reason of that loss. Of one
        worker, or of all."""
        lost: dict[str, str] = {}  # the states that lost work leads to
        found: dict[str, str] = {}
        for name, rows in self.attempt.leases.items():  # each after the one that it follows
            if worker not in (None, rows[-1].worker):
                continue
            lease = pb.Lease.FromString(rows[-1].lease)
            if rows[-1].status == "lost":
                lost[lease.next_version] = rows[-1].reason
            elif lease.base_version in lost:
                found[name] = lost[lease.next_version] = lost[lease.base_version]
            lost.pop("", None)  # where what was never sent leads to, and new chains begin
        return found

    def under_way(self) -> list[WorkerId]:
        """Whose chains go on."""
        return sorted(worker for worker, chain in self.chains.items() if not chain.broken)

    def names(self, keys: Iterable[str]) -> Iterator[str]:
        """All that was handed out under these keys, lost work too."""
        for key in keys:
            yield from self._names.get(key, {}).values()

    def collected(self, keys: Iterable[str]) -> None:
        """A round was committed that collected these keys."""
        for key in keys:
            for name in self._names.pop(key, {}).values():
                self.attempt.leases.pop(name, None)
                self.attempt.drop_reply(name)
        left = {worker for names in self._names.values() for worker in names}
        self.chains = {worker: chain for worker, chain in self.chains.items() if worker in left}

    def _note(self, row: LeaseRow) -> pb.Lease:
        lease = pb.Lease.FromString(row.lease)
        key = row.key.partition("/")[0]
        self._names.setdefault(key, {})[WorkerId(row.worker)] = row.key
        return lease


def name_of(key: str, worker: WorkerId, round: int, attempt: int) -> str:
    """Never a name again: a late report of old work would answer the new."""
    return f"{key}/{worker}#{round}.{attempt}"


def _chain_of(given: Sequence[tuple[LeaseRow, pb.Lease]]) -> Chain:
    """The chain of one worker, from what was handed to it. A later one may have taken the place of a broken one."""
    alive = [lease for row, lease in given if row.status != "lost"]
    lost = {lease.base_version: row.reason for row, lease in given if row.status == "lost"}
    followed = {lease.base_version for lease in alive}
    tips = [lease.next_version for lease in alive if lease.next_version not in followed]
    whole = [tip for tip in tips if tip not in lost]
    if whole:
        return Chain(whole[-1])
    return Chain(tips[-1] if tips else "", broken=next(iter(lost.values()), "lost") or "lost")
