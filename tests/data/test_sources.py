from pathlib import Path

import numpy as np
import pytest

from potluck.data.sources import corpus_digest, find_sources
from potluck.types.errors import DataError


def names(paths: list[str], base: Path, format: str = "auto") -> list[tuple[str, str, bool]]:
    sources, _ = find_sources(paths, format=format, base=base)  # pyright: ignore[reportArgumentType]
    return [(s.name, s.kind, s.named) for s in sources]


def test_kinds_go_by_name_in_a_folder(tmp_path: Path) -> None:
    for name in ("b.txt", "a/x.jsonl", "a/y.parquet", "a/z.MD", "photo.jpg", ".hidden/x.txt", ".x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    sources, unknown = find_sources([tmp_path], format="auto", base=tmp_path)
    assert [(s.name, s.kind) for s in sources] == [
        ("a/x.jsonl", "jsonl"),
        ("a/y.parquet", "parquet"),
        ("a/z.MD", "text"),
        ("b.txt", "text"),
    ]
    assert [p.name for p in unknown] == ["photo.jpg"]


def test_a_named_file_is_text_unless_its_name_says_more(tmp_path: Path) -> None:
    for name in ("notes", "a.jsonl"):
        (tmp_path / name).write_text("x")
    assert names(["notes", "a.jsonl"], tmp_path) == [("notes", "text", True), ("a.jsonl", "jsonl", True)]
    assert names(["a.jsonl"], tmp_path, "text") == [("a.jsonl", "text", True)]


def test_globs_are_followed_and_nothing_counts_twice(tmp_path: Path) -> None:
    for name in ("a1.txt", "a2.txt", "b.txt"):
        (tmp_path / name).write_text("x")
    assert names(["a*.txt", "a2.txt"], tmp_path) == [("a1.txt", "text", False), ("a2.txt", "text", True)]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["nowhere.txt"], r"nowhere\.txt does not exist; check the path"),
        (["empty"], "holds no files and one data file is needed"),
        (["pictures"], "holds 1 files of no known kind"),
        (["none*.txt"], "holds no files"),
        ([], "no data was given"),
        (["a.txt", "t.npy"], "1 of 2 data files are arrays of tokens"),
    ],
)
def test_a_wrong_path_is_named(tmp_path: Path, paths: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/x.jpg").write_bytes(b"x")
    (tmp_path / "a.txt").write_text("x")
    np.save(tmp_path / "t.npy", np.zeros(3, np.uint16))
    with pytest.raises(DataError, match=message):
        find_sources(paths, format="auto", base=tmp_path)


def test_the_digest_depends_on_content_and_name_but_not_on_place(tmp_path: Path) -> None:
    def digest(folder: str, name: str, text: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(text)
        return corpus_digest(find_sources([tmp_path / folder / name], format="auto", base=tmp_path)[0])

    assert digest("a", "x.txt", "one") == digest("b", "x.txt", "one")
    assert len({digest("c", "x.txt", "one"), digest("d", "y.txt", "one"), digest("e", "x.txt", "two")}) == 3
