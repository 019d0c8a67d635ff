"""What docs/joining.md says, done: a host and workers as processes, members, an operator elsewhere, restarts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.processes import potluck, start, wait_for, write_corpus, write_recipe

pytestmark = pytest.mark.timeout(180)


class Place:
    """Processes of one test, each with a log, ended with it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "runs" / "tiny"
        self.port = free_pair()
        self.hosting: subprocess.Popen[bytes] | None = None
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, log: str) -> subprocess.Popen[bytes]:
        process = start(*arguments, cwd=self.folder, log=self.folder / log)
        self._running.append(process)
        return process

    def host(self) -> subprocess.Popen[bytes]:
        self.hosting = self.start("host", "tiny.toml", "--address", f"127.0.0.1:{self.port}", log="host.log")
        return self.hosting

    def join(self, line: str, state: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start(
            "join", line, "--state", state, "--device", "cpu", "--threads", "1", *arguments, log=f"{state}.log"
        )

    def ask(self, *arguments: str, cwd: Path | None = None) -> str:
        done = potluck(*arguments, cwd=cwd or self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def log(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")

    def keep_line(self) -> str:
        """The newest join line of the host, put into line.txt."""
        line = wait_for(self.run, "listening")[-1]["join_line"]
        (self.folder / "line.txt").write_text(f"{line}\n")
        return line

    def close(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()


def free_pair() -> int:
    """A port that is free together with the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A host that listens and has one worker, alice."""
    write_corpus(tmp_path / "texts", num_files=6)
    fleet = "min_workers = 1\nheartbeat_s = 1.0\nreconnect_s = 3.0"
    write_recipe(tmp_path / "tiny.toml", 'shared = "texts"', budget="rounds = 100000", fleet=fleet)
    here = Place(tmp_path)
    try:
        here.host()
        here.keep_line()
        yield here
    finally:
        here.close()


def workers_of(status: str) -> dict[str, Any]:
    return {w["id"]: w for w in json.loads(status)["workers"]}


def test_members_come_by_a_line_and_go_by_remove(place: Place) -> None:
    line = place.keep_line()
    assert line.startswith(f"potluck://127.0.0.1:{place.port}/")
    assert f"potluck join {line}" in place.log("host.log")
    assert "no other machine can join" in place.log("host.log")

    alice = place.join("@line.txt", "w1", "--name", "alice")
    (place.folder / "anna.txt").write_text(place.ask("invite", "anna", "--valid-hours", "48"))
    anna = place.join("@anna.txt", "w2", "--name", "ignored")
    wait_for(place.run, "joined", count=2)
    wait_for(place.run, "round", count=len(wait_for(place.run, "round")) + 3)  # both are connected and at work
    members = workers_of(place.ask("status", "tiny", "--json"))
    assert {name for name, worker in members.items() if worker["connected"]} == {"alice", "anna"}

    second = potluck("join", "@line.txt", "--state", "w1", cwd=place.folder)
    assert second.returncode == 1 and "w1 is in use by process" in second.stderr
    used = potluck("join", "@anna.txt", "--state", "w3", cwd=place.folder)
    assert used.returncode == 8, used.stderr

    assert "anna is removed and its certificates are revoked" in place.ask("remove", "anna")
    assert anna.wait(timeout=30) == 8
    assert "anna is not a member of this run any more" in place.log("w2.log")
    assert alice.poll() is None


def test_restarts_on_either_side_and_an_operator_elsewhere(place: Place) -> None:
    alice = place.join("@line.txt", "w1", "--name", "alice")
    wait_for(place.run, "round", count=2)

    if os.name == "posix":
        alice.terminate()
        assert alice.wait(timeout=30) == 0
        assert "SIGTERM: leaving in good order" in place.log("w1.log")
        alice = place.join("@line.txt", "w1")  # the same machine, by the line it came by
        wait_for(place.run, "joined", count=2)

    away = place.folder / "elsewhere"
    away.mkdir()
    (away / "operator.txt").write_text(place.ask("invite", "me", "--role", "operator"))
    said = place.ask("join", "@operator.txt", "--state", "operator", cwd=away)
    assert "potluck status operator" in said
    assert set(workers_of(place.ask("status", "operator", "--json", cwd=away))) == {"alice"}

    assert place.hosting is not None
    place.hosting.kill()
    place.hosting.wait()
    lost = potluck("status", "operator", cwd=away)
    assert lost.returncode == 7 and "the run is not going on" in lost.stderr
    num_rounds = len(wait_for(place.run, "round"))
    host = place.host()
    wait_for(place.run, "round", count=num_rounds + 2)  # alice came back by herself
    assert alice.poll() is None

    place.ask("stop", "operator", cwd=away)
    assert host.wait(timeout=30) == 0
    assert alice.wait(timeout=30) == 0
    assert "continuing after round" in place.log("host.log")
    assert "stopped by its operator" in place.log("host.log")
    assert (place.run / "model" / "model.safetensors").is_file()
