"""Bad input ends in one sentence and its exit code, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.inside import CommandLine
from e2e.processes import events, potluck, result_of, start, wait_for, words, write_corpus, write_recipe

from potluck.storage.digest import digest_file
from potluck.storage.files import FolderLock

pytestmark = pytest.mark.timeout(180)

LINES = 'shared = "lines.jsonl"'
EVERY_ROUND = "every_rounds = 1\nkeep = 3"


@pytest.fixture
def inside(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(tmp_path, capsys, monkeypatch)


def write_lines(path: Path, *, bad: str = "") -> Path:
    """Documents as JSON lines; the 7th is replaced by `bad`."""
    lines = [json.dumps({"text": " ".join(words[(k * 5 + i * i) % 36] for i in range(300))}) for k in range(60)]
    if bad:
        lines[6] = bad
    path.write_text("\n".join(lines) + "\n")
    return path


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file of a folder by content, but for the lock, the mark of this boot and what SQLite folds away."""
    return {
        p.relative_to(folder).as_posix(): digest_file(p)
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in ("lock", "boot") and not p.name.endswith(("-wal", "-shm"))
    }


@pytest.fixture(scope="module")
def lines_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 4 rounds with a checkpoint of each, on JSON lines of which one is bad. Copy before changing."""
    here = tmp_path_factory.mktemp("lines")
    write_lines(here / "lines.jsonl", bad='{"text": "cut of')
    write_recipe(here / "tiny.toml", LINES, checkpoint=EVERY_ROUND)
    result = result_of(potluck("run", "tiny.toml", "--local", "2", "--json", "--dir", "run", cwd=here))
    assert result["rounds"] == 4 and result["stopped"] == ""
    return here


@pytest.fixture
def copied(lines_run: Path, tmp_path: Path) -> Path:
    """A copy of that run to damage."""
    shutil.copytree(lines_run / "run", tmp_path / "run")
    return tmp_path


# Data


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("gone.txt", None, "gone.txt does not exist; check the path"),
        ("empty.txt", b"", "empty.txt holds no text: it is empty"),
        ("empty.jsonl", b"", "empty.jsonl holds no text: it is empty"),
        ("photo.txt", bytes(range(256)) * 40, "photo.txt is not text"),
        ("bad.jsonl", b'{"text": \n[1]\n"word"\n', "bad.jsonl"),
        ("short.txt", b"three small words", "training tokens"),
    ],
)
def test_data_that_cannot_be_used(
    inside: CommandLine, tmp_path: Path, name: str, content: bytes | None, sentence: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    write_recipe(tmp_path / "tiny.toml", f'shared = "{name}"')
    ended = inside("run", "tiny.toml", "--json")
    assert ended.code == 4, ended.stderr
    assert sentence in ended.sentence()
    assert ended.stdout == ""
    assert not list((tmp_path / "runs").glob("*/recipe.json"))  # a mistake binds the folder to nothing


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ('strategy={name="sparse_diloco"}', "codec.up is 'int8': set it to 'topk(1.5625%)+2bit+ef(0.95)'"),
        ('strategy={name="fed_avg", control_variates=true}', 'strategy.inner.optimizer is adamw; set it to "sgd"'),
        ('strategy={name="streaming_diloco", num_inner_steps=99, num_fragments=99}', "num_fragments is 99 and"),
    ],
)
def test_what_a_strategy_refuses_of_a_recipe_binds_the_folder_to_nothing(
    inside: CommandLine, tmp_path: Path, setting: str, sentence: str
) -> None:
    write_lines(tmp_path / "lines.jsonl")
    write_recipe(tmp_path / "tiny.toml", LINES)
    ended = inside("run", "tiny.toml", "--set", setting)
    assert ended.code == 3, ended.stderr
    assert sentence in ended.sentence()
    assert not [p for name in ("recipe.json", "ledger.db") for p in (tmp_path / "runs").rglob(name)]


def test_one_bad_line_is_skipped_counted_and_reported(lines_run: Path) -> None:
    notes = [e["text"] for e in events(lines_run / "run") if e["kind"] == "note"]
    assert [n for n in notes if "lines.jsonl:7: " in n and n.startswith("skipped ")], notes
    assert [n for n in notes if "1 " in n and "skipped" in n and "lines.jsonl:7" not in n], notes
    facts = json.loads((next((lines_run / "cache" / "potluck").glob("data-*")) / "prepared.json").read_text())
    assert facts["num_documents"] + facts["num_validation_documents"] == 59
    assert facts["report"]["num_skipped"] == 1


# Recipes


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"budget": 'rounds = "many"'}, 'budget.rounds is "many" and must be a whole number'),
        ({"budget": "round = 3"}, "budget.round is not a key; did you mean budget.rounds?"),
        ({"stratgy": "outer_lr = 0.1"}, "stratgy is not a key; did you mean strategy?"),
        ({"strategy": 'name = "diloko"'}, "diloco"),
        ({"strategy": 'name = "diloco"\nouter_lr = -1'}, "strategy.outer_lr is -1 and must be greater than 0"),
        ({"codec": 'up = "int7"'}, "int7"),
        ({"fleet": "min_workers = = 2"}, "is not valid TOML"),
        ({"model": "config = 3"}, "model.config is 3 and must be a table"),
    ],
)
def test_a_recipe_with_a_mistake(inside: CommandLine, tmp_path: Path, sections: dict[str, str], sentence: str) -> None:
    write_recipe(tmp_path / "tiny.toml", 'shared = "texts"', **sections)
    ended = inside("run", "tiny.toml")
    assert ended.code == 3, ended.stderr
    assert sentence in ended.sentence()
    assert not (tmp_path / "runs").exists()


def test_a_run_folder_of_another_recipe_is_left_alone(inside: CommandLine, lines_run: Path, copied: Path) -> None:
    before = fingerprint(copied / "run")
    recipe = lines_run / "tiny.toml"
    data = f'shared = "{(lines_run / "lines.jsonl").as_posix()}"'
    write_recipe(copied / "other.toml", data, model='config = { model_type = "gpt2", n_layer = 1, n_embd = 16 }')
    ended = inside("run", "other.toml", "--resume", "--dir", "run")
    assert ended.code == 3
    assert "run holds a run whose model.config.n_layer is 2 and here it is 1; name that folder" in ended.sentence()
    ended = inside("run", recipe, "--dir", "run")
    assert ended.code == 1
    assert "run holds a run already; continue it with --resume" in ended.sentence()
    assert fingerprint(copied / "run") == before


# Places that are taken


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_in_use(inside: CommandLine, tmp_path: Path, offset: int) -> None:
    write_corpus(tmp_path / "texts", num_files=4)
    write_recipe(tmp_path / "tiny.toml", 'shared = "texts"')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = inside("host", "tiny.toml", "--address", f"127.0.0.1:{port - offset}")
    assert ended.code == 6, ended.stderr
    assert f"port {port} on :: is in use by another program; choose another port" in ended.sentence()


def test_one_process_for_each_run_and_each_worker_folder(inside: CommandLine, lines_run: Path, copied: Path) -> None:
    with FolderLock(copied / "run"):
        ended = inside("run", lines_run / "tiny.toml", "--resume", "--dir", "run")
    assert ended.code == 1
    assert f"run is in use by process {os.getpid()}; stop that one or choose another folder" in ended.sentence()
    with FolderLock(copied / "worker"):
        ended = inside("join", "potluck://127.0.0.1:1/a.b", "--state", "worker")
    assert ended.code == 1
    assert f"worker is in use by process {os.getpid()}" in ended.sentence()


# Broken files


def test_a_damaged_ledger_costs_what_came_after_the_last_checkpoint_only(lines_run: Path, copied: Path) -> None:
    run = copied / "run"
    (run / "ledger.db").write_bytes(b"not a database at all" * 500)
    for aside in ("ledger.db-wal", "ledger.db-shm"):
        (run / aside).unlink(missing_ok=True)
    before = fingerprint(run)
    recipe = lines_run / "tiny.toml"
    arguments = ("run", recipe, "--local", "2", "--resume", "--dir", "run", "--set", "budget.rounds=5", "--json")
    done = potluck(*arguments, cwd=copied)
    assert done.returncode == 10, done.stderr
    assert "Traceback" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert f"potluck: the database {Path('run', 'ledger.db')} is damaged" in said
    assert "the checkpoint of round 4" in said
    changed = {name for name, digest in fingerprint(run).items() if before.get(name) != digest}
    assert changed <= {"metrics.jsonl"}
    (run / "ledger.db").rename(run / "ledger.db.damaged")
    result = result_of(potluck(*arguments, cwd=copied))
    assert result["rounds"] == 5
    assert result["tokens"] == 5 * 2 * 5 * 4 * 32
    assert [e["round"] for e in events(run) if e["kind"] == "round"] == [1, 2, 3, 4, 5]


def test_cut_state_and_a_cut_checkpoint_go_back_to_the_one_before(lines_run: Path, copied: Path) -> None:
    run = copied / "run"
    checkpoints = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert checkpoints == ["round-000002", "round-000003", "round-000004"]
    for path in [*(run / "params").iterdir(), run / "checkpoints" / "round-000004" / "params.safetensors"]:
        if "initial" not in path.name and "zeros" not in path.name:
            os.truncate(path, path.stat().st_size // 2)
    arguments = ("--local", "2", "--resume", "--dir", "run", "--json")
    done = potluck("run", lines_run / "tiny.toml", *arguments, cwd=copied)
    result = result_of(done)
    assert "checkpoint round-000004 was passed over" in done.stderr
    assert "going back to the checkpoint of round 3" in done.stderr
    assert result["rounds"] == 4 and result["tokens"] == 4 * 2 * 5 * 4 * 32
    assert [e["round"] for e in events(run) if e["kind"] == "round"] == [1, 2, 3, 4, 4]
    assert sum(w["tokens"] for w in result["workers"]) == result["tokens"], "lost rounds still count"
    losses = [e["loss"] for e in events(run) if e["kind"] == "validation" and e["round"] == 4]
    assert len(losses) == 2 and result["final_val_loss"] == losses[-1], "the loss of a round that was lost"


# Too little room


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


may_mount = sys.platform == "linux" and os.geteuid() == 0


def resumes_whole(here: Path, run: Path, num_rounds: int) -> None:
    done = potluck(
        "run", "tiny.toml", "--local", "2", "--resume", "--dir", run, "--set", f"budget.rounds={num_rounds}", "--json",
        cwd=here,
    )  # fmt: skip
    result = result_of(done)
    assert result["rounds"] == num_rounds
    rounds = [e["round"] for e in events(run) if e["kind"] == "round"]
    assert rounds == list(range(1, num_rounds + 1)), "a committed round was lost"


def test_a_disk_without_room_for_the_next_checkpoint(
    inside: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "lines.jsonl")
    write_recipe(tmp_path / "tiny.toml", LINES, checkpoint=EVERY_ROUND, budget="rounds = 3")
    usage = shutil.disk_usage

    def pretended(path: Any) -> Any:
        found = usage(path)
        full = (tmp_path / "run" / "checkpoints" / "round-000001").exists()
        return found._replace(free=1234) if full else found

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", pretended)
        ended = inside("run", "tiny.toml", "--local", "2", "--dir", "run")
    assert ended.code == 5, ended.stderr
    sentence = ended.sentence()
    assert re.match(r"the disk for run\S+ has 1,234 bytes free and [\d,]+ bytes are needed; free some", sentence)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["round-000001"]
    resumes_whole(tmp_path, tmp_path / "run", 3)


if may_mount:

    def test_a_disk_that_runs_full(small_disk: Path, tmp_path: Path) -> None:
        write_lines(tmp_path / "lines.jsonl")
        write_recipe(tmp_path / "tiny.toml", LINES, checkpoint=EVERY_ROUND, budget="rounds = 3000")
        run = small_disk / "run"
        running = start("run", "tiny.toml", "--local", "2", "--dir", run, cwd=tmp_path, log=tmp_path / "log")
        try:
            wait_for(run, "checkpoint", count=2)
            with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
                while filler.write(bytes(4096)):
                    pass
            assert running.wait(60) == 5, (tmp_path / "log").read_text()[-3000:]
        finally:
            if running.poll() is None:
                running.kill()
                running.wait()
        log = (tmp_path / "log").read_text()
        assert "Traceback" not in log, log[-3000:]
        said = [line for line in log.splitlines() if line.startswith("potluck: ")]
        assert len(said) == 1 and str(run) in said[0] and "free" in said[0], said
        (small_disk / "filler").unlink()
        num_done = max(e["round"] for e in events(run) if e["kind"] == "checkpoint")
        done = potluck(
            "run", "tiny.toml", "--local", "2", "--resume", "--dir", run, "--set", f"budget.rounds={num_done + 2}",
            "--json", cwd=tmp_path,
        )  # fmt: skip
        result = result_of(done)
        assert result["rounds"] >= num_done + 2
        assert result["tokens"] == result["rounds"] * 2 * 5 * 4 * 32


def test_a_model_too_big_for_the_coordinator(inside: CommandLine, tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts", num_files=4)
    model = 'config = { model_type = "gpt2", n_layer = 64, n_embd = 16384, n_head = 64, n_positions = 32 }'
    write_recipe(tmp_path / "tiny.toml", 'shared = "texts"', model=model)
    ended = inside("run", "tiny.toml")
    assert ended.code == 5, ended.stderr
    sentence = ended.sentence()
    assert "206,177,533,952 parameters" in sentence and "needs 1,536.1 GiB" in sentence and "GiB are free" in sentence


# Models and tokenizers


def test_a_model_folder_that_is_not_there(inside: CommandLine, tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts", num_files=4)
    write_recipe(tmp_path / "tiny.toml", 'shared = "texts"', model='path = "no-such-model"')
    ended = inside("run", "tiny.toml")
    assert ended.code == 12, ended.stderr
    assert "no-such-model" in ended.sentence()


def test_a_tokenizer_larger_than_the_models_vocabulary(inside: CommandLine, tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts", num_files=4)
    model = 'config = { model_type = "gpt2", n_layer = 1, n_embd = 16, n_head = 1, n_positions = 32, vocab_size = 200 }'
    write_recipe(tmp_path / "tiny.toml", 'shared = "texts"', model=model)
    ended = inside("run", "tiny.toml")
    assert ended.code in (4, 12), ended.stderr
    sentence = ended.sentence()
    assert "200" in sentence and "vocab" in sentence
