"""Files that hold keys: readable by their owner only, replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from potluck.types.errors import CorruptError, PotluckError

MAX_PRIVATE_BYTES = 65536


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, mode 0600 from its first byte, and safe on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise PotluckError(
            f"{path} cannot be written ({error.strerror or error}); free space there or mend its permissions"
        ) from error
    if hasattr(os, "O_DIRECTORY"):  # makes the rename itself durable; Windows has no such call
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_private(path: Path, *, what: str) -> bytes:
    """The whole file. `what` is the subject of the sentence when it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PRIVATE_BYTES + 1)
    except OSError as error:
        raise PotluckError(f"{what} in {path} cannot be read: {error.strerror or error}") from error
    if not data or len(data) > MAX_PRIVATE_BYTES:
        raise CorruptError(
            f"{what} in {path} has {len(data)} bytes and should have 1 to {MAX_PRIVATE_BYTES}; "
            "restore the file from a copy, or remove it to begin anew"
        )
    return data
