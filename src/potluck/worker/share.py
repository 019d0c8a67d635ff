"""One download per machine: workers on one machine (one for each GPU, say) fetch an object once between them.

    SHARE/NAME/lock      held by the worker that downloads it; the others wait for it
    SHARE/NAME/object    a hard link to its copy, or a copy where the file system has no links

A file found here is believed only after its digest was checked. An object whose last worker dropped it is removed by
whoever looks next.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from potluck.clock import Clock, Executor
from potluck.storage.digest import file_name
from potluck.storage.files import FolderLock, full_disk_named, unfinished_name
from potluck.storage.objects import ObjectStore
from potluck.types.errors import PotluckError
from potluck.types.ids import Digest

wait_s = 0.2
unused_age_s = 600.0


class MachineShare:
    """A folder that the workers of one machine and one run have in common."""

    def __init__(self, root: Path, clock: Clock, files: Executor) -> None:
        self._root, self._clock, self._files = root, clock, files

    async def fetch(self, digest: Digest, store: ObjectStore, download: Callable[[], Awaitable[object]]) -> bool:
        """Put the object into `store`: from another worker's copy (True), or by `download`, alone on this machine."""
        folder = self._root / file_name(digest)
        while True:
            if await self._files.run(_take, folder, digest, store):
                return True
            lock = await self._files.run(_try_lock, folder)
            if lock is None:
                await self._clock.sleep(wait_s)
                continue
            try:
                if await self._files.run(_take, folder, digest, store):
                    return True
                await download()
                await self._files.run(_give, folder, store.path(digest))
                return False
            finally:
                await self._files.run(lock.release)
                await self._files.run(_remove_unused, self._root, time.time())


def _try_lock(folder: Path) -> FolderLock | None:
    try:
        return FolderLock(folder)
    except PotluckError:
        return None  # another worker is at it


def _take(folder: Path, digest: Digest, store: ObjectStore) -> bool:
    """Link or copy the shared file into the store, if it is there and whole."""
    scratch = unfinished_name(store.root / "shared")
    try:
        with full_disk_named(scratch):
            _link_or_copy(folder / "object", scratch)
    except FileNotFoundError:
        return False
    except BaseException:
        scratch.unlink(missing_ok=True)  # part of a copy would keep the disk full
        raise
    found = store.adopt(scratch)
    if found == digest:
        return True
    store.remove(found)
    (folder / "object").unlink(missing_ok=True)
    return False


def _give(folder: Path, path: Path) -> None:
    scratch = unfinished_name(folder / "object")
    try:
        _link_or_copy(path, scratch)
        os.replace(scratch, folder / "object")
    except OSError:  # without a shared copy the others download their own
        scratch.unlink(missing_ok=True)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _remove_unused(root: Path, now: float) -> None:
    """Drop files that no worker's store links to any more; where there are no links, those that grew old."""
    for path in root.glob("*/object"):
        with contextlib.suppress(OSError):
            stat = path.stat()
            if stat.st_nlink == 1 and now - stat.st_mtime > unused_age_s:
                path.unlink()
