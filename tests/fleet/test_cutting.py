"""When late work is cut short, and what then counts as trained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from potluck.clock import VirtualClock, run_virtual
from potluck.fleet.config import FleetConfig
from potluck.fleet.cutting import Cutting
from potluck.fleet.data import num_steps_left, num_trained, parted
from potluck.fleet.leases import Lost, OpenLease, Outcome
from potluck.fleet.roster import Roster
from potluck.protocol import pb
from potluck.storage.ledger import ReplyRow
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile

# Each worker takes 1 s for a sequence by its past and has 10 of them.
num_sequences = 10
begun_at = 50.0


class Call:
    """Leases of some workers, and when which of them was told to end."""

    def __init__(self, *workers: str, past: Mapping[str, list[float]] | None = None, per_step: int = 2) -> None:
        self.roster, self.clock = Roster(FleetConfig()), VirtualClock()
        self.told: list[tuple[float, str]] = []
        self.leases = {name: self._lease(i, name, per_step) for i, name in enumerate(workers)}
        for name in workers:
            member = self.roster.arrive(WorkerId(name), DeviceProfile(device="cpu"), 0.0)
            member.seconds_per_unit["toy.train"] = (past or {}).get(name, [0.5, 1.0, 9.0])

    def _lease(self, number: int, name: str, per_step: int) -> OpenLease:
        message = pb.Lease(key=name, task="toy.train", num_sequences=num_sequences, sequences_per_step=per_step)
        return OpenLease(
            message=message, worker=WorkerId(name), attempt=0, issue=0, expects=None, issued_at=0.0, progress_at=0.0,
            outcome=asyncio.get_running_loop().create_future(), number=number,
        )  # fmt: skip

    def begin(self, *names: str) -> None:
        for name in names:
            self.leases[name].seen(pb.Progress(activity="training"), self.clock.now())

    def reply(self, name: str) -> None:
        self.leases[name].answer(ReplyRow(key=name, worker=name, object="", scalars={}, version=""))

    def lose(self, name: str) -> None:
        self.leases[name].answer(Lost(WorkerId(name), "gone"))

    async def outcomes(self, num_missing: int) -> Mapping[str, Outcome]:
        def notify(worker: WorkerId) -> None:
            assert self.leases[worker].is_cut_short
            self.told.append((self.clock.now(), worker))

        return await Cutting(
            self.leases, num_missing=num_missing, roster=self.roster, clock=self.clock, notify=notify
        ).outcomes()


Script = list[tuple[float, Callable[[Call], Any]]]


def play(make: Callable[[], Call], num_missing: int, script: Script) -> list[tuple[float, str]]:
    """Let each line of the script happen at its time; in the end everyone answers."""

    async def main() -> list[tuple[float, str]]:
        await asyncio.sleep(begun_at)
        call = make()
        waiting = asyncio.create_task(call.outcomes(num_missing))
        for at, do in script:
            await asyncio.sleep(begun_at + at - call.clock.now())
            do(call)
        await asyncio.sleep(100.0)
        for name, lease in call.leases.items():
            if not lease.outcome.done():
                call.reply(name)
        outcomes = await waiting
        assert outcomes == {name: lease.outcome.result() for name, lease in call.leases.items()}
        return [(round(at - begun_at, 3), name) for at, name in call.told]

    return run_virtual(main())


def all_begin(call: Call) -> None:
    call.begin(*call.leases)


def replies(name: str) -> Callable[[Call], None]:
    return lambda call: call.reply(name)


def test_once_half_have_answered_the_others_are_told_when_the_last_is_late() -> None:
    """w2 begins at 0 and w3 at 3: both are late from 13 on."""
    script: Script = [
        (0.0, lambda call: call.begin("w1", "w2", "w4")), (3.0, lambda call: call.begin("w3")),
        (9.0, replies("w1")), (10.0, replies("w4")),
    ]  # fmt: skip
    assert play(lambda: Call("w1", "w2", "w3", "w4"), 2, script) == [(13.0, "w2"), (13.0, "w3")]


def test_with_the_reply_that_was_missing_who_is_late_is_told_at_once() -> None:
    script: Script = [(0.0, all_begin), (9.0, replies("w1")), (25.0, replies("w2"))]
    assert play(lambda: Call("w1", "w2", "w3"), 2, script) == [(25.0, "w3")]
    assert play(lambda: Call("w1", "w2", "w3"), 3, script) == []


def test_work_that_has_not_begun_is_waited_for() -> None:
    script: Script = [(0.0, lambda call: call.begin("w1", "w2")), (9.0, replies("w1"))]
    assert play(lambda: Call("w1", "w2", "w3"), 1, script) == []
    script = [*script, (40.0, lambda call: call.begin("w3"))]
    assert play(lambda: Call("w1", "w2", "w3"), 1, script) == [(50.0, "w2"), (50.0, "w3")]


def test_who_is_given_up_is_not_waited_for_and_no_reply() -> None:
    script: Script = [(0.0, lambda call: call.begin("w1", "w2")), (9.0, replies("w1"))]
    given_up: Script = [*script, (30.0, lambda call: call.lose("w3"))]
    assert play(lambda: Call("w1", "w2", "w3"), 1, given_up) == [(30.0, "w2")]
    assert play(lambda: Call("w1", "w2", "w3"), 2, given_up) == []


def test_whose_past_is_not_known_is_never_late() -> None:
    script: Script = [(0.0, all_begin), (9.0, replies("w1"))]
    assert play(lambda: Call("w1", "w2"), 1, script) == [(10.0, "w2")]
    assert play(lambda: Call("w1", "w2", past={"w2": [1.0]}), 1, script) == []
    assert play(lambda: Call("w1", "w2", past={"w2": [2.0, 2.0]}), 1, script) == [(20.0, "w2")]


def test_a_task_that_may_not_end_early_does_not() -> None:
    assert play(lambda: Call("w1", "w2", per_step=0), 1, [(0.0, all_begin), (9.0, replies("w1"))]) == []


def test_a_pause_of_the_coordinator_is_nobody_s_delay() -> None:
    def forgive(call: Call) -> None:
        call.leases["w2"].started_at += 4.0

    assert play(lambda: Call("w1", "w2"), 1, [(0.0, all_begin), (5.0, replies("w1")), (6.0, forgive)]) == [(14.0, "w2")]


def test_only_the_told_lease_says_so() -> None:
    async def main() -> None:
        lease = Call("w1").leases["w1"]
        assert lease.told is lease.message
        lease.is_cut_short = True
        assert lease.told.cut_short and not lease.message.cut_short
        assert lease.told.num_sequences == num_sequences

    run_virtual(main())


def span(start: int, stop: int, shard: str = "a") -> pb.Span:
    return pb.Span(shard=shard, start=start, stop=stop, epoch=3, digest=f"of {shard}")


@pytest.mark.parametrize(
    ("num_first", "first", "rest"),
    [
        (0, [], [span(4, 9), span(0, 3, "b")]),
        (2, [span(4, 6)], [span(6, 9), span(0, 3, "b")]),
        (5, [span(4, 9)], [span(0, 3, "b")]),
        (6, [span(4, 9), span(0, 1, "b")], [span(1, 3, "b")]),
        (8, [span(4, 9), span(0, 3, "b")], []),
        (99, [span(4, 9), span(0, 3, "b")], []),
    ],
)
def test_spans_are_parted_in_the_order_in_which_they_are_read(
    num_first: int, first: list[pb.Span], rest: list[pb.Span]
) -> None:
    assert parted([span(4, 9), span(0, 3, "b")], num_first) == (first, rest)


def test_how_much_was_trained_is_bounded_by_what_was_granted() -> None:
    lease = pb.Lease(num_sequences=12, sequences_per_step=4)
    assert [num_trained(lease, {"num_steps": n}) for n in (1, 3, 9)] == [4, 12, 12]
    assert [num_steps_left(lease, {"num_steps": n}) for n in (1, 3, 9)] == [2, 0, 0]
    whole = pb.Lease(num_sequences=12)
    assert num_trained(whole, {"num_steps": 1}) == 12 and num_steps_left(whole, {}) == 0
