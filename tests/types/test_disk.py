import errno
import os
from pathlib import Path

import pytest

from potluck.types.disk import free_bytes, full_disk_named, require_free, reserve
from potluck.types.errors import ResourceError


def test_free_bytes_are_those_of_the_disk_that_would_hold_it(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "there") > 0


def test_too_little_room_is_said_with_need_and_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.types.disk.free_bytes", lambda _: 999)
    require_free(tmp_path, 999)
    with pytest.raises(ResourceError, match=r"has 999 bytes free and 1,000 bytes are needed; free some space"):
        require_free(tmp_path, 1000)


def test_only_a_full_disk_is_translated(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=f"{tmp_path.name} has"), full_disk_named(tmp_path):
        raise OSError(errno.ENOSPC, "no space")
    with pytest.raises(FileNotFoundError), full_disk_named(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "missing")


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot set room aside")
def test_room_that_is_set_aside_is_there_or_the_file_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"something else")
    reserve(tmp_path / "file", 1 << 20)
    assert (tmp_path / "file").read_bytes() == bytes(1 << 20)
    assert (tmp_path / "file").stat().st_blocks * 512 >= 1 << 20

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(ResourceError, match="1,048,576 bytes are needed"):
        reserve(tmp_path / "other", 1 << 20)
    assert not (tmp_path / "other").exists()
