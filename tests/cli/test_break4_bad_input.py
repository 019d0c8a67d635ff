"""Input that a command must refuse with one sentence: found from outside."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from potluck.cli.app import app
from potluck.simulator.fleet_files import load_fleet
from potluck.storage.files import is_same_boot
from potluck.types.errors import PotluckError


@pytest.mark.parametrize("line", ["gflops = 0", "gflops = 10\nup_mbit_s = 0", "gflops = 10\nduty = 0"])
def test_a_device_that_could_never_finish_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(f'[[devices]]\nname = "a"\n{line}\n', encoding="utf-8")
    with pytest.raises(PotluckError):
        load_fleet(str(path))


def test_a_seed_that_no_generator_takes_is_refused() -> None:
    done = CliRunner().invoke(app, ["simulate", "--fuzz", "1", "--seed", str(1 << 64)])
    assert not isinstance(done.exception, ValueError | RuntimeError), done.exception


def test_a_picture_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    small = ["stdlib-gpt", "--fleet", "home", "--set", "budget.tokens=50_000"]
    done = CliRunner().invoke(app, ["simulate", *small, "--picture", str(tmp_path)])
    assert not isinstance(done.exception, OSError), done.exception


def test_a_spoilt_boot_mark_is_another_start(tmp_path: Path) -> None:
    (tmp_path / "boot").write_bytes(b"\xf8\xfe\x00")
    assert not is_same_boot(tmp_path)
