"""Membership and loss are pure decisions with reasons."""

import asyncio

import pytest

from potluck.fleet.config import FleetConfig
from potluck.fleet.leases import OpenLease, loss, wire_attempt
from potluck.fleet.roster import Member, Roster, absence, decide
from potluck.protocol import pb
from potluck.types.ids import WorkerId
from potluck.types.profile import DeviceProfile

config = FleetConfig(heartbeat_s=2.0, reconnect_s=6.0, no_progress_s=100.0, quarantine_after=2)


def member(name: str = "w1", **changes: object) -> Member:
    made = Member(id=WorkerId(name), profile=DeviceProfile(device="cpu"), connected=True, last_seen=100.0)
    for key, value in changes.items():
        setattr(made, key, value)
    return made


def open_lease(**changes: object) -> OpenLease:
    message = pb.Lease(key="inner/w1", task="diloco.inner", kind="pinned", num_sequences=10)
    made = OpenLease(
        message=message,
        worker=WorkerId("w1"),
        attempt=0,
        issue=0,
        expects=None,
        issued_at=100.0,
        progress_at=100.0,
        outcome=asyncio.new_event_loop().create_future(),
    )
    for key, value in changes.items():
        setattr(made, key, value)
    made.outcome.get_loop().close()
    return made


@pytest.mark.parametrize(
    ("changes", "now", "reason"),
    [
        ({}, 106.0, ""),
        ({}, 106.1, "w1 has not been heard for 6 s"),
        ({"connected": False, "away_since": 100.0}, 105.9, ""),
        ({"connected": False, "away_since": 100.0}, 106.0, "w1 has been away for 6 s"),
        ({"leaving": True}, 100.0, "w1 left"),
    ],
)
def test_absence(changes: dict[str, object], now: float, reason: str) -> None:
    assert absence(member(**changes), now, config) == reason


def test_work_that_was_answered_before_anyone_asked_is_not_given_up() -> None:
    """A coordinator that was started again waits for more workers before the round begins in which it asks."""
    answered = open_lease(early=pb.TaskResult(), claimed=False)
    for later in (member(last_seen=900.0), member(connected=False, away_since=200.0), member(leaving=True)):
        assert loss(answered, later, 900.0, config) == ""
        assert loss(open_lease(claimed=False), later, 900.0, config)
    assert "is quarantined" in loss(answered, member(quarantined="2 refused results"), 900.0, config)


def test_those_who_are_not_here_get_no_work_and_the_reason_is_said() -> None:
    members = [
        member("c"),
        member("a"),
        member("b", connected=False, away_since=99.0),
        member("d", quarantined="3 refused results"),
        member("e", last_seen=50.0),
    ]
    here, reason = decide(members, 100.0, config)
    assert [w.id for w in here] == ["a", "c"]
    assert reason == "b is away; d is quarantined: 3 refused results; e has not been heard for 50 s"


def test_refused_results_in_a_row_lead_to_quarantine() -> None:
    async def main() -> None:
        roster = Roster(config)
        someone = roster.arrive(WorkerId("w1"), DeviceProfile(device="cpu"), 0.0)
        roster.connect(someone, 0.0)
        roster.refused(someone, "it is not finite", 0.0)
        assert [w.id for w in roster.here(0.0)] == ["w1"]
        roster.refused(someone, "it is not finite", 0.0)
        assert roster.here(0.0) == ()
        assert someone.quarantined == "2 refused results in a row, the last: it is not finite"

    asyncio.run(main())


def test_a_quarantine_ends_and_the_next_one_is_longer() -> None:
    async def main() -> None:
        roster = Roster(config)
        someone = roster.arrive(WorkerId("w1"), DeviceProfile(device="cpu"), 0.0)
        roster.connect(someone, 0.0)
        for _ in range(2):
            roster.refused(someone, "it is not finite", 0.0)
        roster.release(config.quarantine_s - 1)
        assert someone.quarantined
        roster.release(config.quarantine_s)
        assert not someone.quarantined
        roster.refused(someone, "it is not finite", config.quarantine_s)
        assert someone.quarantined
        roster.release(config.quarantine_s * 3 - 1)
        assert someone.quarantined
        roster.release(config.quarantine_s * 3)
        assert not someone.quarantined

    asyncio.run(main())


