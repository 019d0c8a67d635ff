"""The floor of a round: a bare parameter server over gRPC, as little as the wire allows.

One flat fp32 vector, no TLS, no checksum, no spool, no recovery: workers pull the vector, add a constant and push all
of it back, the server keeps a running sum. Raw bytes in pieces of 1 MiB. Nothing of Potluck is used.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
import grpc.aio
import numpy as np

piece_bytes = 1 << 20
patience_s = 300.0
_options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _same(data: bytes) -> bytes:
    return data


class _Server:
    def __init__(self, numel: int, num_workers: int, num_rounds: int) -> None:
        self.vector = np.random.default_rng(0).standard_normal(numel, dtype=np.float32)
        self.total = np.zeros(numel, np.float32)
        self.num_workers, self.num_rounds = num_workers, num_rounds
        self.round = self.num_pushed = 0
        self.begun_at = 0.0
        self.seconds: list[float] = []
        self.turned = asyncio.Condition()

    async def pull(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        async with self.turned:
            await self.turned.wait_for(lambda: self.round == int(request))
        self.begun_at = self.begun_at or time.monotonic()
        view = self.vector.data.cast("B")
        for start in range(0, len(view), piece_bytes):
            yield bytes(view[start : start + piece_bytes])

    async def push(self, pieces: AsyncIterator[bytes], context: Any) -> bytes:
        start = 0
        async for piece in pieces:
            values = np.frombuffer(piece, np.float32)
            self.total[start : start + len(values)] += values
            start += len(values)
        async with self.turned:
            self.num_pushed += 1
            if self.num_pushed == self.num_workers:
                np.multiply(self.total, np.float32(1 / self.num_workers), out=self.vector)
                self.total[:] = 0
                self.seconds.append(time.monotonic() - self.begun_at)
                self.begun_at, self.num_pushed = 0.0, 0
                self.round += 1
                self.turned.notify_all()
        return b""

    async def finished(self, workers: Sequence[subprocess.Popen[bytes]]) -> None:
        """RuntimeError if a worker dies on the way, TimeoutError if a round does not end in `patience_s`."""
        while (round := self.round) < self.num_rounds:
            async with asyncio.timeout(patience_s):
                while self.round == round:
                    if failed := [w.returncode for w in workers if w.poll()]:
                        raise RuntimeError(f"a worker of the floor ended with {failed[0]} in round {round + 1}")
                    await asyncio.sleep(0.1)


async def _serve(numel: int, num_workers: int, num_rounds: int) -> list[float]:
    state = _Server(numel, num_workers, num_rounds)
    methods = {
        "Pull": grpc.unary_stream_rpc_method_handler(state.pull, _same, _same),
        "Push": grpc.stream_unary_rpc_method_handler(state.push, _same, _same),
    }
    server = grpc.aio.server(options=_options)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("floor", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    command = [sys.executable, "-m", "potluck.bench.rig.floor", f"127.0.0.1:{port}", str(numel), str(num_rounds)]
    workers = [subprocess.Popen(command) for _ in range(num_workers)]
    try:
        await state.finished(workers)
        await asyncio.to_thread(lambda: [worker.wait(30) for worker in workers])
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        await server.stop(1)
    return state.seconds


def floor_seconds(numel: int, num_workers: int, num_rounds: int) -> list[float]:
    """Seconds of each round, from the first pull to the new vector. The server is in this process."""
    return asyncio.run(_serve(numel, num_workers, num_rounds))


def _work(address: str, numel: int, num_rounds: int) -> None:
    vector = np.empty(numel, np.float32)
    view = vector.data.cast("B")

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(view), piece_bytes):
            yield bytes(view[start : start + piece_bytes])

    with grpc.insecure_channel(address, options=_options) as channel:
        pull = channel.unary_stream("/floor/Pull", _same, _same)
        push = channel.stream_unary("/floor/Push", _same, _same)
        for number in range(num_rounds):
            start = 0
            for piece in pull(str(number).encode()):
                view[start : start + len(piece)] = piece
                start += len(piece)
            vector += np.float32(1)
            push(pieces())


if __name__ == "__main__":
    _work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
