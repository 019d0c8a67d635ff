"""The main job by its public command, in real processes over real sockets with TLS."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from e2e.processes import events, potluck, result_of, start, wait_for, write_corpus, write_recipe
from torch.nn.functional import cross_entropy

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A run that went through: its folder and what it printed."""
    here = tmp_path_factory.mktemp("run")
    write_corpus(here / "texts")
    recipe = write_recipe(here / "tiny.toml", 'shared = "texts"')
    done = potluck("run", recipe, "--local", "2", "--json", "--dir", here / "run", cwd=here)
    return here, result_of(done)


def test_a_run_prints_what_it_did(finished: tuple[Path, dict[str, object]]) -> None:
    here, result = finished
    assert result["strategy"] == "diloco"
    assert result["rounds"] == 4
    assert result["tokens"] == 4 * 2 * 5 * 4 * 32  # rounds, workers, steps, batch, sequence
    workers = result["workers"]
    assert isinstance(workers, list)
    assert [w["id"] for w in workers] == ["worker-1", "worker-2"]
    assert sum(w["tokens"] for w in workers) == result["tokens"]
    assert all(w["bytes_up"] > 10_000 and w["bytes_down"] > 10_000 for w in workers)
    assert isinstance(result["initial_val_loss"], float) and isinstance(result["final_val_loss"], float)
    assert result["final_val_loss"] < result["initial_val_loss"] - 0.3
    assert result["stopped"] == ""
    kinds = [e["kind"] for e in events(here / "run")]
    assert kinds.count("round") == 4
    assert kinds[-1] in ("model", "left")