def test_a_worker_whose_tasks_failed_is_free_once_it_is_started_again() -> None:
    async def main() -> None:
        roster = Roster(config)
        ids = [WorkerId("w1"), WorkerId("w2")]
        broken, hostile = (roster.arrive(id, DeviceProfile(device="cpu"), 0.0) for id in ids)
        for each in (broken, hostile):
            roster.connect(each, 0.0)
        for _ in range(2):
            roster.failed(broken, "no such file", 0.0)
            roster.refused(hostile, "it is not finite", 0.0)
        assert broken.quarantined and hostile.quarantined
        for id in ids:
            roster.arrive(id, DeviceProfile(device="cpu"), 1.0)
        assert not broken.quarantined and hostile.quarantined

    asyncio.run(main())


def test_failures_that_most_share_are_held_against_nobody() -> None:
    async def main() -> None:
        roster = Roster(config)
        members = [roster.arrive(WorkerId(f"w{i}"), DeviceProfile(device="cpu"), 0.0) for i in range(4)]
        for member in members:
            roster.connect(member, 0.0)
        for _ in range(10):
            for member in members:
                roster.failed(member, "the data is broken", 0.0)
        assert len(roster.here(0.0)) == 4
        for member in members[1:]:
            roster.succeeded(member)
        for _ in range(2):
            roster.failed(members[0], "its disk is broken", 0.0)
        assert [m.id for m in members if m.quarantined] == ["w0"]

    asyncio.run(main())


def test_an_old_stream_that_ends_does_not_end_the_new_one() -> None:
    async def main() -> None:
        roster = Roster(config)
        someone = roster.arrive(WorkerId("w1"), DeviceProfile(device="cpu"), 0.0)
        first = roster.connect(someone, 0.0)
        second = roster.connect(someone, 1.0)
        roster.disconnect(someone, first, 2.0)
        assert someone.connected
        roster.disconnect(someone, second, 2.0)
        assert not someone.connected

    asyncio.run(main())


def test_a_lease_is_kept_while_its_worker_makes_progress() -> None:
    busy = member(last_seen=300.0)
    assert loss(open_lease(progress_at=250.0), busy, 300.0, config) == ""
    assert "has made no progress for 101 s" in loss(open_lease(progress_at=199.0), busy, 300.0, config)


def test_a_lease_has_a_deadline_by_its_worker_s_past() -> None:
    steady = member(last_seen=300.0, seconds_per_unit={"diloco.inner": [1.0] * 6})
    on_time = open_lease(started_at=286.0, progress_at=299.0)
    late = open_lease(started_at=284.0, progress_at=299.0)
    assert loss(on_time, steady, 300.0, config) == ""  # 14 s of 10 + 5
    assert "its past allows 15 s" in loss(late, steady, 300.0, config)
    assert loss(late, steady, 300.0, config.model_copy(update={"deadlines": False})) == ""
    assert loss(late, steady, 300.0, config, is_alone=True) == ""


def test_how_long_a_result_takes_to_come_is_no_part_of_the_work() -> None:
    lease, steady = open_lease(), member(last_seen=300.0, seconds_per_unit={"diloco.inner": [1.0] * 6})
    for now, activity, step in ((284.0, "training", 1), (294.0, "training", 9), (296.0, "uploading", 0)):
        lease.seen(pb.Progress(key="inner/w1", activity=activity, step=step), now)
    assert loss(lease, steady, 300.0, config) == ""  # 12 s of 15
    lease.seen(pb.Progress(key="inner/w1", activity="uploading", step=1 << 20), 390.0)
    assert loss(lease, member(last_seen=480.0), 480.0, config) == ""
    assert "has made no progress for 101 s" in loss(lease, member(last_seen=491.0), 491.0, config)


