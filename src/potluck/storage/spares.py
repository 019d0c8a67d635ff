"""Files that nobody needs any more, kept a while to be written over.

A large new file costs more in the kernel than the copy into it: each of its pages has to be found, on a virtual
machine often with the host's help. A run removes and makes files of the same sizes every round, so the next one is
written over the last one's pages.

    FOLDER/spare/NUMBER     the old bytes

After a power cut a file that was written over may hold its old bytes under its new name, so stores that use this must
notice that the machine was started anew (`files.is_same_boot`) or sync what they write. All methods block.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from potluck.storage.files import boot_id, remove_files
from potluck.types.disk import free_bytes, require_free

least_bytes = 1 << 20
"""Smaller files are cheap to make."""
max_age_s = 600.0
largest_ratio = 2.0
"""A spare this much larger or smaller than the file it would become is not taken."""


class Spares:
    """The spare files of one folder. Where the system does not tell its boots apart, files are removed at once."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "spare"
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._kept: dict[Path, tuple[int, float]] = {}  # bytes, when it was retired
        if self._folder.is_dir():
            remove_files(self._folder.iterdir())
        self._is_used = bool(boot_id())

    def retire(self, paths: Iterable[Path]) -> int:
        """Remove files, or keep them as spares; the bytes that were theirs. Nobody may read them any more."""
        freed = 0
        with self._lock:
            self._drop_old()
            for path in paths:
                freed += self._keep(path) or remove_files([path])
        return freed

    def take(self, path: Path, size: int) -> bool:
        """Make `path` of a spare of about `size` bytes, if there is one. It holds old bytes, any number of them."""
        with self._lock:
            fitting = [p for p, (held, _) in self._kept.items() if size / largest_ratio <= held <= size * largest_ratio]
            for spare in sorted(fitting, key=lambda p: abs(self._kept[p][0] - size)):
                del self._kept[spare]
                with suppress(OSError):  # someone tidied up, or another file system
                    spare.replace(path)
                    return True
        return False

    def clear(self) -> int:
        """Remove all spares: the disk is needed, or nothing more will be written; bytes freed."""
        with self._lock:
            paths = list(self._kept)
            self._kept.clear()
        return remove_files(paths)

    def make_room(self, path: Path, need_bytes: int) -> None:
        """Before so many bytes are written to `path`: where the disk has fewer, the spares go first."""
        if free_bytes(path) < need_bytes:
            self.clear()

    def require_free(self, path: Path, need_bytes: int) -> None:
        """ResourceError if the disk of `path` has less than `need_bytes` free, even without spares."""
        self.make_room(path, need_bytes)
        require_free(path, need_bytes)

    def _keep(self, path: Path) -> int:
        """The bytes of a file that is a spare now; 0 if it is not to be one."""
        with suppress(OSError):
            stat = path.stat()
            held = sum(size for size, _ in self._kept.values())
            # A file of more names is another worker's too; and a disk that is nearly full is for others.
            if not self._is_used or stat.st_size < least_bytes or stat.st_nlink > 1:
                return 0
            if free_bytes(path) < 2 * (held + stat.st_size):
                return 0
            self._folder.mkdir(exist_ok=True)
            spare = self._folder / str(next(self._numbers))
            path.replace(spare)
            self._kept[spare] = (stat.st_size, time.monotonic())
            return stat.st_size
        return 0

    def _drop_old(self) -> None:
        oldest = time.monotonic() - max_age_s
        old = [path for path, (_, at) in self._kept.items() if at < oldest]
        for path in old:
            del self._kept[path]
        remove_files(old)
