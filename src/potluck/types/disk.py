"""What a full disk says: how much is free, and `OSError` as a sentence that names the path and the need."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from potluck.types.errors import ResourceError

_full = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})


def free_bytes(path: Path) -> int:
    """Free bytes on the disk that holds `path`, or would hold it if it does not exist yet."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def require_free(path: Path, need_bytes: int) -> None:
    """ResourceError if the disk of `path` has less than `need_bytes` free."""
    free = free_bytes(path)
    if free < need_bytes:
        raise ResourceError(_sentence(path, need_bytes, free))


def reserve(path: Path, num_bytes: int) -> None:
    """A file of that many zeros which has its room on the disk, where the system can say so: writing to a mapped file
    on a disk that is full by then would end the process. ResourceError."""
    require_free(path, num_bytes)
    try:
        with full_disk_named(path, num_bytes), path.open("wb") as file:
            if num_bytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            else:
                file.truncate(num_bytes)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def full_disk_named(path: Path, need_bytes: int = 0) -> Generator[None, None, None]:
    """Turns "no space left" (or a used-up quota) inside the block into a ResourceError; all else passes."""
    try:
        yield
    except OSError as error:
        if error.errno not in _full:
            raise
        raise ResourceError(_sentence(path, need_bytes, free_bytes(path))) from error


def open_over(path: Path) -> BinaryIO:
    """Open a file to be written from its start, over what may be there. Who writes cuts off what is left of that."""
    return path.open("r+b" if path.exists() else "w+b")


def _sentence(path: Path, need_bytes: int, free: int) -> str:
    need = f"and {need_bytes:,} bytes are needed" if need_bytes else "and more is needed"
    return f"the disk for {path} has {free:,} bytes free {need}; free some space or choose another folder"
