"""Real processes for the end-to-end tests: a tiny recipe, and the command line as a user runs it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from potluck.bench.rig.real_run import events, free_port_pair, start_command, tiny_recipe

__all__ = [
    "events",
    "free_port_pair",
    "potluck",
    "result_of",
    "start",
    "wait_for",
    "words",
    "write_corpus",
    "write_recipe",
]

words = [f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe", "ra") for b in ("ta", "so", "vi", "ru", "de", "li")]


def write_corpus(folder: Path, *, num_files: int = 12, seed: int = 1) -> Path:
    """Text with a simple grammar: each word is followed by one of three."""
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        index, text = chance.randrange(36), []
        for _ in range(1500):
            index = (index * 5 + chance.choice((1, 2, 3))) % 36
            text.append(words[index])
        (folder / f"text-{number}.txt").write_text(" ".join(text))
    return folder


def write_recipe(path: Path, data: str, /, **sections: str) -> Path:
    """A run of seconds. `sections` replace whole sections by name."""
    path.write_text(tiny_recipe("tiny", data, **sections))
    return path


def _environment(cwd: Path) -> dict[str, str]:
    return {"COLUMNS": "200", "NO_COLOR": "1", "XDG_CACHE_HOME": str(cwd / "cache")}


def potluck(*arguments: str | Path, cwd: Path, timeout_s: float = 110.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "potluck", *map(str, arguments)], cwd=cwd, capture_output=True, text=True,
        timeout=timeout_s, env={**os.environ, **_environment(cwd)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def start(*arguments: str | Path, cwd: Path, log: Path) -> subprocess.Popen[bytes]:
    return start_command([*map(str, arguments)], cwd, log, _environment(cwd))


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one JSON object on standard output."""
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0])


def wait_for(run_dir: Path, kind: str, *, count: int = 1, timeout_s: float = 90.0) -> list[dict[str, Any]]:
    """The events of a kind once there are `count` of them."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = [e for e in events(run_dir) if e["kind"] == kind]
        if len(found) >= count:
            return found
        time.sleep(0.1)
    raise AssertionError(f"no {count} events {kind} in {timeout_s} s; there are {[e['kind'] for e in events(run_dir)]}")
