"""Back-off: by hand, and how much a machine can cost that never gives."""

from __future__ import annotations

from potluck.types.back_off import BackOff


def test_it_grows_up_to_a_limit() -> None:
    off = BackOff(longest_s=10.0)
    assert [off.fault(0.0) for _ in range(8)] == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert not off.is_over(9.9) and off.is_over(10.0)
    assert BackOff(num_forgiven=0).fault(5.0, least_s=3.0) == 3.0


def test_good_turns_in_a_row_make_up_for_a_fault() -> None:
    off = BackOff()
    for _ in range(3):
        off.fault(0.0)
    for _ in range(15):
        off.good()
    assert off.num_faults == 3
    off.good()
    assert off.num_faults == 2
    for _ in range(100):
        off.good()
    assert off.num_faults == 0


def test_who_gives_three_of_four_is_left_alone_ever_longer() -> None:
    off, now, num_faults = BackOff(), 0.0, 0
    while now < 3600.0:
        for _ in range(3):
            off.good()
        off.fault(now)
        num_faults += 1
        now = max(now + 0.1, off.until)
    assert num_faults <= 2 + 10 + 6
