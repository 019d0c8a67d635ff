"""Objects: files named by the digest of their bytes. Model versions, updates, data shards, tokenizers.

    ROOT/blake3-HEX                 a whole object
    ROOT/partial/blake3-HEX         one that is on its way
    ROOT/partial/blake3-HEX.offset  how many bytes of it are here

An upload goes on where it stopped, also after a restart. Its digest is checked when it is complete, and only then does
it get the object's name. Objects that were removed are written over by those that come; so after the machine was
started anew, unless all is synced, every object is checked again. All methods block and may be called from any thread.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from potluck.storage.digest import Hasher, digest_bytes, digest_file, file_name, from_file_name
from potluck.storage.files import (
    fsync_folder,
    full_disk_named,
    is_same_boot,
    note_boot,
    remove_files,
    remove_unfinished,
    unfinished_name,
    write_atomic,
)
from potluck.storage.spares import Spares
from potluck.types.errors import CorruptError, ResourceError
from potluck.types.ids import Digest

_offset_suffix = ".offset"
_offset_bytes = 8


class ObjectStore:
    """Objects in one folder. `quota_bytes` bounds them and what partial ones will grow to; 0 for no bound.

    `durable` makes a stored object survive a power cut. One process at a time uses a folder.
    """

    def __init__(self, root: Path, *, quota_bytes: int = 0, durable: bool = False) -> None:
        self.root = root
        self.quota_bytes = quota_bytes
        self.durable = durable
        self._partial_folder = root / "partial"
        self._partial_folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._partials: dict[Digest, PartialObject] = {}
        self.spares = Spares(root)
        remove_unfinished(root)
        if not durable and not is_same_boot(root):
            for digest in self.digests():
                with suppress(CorruptError):
                    self.verify(digest)
        if not durable:
            note_boot(root)

    # Whole objects

    def path(self, digest: Digest) -> Path:
        """Where the object is, or would be. Refused if it is not a digest."""
        return self.root / file_name(digest)

    def has(self, digest: Digest) -> bool:
        with self._lock:  # not while it is looked at for removal
            return self.path(digest).is_file()

    def size(self, digest: Digest) -> int:
        """Bytes of an object. CorruptError if it is not here."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError as error:
            raise CorruptError(f"the object {digest} is not in {self.root}") from error

    def digests(self) -> set[Digest]:
        return {digest for path in self.root.iterdir() if (digest := from_file_name(path.name))}

    def used_bytes(self) -> int:
        """Bytes of all objects, partial ones counted whole."""
        with self._lock:
            whole = sum(_size(self.path(digest)) for digest in self.digests())
            growing = {file_name(digest): partial.size for digest, partial in self._partials.items()}
            resting = (p for p in self._partial_folder.iterdir() if from_file_name(p.name) and p.name not in growing)
            return whole + sum(growing.values()) + sum(map(_size, resting))

    def put(self, data: bytes) -> Digest:
        """Store bytes. ResourceError beyond the quota or on a full disk."""
        digest = digest_bytes(data)
        with self._lock:
            if not self.has(digest):
                self._require_room(len(data))
                self.spares.make_room(self.root, len(data))
                write_atomic(self.path(digest), data, durable=self.durable)
        return digest

    @contextmanager
    def scratch(self, name: str, size: int) -> Iterator[Path]:
        """Where to write an object of about `size` bytes for `adopt` to move in. It may hold old bytes.

        What was not moved in by the end of the block is removed.
        """
        path = unfinished_name(self.root / name)
        self.spares.take(path, size)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def adopt(self, path: Path) -> Digest:
        """Move a file in, named by its digest. It must not be written to any more."""
        digest = digest_file(path)
        with self._lock:
            if self.has(digest):
                path.unlink()
                return digest
            self._require_room(path.stat().st_size)
            if self.durable:
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
            self._move_in(path, digest)
        return digest

    def verify(self, digest: Digest) -> None:
        """Read an object again. CorruptError if its bytes changed; it is removed then."""
        found = digest_file(self.path(digest), like=digest)
        if found != digest:
            self.remove(digest)
            raise CorruptError(f"the object {digest} had become {found} on the disk and was removed; fetch it again")

    def remove(self, digest: Digest) -> None:
        """Remove an object and what is here of it. Nothing happens if there is none."""
        with self._lock:
            self._drop_partial(digest)
            self.spares.retire([self.path(digest)])

    def collect(self, is_kept: Callable[[Digest], bool], *, partial_age_s: float = 3600.0) -> int:
        """Remove every object that is not kept, and partial ones that nobody added to for so long; bytes freed.

        `is_kept` is asked about each object just before it would go: one that `has` said is here after it was wanted
        stays. The age of partial ones is that of the file: the one time here that is the system's.
        """
        freed = 0
        for digest in self.digests():
            with self._lock:
                if not is_kept(digest):
                    freed += self.spares.retire([self.path(digest)])
        with self._lock:
            oldest = time.time() - partial_age_s
            for path in list(self._partial_folder.iterdir()):
                digest = from_file_name(path.name.removesuffix(_offset_suffix))
                if (digest and is_kept(digest)) or not path.exists() or path.stat().st_mtime > oldest:
                    continue
                freed += self._drop_partial(digest) if digest else remove_files([path])
        return freed

    # Objects on their way

    def arrived(self, digest: Digest) -> int:
        """Bytes of an object on its way that are here: where its sender may go on. 0 if there are none."""
        with self._lock:
            partial = self._partials.get(digest)
            return partial.offset if partial else _arrived(self._partial_folder / file_name(digest))

    def begin(self, digest: Digest, size: int) -> PartialObject:
        """Begin or go on to receive an object of `size` bytes; `offset` of the result says from where.

        Two who send the same object share one partial: both may write, and each piece counts once.
        ResourceError beyond the quota or on a full disk.
        """
        with self._lock:
            partial = self._partials.get(digest)
            if partial is not None and partial.size == size:
                return partial
            path = self._partial_folder / file_name(digest)
            if self.has(digest):
                return PartialObject(self, digest, self.size(digest), path)
            goes_on = partial is None and 0 < _arrived(path) <= size
            if not goes_on:
                self._drop_partial(digest)
            self._require_room(size - _size(path))
            try:
                if not goes_on:
                    with full_disk_named(path, size):
                        _offset_path(path).write_bytes(bytes(_offset_bytes))  # before the file: old bytes count as none
                        if not self.spares.take(path, size):
                            path.touch()
                self.spares.require_free(path, size - _size(path))
            except ResourceError:
                if not goes_on:
                    self._drop_partial(digest)
                raise
            self._partials[digest] = PartialObject(self, digest, size, path)
            return self._partials[digest]

    def settle(self, partial: PartialObject, found: Digest) -> None:
        """Give a complete partial its name, or drop it if it was `found` to be another. Called by `finish`."""
        with self._lock:
            if self._partials.get(partial.digest) is not partial:
                if self.has(partial.digest):
                    return  # another sender was faster
                raise _dropped(partial.digest)
            if found != partial.digest:
                self._drop_partial(partial.digest)
                raise CorruptError(
                    f"the object {partial.digest} arrived as {found} and was dropped; it has to be sent again"
                )
            if self.durable:
                with partial.path.open("rb+") as file:
                    os.fsync(file.fileno())
            del self._partials[partial.digest]
            self._move_in(partial.path, partial.digest)
            remove_files([_offset_path(partial.path)])

    def _drop_partial(self, digest: Digest) -> int:
        partial = self._partials.pop(digest, None)
        if partial is not None:
            partial.drop()
        path = self._partial_folder / file_name(digest)
        freed = remove_files([path])
        remove_files([_offset_path(path)])
        return freed

    def _move_in(self, path: Path, digest: Digest) -> None:
        target = self.path(digest)
        try:
            path.replace(target)
        except OSError:  # another disk: copy beside the target first, so that the name is only ever a whole file's
            scratch = unfinished_name(target)
            with full_disk_named(target):
                shutil.copyfile(path, scratch)
            scratch.replace(target)
            path.unlink()
        if self.durable:
            fsync_folder(self.root)

    def _require_room(self, more_bytes: int) -> None:
        if not self.quota_bytes:
            return
        used = self.used_bytes()
        if used + more_bytes > self.quota_bytes:
            raise ResourceError(
                f"{self.root} holds {used:,} bytes of objects, {more_bytes:,} more are needed and "
                f"{self.quota_bytes:,} are allowed; raise its quota or wait until older objects are removed"
            )


