"""A hosted run and the commands around it, as processes over real sockets."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from pathlib import Path

import pytest
from e2e.processes import events, free_port_pair, potluck, start, wait_for, write_corpus, write_recipe

pytestmark = pytest.mark.timeout(120)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def test_invite_remove_status_and_stop(tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts")
    recipe = write_recipe(tmp_path / "tiny.toml", 'shared = "texts"', budget="rounds = 1000")
    port, run = free_port_pair(), tmp_path / "runs" / "tiny"
    log = tmp_path / "log"
    host = start("host", recipe, "--address", f"127.0.0.1:{port}", cwd=tmp_path, log=log)
    worker = None
    try:
        wait_for(run, "waiting")
        assert f"potluck join potluck://127.0.0.1:{port}/" in log.read_text()
        assert "no other machine can join" in log.read_text()

        invited = potluck("invite", "anna", cwd=tmp_path)
        assert invited.stdout.startswith(f"potluck://127.0.0.1:{port}/"), invited.stderr
        (tmp_path / "line").write_text(invited.stdout)
        worker = start("join", "line", "--state", "anna", "--threads", "1", cwd=tmp_path, log=tmp_path / "anna.log")
        assert wait_for(run, "joined")[0]["worker"] == "anna"
        shown = potluck("status", cwd=tmp_path)
        assert shown.stdout.startswith("tiny (diloco)")
        assert "anna" in shown.stdout and "cpu" in shown.stdout
        status = json.loads(potluck("status", "tiny", "--json", cwd=tmp_path).stdout)
        assert [row["id"] for row in status["workers"]] == ["anna"]

        removed = potluck("remove", "anna", cwd=tmp_path)
        assert removed.returncode == 0
        assert "anna is removed" in removed.stderr
        assert worker.wait(20) == 8
        assert re.search("is revoked|is not a member of this run any more", (tmp_path / "anna.log").read_text())

        stopped = potluck("stop", cwd=tmp_path)  # while the run waits for workers
        assert stopped.returncode == 0
        assert host.wait(20) == 0
        assert "model" in [event["kind"] for event in events(run)]
        assert potluck("status", cwd=tmp_path).returncode == 7
    finally:
        for process in (host, worker):
            if process is not None:
                end(process)


def test_a_port_that_is_in_use(tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts")
    recipe = write_recipe(tmp_path / "tiny.toml", 'shared = "texts"')
    port = free_port_pair()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        done = potluck("host", recipe, "--address", f"127.0.0.1:{port}", cwd=tmp_path)
    assert done.returncode == 6, done.stderr
    assert f"port {port} " in done.stderr.splitlines()[-1]
    assert "in use" in done.stderr.splitlines()[-1]


def test_a_run_whose_only_worker_cannot_work_says_why(tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts")
    recipe = write_recipe(tmp_path / "tiny.toml", 'shared = "texts"', fleet="min_workers = 1")
    (tmp_path / "run" / "workers").mkdir(parents=True)
    (tmp_path / "run" / "workers" / "worker-1").write_text("in the way of the worker's folder")
    done = potluck("run", recipe, "--local", "1", "--dir", "run", cwd=tmp_path)
    assert done.returncode == 11, done.stderr
    assert done.stderr.splitlines()[-1].startswith("potluck: every worker on this machine has ended")
    assert done.stdout == ""
