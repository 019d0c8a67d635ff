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

from potluck.bench.rig.site import events, free_ports

__all__ = [
    "command",
    "environment",
    "events",
    "free_ports",
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
    parts = {
        "model": 'config = { model_type = "gpt2", n_layer = 2, n_embd = 32, n_head = 2, n_positions = 32 }',
        "data": f'{data}\ntokenizer = {{ train = "bpe", vocab_size = 300 }}\nseq_len = 32\nvalidation = 0.1',
        "budget": "rounds = 4",
        "strategy": 'name = "diloco"\nnum_inner_steps = 5\nouter_momentum = 0.6\n'
        "inner = { lr = 5e-3, batch_size = 4, warmup = 0.0 }",
        "codec": 'up = "int8"\ndown = "bf16"',
        "fleet": "min_workers = 2\nheartbeat_s = 1.5\nreconnect_s = 4.0",
        "validation": "every_rounds = 2",
        **sections,
    }
    body = "\n\n".join(f"[{name}]\n{text}" for name, text in parts.items() if text)
    path.write_text(f'name = "tiny"\nseed = 3\n\n{body}\n')
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "potluck", *map(str, arguments)]


def environment(cwd: Path) -> dict[str, str]:
    return {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "XDG_CACHE_HOME": str(cwd / "cache")}


def potluck(*arguments: str | Path, cwd: Path, timeout_s: float = 110.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=cwd, capture_output=True, text=True, timeout=timeout_s, env=environment(cwd),
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def start(*arguments: str | Path, cwd: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            command(*arguments), cwd=cwd, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=environment(cwd)
        )


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
