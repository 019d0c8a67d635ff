import os
from pathlib import Path

import pytest

from potluck.cli.runs import MARK, find_run, free_run, new_run
from potluck.types.errors import PotluckError


def make_run(folder: Path, used_at: float) -> Path:
    folder.mkdir(parents=True)
    for name in (MARK, f"{MARK}-wal"):
        (folder / name).touch()
        os.utime(folder / name, (used_at, used_at))
    return folder


def test_a_run_is_found_by_path_by_name_or_as_the_last_used(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    first, second = make_run(root / "first", 1000), make_run(root / "second", 2000)
    assert find_run(str(first), root) == first
    assert find_run("first", root) == first
    assert find_run(None, root) == second
    os.utime(first / f"{MARK}-wal", (3000, 3000))  # a run that goes on writes beside its ledger
    assert find_run(None, root) == first


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PotluckError, match="there is no run under"):
        find_run(None, tmp_path)
    with pytest.raises(PotluckError, match="there is no run at other"):
        find_run("other", tmp_path)
    make_run(tmp_path / "runs" / "stdlib-gpt", 1000)
    with pytest.raises(PotluckError, match=r"there is no run at stdlib-gtp nor at .*; did you mean stdlib-gpt\?"):
        find_run("stdlib-gtp", tmp_path / "runs")


def test_a_new_run_takes_no_folder_that_holds_one(tmp_path: Path) -> None:
    assert new_run(tmp_path / "new") == tmp_path / "new"
    old = make_run(tmp_path / "old", 1)
    with pytest.raises(PotluckError, match="holds a run already; continue it with --resume"):
        new_run(old)


def test_the_first_free_folder(tmp_path: Path) -> None:
    assert free_run(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert free_run(tmp_path / "demo") == tmp_path / "demo-3"
