import pytest

from potluck.planner.deadline import deadline_s, predict_s


def test_two_samples_are_needed() -> None:
    assert deadline_s([], 10) is None
    assert deadline_s([1.0], 10) is None
    assert predict_s([1.0], 10) is None


def test_a_steady_worker_gets_a_quarter_more_than_it_needs() -> None:
    assert predict_s([2.0, 2.0, 2.0], 20) == pytest.approx(40.0)
    assert deadline_s([2.0] * 6, 20) == pytest.approx(40.0 + 10.0)
    assert deadline_s([2.0] * 5, 20) == pytest.approx(40.0 + 40.0)


def test_a_short_task_gets_five_seconds_more() -> None:
    assert deadline_s([0.1, 0.1], 10) == pytest.approx(1.0 + 5.0)


def test_an_unsteady_worker_gets_four_times_its_spread() -> None:
    # Medians: 3 s a unit, deviations 2, 0, 2 with median 2; 10 units.
    assert deadline_s([1.0, 3.0, 5.0], 10) == pytest.approx(30.0 + 4.0 * 20.0)
