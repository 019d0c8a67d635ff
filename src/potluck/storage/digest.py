"""Digests of bytes and files: `sha256:hex`.

SHA-256 because every processor of the last years has instructions for it: 1.7 GB/s on a small server, twice what
BLAKE2 reaches, and faster than any link that an object crosses.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from potluck.types.errors import Refused
from potluck.types.ids import Digest

_algorithm = "sha256"
_form = re.compile(r"sha256:[0-9a-f]{64}")


class Hasher:
    """A digest of what is fed to it piece by piece."""

    def __init__(self) -> None:
        self._hash = hashlib.new(_algorithm, usedforsecurity=True)

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._hash.update(data)

    def digest(self) -> Digest:
        return Digest(f"{_algorithm}:{self._hash.hexdigest()}")


def digest_bytes(data: bytes | bytearray | memoryview) -> Digest:
    return Digest(f"{_algorithm}:{hashlib.new(_algorithm, data).hexdigest()}")


def digest_file(path: Path) -> Digest:
    """Reads the file once, in pieces."""
    with path.open("rb") as file:
        return Digest(f"{_algorithm}:{hashlib.file_digest(file, _algorithm).hexdigest()}")


def check_digest(text: str) -> Digest:
    """A digest that came from elsewhere, now safe as a file name. Refused if it is not one."""
    if not _form.fullmatch(text):
        raise Refused(f"{text[:100]!r} is not a digest of the form sha256 and 64 hexadecimal digits")
    return Digest(text)


def file_name(digest: Digest) -> str:
    """The digest as a file name on every system. Refused if it is not a digest."""
    return check_digest(digest).replace(":", "-")


def from_file_name(name: str) -> Digest | None:
    """The digest that a file is named by, None for other names."""
    text = name.replace("-", ":", 1)
    return Digest(text) if _form.fullmatch(text) else None
