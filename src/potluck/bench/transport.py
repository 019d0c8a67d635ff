"""Transfers of a large object over the shipping stack, beside bare gRPC streams: MB/s, CPU, bytes after ten cuts.

Server and client are processes of their own on loopback, with mutual TLS. The shipping side reads and writes real
files, with the checksums and digests it always has; the bare side (`rig.bare`) sends as many bytes in equal pieces,
once out of memory into nothing and once (`files`) from a file into a file. All alternate in one run; MB/s and ratios
are medians, a ratio over each pair.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from potluck.bench.rig.bare import BareClient, serve_bare
from potluck.bench.rig.wire import Way, Wire
from potluck.clock import SystemClock, ThreadExecutor
from potluck.protocol.frames import CHUNK_BYTES
from potluck.storage.digest import digest_file, file_name
from potluck.storage.objects import ObjectStore
from potluck.transport import objects
from potluck.transport.connection import Channel, Peer
from potluck.transport.grpc.client import GrpcConnection
from potluck.transport.grpc.options import TlsIdentity
from potluck.transport.grpc.server import GrpcServer
from potluck.transport.security.authority import Authority, ServerCertificates
from potluck.transport.security.keys import key_to_pem, new_key
from potluck.types.errors import ConnectionLost
from potluck.types.ids import Digest, WorkerId

num_cuts = 10
patience_s = 600.0
num_transfer_threads = 4
"""As `Lanes.threads` has on the coordinator; a worker has as many."""


def bench_transport(*, size_mb: int = 512, repeats: int = 7) -> dict[str, Any]:
    """`size_mb` in units of 2^20 bytes."""
    with tempfile.TemporaryDirectory(prefix="potluck-bench-", dir=os.environ.get("POTLUCK_BENCH_DIR")) as name:
        folder = Path(name)
        _certificates(folder)
        for file, seed in (("down", 1), ("up", 2)):
            _write_noise(folder / file, size_mb, seed)
        server = _start("serve", folder)
        client = _start("ask", folder, str(repeats))
        try:
            if client.wait(patience_s) != 0:
                raise RuntimeError(f"the client of the bench failed: {(folder / 'ask.log').read_text()[-3000:]}")
        finally:
            for process in (client, server):
                process.kill()
                process.wait()
        return {"size_mb": round(size_mb * 1.048576, 1), **json.loads((folder / "figures.json").read_text())}


def _certificates(folder: Path) -> None:
    """The authority for the server, and one member's identity for the client."""
    now = time.time()
    authority, key = Authority.open(folder / "authority", now=now), new_key()
    certificate = authority.issue_client("w1", role="worker", key=key.public_key(), serial=1, now=now)
    for name, data in (("key", key_to_pem(key)), ("certificate", certificate), ("ca", authority.certificate_pem)):
        (folder / name).write_bytes(data)


def _write_noise(path: Path, size_mb: int, seed: int) -> None:
    """Pieces that differ, so that none can stand for another."""
    chance = random.Random(seed)
    with path.open("wb") as file:
        for _ in range(size_mb):
            file.write(chance.randbytes(1 << 20))


