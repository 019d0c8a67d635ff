"""What waiting costs: a worker that waits for a run to begin, and a coordinator with 50 and with 1,000 of them.

The coordinator and one full worker are real processes; the others are protocol clients (the worker's connection, its
Welcome, its heartbeats, without a model), many in one process, so that a small machine can hold them.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from potluck.bench.rig.real_run import events
from potluck.clock import ThreadExecutor
from potluck.protocol import pb, version
from potluck.strategies.run import RunSpec
from potluck.transport.grpc.client import GrpcConnection
from potluck.transport.security.enrol import obtain
from potluck.transport.security.link import JoinLink
from potluck.types.errors import ConnectionLost
from potluck.types.profile import DeviceProfile

num_clients = 50
num_many, num_processes = 1000, 4
num_joining = 8
"""Clients of one process that join at once."""
settle_s = 10.0
measure_s = 30.0
patience_s = 300.0


def bench_idle(told: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Shares of one core, over 30 s; memory in MB."""
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as name:
        folder = Path(name)
        # The run never begins: it waits for more workers than there are.
        with _running(
            "host", "stdlib-gpt", "--set", "fleet.min_workers=100000", "--dir", str(folder / "run"), folder=folder
        ) as coordinator:
            line = _join_line(folder / "run", coordinator)
            told("coordinator is listening")
            alone = _measure(coordinator)
            with (
                _running("join", line, "--state", str(folder / "worker"), folder=folder) as worker,
                _clients(line, folder / "clients", num_clients) as clients,
            ):
                _wait_joined(folder / "run", num_clients + 1)
                told(f"{num_clients} clients and one worker have joined")
                time.sleep(settle_s)
                shares = _measure(coordinator, worker, clients)
                memory = _memory_mb(coordinator)
        many = _many(folder, told)
    return {
        "connected_workers": num_clients + 1,
        "coordinator_alone_core_percent": alone[0],
        "coordinator_core_percent": shares[0],
        "worker_core_percent": shares[1],
        "client_core_percent_each": shares[2] / num_clients,
        "coordinator_memory_mb": memory,
        "measured_s": measure_s,
        **many,
    }


def _many(folder: Path, told: Callable[[str], None]) -> dict[str, Any]:
    """A coordinator of its own, so that its memory before anybody joined is known."""
    run = folder / "large-run"
    with _running(
        "host", "stdlib-gpt", "--set", "fleet.min_workers=100000", "--dir", str(run), folder=folder
    ) as coordinator, ExitStack() as stack:  # fmt: skip
        line = _join_line(run, coordinator)
        time.sleep(settle_s)
        before_mb = _memory_mb(coordinator)
        for number in range(num_processes):
            place = folder / f"many-{number}"
            stack.enter_context(_clients(line, place, num_many // num_processes))
        _wait_joined(run, num_many)
        told(f"{num_many} clients have joined")
        time.sleep(settle_s)
        (share,) = _measure(coordinator)
        return {
            "many_clients": num_many,
            "many_coordinator_core_percent": share,
            "many_coordinator_more_memory_mb": _memory_mb(coordinator) - before_mb,
        }


def _memory_mb(process: subprocess.Popen[bytes]) -> float:
    return psutil.Process(process.pid).memory_info().rss / 1e6


@contextmanager
def _running(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{arguments[0]}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "potluck", *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _clients(line: str, folder: Path, count: int) -> Iterator[subprocess.Popen[bytes]]:
    with folder.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "potluck.bench.idle", line, str(count), str(folder)],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _join_line(run: Path, coordinator: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        assert coordinator.poll() is None, "the coordinator ended; its log is beside the run"
        for event in events(run):
            if event["kind"] == "listening":
                return str(event["join_line"])
        time.sleep(0.5)
    raise TimeoutError("the coordinator does not listen")


def _wait_joined(run: Path, num_workers: int) -> None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if len({e["worker"] for e in events(run) if e["kind"] == "joined"}) >= num_workers:
            return
        time.sleep(0.5)
    raise TimeoutError("not all workers joined")


def _measure(*processes: subprocess.Popen[bytes]) -> list[float]:
    """Percent of one core that each uses over `measure_s`."""
    watched = [psutil.Process(p.pid) for p in processes]
    before = [_cpu_s(p) for p in watched]
    begun = time.monotonic()
    time.sleep(measure_s)
    passed = time.monotonic() - begun
    return [100.0 * (_cpu_s(p) - b) / passed for p, b in zip(watched, before, strict=True)]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def _idle_clients(line: str, count: int, folder: Path) -> None:
    executor = ThreadExecutor(2, "clients")
    link, turn = JoinLink.parse(line), asyncio.Semaphore(num_joining)
    clients = (_idle_client(link, f"{folder.name}-{i}", folder / str(i), executor, turn) for i in range(count))
    await asyncio.gather(*clients)


async def _idle_client(
    link: JoinLink, name: str, folder: Path, executor: ThreadExecutor, turn: asyncio.Semaphore
) -> None:  # fmt: skip
    folder.mkdir(parents=True)
    async with turn:
        identity = await obtain(link, name=name, folder=folder, executor=executor, now=time.time())
        connection = GrpcConnection(identity.address, identity)
        request = pb.WelcomeRequest(version=version(), profile_json=json.dumps(DeviceProfile(device="cpu").to_json()))
        reply = pb.WelcomeReply.FromString(await connection.call("Welcome", request.SerializeToString()))
    heartbeat_s = RunSpec.model_validate_json(reply.run_json).heartbeat_s
    control = await connection.open("Control")

    async def read() -> None:
        nonlocal heartbeat_s
        while (message := await control.receive()) is not None:
            heartbeat_s = pb.Desired.FromString(message).heartbeat_s or heartbeat_s

    reading = asyncio.create_task(read())
    sequence = 0
    try:
        while not reading.done():
            sequence += 1
            await control.send(pb.Report(sequence=sequence).SerializeToString())
            await asyncio.sleep(heartbeat_s)
    except ConnectionLost:
        return


if __name__ == "__main__":
    asyncio.run(_idle_clients(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
