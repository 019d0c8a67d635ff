"""What every test stands on: no network, one thread, and a watch over the event loop.

The limit of 60 s for each test and *warnings are errors* are set in pyproject.toml.
"""

import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterator

import pytest

# Before anything imports the libraries that read them. Processes that tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    """Many tests at once must not fight over the cores; results do not depend on how many there are."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def stall_watchdog(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Fail the test if any callback holds an event loop of it for more than 50 ms. Call it to set another limit in s.

    Measures the CPU time of the loop's thread, so that a busy machine does not fail a test, and the time on the clock
    with a tenfold allowance, so that a blocking read or a sleep does.
    """
    limit_s = 0.05
    stalls: list[str] = []
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.events.Handle) -> None:
        cpu, wall = time.thread_time(), time.perf_counter()
        run(handle)
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        if cpu > limit_s or wall > 10 * limit_s:
            stalls.append(f"{handle!r}: {wall * 1000:.0f} ms, {cpu * 1000:.0f} ms of them on the CPU")

    def set_limit(seconds: float) -> None:
        nonlocal limit_s
        limit_s = seconds

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    gc.collect()
    gc.freeze()  # what other tests left would be looked through by every full collection, on the loop's thread
    yield set_limit
    gc.unfreeze()
    assert not stalls, "the event loop was blocked by " + "; ".join(stalls)
