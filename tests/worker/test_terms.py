"""The owner's terms: hours, an idle machine, mains power, a pause."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from potluck.cli.joining import parse_conditions
from potluck.cli.units import parse_rate
from potluck.types.errors import PotluckError
from potluck.worker.surroundings import Machine
from potluck.worker.terms import Idleness, Stop, Terms, duty, pause, resume, seconds_until_open


def at(hour: int, minute: int = 0) -> float:
    return time.mktime((2026, 3, 4, hour, minute, 0, 0, 0, -1))


@dataclass
class Desk:
    """A machine on somebody's desk."""

    battery: bool = False
    busy: float = 0.0
    untouched: float = math.inf

    def on_battery(self) -> bool:
        return self.battery

    def busy_share(self) -> float:
        return self.busy

    def untouched_s(self) -> float:
        return self.untouched


@pytest.mark.parametrize(
    ("hours", "now", "opens_s"),
    [
        ((9, 17), at(12), 0.0),
        ((9, 17), at(8, 30), 1800.0),
        ((9, 17), at(17), 16 * 3600),
        ((22, 7), at(23), 0.0),
        ((22, 7), at(6), 0.0),
        ((22, 7), at(12), 10 * 3600),
        ((0, 24), at(12), 0.0),
    ],
)
def test_the_owner_s_hours(hours: tuple[int, int], now: float, opens_s: float) -> None:
    assert seconds_until_open(hours, now) == opens_s


def test_outside_the_hours_nothing_is_kept(tmp_path: Path) -> None:
    terms = Terms(tmp_path, Desk(), hours=(22, 7))
    assert terms.stop(now=0.0, wall=at(23)) is None
    assert terms.stop(now=0.0, wall=at(12)) == Stop("outside the hours 22-7; waiting 10.0 h", 0.0)


def test_the_share_of_the_day_that_is_left_to_the_run() -> None:
    assert duty(None) == duty((0, 0)) == duty((5, 5)) == 1.0
    assert duty((9, 17)) == 8 / 24
    assert duty((22, 7)) == 9 / 24


def test_plugged_in(tmp_path: Path) -> None:
    desk = Desk(battery=True)
    terms = Terms(tmp_path, desk, only_when=("plugged-in",))
    stop = terms.stop(now=0.0, wall=0.0)
    assert stop is not None and stop.reason == "this machine runs on its battery" and stop.keep_s == 20.0
    desk.battery = False
    assert terms.stop(now=1.0, wall=0.0) is None
    assert Terms(tmp_path, Desk(battery=True)).stop(now=0.0, wall=0.0) is None


def test_a_pause_holds_over_a_restart(tmp_path: Path) -> None:
    with pytest.raises(PotluckError, match="no worker has joined with the state folder"):
        pause(tmp_path)
    (tmp_path / "identity").mkdir()
    pause(tmp_path)
    for _ in range(2):
        stop = Terms(tmp_path, Desk()).stop(now=0.0, wall=0.0)
        assert stop is not None and stop.reason == "it is paused until `potluck resume`"
    resume(tmp_path)
    resume(tmp_path)
    assert Terms(tmp_path, Desk()).stop(now=0.0, wall=0.0) is None


def test_an_idle_machine_is_one_that_has_been_quiet_for_a_minute(tmp_path: Path) -> None:
    desk = Desk(busy=0.1)
    terms = Terms(tmp_path, desk, only_when=("idle",))
    stops = [terms.stop(now=float(t), wall=0.0) for t in range(62)]
    assert [s is None for s in stops] == [False] * 60 + [True] * 2
    assert stops[0] is not None and stops[0].reason == "it takes a minute to see whether this machine is idle"


def test_somebody_s_work_ends_it_within_seconds_and_a_blip_does_not() -> None:
    idleness = Idleness()
    for t in range(61):
        reason = idleness.observe(float(t), 0.0, math.inf)
    assert reason == ""
    assert idleness.observe(61.0, 1.0, math.inf) == ""  # one second of ten
    assert idleness.observe(62.0, 1.0, math.inf) == ""
    assert idleness.observe(63.0, 1.0, math.inf) == "others use 30% of this machine's processors"
    assert idleness.observe(64.0, 0.0, math.inf) != ""
    quiet = [t for t in range(65, 200) if not idleness.observe(float(t), 0.0, math.inf)]
    assert quiet[0] == 72  # one busy second of the last ten


def test_lasting_work_keeps_it_busy_until_a_minute_is_quiet_on_average() -> None:
    idleness = Idleness()
    reasons = [idleness.observe(float(t), 1.0 if t < 100 else 0.0, math.inf) for t in range(200)]
    assert all(reasons[:151])
    assert reasons.index("") == 151  # eight of the last sixty seconds


def test_typing_ends_it_at_once() -> None:
    idleness = Idleness()
    for t in range(61):
        idleness.observe(float(t), 0.0, 1000.0)
    assert idleness.observe(61.0, 0.0, 3.0) == "someone used a terminal of this machine 3 s ago"
    assert idleness.observe(62.0, 0.0, 119.0) != ""
    assert idleness.observe(63.0, 0.0, 120.0) == ""


def test_after_a_sleep_it_is_looked_at_anew() -> None:
    idleness = Idleness()
    for t in range(61):
        idleness.observe(float(t), 0.0, math.inf)
    assert idleness.observe(500.0, 0.0, math.inf) == "it takes a minute to see whether this machine is idle"


def test_what_this_process_computes_is_not_others_work() -> None:
    machine = Machine()
    assert 0.0 <= machine.busy_share() <= 1.0
    busy, total, own = machine._used()
    assert 0.0 < own < busy < total
    machine._last = (0.0, 0.0, 0.0)
    machine._used = lambda: (1.5, 4.0, 0.5)  # pyright: ignore[reportAttributeAccessIssue]
    assert machine.busy_share() == 0.25
    assert machine.untouched_s() >= 0.0
    assert machine.on_battery() in (False, True)


def test_how_terms_are_written() -> None:
    with pytest.raises(PotluckError, match="--only-when names nothing"):
        parse_conditions(" ,")
    assert parse_conditions("plugged-in, idle") == ("idle", "plugged-in")
    with pytest.raises(PotluckError, match="knows idle and plugged-in, not 'asleep'"):
        parse_conditions("idle,asleep")
    assert parse_rate("5mbit") == 625_000
    assert parse_rate("500 kbit/s") == 62_500
    assert parse_rate("1gbitps") == 125_000_000
    with pytest.raises(PotluckError, match="is not a rate"):
        parse_rate("5MB")
    with pytest.raises(PotluckError, match="too slow"):
        parse_rate("50kbit")
