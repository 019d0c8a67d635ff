"""Processes that start at once: forked from one that has imported everything and done nothing yet.

Run as a program it is that one: a line of JSON on standard input forks `potluck ARGUMENTS` or says how a child ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IMPORTS = (
    "potluck.cli.app", "potluck.cli.running", "potluck.cli.joining", "potluck.worker.join",
    "transformers.models.gpt2.modeling_gpt2", "potluck.strategies.diloco", "potluck.strategies.evaluation",
)  # fmt: skip


class Child:
    """A forked process; the part of `subprocess.Popen` that tests use."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 60.0)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 60.0)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """`kill -9`, and wait until it is gone."""
        self.send_signal(signal.SIGKILL)
        self.wait()


class Nursery:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "potluck.bench.rig.nursery"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0", "OMP_WAIT_POLICY": "PASSIVE"},
        )  # fmt: skip
        self._children: list[Child] = []
        self.speeds = b""  # of this machine, once a worker has measured them

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, arguments: list[str], cwd: Path, log: Path, environment: dict[str, str]) -> Child:
        """`potluck ARGUMENTS`. Python in the variable BEFORE is run in it first."""
        pid = self.ask(argv=["potluck", *arguments], cwd=str(cwd), log=str(log), env={"NO_COLOR": "1", **environment})
        self._children.append(Child(self, pid))
        return self._children[-1]

    def close(self) -> None:
        for child in self._children:
            child.kill()
        self._process.communicate(timeout=10)


@contextmanager
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    try:
        yield made
    finally:
        made.close()


def _serve() -> None:
    for name in IMPORTS:
        __import__(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                answers.close()
                _become(request)
        print(json.dumps(answer), file=answers, flush=True)


def _become(request: dict[str, Any]) -> None:
    """Never returns."""
    code: Any = 1
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        sys.stdin = os.fdopen(0)
        os.chdir(request["cwd"])
        os.environ.update(request["env"])
        sys.argv = request["argv"]
        exec(request["env"].get("BEFORE", ""), {})
        runpy.run_module("potluck", run_name="__main__", alter_sys=True)  # as `python -m potluck` does
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
