import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from potluck.bench import peers
from potluck.bench.rig.peer_systems import (
    PeerFailed,
    PeerSystem,
    Sandbox,
    Workload,
    flower,
    free_ports,
    nvflare,
    read_notes,
)
from potluck.bench.rig.processes import Marked
from potluck.types.errors import PotluckError

job = """
import json, sys, time
for number in range(1 + int(sys.argv[2])):
    with open(sys.argv[1], "a") as record:
        record.write(json.dumps({"round": number, "at": 2.0 * number ** 2, "first": STEP * number}) + "\\n")
    time.sleep(0.25)
"""
sleeper = ("python", "-c", "import time; held = bytearray(30_000_000); time.sleep(60)")


class HerePeer(PeerSystem):
    """Runs in this Python."""

    def install(self, cache: Path, told: Callable[[str], None]) -> Path:
        return Path(sys.executable)


def fake(name: str, code: str = job.replace("STEP", "0.5"), *, standing: tuple[str, ...] = sleeper) -> PeerSystem:
    def start(sandbox: Sandbox, workload: Workload) -> subprocess.Popen[bytes]:
        sandbox.start("server", *standing)
        for number in range(workload.num_workers):
            sandbox.start(f"client-{number}", *sleeper)
        return sandbox.submit("python", "-c", code, sandbox.record, workload.num_rounds)

    return HerePeer(name, name.title(), name, "1.0", start)


def figures_of_potluck(*_: object) -> dict[str, Any]:
    figures = ("server_mb", "client_mb", "server_cpu_s_per_round", "client_cpu_s_per_round")
    return {"potluck_round_s": 4.0, "floor_s": 2.0, "potluck_times_floor": 2.0} | {f"potluck_{f}": 1.0 for f in figures}


def processes_at_home_in(folder: Path) -> set[int]:
    return {
        process.pid
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("HOME", "").startswith(str(folder))
    }


@pytest.mark.skipif(sys.platform == "win32", reason="Python there is python.exe")
def test_what_runs_has_figures_and_what_does_not_has_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ends = ("python", "-c", "print('no such thing'); raise SystemExit(3)")
    monkeypatch.setattr(
        peers, "peers",
        (fake("good"), fake("gone", standing=ends), fake("early", "print('stopped')"),
         fake("wrong", job.replace("STEP", "0.4"))),
    )  # fmt: skip
    monkeypatch.setattr(peers, "_measure_potluck", figures_of_potluck)
    monkeypatch.setenv("POTLUCK_BENCH_DIR", str(tmp_path))
    said: list[str] = []
    figures = peers.bench_peers(params=1, rounds=3, told=said.append)
    assert (figures["good_first_round_s"], figures["good_round_s"], figures["good_times_potluck"]) == (2.0, 8.0, 2.0)
    assert (figures["good_round_s_lowest"], figures["good_round_s_highest"]) == (6.0, 10.0)
    assert 30 < figures["good_server_mb"] < 100
    assert 30 < figures["good_client_mb"] < 100
    assert figures["gone_failed_because"] == "its server ended with 3: no such thing"
    assert figures["early_failed_because"] == "its job ended after 0 rounds: stopped"
    assert figures["wrong_failed_because"] == "round 1 turned 0.0 into 0.4, not 0.5 more"
    failed = [key for key in figures if key.startswith(("gone_", "early_", "wrong_"))]
    assert failed == ["gone_failed_because", "early_failed_because", "wrong_failed_because"]
    assert "| Good 1.0 | 8.0 | 2.0 |" in said[-1]
    assert "| Gone 1.0 | failed: its server ended with 3: no such thing |" in said[-1]
    assert "| bare floor | 2.0 | 0.5 |" in said[-1]
    assert list(tmp_path.iterdir()) == []
    assert processes_at_home_in(tmp_path) == set()


@pytest.mark.skipif(sys.platform == "win32", reason="Python there is python.exe")
def test_nothing_is_left_after_ctrl_c(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Path(sys.executable), Marked())
    with pytest.raises(KeyboardInterrupt), sandbox.closing():  # noqa: PT012
        fake("one").start(sandbox, Workload(((1,),), 2, 3))
        assert len(processes_at_home_in(tmp_path)) == 4
        raise KeyboardInterrupt
    assert processes_at_home_in(tmp_path) == set()


def test_a_peer_that_cannot_be_installed_tells_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(PeerFailed, match=r"it cannot be installed: .*flwr==1\.42\.0"):
        flower.install(tmp_path, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("potluck.bench.rig.peer_systems.is_taken", lambda port: port == 8003)
    with pytest.raises(PeerFailed, match="port 8003 is taken"):
        nvflare.start(Sandbox(tmp_path, Path(sys.executable), Marked()), Workload(((1,),), 2, 3))


def test_a_half_written_note_waits(tmp_path: Path) -> None:
    record = tmp_path / "record"
    assert read_notes(record) == []
    record.write_text(json.dumps({"round": 0, "at": 1.5}) + '\n{"round": 1, "a')
    [note] = read_notes(record)
    assert (note.round, note.at, note.first) == (0, 1.5, None)


def test_ports_differ() -> None:
    assert len(set(free_ports(5))) == 5


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(PotluckError, match="2 workers and 2 rounds give no figure"):
        peers.bench_peers(rounds=2)
