"""The demo corpus: the source code of Python's own standard library, which every machine with Python has.

8 to 9 MB, no download. Its text differs between Python versions, so results name its digest and are compared only
with results of the same digest.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from potluck.types.errors import DataError

NAME = "python-stdlib"

_left_out = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__"}
)


def stdlib_root() -> Path:
    """The folder of the standard library: that of the base installation, also within a virtual environment."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files(root: Path | None = None) -> list[Path]:
    """The corpus: `*.py` by relative POSIX path, without tests, generated tables and installed packages.

    DataError if the library's source is not there (some installations ship byte code only).
    """
    root = stdlib_root() if root is None else root
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _left_out]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(
            f"{root} holds no Python source files, so there is no `{NAME}` corpus on this machine; "
            "set `data.shared` to text of your own"
        )
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())
