"""Files that are whole or not there, locked folders, where the cache lies, and a full disk as a sentence."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from potluck.types.disk import free_bytes, full_disk_named, require_free, reserve
from potluck.types.errors import PotluckError, ResourceError

__all__ = [
    "FolderLock",
    "boot_id",
    "cache_folder",
    "free_bytes",
    "fsync_folder",
    "full_disk_named",
    "is_same_boot",
    "note_boot",
    "remove_files",
    "remove_unfinished",
    "require_free",
    "reserve",
    "rest",
    "unfinished_name",
    "write_atomic",
]

_unfinished = ".tmp"


def write_atomic(path: Path, content: bytes | Callable[[BinaryIO], object], *, durable: bool = False) -> None:
    """Write `path` so that a reader finds the old content or the new, whole, whenever the process dies.

    `content` is the bytes, or a function that writes them to the open file. `durable` adds the fsyncs that a power
    cut asks for. ResourceError if the disk is full, or a folder is in its place.
    """
    if path.is_dir():
        raise ResourceError(f"{path} is a folder and a file of that name is to be written; move it away")
    need_bytes = len(content) if isinstance(content, bytes) else 0
    scratch = unfinished_name(path)
    try:
        with full_disk_named(path, need_bytes):
            path.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    content(file)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def unfinished_name(path: Path) -> Path:
    """A name beside `path` to write under until the content is whole. Unique, so writers never meet."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{_unfinished}")


def remove_unfinished(folder: Path) -> None:
    """Remove what a writer that died left in `folder`. Only for a folder that nobody writes to now."""
    remove_files(folder.glob(f"*{_unfinished}"))


def remove_files(paths: Iterable[Path]) -> int:
    """Remove files; bytes freed. One that is open elsewhere on Windows stays, for the next call to remove."""
    freed = 0
    for path in paths:
        try:
            size = path.stat().st_size
            path.unlink()
        except (FileNotFoundError, PermissionError):
            continue
        freed += size
    return freed


def link_or_copy(source: Path, target: Path) -> None:
    """The same content under a second name, which costs no room where the file system has links. FileNotFoundError."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def fsync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut, where the system has such a call: Windows has none."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems refuse it, and nothing else can be done there
    finally:
        os.close(descriptor)


def boot_id() -> str:
    """A name of this start of the machine; "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_same_boot(folder: Path) -> bool:
    """Whether the machine was not started anew since `note_boot(folder)`; True where that was never called.

    After a start, files that were not synced may hold anything.
    """
    try:
        return (folder / "boot").read_bytes().strip() == boot_id().encode()
    except FileNotFoundError:
        return True
    except OSError:  # it is there and says nothing
        return False


def note_boot(folder: Path) -> None:
    if boot_id():
        write_atomic(folder / "boot", boot_id().encode(), durable=True)


def rest(folder: Path) -> None:
    """All in the folder is whole and will not be written: sync it, so that it counts at any start of any machine."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    fsync_folder(folder)
    (folder / "boot").unlink(missing_ok=True)


class FolderLock:
    """Holds a folder for one user at a time, across processes; the system drops it when the process dies.

    Taken when built; PotluckError naming the other process if it is held. The file `lock` stays: removing it would
    let two processes hold two files of one name.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = None
        file = (folder / "lock").open("a+b")
        if not _lock(file):
            file.seek(0)
            holder = file.read(32).decode("ascii", "replace").strip()
            file.close()
            raise PotluckError(
                f"{folder} is in use by process {holder or 'unknown'}; stop that one or choose another folder"
            )
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        self._file = file

    def release(self) -> None:
        """Let the folder go. Idempotent."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()  # closing drops the lock
            self._file = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


if sys.platform == "win32":
    import msvcrt

    _locked_byte = 1 << 30  # far beyond the text, which others may then still read

    def _lock(file: BinaryIO) -> bool:
        file.seek(_locked_byte)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _lock(file: BinaryIO) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike lockf, holds against this very process too
        except BlockingIOError:
            return False
        return True


def cache_folder() -> Path:
    """Where prepared data is kept between runs: the system's place for what can be made again."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "potluck"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(Path.home()))) / "potluck" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "potluck"
    return Path.home() / ".cache" / "potluck"
