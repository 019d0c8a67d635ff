"""A coordinator and workers as real processes, each worker behind a wire of its own that can be made bad."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import potluck
from potluck.bench.rig import paced
from potluck.bench.rig.wire import Way, Wire, WireLoop

look_s = 0.03
told_s = 0.1
"""So long after it was written down a lease is in its worker's hands, on loopback."""
no_environment: Mapping[str, str] = {}  # beside this process' own


class Process(Protocol):
    """The part of `subprocess.Popen` that is used here."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


Start = Callable[[list[str], Path, Path, dict[str, str]], Process]
"""`start(arguments, cwd, log, environment)`: the `potluck` command as a process, its output at the end of `log`."""


def start_command(arguments: list[str], cwd: Path, log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "potluck", *arguments], cwd=cwd, stdout=file, stderr=file,
            stdin=subprocess.DEVNULL, env={**os.environ, **environment},
        )  # fmt: skip


def free_port_pair() -> int:
    """A port that is free, as is the next: what `host --address` needs."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            with contextlib.suppress(OSError, OverflowError):  # the last port has no next
                second.bind(("127.0.0.1", first.getsockname()[1] + 1))
                return int(first.getsockname()[1])


def events(run_dir: Path) -> list[dict[str, Any]]:
    """What the run has told so far."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


class RealRun:
    """The run of `recipe.toml` in `folder`. Workers dial an address of loopback each, whose ports are their wire's.

    Such addresses are Linux's only. Each worker is a machine of its own: it shares no cache with the others.
    """

    def __init__(self, folder: Path, loop: WireLoop, *, start: Start = start_command, speeds: bytes = b"") -> None:
        self.folder, self.run = folder, folder / "run"
        self.wires: dict[str, Wire] = {}
        self.workers: dict[str, Process] = {}
        self.host: Process  # once it was started
        self._processes: list[Process] = []
        self.speeds = speeds  # of this machine, once a worker has measured them
        self._loop, self._start = loop, start
        self._port, self._seen_port = free_port_pair(), free_port_pair()

    def start_host(self, *arguments: str, **environment: str) -> float:
        """Start the coordinator, or start it again; when it listens, in seconds since 1970."""
        num_before = len(self.events("listening"))
        command = [
            "host", "recipe.toml", "--dir", str(self.run), "--address", f"127.0.0.1:{self._seen_port}",
            "--port", str(self._port), *arguments,
        ]  # fmt: skip
        self.host = self._begin(command, "host", self.folder / "log", **environment)
        self.wait(lambda: len(self.events("listening")) > num_before, "coordinator that listens")
        return float(self.events("listening")[-1]["time"])

    def join(
        self, name: str, *, up: Way | None = None, down: Way | None = None,
        environment: Mapping[str, str] = no_environment, data: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        """Start a worker, or start it again with what it left. Its wire is made the first time. `data` is its own."""
        line, state = self.folder / f"{name}.line", self.folder / name
        if name not in self.wires:
            host = f"127.0.0.{2 + len(self.wires)}"
            wire = self.wires[name] = Wire(up=up, down=down)
            for more in (0, 1):
                self._loop.run(wire.open(self._port + more, host=host, port=self._seen_port + more))
            line.write_text(str(self.events("listening")[-1]["join_line"]).replace("127.0.0.1", host))
        if self.speeds and not (state / "speeds.json").exists():
            state.mkdir(exist_ok=True)
            (state / "speeds.json").write_bytes(self.speeds)
        command = ["join", str(line), "--state", str(state), "--name", name, "--threads", "1"]
        command += ["--allow-strategy", paced.__file__, *(part for path in data for part in ("--data", str(path)))]
        self.workers[name] = self._begin(command, name, self.folder / f"{name}.log", **environment)

    def join_all(
        self, *names: str, up: Callable[[], Way] = Way, down: Callable[[], Way] = Way,
        environment: Mapping[str, str] = no_environment,
    ) -> None:  # fmt: skip
        """The first one alone until it has measured this machine, then the others."""
        for number, name in enumerate(names):
            self.join(name, up=up(), down=down(), environment=environment)
            if not self.speeds:
                self.wait(lambda n=number: len(self.events("joined")) > n, f"joining of {name}")
                self.speeds = (self.folder / name / "speeds.json").read_bytes()

    def reset(self, name: str, *, callers: bool = True, targets: bool = True) -> None:
        """Reset the worker's connections."""
        self._loop.call(lambda: self.wires[name].reset(callers=callers, targets=targets))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for wire in self.wires.values():
            self._loop.run(wire.close())

    def _begin(self, command: list[str], name: str, log: Path, **environment: str) -> Process:
        own = {"XDG_CACHE_HOME": str(self.folder / "cache" / name)}
        process = self._start(command, self.folder, log, own | environment)
        self._processes.append(process)
        return process

    # What can be seen

    def events(self, kind: str, *, since: float = 0.0) -> list[dict[str, Any]]:
        return [e for e in events(self.run) if e["kind"] == kind and e["time"] > since]

    def rounds(self) -> list[dict[str, Any]]:
        return self.events("round")

    def log(self, name: str = "") -> str:
        """What a worker has printed, or the coordinator."""
        return (self.folder / (f"{name}.log" if name else "log")).read_text()

    def ledger(self, statement: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{self.run / 'ledger.db'}?mode=ro", uri=True)) as ledger:
            return ledger.execute(statement).fetchall()

    def leased(self, name: str) -> list[str]:
        """The keys of a worker's open leases."""
        return [k for (k,) in self.ledger(f"SELECT key FROM leases WHERE status = 'open' AND worker = '{name}'")]

    def accepted(self) -> list[tuple[int, str, str]]:
        """Round, worker and update of every reply that was ever committed; rounds count from 0."""
        commits = self.ledger("SELECT round, accepted FROM commits ORDER BY round")
        return [(round, reply[1], reply[2]) for round, accepted in commits for reply in json.loads(accepted)]

    # Waiting

    def wait(self, until: Callable[[], object], what: str, *, timeout_s: float = 90.0, every_s: float = look_s) -> None:
        """TimeoutError with what the processes said."""
        deadline = time.monotonic() + timeout_s
        while not until():
            if time.monotonic() > deadline:
                said = "\n".join(f"{name or 'host'}: {self.log(name)[-800:]}" for name in ("", *self.workers))
                last = "\n".join(str(event) for event in events(self.run)[-12:])
                raise TimeoutError(f"no {what} in {timeout_s:.0f} s\n{last}\n{said}")
            time.sleep(every_s)

    def wait_round(self, *names: str, more: int = 1, timeout_s: float = 90.0) -> dict[str, Any]:
        """As many more rounds of exactly these workers; the last of them."""
        seen = len(self.rounds())

        def those() -> list[dict[str, Any]]:
            return [e for e in self.rounds()[seen:] if e["workers"] == sorted(names)]

        self.wait(lambda: len(those()) >= more, f"{more} rounds of {', '.join(names)}", timeout_s=timeout_s)
        return those()[more - 1]

    def wait_at_work(self, name: str) -> None:
        """Until it has just been given work, and knows of it."""
        self.wait(lambda: not self.leased(name), f"end of what {name} does")
        self.wait(lambda: self.leased(name), f"lease of {name}")
        time.sleep(told_s)


@contextmanager
def real_run(folder: Path, loop: WireLoop, *, start: Start = start_command, speeds: bytes = b"") -> Iterator[RealRun]:
    """Everything is ended at the end."""
    made = RealRun(folder, loop, start=start, speeds=speeds)
    try:
        yield made
    finally:
        made.close()


def tiny_recipe(name: str, source: str = 'shared = "texts"', /, **sections: str) -> str:
    """The recipe of a run of seconds. `sections` replace whole sections by name; an empty one leaves it out."""
    parts = {
        "model": 'config = { model_type = "gpt2", n_layer = 2, n_embd = 32, n_head = 2, n_positions = 32 }',
        "data": f'{source}\ntokenizer = {{ train = "bpe", vocab_size = 300 }}\nseq_len = 32\nvalidation = 0.1',
        "budget": "rounds = 4",
        "strategy": 'name = "diloco"\nnum_inner_steps = 5\nouter_momentum = 0.6\n'
        "inner = { lr = 5e-3, batch_size = 4, warmup = 0.0 }",
        "codec": 'up = "int8"\ndown = "bf16"',
        "fleet": "min_workers = 2\nheartbeat_s = 1.5\nreconnect_s = 4.0",
        "validation": "every_rounds = 2",
        **sections,
    }
    body = "\n\n".join(f"[{section}]\n{text}" for section, text in parts.items() if text)
    return f'name = "{name}"\nseed = 3\n\n{body}\n'


def write_corpus(folder: Path) -> None:
    """Text to train on that is here wherever Potluck is: a part of its own source."""
    folder.mkdir()
    for path in sorted((Path(potluck.__file__).parent / "strategies").glob("*.py")):
        shutil.copyfile(path, folder / f"{path.stem}.txt")
