"""What `run` says of the workers on this machine."""

from __future__ import annotations

from potluck.cli.running import how_it_ended


def test_a_killed_worker_has_no_reason_and_another_one_its_last_word() -> None:
    assert how_it_ended(-9, "joined run mine (mine-1) as worker-2") == "was ended by signal 9"
    assert how_it_ended(8, "potluck: revoked") == "ended with exit code 8: potluck: revoked"
    assert how_it_ended(1, "") == "ended with exit code 1"
