"""Runs in processes of their own, one a core, with their files where they cost no waiting for a disk."""

from __future__ import annotations

import os
import shutil
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

memory_disk = Path("/dev/shm")
watch_s = 1.0


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
