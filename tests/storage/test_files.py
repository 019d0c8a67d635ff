import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from potluck.storage.files import (
    FolderLock,
    free_bytes,
    is_same_boot,
    note_boot,
    remove_files,
    remove_unfinished,
    unfinished_name,
    write_atomic,
)
from potluck.types.errors import PotluckError, ResourceError


def test_a_file_is_written_from_bytes_or_by_a_function(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_atomic(path, b"one")
    assert path.read_bytes() == b"one"

    def content(file: BinaryIO) -> None:
        file.write(b"two")
        assert path.read_bytes() == b"one"

    write_atomic(path, content, durable=True)
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_one_name_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([n]) * 100_000 for n in range(4)]
    threads = [threading.Thread(target=lambda c=c: [write_atomic(path, c) for _ in range(20)]) for c in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not path.exists() or path.read_bytes() in contents
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)])
def test_a_full_disk_is_named_with_need_and_free(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: BinaryIO) -> None:
        raise OSError(code, "no room")

    monkeypatch.setattr("potluck.types.disk.free_bytes", lambda _: 4096)
    with pytest.raises(ResourceError, match=r"results\.json has 4,096 bytes free and more is needed; free some space"):
        write_atomic(tmp_path / "results.json", full)
    assert list(tmp_path.iterdir()) == []


def test_other_errors_pass(tmp_path: Path) -> None:
    def denied(_: BinaryIO) -> None:
        raise PermissionError(errno.EACCES, "denied")

    with pytest.raises(PermissionError):
        write_atomic(tmp_path / "file", denied)


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") > 0


def test_unfinished_files_are_removed_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123")
    left = [unfinished_name(tmp_path / "file"), unfinished_name(tmp_path / "file")]
    assert len(set(left)) == 2
    for path in left:
        path.write_bytes(b"x")
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert remove_files([tmp_path / "file", tmp_path / "missing"]) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_mark_of_the_start_that_says_nothing_is_another_start(tmp_path: Path) -> None:
    assert is_same_boot(tmp_path)  # never noted
    note_boot(tmp_path)
    assert is_same_boot(tmp_path)
    for content in (b"\xf8\xfe\x00", b"another"):
        (tmp_path / "boot").write_bytes(content)
        assert not is_same_boot(tmp_path)
    (tmp_path / "boot").unlink()
    (tmp_path / "boot").mkdir()
    assert not is_same_boot(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(ResourceError, match="file is a folder and a file of that name is to be written"):
        write_atomic(tmp_path / "file", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_locked_folder_refuses_a_second_user_by_name(tmp_path: Path) -> None:
    reason = rf"state is in use by process {os.getpid()}; stop that one"
    with FolderLock(tmp_path / "state"), pytest.raises(PotluckError, match=reason):
        FolderLock(tmp_path / "state")
    again = FolderLock(tmp_path / "state")
    again.release()
    again.release()
    FolderLock(tmp_path / "state").release()


holder = """
import sys
from pathlib import Path
from potluck.storage.files import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_holds_across_processes_and_ends_with_a_killed_one(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"held"
        with pytest.raises(PotluckError, match=f"in use by process {process.pid};"):
            FolderLock(tmp_path)
        process.kill()
        process.wait()
    FolderLock(tmp_path).release()
