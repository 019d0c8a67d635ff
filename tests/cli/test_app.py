"""The commands as processes: help, lists, and mistakes that end in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from potluck.cli.app import app
from potluck.coordinator.shipped import shipped

COMMANDS = {
    "demo": "Train a small model on this machine with four workers and show what happens.",
    "run": "Run a recipe with N workers on this machine.",
    "host": "Start a run that other machines join; prints the line to paste there.",
    "join": "Give this machine to a run, on your terms.",
    "pause": "Let this machine's worker stop after its present step, until `potluck resume`.",
    "resume": "Let this machine's worker go on after `potluck pause`.",
    "profile": "Measure this machine as a worker does when it joins.",
    "receipts": "On a worker: everything that left this machine.",
    "digest": "Print the digest by which a policy allows a strategy file or a base model.",
    "invite": "Print a join line for one member.",
    "remove": "Revoke a member",
    "status": "Who is here, what they do, what the run waits for, how it goes.",
    "stop": "Checkpoint and end the run; restarting `host` or `run --resume` continues it.",
    "limit": "Limit the transfers of a running run, in Mbit/s; 0 for no limit. Without options it prints the limits.",
    "set": "Change the recipe of a run that goes on or is stopped, written down for restarts.",
    "generate": "Let a trained model write.",
    "export": "Write the whole model of a run that trained adapters; on a worker, the adapters that stay there.",
    "recipes": "List the shipped recipes, or print one to start from.",
    "manifest": "List the files of a folder for `data.listed`: names, digests, sizes and tokens.",
    "simulate": "Play a run on a virtual fleet, with faults if asked.",
    "bench": "Measure Potluck itself, beside its peers.",
    "test": "Run the contract tests on a strategy of your own.",
}


def potluck(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "potluck", *arguments], cwd=cwd, capture_output=True, text=True, timeout=50,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
    )  # fmt: skip


def test_the_commands_and_their_help() -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"])
    assert result.exit_code == 0
    for name, text in COMMANDS.items():
        assert name in result.output
        assert text in result.output
    assert set(COMMANDS) == {command.name or command.callback.__name__ for command in app.registered_commands}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_has_more_than_ten_flags(name: str) -> None:
    group = typer.main.get_command(app)
    command = group.commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    flags = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    assert len(flags) <= (12 if name == "join" else 10)  # an owner's terms are one flag each
    assert all(flag.help for flag in flags)


@pytest.mark.parametrize("arguments", [["--help"], ["recipes"], ["join", "--help"], ["recipes", "stdlib-gpt"]])
def test_what_needs_no_torch_does_not_load_it(arguments: list[str]) -> None:
    code = "import sys; from potluck.cli.app import app; app(sys.argv[1:], standalone_mode=False); " \
        "assert not {'torch', 'transformers', 'grpc', 'datasets'} & set(sys.modules)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


def test_recipes_are_listed_and_printed() -> None:
    listed = potluck("recipes").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(shipped())
    printed = potluck("recipes", "stdlib-gpt").stdout
    assert tomllib.loads(printed)["name"] == "stdlib-gpt"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["recipes", "stdlib"], 3, "potluck: there is no shipped recipe stdlib; did you mean stdlib-"),
        (["run", "missing.toml"], 3, "potluck: there is no recipe file missing.toml"),
        (["run", "stdlib-gpt", "--set", "seq_len=3"], 3, "seq_len is not a key; did you mean data.seq_len?"),
        (["status"], 1, "potluck: there is no run under"),
        (["stop", "nowhere"], 1, "potluck: there is no run at nowhere"),
        (["join", "nonsense"], 1, "is neither a join line"),
        (["join", "potluck://x:1/y", "--max-memory", "lots"], 1, "'lots' is not a size"),
        (["join", "potluck://x:1/y", "--hours", "late"], 1, "'late' is not a span of hours"),
        (["simulate", "stdlib-gpt", "--fuzz", "1"], 1, "--fuzz draws its runs from seeds; leave out RECIPE"),
        (["generate", "nowhere"], 12, "nowhere holds no config.json"),
        (["profile", "--device", "tpu"], 5, "is not a device"),
        (["bench", "nothing"], 1, "there is no bench nothing"),
        (["bench", "round", "--parms", "3", "--json"], 1, "bench round has no option --parms; did you mean --params?"),
        (["test", "my_method.py"], 3, "my_method.py does not exist"),
        (["frobnicate"], 2, "No such command"),
        (["run"], 2, "Missing argument"),
    ],
)
def test_mistakes_end_in_one_sentence_and_a_code(
    tmp_path: Path, arguments: list[str], code: int, sentence: str
) -> None:
    if arguments[0] == "join":
        arguments = [*arguments, "--state", str(tmp_path / "state")]
    done = potluck(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert done.stdout == ""
    if code != 2:
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_a_paused_worker_is_resumed_by_the_command_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine" / "identity").mkdir(parents=True)
    told = potluck("pause", "--state", "mine", cwd=tmp_path).stderr
    assert told == "the worker of mine is paused; `potluck resume --state mine` lets it go on\n"
    assert potluck("resume", "--state", "mine", cwd=tmp_path).stderr.startswith("the worker of mine may go on; ")


def test_run_does_not_touch_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "ledger.db").write_bytes(b"precious")
    done = potluck("run", "stdlib-gpt", "--dir", "old", cwd=tmp_path)
    assert done.returncode == 1
    assert "old holds a run already; continue it with --resume" in done.stderr
    assert (tmp_path / "old" / "ledger.db").read_bytes() == b"precious"
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "ledger.db"]


def test_benches_are_listed_with_what_they_measure() -> None:
    lines = dict(line.split("  ", 1) for line in potluck("bench").stdout.splitlines())
    assert {"idle", "convergence"} <= set(lines)
    assert all(len(about) > 10 for about in lines.values())
