"""A method of your own in one file: the one of the documentation, tested, run, and refused where it is not allowed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from e2e.inside import CommandLine
from e2e.processes import events, free_port_pair, potluck, result_of, start, wait_for, write_corpus, write_recipe

from potluck.storage.digest import digest_file

pytestmark = pytest.mark.timeout(180)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own_method.md"
STRATEGY = 'name = "averaging.py:Averaging"\nnum_steps = 5\ninner = { lr = 5e-3, batch_size = 4, warmup = 0.0 }'


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the page's file and a recipe that names it."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "averaging.py").write_text(code, encoding="utf-8")
    write_corpus(tmp_path / "texts", num_files=6)
    write_recipe(tmp_path / "tiny.toml", 'shared = "texts"', strategy=STRATEGY)
    return tmp_path


def test_the_pages_file_keeps_the_contract(here: Path) -> None:
    assert "potluck test averaging.py" in PAGE.read_text(encoding="utf-8")
    done = potluck("test", "averaging.py", cwd=here)
    assert done.returncode == 0, done.stderr
    verdicts = [line for line in done.stderr.splitlines() if line.startswith("Averaging: ")]
    assert len(verdicts) == 5
    assert sum("passed" in line for line in verdicts) == 4, done.stderr
    assert sum("not run" in line and "reference" in line for line in verdicts) == 1, done.stderr


def test_it_trains_with_two_local_workers(here: Path) -> None:
    (here / "elsewhere").mkdir()
    result = result_of(potluck("run", here / "tiny.toml", "--local", "2", "--json", cwd=here / "elsewhere"))
    assert result["strategy"].endswith("averaging.py:Averaging")
    assert result["rounds"] == 4 and result["tokens"] == 4 * 2 * 5 * 4 * 32
    assert result["final_val_loss"] < result["initial_val_loss"] - 0.3


def test_a_worker_that_does_not_allow_it_runs_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = CommandLine(here, capsys, monkeypatch)
    host = start(
        "host", "tiny.toml", "--dir", "run", "--address", f"127.0.0.1:{free_port_pair()}", cwd=here, log=here / "log"
    )
    try:
        line = wait_for(here / "run", "listening")[0]["join_line"]
        digest = digest_file(here / "averaging.py")
        plain = inside("join", line, "--state", "w", "--name", "plain")
        assert plain.code == 8, plain.stderr
        assert f"the strategy file averaging.py:Averaging ({digest}), which plain does not allow" in plain.sentence()
        assert "--allow-strategy" in plain.sentence()
        (here / "mine").mkdir()
        changed = here / "mine" / "averaging.py"
        changed.write_text((here / "averaging.py").read_text().replace("a=-1.0", "a=-1.5"))
        other = inside("join", line, "--state", "v", "--name", "other", "--allow-strategy", changed)
        assert other.code == 8, other.stderr
        assert "which other does not allow" in other.sentence()
        status = inside("status", "run", "--json")
        assert json.loads(status.stdout)["workers"] == []
        assert not [e for e in events(here / "run") if e["kind"] == "joined"]
    finally:
        host.kill()
        host.wait()
