"""Memory for chunks on their way, kept by the process instead of given back and asked for again with each.

glibc returns the top of a thread's heap to the system as soon as two chunks of it are free, so a transfer would fault
in every page of every chunk anew: a third of what sending costs. What is kept so creeps up over hundreds of rounds, as
small blocks that live on lie between free ones: `release_buffers` gives it back. Without glibc both do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

TRIM_BYTES = 16 << 20
"""Free bytes at the top of a heap before they go back to the system."""
MMAP_BYTES = 2 << 20
"""From this size on an allocation is a mapping of its own, gone when it is freed. Chunks and what gRPC makes of them
are smaller; setting the one stops glibc from adapting the other, so it is set too."""

MAX_HEAPS = 2
"""Of all threads together: each keeps up to `TRIM_BYTES`, and what lies above a small block that lives on."""

_m_trim_threshold, _m_mmap_threshold, _m_arena_max = -1, -3, -8  # malloc.h


@functools.cache
def keep_buffers() -> None:
    """For the whole process, once."""
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(_m_trim_threshold, TRIM_BYTES)
        mallopt(_m_mmap_threshold, MMAP_BYTES)
        mallopt(_m_arena_max, MAX_HEAPS)


def release_buffers() -> None:
    """Give the system what is free in all heaps: some ms, and the next transfer faults its pages in again."""
    if (malloc_trim := _glibc("malloc_trim")) is not None:
        malloc_trim(0)


@functools.cache
def _glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library; None elsewhere than on Linux, and where musl has none."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
