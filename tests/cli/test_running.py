"""What `run` says of the workers on this machine."""

from __future__ import annotations

from pathlib import Path

from potluck.cli.running import command_again, how_it_ended


def test_a_killed_worker_has_no_reason_and_another_one_its_last_word() -> None:
    assert how_it_ended(-9, "joined run mine (mine-1) as worker-2") == "was ended by signal 9"
    assert how_it_ended(8, "potluck: revoked") == "ended with exit code 8: potluck: revoked"
    assert how_it_ended(1, "") == "ended with exit code 1"


def test_the_command_that_goes_on_has_the_address_where_workers_look_for_the_run() -> None:
    run = Path("runs") / "mine"
    assert command_again(run, num_local=2, address="", port=0) == f"potluck run {run} --local 2 --resume"
    assert command_again(run, num_local=0, address="", port=0) == f"potluck host {run}"
    assert (
        command_again(run, num_local=0, address="train.example.org:7443", port=9000)
        == f"potluck host {run} --address train.example.org:7443 --port 9000"
    )
