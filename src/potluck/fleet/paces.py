"""How fast each worker is taken to be in a round: decided when an attempt begins, and written down with it.

So a strategy that balances its work by it plans the same when the round is run again, whatever was measured since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from potluck.fleet.roster import Member, Roster
from potluck.models.config import AdapterConfig
from potluck.planner.balance import Measured, Pace, num_recent, paces, sequence_work
from potluck.strategies.fleet import WorkerInfo
from potluck.strategies.run import Budget, RunFacts
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile

COHORT, PACES, BUDGET, UNDER_WAY, HOLDING, RANKS = "cohort", "paces", "budget", "under_way", "holding", "ranks"
"""Names of decisions that an attempt begins with."""
_digits = 4
"""What times differ by beyond that is noise, and should not make plans differ."""


class Paces:
    """What each worker took for a training sequence the last times. The ledger keeps it with replies and losses."""

    def __init__(self, run: RunFacts, roster: Roster) -> None:
        self._run, self._roster = run, roster
        self.seconds: dict[WorkerId, list[float]] = {}

    def observe(self, worker: WorkerId, seconds: float, num_sequences: int) -> None:
        """A task of so many training sequences took so long; one that was given up on, at least so long."""
        if num_sequences:
            past = self.seconds.setdefault(worker, [])
            past.append(seconds / num_sequences)
            del past[:-num_recent]

    def kept(self, worker: WorkerId, num_sequences: int) -> dict[str, list[float]]:
        """What the ledger is to keep after a task of so many training sequences."""
        past = self.seconds.get(worker)
        return {worker: list(past)} if past and num_sequences else {}

    def restore(self, seconds: Mapping[str, list[float]]) -> None:
        """What the ledger has kept."""
        self.seconds = {WorkerId(worker): past for worker, past in seconds.items()}

    def first(self, here: Sequence[WorkerId], *, balance: bool) -> dict[str, Any]:
        """What an attempt begins with."""
        found: dict[str, Any] = {COHORT: list(here), BUDGET: asdict(self._run.budget)}
        adapter = self._run.adapter
        if adapter is not None and adapter.lower_ranks:
            found[RANKS] = {id: self._rank(id, adapter) for id in here}
        return {**found, PACES: self.decided(here)} if balance else found

    def _rank(self, worker: WorkerId, adapter: AdapterConfig) -> int:
        """The highest that the worker has the memory for; the lowest where it has not said so."""
        member = self._roster.members.get(worker)
        most = member.profile.adapter_rank if member is not None else 0
        return max((rank for rank in adapter.ranks if rank <= most), default=adapter.ranks[0])

    def adopt(self, run: RunFacts) -> None:
        """The run's facts have changed."""
        self._run = run

    def decided(self, here: Sequence[WorkerId]) -> Any:
        """The paces of those who are here and of whom anything is known, as JSON."""
        known = {
            id: Measured(profile=self._roster.members[id].profile, unit_s=tuple(self.seconds.get(id, ())))
            for id in here
            if id in self._roster.members
        }
        run = self._run
        work = sequence_work(run.layout.numel, run.seq_len, run.inner.sequences_per_step)
        found = paces(known, work, up_bytes=run.up_bytes("update"), down_bytes=run.down_bytes())
        return {id: [_rounded(pace.unit_s), _rounded(pace.fixed_s)] for id, pace in found.items()}


def cohort(decisions: Mapping[str, Any], members: Mapping[WorkerId, Member]) -> tuple[WorkerInfo, ...]:
    """Who takes part in an attempt, in the order of ids, each at the pace that was decided: by its decisions."""
    paces = {id: Pace.bounded(*pace) for id, pace in decisions.get(PACES, {}).items()}
    unknown = DeviceProfile(device="cpu")
    ranks = decisions.get(RANKS, {})
    under_way, holding = set(decisions.get(UNDER_WAY, ())), set(decisions.get(HOLDING, ()))
    return tuple(
        WorkerInfo(
            id=id,
            profile=members[id].profile if id in members else unknown,
            pace=paces.get(id),
            under_way=id in under_way,
            holds_state=id in holding,
            adapter_rank=int(ranks.get(id, 0)),
        )
        for id in map(WorkerId, decisions.get(COHORT, ()))
    )


def facts(run: RunFacts, decisions: Mapping[str, Any]) -> RunFacts:
    """With the budget that an attempt began with: run again after a restart, it plans as the first time."""
    budget = decisions.get(BUDGET)
    return replace(run, budget=Budget(**budget)) if budget else run


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{_digits}g}")
