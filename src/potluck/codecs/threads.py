"""Slices of one large tensor on several threads. numba's kernels and zstandard let go of the interpreter's lock.

The pool is the process's own and never waits on itself: what runs in it must not spread again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Lock
from typing import TypeVar

T = TypeVar("T")

smallest_numel = 1 << 20
"""Tensors of fewer elements are not worth a second thread."""


def num_threads() -> int:
    """What PyTorch was told to use: an owner's limit on cores holds here too."""
    import torch

    return torch.get_num_threads()


@lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, os.cpu_count() or 1), "codec")


def spread(work: Callable[[int, int], T], count: int, size: int, *, numel_each: int = 1) -> list[T]:
    """`work(low, high)` for [0, count) cut at multiples of `size`; the results in order of the slices.

    What is counted are elements, or something of `numel_each` elements.
    """
    cuts = [(low, min(low + size, count)) for low in range(0, count, size)]
    helpers = min(num_threads(), len(cuts)) if count * numel_each >= smallest_numel else 1
    if helpers <= 1:
        return [work(low, high) for low, high in cuts]
    found: dict[int, T] = {}
    remaining = iter(range(len(cuts)))
    lock = Lock()

    def help_out() -> None:
        while True:
            with lock:
                number = next(remaining, None)
            if number is None:
                return
            found[number] = work(*cuts[number])

    pool = _pool(os.getpid())
    others = [pool.submit(help_out) for _ in range(helpers - 1)]
    try:
        help_out()
    finally:
        for other in others:
            other.result()
    return [found[number] for number in range(len(cuts))]
