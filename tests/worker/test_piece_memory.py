"""What pieces really take of a machine's memory, as its kernel counts it, against what its owner gives.

Run in a process of its own: the peak of what is resident, beyond what was so before the first piece.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT_BYTES = 48 << 20
SLACK_BYTES = 6 << 20
"""Of frames on their way, of threads that are started, and of the library that multiplies."""


def resident_bytes() -> int:
    """Without files that are mapped."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def play(wire: str, num_in_flight: int) -> None:
    """A head that sends tiles as fast as the device reads, weights of the same few names among them."""
    import torch

    from potluck.clock import SystemClock, ThreadExecutor
    from potluck.codecs.bundle import Packing
    from potluck.codecs.factors import encoded_rows
    from potluck.protocol.frames import unpack_data
    from potluck.strategies.sub_gemm import strategy
    from potluck.strategies.sub_gemm.assembly import Box
    from potluck.strategies.sub_gemm.multiply import wire_sizes
    from potluck.strategies.sub_gemm.tile import multiply
    from potluck.transport.pieces import PieceRequest, frames_of
    from potluck.worker.pieces import Pieces

    assert strategy.SubGEMM
    torch.set_num_threads(1)
    x, weights = torch.randn(2048, 4096), [torch.randn(4096, 512) for _ in range(3)]
    compute = ThreadExecutor(1)
    pieces = Pieces(compute=compute, clock=SystemClock(), limit_bytes=LIMIT_BYTES, note=lambda _: None)
    replies: dict[int, str] = {}
    there, kept = asyncio.Event(), set[str]()

    async def sent(frame: bytes) -> None:
        head, data = unpack_data(frame)
        if "piece" in head:
            what = next((w for w in ("error", "missing") if w in head), "whole")
            if what != "whole" or head["offset"] + len(data) == head["total"]:
                replies[head["piece"]] = str(head.get(what, what))
                there.set()

    def frames(id: int, turn: int, *, sends_all: bool) -> Iterator[bytes]:
        depth, rows, cols = turn % 3 * 1000 + 1000, 100 + 400 * (turn % 4), 512 - 100 * (turn % 2)
        a, b, name = x[:rows, :depth], weights[turn % 3][:depth, :cols], f"w{turn % 6}"
        keeps = name in kept and not sends_all
        kept.add(name)
        operands = {"a": a} if keeps else {"a": a, "b": b}
        packed = Packing({f"{k}/{p}": r for k, v in operands.items() for p, r in encoded_rows(v, wire).items()})
        request = PieceRequest(
            id=id, task="sub_gemm.tile", operands={"a": f"x{turn}" if turn % 5 == 0 else "", "b": name},
            arguments={"wire": wire, "is_a_transposed": False, "is_b_transposed": False},
            kept=frozenset({"b"} if keeps else ()),
            memory_bytes=wire_sizes[wire].memory_bytes(Box(0, rows, 0, cols, 0, depth)),
        )  # fmt: skip
        for start in range(0, len(packed), 1 << 20):
            yield from frames_of(request, packed[start : start + (1 << 20)], start, len(packed))

    async def script() -> None:
        serving = [asyncio.ensure_future(c) for c in pieces.serve(sent)]
        turns = {id: id for id in range(1, 15)}
        waiting = list(turns)
        while waiting or len(replies) < len(turns):
            while waiting and sum(id not in replies for id in turns if id not in waiting) < num_in_flight:
                id = waiting.pop(0)
                for frame in frames(id, turns[id], sends_all=id > 1000):
                    await pieces.take(*unpack_data(frame))
            if sum(id not in replies for id in turns if id not in waiting) >= num_in_flight or not waiting:
                async with asyncio.timeout(20):
                    await there.wait()
            there.clear()
            for id, what in list(replies.items()):
                if what.startswith("["):  # it keeps that no more
                    turns[1000 + id] = turns.pop(id)
                    del replies[id]
                    waiting.append(1000 + id)
        for each in serving:
            each.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    dtype = torch.bfloat16 if wire == "bf16" else torch.float32

    def warm_up() -> None:
        for turn in range(12):  # what the library itself keeps
            depth, rows, cols = turn % 3 * 1000 + 1000, 100 + 400 * (turn % 4), 512 - 100 * (turn % 2)
            a, b = (torch.ones(n, m, dtype=dtype) for n, m in ((rows, depth), (depth, cols)))
            multiply(a, b, wire=wire)

    asyncio.run(compute.run(warm_up))
    before, peak, over = resident_bytes(), [0], threading.Event()

    def sample() -> None:
        while not over.wait(5e-4):
            peak[0] = max(peak[0], resident_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    asyncio.run(script())
    over.set()
    sampler.join()
    compute.close()
    assert set(replies.values()) == {"whole"}, replies
    print(peak[0] - before)


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_all_that_pieces_take_stays_within_the_limit() -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert not done.returncode, done.stderr[-2000:]
    peaks = [int(line) for line in done.stdout.split()]
    assert len(peaks) == 3
    assert min(peaks) > LIMIT_BYTES / 3 and max(peaks) <= LIMIT_BYTES + SLACK_BYTES, peaks


if __name__ == "__main__":
    for kind in (("fp32", 40), ("bf16", 40), ("int8", 3)):
        play(*kind)
