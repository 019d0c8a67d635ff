"""What a worker begins of the work that it holds."""

from __future__ import annotations

from potluck.protocol import AHEAD, pb
from potluck.worker.order import to_begin


def chained(number: int, *, chain: str = "v") -> pb.Lease:
    """The task of a chain with that number; the first goes on from no state."""
    base = f"{chain}{number - 1}" if number else ""
    return pb.Lease(key=f"{number}{chain}", round=AHEAD, kind="pinned", base_version=base,
                    next_version=f"{chain}{number}")  # fmt: skip


def begun(leases: list[pb.Lease], results: dict[str, str], sending: tuple[str, ...] = ()) -> list[str]:
    """Keys; `results` are errors by key, "" for none."""
    id_of = {lease.key: (lease.round, lease.attempt, lease.key) for lease in leases}
    found = to_begin(
        {id_of[lease.key]: lease for lease in leases},
        {id_of[key]: pb.TaskResult(error=error) for key, error in results.items()},
        [id_of[key] for key in sending],
    )
    return [lease.key for lease in found]


def test_what_is_done_or_on_its_way_is_not_begun_again() -> None:
    leases = [chained(n) for n in range(4)]
    assert begun(leases, {}) == ["0v", "1v", "2v", "3v"]
    assert begun(leases, {"0v": ""}, sending=("1v",)) == ["2v", "3v"]


def test_nothing_is_begun_that_follows_a_task_which_failed() -> None:
    leases = [chained(0), chained(1), chained(2), pb.Lease(key="validation", kind="pure"), chained(0, chain="u")]
    assert begun(leases, {"0v": "the loss is nan"}) == ["validation", "0u"]
    assert begun(leases, {"0v": "", "1v": "the loss is nan"}) == ["validation", "0u"]


def test_a_pure_task_that_failed_leads_nowhere_and_holds_nothing_up() -> None:
    leases = [pb.Lease(key="bag", kind="pure"), pb.Lease(key="bag too", kind="pure"), chained(0)]
    assert begun(leases, {"bag": "no memory"}) == ["bag too", "0v"]
