"""Runs that a bench makes: which of them, in processes of their own, one a core, with their files in memory."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from potluck.types.errors import PotluckError
from potluck.types.mistakes import nearest

memory_disk = Path("/dev/shm")
watch_s = 1.0


def named_methods(only: str, known: Sequence[str], *, always: Sequence[str]) -> list[str]:
    """Those of the known methods that `only` names between semicolons, and those that `always` are done; all where it
    names none. PotluckError for one that is not known."""
    chosen = {name.strip() for name in only.split(";")} if only else set(known)
    for name in sorted(chosen - set(known)):
        hint = f"did you mean {near!r}? " if (near := nearest(name, known)) else ""
        raise PotluckError(f"there is no method {name!r}; {hint}there are {'; '.join(known)}")
    return [name for name in known if name in chosen or name in always]


def scratch_place(need_bytes: int) -> str | None:
    """Where to make scratch folders: in memory if there is room, as thousands of rounds write some twenty files each;
    None for the system's usual place.
    """
    if not memory_disk.is_dir() or not os.access(memory_disk, os.W_OK):
        return None
    return str(memory_disk) if shutil.disk_usage(memory_disk).free >= need_bytes else None


def job_pool(processes: int) -> ProcessPoolExecutor:
    """0 processes for one a core. They end with this process, however it ends."""
    return ProcessPoolExecutor(
        processes or os.cpu_count(), mp_context=get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),)
    )


def _end_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(watch_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
