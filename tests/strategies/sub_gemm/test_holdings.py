"""What a device is believed to have."""

from __future__ import annotations

from potluck.strategies.sub_gemm.holdings import Holdings
from potluck.types.ids import WorkerId

one, other = WorkerId("a"), WorkerId("b")


def test_what_passes_goes_the_oldest_first_and_what_stays_stays() -> None:
    holdings = Holdings()
    holdings.sent(one, {"stays:w[0:4,0:4]": 90, "x": 40}, 100)
    holdings.sent(one, {"y": 50}, 100)
    holdings.sent(one, {"x": 40}, 100)  # used again
    holdings.sent(one, {"z": 30}, 100)
    assert [holdings.holds(one, name) for name in ("x", "y", "z", "stays:w[0:4,0:4]")] == [True, False, True, True]
    assert not holdings.holds(other, "x")


def test_a_new_step_and_a_device_that_is_gone_leave_nothing_but_what_is_reserved() -> None:
    holdings = Holdings()
    for forget in (lambda: holdings.forget(one), holdings.clear):
        holdings.sent(one, {"stays:w": 90, "x": 40}, 100)
        forget()
        assert not holdings.holds(one, "stays:w") and not holdings.holds(one, "x")
        holdings.sent(one, {"y": 70}, 100)
        holdings.sent(one, {"z": 30}, 100)
        assert holdings.holds(one, "y") and holdings.holds(one, "z")
    holdings.reserve({one: 50.0})
    assert holdings.reserved_bytes(one) == 50.0 and holdings.reserved_bytes(other) == 0.0
