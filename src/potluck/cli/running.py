"""`run` and `host`: a coordinator in this process, its view, and the workers this machine gives."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from potluck.cli.local import LocalWorkers, patience_s
from potluck.cli.quiet import quiet_libraries
from potluck.cli.signals import graceful
from potluck.cli.view import View
from potluck.coordinator.events import Event, OnEvent
from potluck.coordinator.host import serve
from potluck.coordinator.options import HostOptions, Listening, RunResult, default_port
from potluck.coordinator.recipe import Recipe
from potluck.storage.files import cache_folder
from potluck.types.errors import RunStopped


class Running:
    """One run from start to end. `heard` is called with each event after the view has shown it."""

    def __init__(
        self, options: HostOptions, view: View, *, num_local: int = 0, num_threads: int = 0,
        heard: OnEvent = lambda _: None,
    ) -> None:  # fmt: skip
        self.options, self.view, self.num_local, self._heard = options, view, num_local, heard
        self.listening: Listening | None = None
        self._stop_reason, self._over = "", False
        self._failure: BaseException | None = None
        self._serving: asyncio.Task[RunResult] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        file = options.recipe.strategy.file
        self.workers = LocalWorkers(
            options.run_dir,
            num_threads=num_threads or max(1, (os.cpu_count() or 1) // max(1, num_local)),
            arguments=["--allow-strategy", str(file)] if file else [],
            ended=self._worker_ended,
        )

    @property
    def names(self) -> list[str]:
        """Of the local workers."""
        return [f"worker-{number}" for number in range(1, self.num_local + 1)]

    async def run(self) -> RunResult:
        """Until the budget is spent or the run is stopped. RunStopped if every local worker ended by itself."""
        with graceful(lambda name: self.stop(f"stopped by {name}"), at_once=self.workers.kill_all):
            try:
                async with self.view.showing():
                    self._serving = asyncio.create_task(
                        serve(self.options, on_event=self._event, on_listening=self._start)
                    )
                    await asyncio.wait([self._serving])
            finally:
                self.view.watch(None)
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                error = _error_of(self._serving) if self._serving else None
                # After an error of this machine nobody has told them to go.
                await self.workers.close(0.0 if error and not isinstance(error, RunStopped) else patience_s)
        assert self._serving is not None
        if error is not None:
            raise error from self._failure  # what was wrong here outranks what it did to the workers
        if self._failure is not None:
            raise self._failure
        if self._serving.cancelled():
            raise RunStopped(f"the run was {self._stop_reason} before it began; nothing is lost, start it again")
        return self._serving.result()

    def stop(self, reason: str) -> None:
        """Ask the run to end in good order: checkpoint written, workers told."""
        if self._stop_reason:
            return
        self._stop_reason = reason
        self.view.say(f"{reason}: ending the run in good order; Ctrl-C once more ends it at once", "yellow")
        if self.listening is not None:
            self.listening.stop(reason)
        elif self._serving is not None:
            self._serving.cancel()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it beside the run and end it with the run. What it raises stops the run and is raised at its end."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self.stop(f"stopped because of {type(error).__name__}: {error}")

    def _start(self, listening: Listening) -> None:
        self.listening = listening
        self.view.watch(listening.status)
        if self.num_local:
            self.begin(self._start_workers(listening.join_line))
        else:
            self.view.say("On every machine that joins, install Potluck and paste this line:")
            self.view.say(f"\n    potluck join {listening.join_line}\n", "bold")

    def _event(self, event: Event) -> None:
        self._over = self._over or event.kind == "model"
        if not ((self._over or self._stop_reason) and event.kind == "left"):  # that all go home now is no news
            self.view.event(event)
        if event.kind == "waiting" and self.num_local and self.listening is not None:
            self._stop_if_nobody_is_left(self.listening.status()["workers"])
        self._heard(event)

    def _stop_if_nobody_is_left(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Where all workers are ours and get no more work, nobody else will come."""
        running = self.workers.running
        reasons = [worker["reason"] for worker in workers if worker["id"] in running]
        if reasons and len(reasons) == len(running) and all(reasons) and not self._stop_reason:
            reason = f"every worker on this machine is quarantined, one of them for {reasons[0]}"
            self._failure = RunStopped(f"{reason}; --resume continues the run with a clean record")
            self.stop(reason)

    async def _start_workers(self, join_line: str) -> None:
        await self.workers.use_link(join_line)
        for index, name in enumerate(self.names):
            await self.workers.start(name, device_arguments(index))

    def _worker_ended(self, name: str, code: int, last_line: str) -> None:
        if code == 0:
            return  # the coordinator told it to go
        how = how_it_ended(code, last_line)
        self.view.say(f"{name} {how} (its log is {self.workers.log_path(name)})", "red")
        if not self.workers.running and not self._stop_reason:
            reason = f"every worker on this machine has ended; the last one {how}"
            self._failure = RunStopped(reason)
            self.stop(reason)


def how_it_ended(code: int, last_line: str) -> str:
    """Of a process. What it said last is the reason for an exit code; one that a signal ended had no time for it."""
    if code < 0:
        return f"was ended by signal {-code}"
    return f"ended with exit code {code}{': ' * bool(last_line)}{last_line}"


def _error_of(task: asyncio.Task[RunResult]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def run_recipe(recipe: Recipe, run_dir: Path, *, num_local: int = 0, address: str = "", port: int = 0) -> RunResult:
    """Host a run to its end and say how it went. Local workers need no address."""
    quiet_libraries()
    again = command_again(run_dir, num_local=num_local, address=address, port=port)
    if not num_local:
        address = address or f"{own_host()}:{port or default_port}"
    options = HostOptions(recipe=recipe, run_dir=run_dir, cache_dir=cache_folder(), address=address, port=port)
    view = View(Console(stderr=True, highlight=False))
    result = asyncio.run(Running(options, view, num_local=num_local).run())
    if result.stopped:
        view.say(f"{result.stopped} after {result.rounds} rounds; `{again}` continues it")
    view.say(f"the model is in {result.model_dir}; let it write: potluck generate {result.model_dir}")
    return result


def command_again(run_dir: Path, *, num_local: int, address: str, port: int) -> str:
    """The command that goes on with a run, also for the workers that found it under the address that was given."""
    if num_local:
        return shlex.join(["potluck", "run", str(run_dir), "--local", str(num_local), "--resume"])
    where = [*(["--address", address] if address else []), *(["--port", str(port)] if port else [])]
    return shlex.join(["potluck", "host", str(run_dir), *where])


def own_host() -> str:
    """The address of this machine on its way out. Nothing is sent: connecting a datagram socket only picks a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation, never in use
        except OSError:
            return socket.gethostname()  # no route out: only machines that know our name can join
        return str(probe.getsockname()[0])


def device_arguments(index: int) -> Sequence[str]:
    """Which GPU the local worker of that number takes, where there are any; else the choice is its own."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["--device", f"cuda:{index % num_gpus}"] if num_gpus else []
