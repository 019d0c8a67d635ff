import time

import pytest

from potluck.worker.join import duty, seconds_until_closed, seconds_until_open


def at(hour: int, minute: int = 0) -> float:
    return time.mktime((2026, 3, 4, hour, minute, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("hours", "now", "opens_s", "closes_s"),
    [
        (None, at(3), 0.0, None),
        ((9, 17), at(12), 0.0, 5 * 3600),
        ((9, 17), at(8, 30), 1800.0, 8.5 * 3600),
        ((9, 17), at(17), 16 * 3600, 24 * 3600),
        ((22, 7), at(23), 0.0, 8 * 3600),
        ((22, 7), at(6), 0.0, 3600.0),
        ((22, 7), at(12), 10 * 3600, 19 * 3600),
        ((0, 24), at(12), 0.0, None),
    ],
)
def test_the_owner_s_hours(hours: tuple[int, int] | None, now: float, opens_s: float, closes_s: float | None) -> None:
    assert seconds_until_open(hours, now) == opens_s
    assert seconds_until_closed(hours, now) == closes_s


def test_the_share_of_the_day_that_is_left_to_the_run() -> None:
    assert duty(None) == duty((0, 0)) == duty((5, 5)) == 1.0
    assert duty((9, 17)) == 8 / 24
    assert duty((22, 7)) == 9 / 24
