"""One certificate in two processes: a worker's folder was copied, and each copy takes the other's connection for ever.

A process says a name of its own with each Welcome. A worker that was restarted has another name from then on, and one
whose link broke, however often, the same. So a name that comes back after another one took its place is proof that both
live: the older of the two is sent away once that has happened `most_returns` times, and the younger one works on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from potluck.types.errors import NotAdmitted
from potluck.types.ids import WorkerId

most_returns = 3
window_s = 600.0
"""Returns that lie further apart do no harm, and a paused machine may come back after its copy ended."""
MAX_KNOWN = 16
"""Names of one worker that are remembered."""


@dataclass
class _Processes:
    """Of one worker: names in the order of their first Welcome, the last one is at work."""

    known: list[str] = field(default_factory=list[str])
    at_work: str = ""
    sent_away: set[str] = field(default_factory=set[str])
    returns: list[float] = field(default_factory=list[float])  # when a name came back


class Twins:
    """Who says Welcome under which name. `told` hears, for people, of each process that is sent away, once."""

    def __init__(self, told: Callable[[WorkerId, str], None]) -> None:
        self._told = told
        self._of: dict[WorkerId, _Processes] = {}

    def welcome(self, worker: WorkerId, process: str, now: float) -> None:
        """NotAdmitted for a process that is sent away."""
        if not process:
            return  # of an earlier version
        found = self._of.setdefault(worker, _Processes())
        if process in found.sent_away:
            raise NotAdmitted(self._sentence(worker))
        came_back = process in found.known and process != found.at_work
        before, found.at_work = found.at_work, process
        if process not in found.known:
            found.known.append(process)
            found.sent_away.discard(found.known.pop(0) if len(found.known) > MAX_KNOWN else "")
        if not came_back:
            return
        found.returns = [at for at in found.returns if now - at < window_s] + [now]
        if len(found.returns) < most_returns:
            return
        found.returns.clear()
        older = min(before, process, key=lambda name: found.known.index(name) if name in found.known else -1)
        found.sent_away.add(older)
        self._told(
            worker,
            f"two processes work with the certificate of {worker}, so its folder was copied; the one that was started "
            "first is sent away: let one of them join with a line and a folder of its own",
        )
        if older == process:
            found.at_work = before
            raise NotAdmitted(self._sentence(worker))

    def _sentence(self, worker: WorkerId) -> str:
        return (
            f"another process, started later, works with the certificate of {worker}, so its folder is a copy or was "
            "copied; stop one of the two, or let this one join again with --state and an empty folder"
        )
