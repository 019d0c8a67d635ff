"""Memory for chunks on their way, kept by the process instead of given back and asked for again with each.

glibc returns the top of a thread's heap to the system as soon as two chunks of it are free, so a transfer would fault
in every page of every chunk anew: a third of what sending costs. Elsewhere the allocator is left as it is.
"""

from __future__ import annotations

import ctypes
import functools
import sys

TRIM_BYTES = 32 << 20
"""Free bytes at the top of a heap before they go back to the system."""
MMAP_BYTES = 4 << 20
"""From this size on an allocation is a mapping of its own, gone when it is freed. Chunks and what gRPC makes of them
are smaller; setting the one stops glibc from adapting the other, so it is set too."""

_m_trim_threshold, _m_mmap_threshold = -1, -3  # malloc.h


@functools.cache
def keep_buffers() -> None:
    """For the whole process, once."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_m_trim_threshold, TRIM_BYTES)
        mallopt(_m_mmap_threshold, MMAP_BYTES)
