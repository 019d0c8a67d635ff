"""One download per machine: workers on one machine (one for each GPU, say) fetch an object once between them.

    SHARE/NAME/lock      held by the worker that downloads it; the others wait for it
    SHARE/NAME/object    a hard link to its copy, or a copy where the file system has no links
    SHARE/NAME/arrived   how many bytes it has so far: the progress of those who wait

A file found here is believed only after its digest was checked. An object whose last worker dropped it is removed by
whoever looks next.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from potluck.clock import Clock, Executor
from potluck.storage.digest import file_name
from potluck.storage.files import FolderLock, full_disk_named, link_or_copy, unfinished_name, write_atomic
from potluck.storage.objects import ObjectStore
from potluck.types.errors import PotluckError, ResourceError
from potluck.types.ids import Digest

wait_s = 0.2
tell_s = 1.0
unused_age_s = 600.0


class MachineShare:
    """A folder that the workers of one machine and one run have in common."""

    def __init__(self, root: Path, clock: Clock, files: Executor) -> None:
        self._root, self._clock, self._files = root, clock, files

    async def fetch(
        self, digest: Digest, store: ObjectStore, download: Callable[[], Awaitable[object]], *,
        arrived: Callable[[], int] = lambda: 0, told: Callable[[int], None] = lambda _: None,
    ) -> bool:  # fmt: skip
        """Put the object into `store`: from another worker's copy (True), or by `download`, alone on this machine.

        `arrived` is asked how far `download` is; while another worker downloads, `told` hears how far that one is.
        """
        folder = self._root / file_name(digest)
        while True:
            if await self._files.run(_take, folder, digest, store):
                return True
            lock = await self._files.run(_try_lock, folder)
            if lock is None:
                told(await self._files.run(_read_arrived, folder))
                await self._clock.sleep(wait_s)
                continue
            try:
                if await self._files.run(_take, folder, digest, store):
                    return True
                telling = asyncio.create_task(self._tell(folder, arrived))
                try:
                    await download()
                finally:
                    telling.cancel()
                    await asyncio.gather(telling, return_exceptions=True)
                await self._files.run(_give, folder, store.path(digest))
                return False
            finally:
                await self._files.run(lock.release)
                await self._files.run(_remove_unused, self._root, time.time())

    async def _tell(self, folder: Path, arrived: Callable[[], int]) -> None:
        while True:
            await self._files.run(_write_arrived, folder, arrived())
            await self._clock.sleep(tell_s)


def _write_arrived(folder: Path, num_bytes: int) -> None:
    with contextlib.suppress(
        OSError, ResourceError
    ):  # on a full disk the others see no progress, and the download itself fails
        write_atomic(folder / "arrived", str(num_bytes).encode())


def _read_arrived(folder: Path) -> int:
    try:
        return min(max(int((folder / "arrived").read_bytes()[:20]), 0), 1 << 60)
    except (OSError, ValueError):
        return 0


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
            link_or_copy(folder / "object", scratch)
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
        link_or_copy(path, scratch)
        os.replace(scratch, folder / "object")
    except OSError:  # without a shared copy the others download their own
        scratch.unlink(missing_ok=True)


def _remove_unused(root: Path, now: float) -> None:
    """Drop files that no worker's store links to any more; where there are no links, those that grew old."""
    for path in root.glob("*/object"):
        with contextlib.suppress(OSError):
            stat = path.stat()
            if stat.st_nlink == 1 and now - stat.st_mtime > unused_age_s:
                path.unlink()
