"""scripts/setup before it downloads anything: which Python it takes, what it says is missing, when it has no work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

root = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with what set-up reads, and a `bin` for programs of the test."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    (folder / "bin").mkdir()
    shutil.copy(root / "scripts" / "setup", folder / "scripts" / "setup")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(root / name, folder / name)
    return folder


def program(checkout: Path, name: str, text: str) -> None:
    path = checkout / "bin" / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def setup(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PATH": f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}", **environment}
    return subprocess.run(
        [str(checkout / "scripts" / "setup"), *arguments], capture_output=True, text=True, timeout=50, env=variables
    )


def test_a_python_that_is_too_old(checkout: Path) -> None:
    program(checkout, "oldpython", '[ "$1" = --version ] && { echo "Python 3.9.2"; exit 0; }; exit 1')
    done = setup(checkout, PYTHON="oldpython")
    assert done.returncode == 1
    assert "found Python 3.9.2, and Potluck needs Python 3.11 or newer" in done.stderr
    assert done.stdout == ""


def test_no_python(checkout: Path) -> None:
    done = setup(checkout, PYTHON="nosuchpython")
    assert done.returncode == 1
    assert "found no nosuchpython, and Potluck needs Python 3.11 or newer" in done.stderr


def test_a_missing_system_package_is_named(checkout: Path) -> None:
    program(checkout, "debian", f'case "$*" in *ensurepip*) exit 1;; esac; exec "{sys.executable}" "$@"')
    done = setup(checkout, PYTHON="debian")
    assert done.returncode == 1
    assert "the system package python3-venv is missing" in done.stderr
    assert "sudo apt install python3-venv" in done.stderr
    assert f"python3.{sys.version_info.minor}-venv" in done.stderr


def test_unknown_arguments_and_builds(checkout: Path) -> None:
    assert "unknown argument '--devv'; there is only --dev" in setup(checkout, "--devv").stderr
    done = setup(checkout, PYTHON=sys.executable, POTLUCK_TORCH="rocm")
    assert done.returncode == 1
    assert "POTLUCK_TORCH is 'rocm'; it can be cpu or cuda" in done.stderr


def stamp(checkout: Path, extra: str, place: Path | None = None) -> None:
    """As after a set-up that went through."""
    content = subprocess.run(
        "cat pyproject.toml constraints.txt scripts/setup | cksum | tr ' ' '-'", shell=True, cwd=checkout,
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    (checkout / ".venv").mkdir(exist_ok=True)
    (checkout / ".venv" / "potluck-setup").write_text(f"{extra}\n{content}-auto\n{place or checkout}\n")


@pytest.mark.parametrize(("had", "arguments"), [("user", []), ("dev", []), ("dev", ["--dev"])])
def test_nothing_to_do_is_quick_and_silent(checkout: Path, had: str, arguments: list[str]) -> None:
    stamp(checkout, had)
    done = setup(checkout, *arguments, PYTHON="nosuchpython")  # not even looked for
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_change_begins_again(checkout: Path) -> None:
    stamp(checkout, "user")
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# another\n")
    done = setup(checkout, PYTHON="nosuchpython")
    assert "needs Python 3.11" in done.stderr
    stamp(checkout, "user")
    assert "needs Python 3.11" in setup(checkout, "--dev", PYTHON="nosuchpython").stderr


def test_a_moved_checkout_begins_again(checkout: Path) -> None:
    stamp(checkout, "dev", place=checkout.parent / "before")
    done = setup(checkout, PYTHON="nosuchpython")
    assert "this checkout was moved, so .venv is made anew" in done.stderr
    assert not (checkout / ".venv").exists()


def test_everything_that_is_installed_is_pinned() -> None:
    import tomllib

    pinned = {}
    for line in (root / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pinned[name.lower().replace("_", "-")] = version
    assert pinned["torch"] == "2.13.0"
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"], "setuptools"]:
        name = requirement.split(">")[0].split("=")[0].split("<")[0]
        assert name in pinned, f"{name} has no version in constraints.txt"
