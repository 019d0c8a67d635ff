"""The same round in Flower, NVFlare and Potluck, and on the bare floor, on this machine: seconds, memory, CPU.

A round of federated averaging in which clients add a constant; nothing is trained. Tensors, number of clients and
machine are the same for all. Each peer has a virtual environment of its own, made once in a cache folder from the
package index with its version pinned, and runs as its own quick start sets it up for real processes on loopback:
Flower's SuperLink and SuperNodes without TLS, NVFlare's POC mode with the mutual TLS that it comes with; both with
their own FedAvg and NumPy. Seconds are from the end of one aggregation to the end of the next, noted in the server's
process. A peer that cannot be installed or run has no figures but the reason.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from potluck.bench.rig.peer_systems import Note, PeerFailed, PeerSystem, Sandbox, Workload, flower, nvflare
from potluck.bench.rig.processes import Marked, Sampler
from potluck.bench.round import bench_round, coordinator, nearest_shape, shapes, worker
from potluck.models.build import skeleton
from potluck.models.flat import layout_of
from potluck.storage.files import cache_folder
from potluck.types.errors import PotluckError

peers = (flower, nvflare)

Told = Callable[[str], None]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def bench_peers(
    *, params: int = 124_439_808, workers: int = 2, rounds: int = 4, dir: str = "", told: Told = _say
) -> dict[str, Any]:
    """Figures by system; seconds are medians without the first round. `params` takes the nearest shape there is."""
    if workers < 1 or rounds < 3:
        raise PotluckError(
            f"{workers} workers and {rounds} rounds give no figure; take 1 worker and 3 rounds at least, as the first "
            "round does not count"
        )
    layout = layout_of(skeleton(shapes[nearest_shape(params)]))
    workload = Workload(tuple(t.shape for t in layout), workers, rounds)
    cache = Path(dir) if dir else cache_folder() / "peers"
    figures: dict[str, Any] = {"parameters": layout.numel, "workers": workers, "rounds": rounds}
    if hasattr(os, "getloadavg"):
        figures["load_before"] = round(os.getloadavg()[0], 2)  # of others, over a minute
    with _terminable():
        for peer in peers:
            try:
                figures |= _measure_peer(peer, workload, cache, told)
            except (PeerFailed, OSError) as reason:
                figures[f"{peer.name}_failed_because"] = str(reason)
                told(f"{peer.title} {peer.version}: no figures: {reason}")
        told("Potluck and the floor: running")
        figures |= _measure_potluck(layout.numel, workers, rounds)
    for peer in peers:
        if (seconds := figures.get(f"{peer.name}_round_s")) is not None:
            figures[f"{peer.name}_times_potluck"] = round(seconds / figures["potluck_round_s"], 2)
    told(table(figures))
    return figures


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends what is within as Ctrl-C does, so that no process is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure_peer(peer: PeerSystem, workload: Workload, cache: Path, told: Told) -> dict[str, Any]:
    python = peer.install(cache, told)
    told(f"{peer.title} {peer.version}: running")
    marked = Marked()
    sampler = Sampler(marked.role_of)
    with tempfile.TemporaryDirectory(
        prefix="potluck-bench-", dir=os.environ.get("POTLUCK_BENCH_DIR"), ignore_cleanup_errors=True
    ) as name:
        sandbox = Sandbox(Path(name), python, marked)
        with sandbox.closing(), sampler.running():
            submitted = peer.start(sandbox, workload)
            sandbox.follow(submitted, num_rounds=1)
            before = sampler.cpu_s()
            notes = sandbox.follow(submitted, num_rounds=workload.num_rounds)
            after = sampler.cpu_s()
    spent = {role: (after[role] - before.get(role, 0.0)) / (workload.num_rounds - 1) for role in after}
    return {
        f"{peer.name}_{figure}": value
        for figure, value in {
            "version": peer.version, **_seconds(notes), **_by_side("mb", sampler.peak_bytes, 1e-6, 1),
            **_by_side("cpu_s_per_round", spent, 1.0, 2),
        }.items()
    }  # fmt: skip


def _seconds(notes: list[Note]) -> dict[str, float]:
    """From the notes of the beginning and of each round's end."""
    first, *later = [after.at - before.at for before, after in itertools.pairwise(notes)]
    return {
        "round_s": round(statistics.median(later), 3),
        "round_s_lowest": round(min(later), 3),
        "round_s_highest": round(max(later), 3),
        "first_round_s": round(first, 3),
    }


def _by_side(unit: str, values: dict[str, float] | dict[str, int], factor: float, digits: int) -> dict[str, float]:
    """The server's figure, and that of the client with the most."""
    clients = [value for role, value in values.items() if role.startswith("client-")]
    found = {"server": values["server"], "client": max(clients)}
    return {f"{side}_{unit}": round(value * factor, digits) for side, value in found.items()}


def _measure_potluck(numel: int, num_workers: int, num_rounds: int) -> dict[str, Any]:
    sampler = Sampler(_potluck_role)
    with sampler.running():
        found = bench_round(params=numel, workers=num_workers, rounds=num_rounds)
    return {
        "potluck_round_s": found["round_s"],
        "potluck_first_round_s": found["first_round_s"],
        **{f"potluck_{side}": value for side, value in _by_side("mb", sampler.peak_bytes, 1e-6, 1).items()},
        "potluck_server_anonymous_mb": found["coordinator_anonymous_mb"],
        "potluck_client_anonymous_mb": found["worker_anonymous_mb"],
        "potluck_server_cpu_s_per_round": found["coordinator_cpu_s_per_round"],
        "potluck_client_cpu_s_per_round": found["worker_cpu_s_per_round"],
        "floor_s": found["floor_s"],
        "potluck_times_floor": found["times_floor"],
    }


def _potluck_role(process: psutil.Process) -> str | None:
    """Of the processes that `bench_round` starts from this one."""
    if process.ppid() != os.getpid():
        return None
    command = process.cmdline()
    code = command[2] if command[1:2] == ["-c"] else ""
    if f"import {coordinator.__name__};" in code:
        return "server"
    return f"client-{command[-1]}" if f"import {worker.__name__};" in code else None


def table(figures: dict[str, Any]) -> str:
    """The figures of all that ran, side by side, in Markdown."""
    heads = (
        "system",
        "seconds per round",
        "times Potluck",
        "server, MB",
        "client, MB",
        "server, CPU s",
        "client, CPU s",
    )
    rows = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    names = {p.name: f"{p.title} {p.version}" for p in peers} | {"potluck": "Potluck"}
    for name, title in names.items():
        if f"{name}_round_s" not in figures:
            rows.append(f"| {title} | failed: {figures.get(f'{name}_failed_because', '')} | | | | | |")
            continue
        of = {key.removeprefix(f"{name}_"): value for key, value in figures.items() if key.startswith(f"{name}_")}
        rows.append(
            f"| {title} | {of['round_s']} | {of.get('times_potluck', 1)} | {of['server_mb']} | {of['client_mb']} "
            f"| {of['server_cpu_s_per_round']} | {of['client_cpu_s_per_round']} |"
        )
    rows.append(f"| bare floor | {figures['floor_s']} | {round(1 / figures['potluck_times_floor'], 2)} | | | | |")
    return "\n".join(rows)
