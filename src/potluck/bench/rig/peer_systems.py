"""The peers that Potluck is measured beside: how each is installed, started and followed.

What runs in a peer is in `peers_apps/`: a server that notes when each round's aggregation ended, clients that add
`amount`. Both note the first value of the average, so that a round that did not average is found out.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.bench.rig.processes import Marked

amount = 0.5  # what the clients in `peers_apps/` add
poll_s = 0.05
listen_s = 120.0
call_s = 300.0
round_s = 900.0
poc_ports = (8002, 8003)  # those of NVFlare's POC mode
private = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


class PeerFailed(Exception):
    """Why a peer has no figures."""


@dataclass(frozen=True)
class Workload:
    """What each system averages."""

    shapes: tuple[tuple[int, ...], ...]
    num_workers: int
    num_rounds: int

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Note:
    """The beginning (round 0) or the end of a round's aggregation, in seconds of one clock."""

    round: int
    at: float
    first: float | None


class Sandbox:
    """A scratch folder in which one peer runs, with that peer's Python first and a home of its own."""

    def __init__(self, folder: Path, python: Path, marked: Marked) -> None:
        self.folder, self.python, self.marked = folder, python, marked
        self.home = folder / "home"
        self.home.mkdir()
        self.record = folder / "record.jsonl"
        self.standing: dict[str, subprocess.Popen[bytes]] = {}
        self._submitted: list[subprocess.Popen[bytes]] = []
        self._num_calls = 0

    def apps(self, name: str) -> Path:
        """A copy of a peer's own programs."""
        target = self.folder / name
        source = Path(__file__).parent / "peers_apps" / name
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        return target

    def popen(self, role: str, log: Path, *command: object, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        path = os.pathsep.join((str(self.python.parent), os.environ.get("PATH", "")))
        environment = {key: value for key, value in os.environ.items() if key not in private} | {
            "PATH": path, "HOME": str(self.home), "USERPROFILE": str(self.home), "PYTHONUNBUFFERED": "1",
            "FLWR_HOME": str(self.home / "flwr"), "FLWR_TELEMETRY_ENABLED": "0",
            "NVFLARE_POC_WORKSPACE": str(self.home / "poc"), **self.marked.environment(role),
        }  # fmt: skip
        program, *rest = [str(part) for part in command]
        with log.open("wb") as out:
            return subprocess.Popen(
                [shutil.which(program, path=path) or program, *rest], cwd=cwd or self.folder, env=environment,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def start(self, role: str, *command: object) -> None:
        """A process that runs until the end."""
        self.standing[role] = self.popen(role, self.log(role), *command)

    def submit(self, *command: object) -> subprocess.Popen[bytes]:
        """The process that ends when the job does."""
        process = self.popen("job", self.log("job"), *command)
        self._submitted.append(process)
        return process

    def call(self, role: str, *command: object, cwd: Path | None = None) -> str:
        """What a command prints. PeerFailed where it fails or does not end."""
        self._num_calls += 1
        log = self.log(f"call-{self._num_calls}")
        words = " ".join(str(part) for part in command[:4])
        with self.popen(role, log, *command, cwd=cwd) as process:
            try:
                code = process.wait(call_s)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise PeerFailed(f"`{words} ...` did not end within {call_s:.0f} s: {last_lines(log)}") from error
        if code != 0:
            raise PeerFailed(f"`{words} ...` ended with {code}: {last_lines(log)}")
        return log.read_text(encoding="utf-8", errors="replace")

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def require_standing(self) -> None:
        """PeerFailed where a process that should run has ended."""
        for role, process in self.standing.items():
            if (code := process.poll()) is not None:
                raise PeerFailed(f"its {role} ended with {code}: {last_lines(self.log(role))}")

    def await_listening(self, port: int) -> None:
        deadline = time.monotonic() + listen_s
        while not is_taken(port):
            self.require_standing()
            if time.monotonic() > deadline:
                raise PeerFailed(f"its server does not listen on port {port} within {listen_s:.0f} s")
            time.sleep(poll_s)

    def follow(self, submitted: subprocess.Popen[bytes], num_rounds: int) -> list[Note]:
        """The notes so far, once `num_rounds` have ended. PeerFailed where the job ends before or nothing moves."""
        moved_at, num_seen = time.monotonic(), 0
        while True:
            over = submitted.poll() is not None  # before the notes are read: the last of them may just be written
            notes = read_notes(self.record)
            if len(notes) > num_rounds:
                return notes
            self.require_standing()
            if over:
                raise PeerFailed(f"its job ended after {max(0, len(notes) - 1)} rounds: {last_lines(self.log('job'))}")
            if len(notes) > num_seen:
                moved_at, num_seen = time.monotonic(), len(notes)
            if time.monotonic() - moved_at > round_s:
                raise PeerFailed(f"round {len(notes)} did not end within {round_s:.0f} s")
            time.sleep(poll_s)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Ends all that was started here, whatever happens within."""
        try:
            yield
        finally:
            with ExitStack() as stack:
                for process in (*self.standing.values(), *self._submitted):
                    stack.enter_context(process)  # waits, once all are killed
                self.marked.kill()


def read_notes(record: Path) -> list[Note]:
    """The complete lines. PeerFailed where a round added something else than `amount`."""
    text = record.read_text(encoding="utf-8") if record.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    notes = [Note(int(line["round"]), float(line["at"]), line.get("first")) for line in lines]
    for before, after in itertools.pairwise(notes):
        if before.first is not None and abs((after.first or 0.0) - before.first - amount) > 1e-3:
            raise PeerFailed(f"round {after.round} turned {before.first} into {after.first}, not {amount} more")
    return notes


def last_lines(log: Path, count: int = 3) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    said = [line.strip() for line in lines if line.strip()]
    return " / ".join(said[-count:])[-600:] or "it said nothing"


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@dataclass(frozen=True)
class PeerSystem:
    """`start` gives the process that ends when the job does."""

    name: str
    title: str
    package: str
    version: str
    start: Callable[[Sandbox, Workload], subprocess.Popen[bytes]]

    def install(self, cache: Path, told: Callable[[str], None]) -> Path:
        """The Python of this peer's environment, which is made where it is not there yet. PeerFailed."""
        home = cache.absolute() / f"{self.package}-{self.version}-py{sys.version_info[0]}.{sys.version_info[1]}"
        python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        complete = home / "complete"
        if complete.exists() and python.exists():
            return python
        told(f"{self.title} {self.version}: installing into {home}")
        shutil.rmtree(home, ignore_errors=True)
        requirements = (f"{self.package}=={self.version}", "numpy")
        for command in (
            (sys.executable, "-m", "venv", str(home)),
            (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements),
        ):
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if done.returncode != 0:
                shutil.rmtree(home, ignore_errors=True)
                said = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
                raise PeerFailed(f"it cannot be installed: {said}")
        complete.touch()
        return python


def _start_flower(sandbox: Sandbox, workload: Workload) -> subprocess.Popen[bytes]:
    port, *node_ports = free_ports(1 + workload.num_workers)
    app, address = sandbox.apps("flower"), f"127.0.0.1:{port}"
    (sandbox.home / "flwr").mkdir()
    _toml(sandbox.home / "flwr" / "config.toml", {"address": address, "insecure": True}, table="superlink.bench")
    # Without the option the run would install its own packages again, instead of those that are pinned here.
    sandbox.start(
        "server", "flower-superlink", "--insecure", "--port", port, "--disable-runtime-dependency-installation"
    )
    sandbox.await_listening(port)
    for number, node_port in enumerate(node_ports):
        node = ("flower-supernode", "--insecure", "--superlink", address, "--port", node_port)
        sandbox.start(f"client-{number}", *node)
    shapes = sorted(workload.shapes, key=math.prod)  # the smallest, whose first value is noted, comes first
    config = sandbox.folder / "run.toml"
    settings = {
        "num-rounds": workload.num_rounds, "num-clients": workload.num_workers, "record": str(sandbox.record),
        "shapes": ",".join("x".join(map(str, shape)) for shape in shapes),
    }  # fmt: skip
    _toml(config, settings)
    return sandbox.submit("flwr", "run", app, "bench", "--run-config", config, "--stream")


def _toml(path: Path, values: dict[str, Any], table: str = "") -> None:
    head = [f"[{table}]"] if table else []
    path.write_text("\n".join([*head, *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]))


def _start_nvflare(sandbox: Sandbox, workload: Workload) -> subprocess.Popen[bytes]:
    if taken := [port for port in poc_ports if is_taken(port)]:
        raise PeerFailed(f"port {taken[0]} is taken, and its POC mode takes no other; end what listens there")
    app = sandbox.apps("nvflare")
    sizes = (workload.numel, workload.num_workers, workload.num_rounds)
    sandbox.call("job", "python", "job.py", sandbox.folder, *sizes, sandbox.record, cwd=app)
    sandbox.call("job", "nvflare", "poc", "prepare", "-n", workload.num_workers)
    participants = {"server": "server"} | {f"client-{i}": f"site-{i + 1}" for i in range(workload.num_workers)}
    for role, participant in participants.items():
        sandbox.call(role, "nvflare", "poc", "start", "-p", participant, "--timeout", int(listen_s))
    said = sandbox.call("job", "nvflare", "--format", "json", "job", "submit", "-j", sandbox.folder / "add-amount")
    job_id = json.loads(said[said.index("{") :])["data"]["job_id"]
    return sandbox.submit("nvflare", "job", "wait", job_id)


flower = PeerSystem("flower", "Flower", "flwr", "1.42.0", _start_flower)
nvflare = PeerSystem("nvflare", "NVFlare", "nvflare", "2.9.0", _start_nvflare)
