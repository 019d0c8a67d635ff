"""Open files of this process: each connection takes one, and what is left must do for the run's own files."""

from __future__ import annotations

import contextlib
import sys

RESERVED = 256
"""For the run's own files: stores, databases, libraries."""
MAX_CONNECTIONS = 16384
_wanted = (1 << 16, 10240)  # the second is the most that macOS takes


if sys.platform == "win32":

    def raise_limit() -> None:
        """Windows has no such limit that connections would meet."""

    def spare_connections() -> int:
        return MAX_CONNECTIONS

else:
    import resource

    def raise_limit() -> None:
        """Have as many as this user may: many systems start a process with 1024, macOS with 256."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for wanted in _wanted:
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            if soft == resource.RLIM_INFINITY or soft >= limit:
                return
            with contextlib.suppress(ValueError, OSError):  # more than this system takes: try the next
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                return

    def spare_connections() -> int:
        """How many connections a server may have open at once."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return MAX_CONNECTIONS
        return max(min(soft - 2 * RESERVED, MAX_CONNECTIONS), soft // 4)
