from pathlib import Path

import pytest

from potluck.data.sources import corpus_digest, find_sources
from potluck.data.stdlib import stdlib_files, stdlib_root
from potluck.types.errors import DataError


def test_the_corpus_is_the_librarys_source_in_order() -> None:
    files = [path.relative_to(stdlib_root()).as_posix() for path in stdlib_files()]
    assert files == sorted(files)
    assert {"argparse.py", "asyncio/tasks.py", "json/decoder.py"} <= set(files)
    size = sum(path.stat().st_size for path in stdlib_files())
    assert 5e6 < size < 15e6


def test_tests_tables_and_installed_packages_are_left_out(tmp_path: Path) -> None:
    for name in (
        "b.py", "a/c.py", "a.py", "a/data.txt", "site-packages/x.py", "dist-packages/x.py", "test/x.py", "a/tests/x.py",
        "idlelib/x.py", "lib2to3/x.py", "encodings/x.py", "pydoc_data/x.py", "test.py",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    assert [p.relative_to(tmp_path).as_posix() for p in stdlib_files(tmp_path)] == ["a.py", "a/c.py", "b.py", "test.py"]


def test_a_library_without_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no Python source files.*data\.shared"):
        stdlib_files(tmp_path)


def test_the_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    sources, unknown = find_sources(["python-stdlib"], format="auto", base=tmp_path)
    assert not unknown and len(sources) == len(stdlib_files())
    first = corpus_digest(sources)
    assert first == corpus_digest(sources)
    assert first != corpus_digest(sources[1:])