def _start(role: str, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with (folder / f"{role}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "potluck.bench.transport", role, str(folder), *arguments], stdout=log, stderr=log
        )


# The server


class _Site:
    """Serves one object and takes any; `Welcome` says which it serves and forgets what it took."""

    def __init__(self, folder: Path) -> None:
        self._store = ObjectStore(folder / "there")
        self._executor = ThreadExecutor(num_transfer_threads, "transfers")
        self._served = self._store.adopt(folder / "down")

    async def call(self, peer: Peer, method: str, request: bytes) -> bytes:
        for digest in self._store.digests() - {self._served}:
            self._store.remove(digest)
        return self._served.encode()

    async def open(self, peer: Peer, method: str, channel: Channel) -> None:
        if method == "GetObject":
            await objects.serve_get(channel, self._store, self._executor, lambda digest: True)
        else:
            await objects.serve_put(channel, self._store, self._executor, lambda info: None)


async def _serve(folder: Path) -> None:
    certificates = ServerCertificates(Authority.open(folder / "authority", now=time.time()), SystemClock())
    server = GrpcServer(check_peer=lambda pem: Peer(id=WorkerId("w1")), identity=certificates.current)
    site = _Site(folder)
    port = await server.start(site, 0, "127.0.0.1")
    bare, bare_port = await serve_bare(certificates.current(), folder)
    scratch = folder / "ports.tmp"
    scratch.write_text(json.dumps([port, bare_port, os.getpid()]))
    scratch.replace(folder / "ports")
    await bare.wait_for_termination()


# The client


class _Client:
    def __init__(self, folder: Path, port: int, identity: TlsIdentity) -> None:
        self._folder, self._port, self._identity = folder, port, identity
        self._store = ObjectStore(folder / "here")
        self._executor = ThreadExecutor(num_transfer_threads, "transfers")
        self.path = folder / "up"
        self._digest = digest_file(self.path)
        self.connection = self.connect(port)

    def connect(self, port: int) -> GrpcConnection:
        return GrpcConnection(f"127.0.0.1:{port}", self._identity)

    async def fresh(self) -> Digest:
        """Neither side has what the other will send; what there is to fetch."""
        served = Digest((await self.connection.call("Welcome", b"")).decode())
        self._store.remove(served)
        return served

    def warm(self) -> None:
        """Write a file of the same size and remove it: the pages for the next one are there.

        On a virtual machine a page that its host took back costs several times the copy into it; that is not measured.
        """
        shutil.copyfile(self.path, self._folder / "warm")
        (self._folder / "warm").unlink()

    async def down(self, connection: GrpcConnection, served: Digest) -> None:
        await objects.fetch(connection, served, self._store, self._executor)

    async def up(self, connection: GrpcConnection, served: Digest) -> None:
        await objects.push(connection, self._digest, self.path, "bench", self._executor)

    async def sent_with_cuts(self, way: str, num_bytes: int) -> float:
        """Bytes that passed the link until the object was there, over its size, with the link cut at random bytes."""
        served = await self.fresh()
        chance = random.Random(way)
        cut = Way(cuts=sorted(chance.sample(range(num_bytes), num_cuts)))
        wire = Wire(up=cut) if way == "up" else Wire(down=cut)
        port = await wire.open(self._port)
        while True:
            connection = self.connect(port)
            try:
                await (self.down if way == "down" else self.up)(connection, served)
                break
            except ConnectionLost:
                await asyncio.sleep(0.05)
            finally:
                await connection.close()
        assert not cut.cuts
        await wire.close()
        return cut.num_bytes / num_bytes


async def _ask(folder: Path, repeats: int) -> dict[str, Any]:
    ports = folder / "ports"
    while not ports.exists():
        await asyncio.sleep(0.05)
    port, bare_port, server_pid = json.loads(ports.read_text())
    names = {"key_pem": "key", "certificate_pem": "certificate", "authority_pem": "ca"}
    identity = TlsIdentity(**{field: (folder / name).read_bytes() for field, name in names.items()})
    client, bare = _Client(folder, port, identity), BareClient(bare_port, identity)
    num_bytes = client.path.stat().st_size
    both = [psutil.Process(), psutil.Process(server_pid)]
    figures: dict[str, Any] = {"chunk_bytes": CHUNK_BYTES, "repeats": repeats}
    stored = str(Path("there") / file_name(Digest((await client.connection.call("Welcome", b"")).decode())))
    for way in ("down", "up"):
        files = (
            {"source": stored, "target": folder / "bare"}
            if way == "down"
            else {"source": client.path, "target": "bare"}
        )
        turns: dict[str, list[tuple[float, float]]] = {"bare": [], "files": [], "own": []}
        for number in range(repeats + 1):
            served = await client.fresh()
            acts: dict[str, Callable[[], Awaitable[None]]] = {
                "bare": lambda way=way: getattr(bare, way)(num_bytes),
                "files": lambda way=way, files=files: getattr(bare, way)(num_bytes, **files),
                "own": lambda way=way, served=served: getattr(client, way)(client.connection, served),
            }
            order = list(acts)
            for name in order[number % 3 :] + order[: number % 3]:
                client.warm()
                turns[name].append(await _timed(both, acts[name]))
                (folder / "bare").unlink(missing_ok=True)
        figures |= _figures(way, num_bytes, {name: found[1:] for name, found in turns.items()})
    ratios = [await client.sent_with_cuts(way, num_bytes) for way in ("down", "up")]
    await client.connection.close()
    await bare.close()
    return figures | {"cut_10_times_sent_ratio": round(max(ratios), 4)}


def _figures(way: str, num_bytes: int, turns: dict[str, list[tuple[float, float]]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, prefix in (("own", ""), ("bare", "bare_"), ("files", "bare_files_")):
        found[f"{prefix}{way}_mb_per_s"] = round(num_bytes / 1e6 / median(s for s, _ in turns[name]))
        found[f"{prefix}{way}_cpu_s_per_gb"] = round(median(c for _, c in turns[name]) / num_bytes * 1e9, 3)
    for name, suffix in (("bare", "ratio"), ("files", "files_ratio")):
        pairs = zip(turns["own"], turns[name], strict=True)
        found[f"{way}_{suffix}"] = round(median(floor / own for (own, _), (floor, _) in pairs), 3)
    return found


async def _timed(processes: list[psutil.Process], act: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Seconds, and CPU seconds of all `processes`."""
    before, begun = _cpu_s(processes), time.perf_counter()
    await act()
    return time.perf_counter() - begun, _cpu_s(processes) - before


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (p.cpu_times() for p in processes))


if __name__ == "__main__":
    role, place = sys.argv[1], Path(sys.argv[2])
    if role == "serve":
        asyncio.run(_serve(place))
    else:
        (place / "figures.json").write_text(json.dumps(asyncio.run(_ask(place, int(sys.argv[3])))))