def test_the_model_opens_in_transformers_with_the_reported_loss(finished: tuple[Path, dict[str, object]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    here, result = finished
    model = AutoModelForCausalLM.from_pretrained(str(result["model_dir"])).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(result["model_dir"]))
    (prepared,) = (here / "cache" / "potluck").glob("data-*")
    facts = json.loads((prepared / "prepared.json").read_text())
    # The validation files, read again by plain code: every file whose tokens are in the validation shards.
    from potluck.codecs.bundle import Bundle

    loss_sum, num_tokens = 0.0, 0
    for name, *_ in facts["validation"]:
        with Bundle.open(prepared / "validation" / name) as bundle:
            tokens = bundle.tensor("tokens").long()
        with torch.no_grad():
            logits = model(input_ids=tokens[:, :-1]).logits
        loss_sum += float(cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"))
        num_tokens += tokens[:, 1:].numel()
    assert loss_sum / num_tokens == pytest.approx(result["final_val_loss"], abs=1e-3)
    text = tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert text.strip() and any(text[:40].strip()[5:20] in p.read_text() for p in (here / "texts").iterdir())
    card = (Path(str(result["model_dir"])) / "README.md").read_text()
    assert "diloco" in card and str(result["run_id"]) in card


def test_generate_writes_text(finished: tuple[Path, dict[str, object]]) -> None:
    here, result = finished
    done = potluck("generate", str(result["model_dir"]), "--prompt", "kata", "--max-new-tokens", "20", cwd=here)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10


def test_status_of_a_run_that_is_over(finished: tuple[Path, dict[str, object]]) -> None:
    here, result = finished
    done = potluck("status", here / "run", cwd=here)
    assert done.returncode == 7
    assert f"is finished: {result['rounds']} rounds and {result['tokens']:,} tokens" in done.stderr
    assert str(result["model_dir"]) in done.stderr
    known = result_of(potluck("status", here / "run", "--json", cwd=here))
    assert known["running"] is False
    assert (known["round"], known["tokens"]) == (result["rounds"], result["tokens"])
    assert potluck("set", here / "run", cwd=here).stdout == "nothing was set\n"


def test_kill_the_coordinator_between_rounds_and_resume(tmp_path: Path) -> None:
    """The same committed state, worker identities, optimizer state and data positions; workers come back."""
    write_corpus(tmp_path / "texts")
    recipe = write_recipe(tmp_path / "tiny.toml", 'shared = "texts"', budget="rounds = 40")
    first = start("run", recipe, "--local", "2", "--dir", tmp_path / "run", cwd=tmp_path, log=tmp_path / "log")
    wait_for(tmp_path / "run", "round", count=3)
    first.kill()
    first.wait()
    before = [e for e in events(tmp_path / "run") if e["kind"] == "round"]
    done = potluck(
        "run", recipe, "--local", "2", "--resume", "--dir", tmp_path / "run", "--set", "budget.rounds=8", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    result = result_of(done)
    rounds = [e for e in events(tmp_path / "run") if e["kind"] == "round"]
    assert [e["round"] for e in rounds][: len(before)] == [e["round"] for e in before]
    assert sorted({e["round"] for e in rounds}) == list(range(1, max(e["round"] for e in rounds) + 1))
    assert len(rounds) == len({e["round"] for e in rounds}), "a committed round was done again"
    assert result["tokens"] == rounds[-1]["tokens"] == len(rounds) * 2 * 5 * 4 * 32
    assert [w["id"] for w in result["workers"]] == ["worker-1", "worker-2"]
    notes = [e["text"] for e in events(tmp_path / "run") if e["kind"] == "note" and "text" in e]
    assert not [n for n in notes if "starts afresh" in n]


def test_ctrl_c_stops_cleanly_and_the_run_goes_on(tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts")
    recipe = write_recipe(tmp_path / "tiny.toml", 'shared = "texts"', budget="rounds = 1000")
    running = start("run", recipe, "--local", "2", "--dir", tmp_path / "run", cwd=tmp_path, log=tmp_path / "log")
    wait_for(tmp_path / "run", "round", count=2)
    children = psutil.Process(running.pid).children(recursive=True)
    os.kill(running.pid, signal.SIGINT)
    assert running.wait(30) in (0, 130), (tmp_path / "log").read_text()[-2000:]
    psutil.wait_procs(children, timeout=15)
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
    kinds = [e["kind"] for e in events(tmp_path / "run")]
    assert "checkpoint" in kinds and "model" in kinds
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_killed_worker_costs_its_round_only_and_comes_back(tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts")
    recipe = write_recipe(
        tmp_path / "tiny.toml", 'shared = "texts"', budget="rounds = 300",
        fleet="min_workers = 1\nheartbeat_s = 1.0\nreconnect_s = 1.0",
    )  # fmt: skip
    host = start("host", recipe, "--dir", tmp_path / "run", cwd=tmp_path, log=tmp_path / "log")
    workers = {}
    try:
        line = wait_for(tmp_path / "run", "listening")[0]["join_line"]
        for name in ("anna", "bert"):
            workers[name] = start(
                "join", line, "--state", tmp_path / name, "--name", name, "--threads", "1", cwd=tmp_path,
                log=tmp_path / f"{name}.log",
            )  # fmt: skip
        wait_for(tmp_path / "run", "joined", count=2)
        deadline = time.monotonic() + 40
        while not any(e["workers"] == ["anna", "bert"] for e in events(tmp_path / "run") if e["kind"] == "round"):
            assert time.monotonic() < deadline, "no round with both"
            time.sleep(0.1)
        workers["bert"].kill()
        workers["bert"].wait()
        seen = len([e for e in events(tmp_path / "run") if e["kind"] == "round"])
        wait_for(tmp_path / "run", "round", count=seen + 2)
        assert [e for e in events(tmp_path / "run") if e["kind"] == "round"][-1]["workers"] == ["anna"]
        status = potluck("status", tmp_path / "run", "--json", cwd=tmp_path)
        assert json.loads(status.stdout)["round"] >= seen + 2
        workers["bert"] = start(
            "join", line, "--state", tmp_path / "bert", "--name", "bert", "--threads", "1", cwd=tmp_path,
            log=tmp_path / "bert.log",
        )  # fmt: skip
        wait_for(tmp_path / "run", "joined", count=3)
        deadline = time.monotonic() + 40
        while [e for e in events(tmp_path / "run") if e["kind"] == "round"][-1]["workers"] != ["anna", "bert"]:
            assert time.monotonic() < deadline, "bert did not come back"
            time.sleep(0.1)
        assert "starts afresh" not in (tmp_path / "bert.log").read_text()
        stopped = potluck("stop", tmp_path / "run", cwd=tmp_path)
        assert stopped.returncode == 0, stopped.stderr
        assert host.wait(30) == 0, (tmp_path / "log").read_text()[-2000:]
        for worker in workers.values():
            assert worker.wait(20) == 0
    finally:
        for process in (host, *workers.values()):
            if process.poll() is None:
                process.kill()
                process.wait()
