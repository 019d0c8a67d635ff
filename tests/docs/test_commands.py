"""Every command of README and docs is one that the command line knows; the cheap ones are run as they stand.

What takes minutes or other machines is read by the real command line, recipe and overrides included, and done for real
elsewhere: `run` in tests/e2e/test_run.py; `host`, `join`, `invite`, `remove`, `stop` and `status` of a run that goes on
in test_joining.py beside this file; `set` and moving a run in tests/e2e/test_moving.py; what `demo` adds, a kill and a
return, in tests/e2e/test_run.py; the benches in tests/bench. scripts/docs is run by tests/cli/test_reference.py,
scripts/test and scripts/check by .ci/run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from data.chat_templates import CHATML, save_chat_tokenizer
from docs.pages import (
    Command,
    anchors,
    block_lines,
    code_block,
    commands,
    inline_commands,
    links,
    pages,
    read,
    root,
    text_of,
)
from e2e.processes import potluck

from potluck.cli.app import app
from potluck.cli.benches import bench_function, list_benches, option_types, parse_options
from potluck.coordinator.recipe import load_recipe
from potluck.coordinator.shipped import shipped
from potluck.data.config import ReadOptions
from potluck.data.records import RecordForm

group: Any = typer.main.get_command(app)

CHEAP = {"recipes", "status", "generate", "test"}
"""Commands that are run as they are written, after one tiny run has made what they name."""


def is_cheap(command: Command) -> bool:
    words = command.words
    return words[0] == "potluck" and (words[1] in CHEAP or words[1:] == ("bench",))


every = commands()
cheap = [command for command in every if is_cheap(command)]


def parsed(command: Command) -> dict[str, Any]:
    """The command's arguments as the real command line reads them."""
    name, *arguments = command.words[1:]
    assert name in group.commands, f"{command}: there is no such command"
    with group.commands[name].make_context(name, list(arguments)) as context:
        return {**context.params, "bench_options": context.args}


def test_the_pages_have_the_commands_that_matter() -> None:
    words = {command.words[:2] for command in every}
    named = {
        "run",
        "host",
        "join",
        "status",
        "stop",
        "invite",
        "remove",
        "generate",
        "recipes",
        "manifest",
        "test",
        "bench",
    }
    assert {("potluck", name) for name in named} <= words
    assert {("./scripts/demo",), ("./scripts/test",)} <= words
    assert len(cheap) >= 6


@pytest.mark.parametrize("command", [c for c in every if c.words[0] == "potluck"], ids=str)
def test_the_command_line_knows_it(command: Command) -> None:
    arguments = parsed(command)
    if arguments.get("recipe") and not arguments["recipe"].startswith("runs/"):  # run and host; not a run's folder
        recipe = load_recipe(arguments["recipe"], arguments["overrides"] or [])
        for override in arguments["overrides"] or []:
            key, _, value = override.partition("=")
            found: Any = recipe.to_json()
            for part in key.split("."):
                found = found[part]
            if isinstance(found, list):
                assert found == json.loads(value), override
            else:
                assert str(found).rstrip("/") == value.rstrip("/") or float(found) == float(value), override
    if command.words[1] == "bench" and arguments["name"]:
        parse_options(arguments["name"], bench_function(arguments["name"]), arguments["bench_options"])


def test_an_unknown_flag_would_be_found() -> None:
    """The check above is worth something."""
    for line in ("potluck join LINE --no-such-flag", "potluck run", "potluck invite anna --valid-hours soon"):
        command = read("page", line)
        assert command is not None
        with pytest.raises(Exception, match=r".") as found:
            parsed(command)
        assert getattr(found.value, "exit_code", None) == 2, line  # a usage error, whose words differ by version
    command = read("page", "https_proxy=http://a:1 potluck frobnicate  # really")
    assert command is not None and command.words == ("potluck", "frobnicate")
    with pytest.raises(AssertionError, match="there is no such command"):
        parsed(command)
    assert read("page", "the potluck begins") is None