class PartialObject:
    """The first `offset` bytes of an object of `size`. Several may write to it; `rest` when one is through."""

    def __init__(self, store: ObjectStore, digest: Digest, size: int, path: Path) -> None:
        self.digest, self.size, self.path = digest, size, path
        self._dropped = False
        self._store = store
        self._lock = threading.Lock()
        self._offset = size if store.has(digest) else _arrived(path)
        self._file: FileIO | None = None  # open from the first bytes of a sender to its last
        self._offset_file: FileIO | None = None
        # Hashed as it comes in, from the start only: what an earlier process received is read again at the end.
        self._hasher = None if self._offset else Hasher(digest)

    @property
    def offset(self) -> int:
        """Bytes that are here: they survive the death of the process."""
        return self._offset

    def write(self, offset: int, data: bytes | memoryview) -> int:
        """Add bytes that belong at `offset`; the new `offset`. What is here already is skipped.

        CorruptError if there is a gap, or more than `size`; ResourceError on a full disk.
        """
        with self._lock:
            if not 0 <= offset <= self._offset or offset + len(data) > self.size:
                raise CorruptError(
                    f"bytes {offset} to {offset + len(data)} of {self.digest} do not continue the {self._offset} of "
                    f"{self.size} that are here"
                )
            fresh = memoryview(data)[self._offset - offset :]
            if len(fresh):
                self._append(fresh)
            return self._offset

    def _append(self, data: memoryview) -> None:
        self._refuse_if_dropped()
        with full_disk_named(self.path, self.size - self._offset):
            if self._file is None or self._offset_file is None:
                self._file, self._offset_file = FileIO(self.path, "r+"), FileIO(_offset_path(self.path), "r+")
                self._file.seek(self._offset)
            try:
                num_written = 0
                while num_written < len(data):
                    num_written += self._file.write(data[num_written:])
                self._offset_file.seek(0)
                self._offset_file.write((self._offset + len(data)).to_bytes(_offset_bytes, "little"))
            except OSError:
                self._file.truncate(self._offset)  # a write that a full disk cut off may have left more
                self._close()
                raise
        if self._hasher:
            self._hasher.update(data)
        self._offset += len(data)

    def finish(self) -> None:
        """Check the digest and make it an object. CorruptError if bytes are missing or wrong (then all are dropped)."""
        with self._lock:
            if self._offset < self.size:
                raise CorruptError(f"{self.size - self._offset} of {self.size} bytes of {self.digest} are missing")
            self._close()
        if self._store.has(self.digest):
            return
        self._refuse_if_dropped()
        # Complete, so nobody writes to it any more: read it and ask the store without holding others up.
        try:
            os.truncate(self.path, self.size)  # a spare may have been longer
            found = self._hasher.digest() if self._hasher else digest_file(self.path, like=self.digest)
        except FileNotFoundError:  # settled or dropped meanwhile: the store knows
            found = self.digest
        self._store.settle(self, found)

    def rest(self) -> None:
        """Nothing more comes for a while: its file need not stay open. Never waits: who writes now rests it later."""
        if self._lock.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._lock.release()

    def drop(self) -> None:
        """No more bytes are taken: its file is about to go. Called by the store."""
        with self._lock:
            self._dropped = True
            self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        for file in (self._file, self._offset_file):
            if file is not None:
                file.close()
        self._file = self._offset_file = None

    def _refuse_if_dropped(self) -> None:
        if self._dropped:
            raise _dropped(self.digest)


def _dropped(digest: Digest) -> CorruptError:
    return CorruptError(f"what had arrived of {digest} was dropped; send it from the start")


def _offset_path(partial: Path) -> Path:
    return partial.with_name(partial.name + _offset_suffix)


def _arrived(partial: Path) -> int:
    """Bytes of a partial file that were received; 0 if nobody wrote down how many."""
    try:
        noted = int.from_bytes(_offset_path(partial).read_bytes()[:_offset_bytes], "little")
    except OSError:
        return 0
    return min(noted, _size(partial))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