def test_a_pure_task_is_for_others_once_its_worker_misses_its_heartbeats() -> None:
    patient = config.model_copy(update={"reconnect_s": 60.0})
    away = member(connected=False, away_since=103.0)
    pure = open_lease(message=pb.Lease(key="map/0", task="eval.part", kind="pure"))
    assert loss(pure, away, 106.0, patient) == ""
    assert loss(pure, away, 106.1, patient) == "w1 has not been heard for 6 s"
    assert loss(open_lease(), away, 106.1, patient) == ""


def test_who_fell_silent_is_away_since_it_was_heard_last_and_whose_link_broke_since_then() -> None:
    for silent_s, since in ((1.0, 101.0), (6.1, 100.0)):
        roster = Roster(config)
        w1 = roster.arrive(WorkerId("w1"), DeviceProfile(device="cpu"), 100.0)
        roster.disconnect(w1, roster.connect(w1, 100.0), 100.0 + silent_s)
        assert w1.away_since == since


def test_a_result_that_is_being_checked_is_not_given_up() -> None:
    gone = member(connected=False, away_since=0.0)
    assert loss(open_lease(checking=True), gone, 300.0, config) == ""
    assert loss(open_lease(), gone, 300.0, config) == "w1 has been away for 300 s"


def test_after_a_restart_workers_have_time_to_find_the_coordinator() -> None:
    assert loss(open_lease(), None, 125.0, config) == ""
    assert loss(open_lease(), None, 131.0, config) == "w1 did not come back"


def test_attempts_and_issues_never_collide_on_the_wire() -> None:
    seen = {wire_attempt(a, i) for a in range(20) for i in range(50)}
    assert len(seen) == 1000


def test_a_large_fleet_is_asked_for_fewer_signs_of_life() -> None:
    async def main() -> None:
        roster = Roster(config)
        everyone = [roster.arrive(WorkerId(f"w{i}"), DeviceProfile(device="cpu"), 0.0) for i in range(600)]
        connections = [roster.connect(each, 0.0) for each in everyone]
        first = everyone[0]
        assert first.heartbeat_s == config.heartbeat_s
        first.changed.clear()
        roster.heard(first)
        assert first.changed.is_set()  # it is to be told
        assert roster.tell_heartbeat(first) == 4.0
        assert absence(first, 12.0, config) == ""
        assert absence(first, 12.1, config) == "w0 has not been heard for 12 s"
        for each, connection in zip(everyone[1:], connections[1:], strict=True):
            roster.disconnect(each, connection, 1.0)
        assert roster.tell_heartbeat(first) == config.heartbeat_s
        assert absence(first, 12.0, config) == ""  # it may not have read it yet
        roster.heard(first)
        assert absence(first, 12.0, config) == "w0 has not been heard for 12 s"

    asyncio.run(main())


def test_a_worker_that_has_gone_may_come_back_to_its_task_as_long_as_others_work() -> None:
    gone = member(connected=False, away_since=0.0)
    pinned, pure = open_lease(), open_lease()
    pinned.message.kind, pure.message.kind = "pinned", "pure"
    assert loss(pinned, gone, 300.0, config, others_work=True) == ""
    assert loss(pinned, gone, 300.0, config) == "w1 has been away for 300 s"
    assert loss(pure, gone, 300.0, config, others_work=True) == "w1 has been away for 300 s"
    left = member(connected=False, away_since=0.0, leaving=True)
    assert loss(pinned, left, 300.0, config, others_work=True) == "w1 left"
    quarantined = member(quarantined="it lied")
    assert loss(pinned, quarantined, 300.0, config, others_work=True) == "w1 is quarantined: it lied"