@pytest.mark.parametrize("command", [c for c in every if c.words[0] != "potluck"], ids=str)
def test_the_script_is_there(command: Command) -> None:
    script = root / command.words[0]
    assert script.is_file()
    if os.name == "posix":
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", str(script)], check=True)
    for word in command.words[1:]:
        if "/" in word:
            assert (root / word).exists()


@pytest.mark.parametrize("command", inline_commands(), ids=str)
def test_a_command_in_running_text_exists_with_its_flags(command: Command) -> None:
    name = command.words[1]
    if name == "plan":  # named as not there yet
        assert name not in group.commands
        return
    assert name in group.commands
    known = {flag for parameter in group.commands[name].params for flag in parameter.opts}
    if command.words[1] == "bench" and {*command.words[2:3]} & set(list_benches()):
        known |= {f"--{key.replace('_', '-')}" for key in option_types(bench_function(command.words[2]))}
    flags = [word for word in command.words[2:] if word.startswith("--")]
    assert set(flags) <= known


# The cheap ones, for real


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader would have it: finished runs, tiny, under the names that the pages use; averaging.py."""
    folder = tmp_path_factory.mktemp("reader")
    small = [
        'model.config={model_type="gpt2",n_layer=1,n_embd=16,n_head=2,n_positions=16}', "data.seq_len=16",
        "data.tokenizer.vocab_size=300", "data.max_bytes=60000", "budget.rounds=1", "strategy.num_inner_steps=1",
        "validation.every_rounds=0", "data.shared=texts",
    ]  # fmt: skip
    texts = folder / "texts"
    texts.mkdir()
    for number in range(8):
        (texts / f"{number}.txt").write_text("".join(f"def f{i}(x):\n    return x + {number}\n" for i in range(150)))
    done = potluck("run", "stdlib-gpt", *[w for s in small for w in ("--set", s)], cwd=folder, timeout_s=100)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("llama-small", "private-adapters"):
        shutil.copytree(folder / "runs" / "stdlib-gpt", folder / "runs" / name)
    shutil.copytree(folder / "runs" / "stdlib-gpt" / "model", folder / "merged-model")
    shutil.copytree(folder / "runs" / "stdlib-gpt" / "operator", folder / "operator" / "identity")
    (folder / "averaging.py").write_text(code_block("docs/own_method.md", "python"))
    return folder


def lists_recipes(done: subprocess.CompletedProcess[str]) -> None:
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(shipped())


def prints_a_recipe(done: subprocess.CompletedProcess[str]) -> None:
    assert re.search(r'^name = "[\w-]+"$', done.stdout, re.MULTILINE)


def writes_text(done: subprocess.CompletedProcess[str]) -> None:
    assert len(done.stdout) > 20


def says_the_run_is_over(done: subprocess.CompletedProcess[str]) -> None:
    """In its own folder it is known how; an operator elsewhere only sees that nobody answers."""
    from_here = "is finished: 1 rounds" in done.stderr and "its model is in" in done.stderr
    from_elsewhere = "so the run is not going on; `potluck host` or `potluck run --resume` continues it" in done.stderr
    assert from_elsewhere if "operator" in done.args else from_here


def says_it_in_json(done: subprocess.CompletedProcess[str]) -> None:
    known = json.loads(done.stdout)
    assert (known["running"], known["round"], known["rounds"]) == (False, 1, 1)


def passes_the_contract(done: subprocess.CompletedProcess[str]) -> None:
    assert done.stderr.count("Averaging: passed") == 4, done.stderr
    assert done.stderr.count("Averaging: not run") == 1, done.stderr  # it has no reference(problem)


def lists_benches(done: subprocess.CompletedProcess[str]) -> None:
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(list_benches())


def expectation(words: tuple[str, ...]) -> tuple[int, Callable[[subprocess.CompletedProcess[str]], None]]:
    """The exit code and what must be true of the output."""
    match words[1:]:
        case ("recipes",):
            return 0, lists_recipes
        case ("recipes", _):
            return 0, prints_a_recipe
        case ("generate", *_):
            return 0, writes_text
        case ("status", *options) if "--json" in options:
            return 0, says_it_in_json
        case ("status", *_):
            return 7, says_the_run_is_over
        case ("test", _):
            return 0, passes_the_contract
        case ("bench",):
            return 0, lists_benches
        case _:
            raise AssertionError(f"no expectation for {words}")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", sorted({c.words for c in cheap}), ids=" ".join)
def test_it_runs_as_written(words: tuple[str, ...], here: Path) -> None:
    code, holds = expectation(words)
    done = potluck(*words[1:], cwd=here, timeout_s=100)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    holds(done)


@pytest.mark.parametrize("name", sorted(group.commands))
def test_help_answers(name: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        group.main([name, "--help"], prog_name="potluck")
    assert ended.value.code == 0


# Links and the file map


@pytest.mark.parametrize(("page", "target"), links(), ids=lambda value: getattr(value, "name", value))
def test_links_lead_somewhere(page: Path, target: str) -> None:
    name, _, anchor = target.partition("#")
    found = (page.parent / name).resolve() if name else page
    assert found.exists(), f"{page.name} links to {target}"
    if anchor:
        assert anchor in anchors(found), f"{page.name} links to {target}"


def test_every_page_is_named_in_the_readme() -> None:
    readme = text_of(root / "README.md")
    assert [page.name for page in pages[1:] if f"docs/{page.name}" not in readme] == []


def test_the_file_map_has_every_folder() -> None:
    package = root / "src" / "potluck"
    folders = {p.name for p in package.iterdir() if p.is_dir() and p.name != "__pycache__"}
    mapped = set(re.findall(r"^\| `(\w+)/` \|", text_of(root / "README.md"), re.MULTILINE))
    assert mapped == folders
    for row in re.findall(r"^\| `(\w+)/` \| (.*) \|$", text_of(root / "README.md"), re.MULTILINE):
        for file in re.findall(r"`(\w+\.(?:py|proto))`", row[1]):
            assert (package / row[0] / file).is_file(), f"{row[0]}/{file} is in the file map and not there"


def test_all_exit_codes_on_the_joining_page_are_true() -> None:
    table = text_of(root / "docs" / "joining.md").partition("## When it does not work")[2]
    known = set(re.findall(r"^\| (\d+) \|", text_of(root / "docs" / "exit_codes.md"), re.MULTILINE))
    named = re.findall(r"^\| (\d+) \|", table, re.MULTILINE)
    assert len(named) >= 6 and set(named) <= known


FORMATS = ("chat", "chat", "instruct", "instruct", "preference", "preference")


def test_the_records_that_the_pages_show_can_be_used(tmp_path: Path) -> None:
    save_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    lines = [line for line in block_lines(text_of(root / "docs" / "fine_tuning.md")) if line.startswith("{")]
    for format, line in zip(FORMATS, lines, strict=True):
        form = RecordForm(ReadOptions.model_validate({"format": format, "seq_len": 256}), tmp_path / "tokenizer")
        rows, _ = form.of_row(json.loads(line))
        assert (rows >= 0).any()


def test_the_plain_template_is_the_one_that_the_page_shows(tmp_path: Path) -> None:
    tokenizer = save_chat_tokenizer(tmp_path, None)
    form = RecordForm(ReadOptions(format="instruct", seq_len=200), tmp_path)
    record = {"instruction": "Translate into French.", "input": "Good morning", "output": "Bonjour"}
    rows, _ = form.of_row(record)
    text = tokenizer.decode(np.maximum(rows, ~rows)).rstrip().replace("<|endoftext|>", "")
    assert f"```text\n{text}\n```" in text_of(root / "docs" / "fine_tuning.md")
