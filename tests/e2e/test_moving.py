"""A run that moves to another machine: stop, copy one folder, start there; workers get nothing but the address."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from e2e.processes import events, free_port_pair, potluck, start, wait_for, write_corpus, write_recipe

from potluck.storage.database import Database
from potluck.storage.ledger import MARK, Ledger

pytestmark = pytest.mark.timeout(240)
names = ("anna", "bert")


def join(where: str | Path, name: str, machine: Path) -> subprocess.Popen[bytes]:
    return start(
        "join", where, "--state", machine / name, "--name", name, "--threads", "1", cwd=machine,
        log=machine / f"{name}.log",
    )  # fmt: skip


def end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_run_goes_on_in_another_folder_under_another_address(tmp_path: Path) -> None:
    """The second machine has neither recipe nor text nor cache; a change that was made while it was stopped holds."""
    old, new, workers = tmp_path / "old", tmp_path / "new", tmp_path / "workers"
    for machine in (old, new, workers):
        machine.mkdir()
    write_corpus(old / "texts")
    recipe = write_recipe(
        old / "tiny.toml", 'shared = "texts"', budget="rounds = 500",
        fleet="min_workers = 2\nheartbeat_s = 1.5\nreconnect_s = 60.0",
    )  # fmt: skip
    first, second = free_port_pair(), free_port_pair()
    running = [start("host", recipe, "--address", f"127.0.0.1:{first}", "--dir", old / "run", cwd=old, log=old / "log")]
    try:
        line = wait_for(old / "run", "listening")[0]["join_line"]
        running += [join(line, name, workers) for name in names]
        wait_for(old / "run", "round", count=2)
        stopped = potluck("stop", old / "run", cwd=old)
        assert stopped.returncode == 0, stopped.stderr
        assert [process.wait(40) for process in running] == [0, 0, 0], (old / "log").read_text()[-2000:]
        before = [e for e in events(old / "run") if e["kind"] == "round"]
        done = before[-1]["round"]

        shutil.copytree(old / "run", new / "run")
        shutil.rmtree(old)
        told = potluck("set", new / "run", f"budget.rounds={done + 3}", cwd=new)
        assert told.returncode == 0 and f"budget.rounds is {done + 3}, and was 500" in told.stderr, told.stderr
        running = [
            start("host", new / "run", "--address", f"127.0.0.1:{second}", cwd=new, log=new / "log"),
            *(join(f"127.0.0.1:{second}", name, workers) for name in names),
        ]
        assert [process.wait(120) for process in running] == [0, 0, 0], (new / "log").read_text()[-3000:]
    finally:
        end(*running)

    rounds = [e for e in events(new / "run") if e["kind"] == "round"]
    assert [e["round"] for e in rounds] == list(range(1, done + 4))
    assert all(e["workers"] == list(names) for e in rounds)
    result = json.loads((new / "run" / "result.json").read_text())
    assert (result["rounds"], result["stopped"]) == (done + 3, "")
    assert [w["id"] for w in result["workers"]] == list(names)
    assert result["tokens"] == rounds[-1]["tokens"] == (done + 3) * 2 * 5 * 4 * 32  # workers, steps, batch, sequence
    assert (new / "run" / "model" / "tokenizer.json").is_file()
    notes = [e["text"] for e in events(new / "run") if e["kind"] == "note"]
    assert not [text for text in notes if "going back" in text or "starts afresh" in text]
    assert not [name for name in names if "starts afresh" in (workers / f"{name}.log").read_text()]
    ledger = Ledger(Database(new / "run" / MARK))
    (change,) = ledger.operations()
    ledger.close()
    assert (change.kind, change.round, change.value["value"]) == ("set", done, done + 3)
