import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from potluck.data.readers import MAX_DOCUMENT_BYTES, Reader, ReadReport
from potluck.data.sources import find_sources
from potluck.types.errors import DataError


def read(base: Path, *paths: str, **options: Any) -> tuple[list[str], ReadReport]:
    sources, unknown = find_sources(paths, format=options.pop("format", "auto"), base=base)
    reader = Reader(sources, unknown=unknown, **options)
    documents = list(reader.documents())
    assert documents == list(reader.documents()), "two passes must agree"
    return documents, reader.report()


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffgrün\r\n\r\nzwei\n".encode())
    (tmp_path / "b.txt").write_text("b")
    documents, report = read(tmp_path, "a.txt", "b.txt")
    assert documents == ["grün\r\n\r\nzwei\n", "b"]
    assert report == ReadReport(num_documents=2, num_bytes=15)
    assert ReadReport.from_json(json.loads(json.dumps(report.to_json()))) == report


@pytest.mark.parametrize("separator", ["\n\n", "\n", ""])
def test_a_long_text_is_cut_and_nothing_is_lost(tmp_path: Path, separator: str) -> None:
    text = separator.join("€" * 99 for _ in range(9000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    documents, _ = read(tmp_path, "a.txt")
    assert "".join(documents) == text
    assert len(documents) == 3
    assert all(len(d.encode()) <= MAX_DOCUMENT_BYTES for d in documents)
    assert all(d.endswith(separator) for d in documents[:-1])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"good\xff", r"byte 0xff is not valid UTF-8 at byte offset 4"),
        (b"\x89PNG\r\n", r"byte 0x89 is not valid UTF-8 at byte offset 0"),
        (b"abc\0def", r"a zero byte at byte offset 3"),
        (b"", "holds no text: it is empty"),
        (b" \n\t\n", "holds no text: it is empty"),
        (b"x" * MAX_DOCUMENT_BYTES + b"yz\xfe", r"0xfe is not valid UTF-8 at byte offset 1,048,578"),
    ],
)
def test_a_named_file_that_is_not_text_is_an_error(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "bad.txt").write_bytes(data)
    with pytest.raises(DataError, match=r"bad\.txt.*" + message):
        read(tmp_path, "bad.txt")


def test_one_bad_file_among_many_in_a_folder_is_skipped_and_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "c.jpg").write_bytes(b"\xff")
    documents, report = read(tmp_path, ".")
    assert documents == ["good"]
    assert report.num_skipped == 2
    assert str(report.skipped[0]) == "c.jpg: files named .jpg are of no known kind"
    assert report.skipped[1].file == "b.txt" and "byte offset 0" in report.skipped[1].reason
    assert "b.txt" not in report.sentence() and "2 records or files skipped" in report.sentence()


def test_a_folder_without_any_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"2 data files were read and none holds text; the first of 1 faults: b\.txt"):
        read(tmp_path, ".")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")
    sources, _ = find_sources(["a.txt"], format="auto", base=tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"a\.txt cannot be read: Permission denied; check"):
        list(Reader(sources).documents())


LINES = [
    b'{"text": "one"}',
    b'{"text": "cut',
    b"",
    b'{"other": 1}',
    b'{"text": 5}',
    b'["text"]',
    b'{"text": " "}',
    b'{"text": "\\ud800"}',
    b'{"text": "\xff"}',
    b"[" * 200_000,
    '{"text": "zwölf"}'.encode(),
]


def test_bad_json_lines_among_good_ones_are_skipped_and_reported(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(LINES))
    documents, report = read(tmp_path, "a.jsonl")
    assert documents == ["one", "zwölf"]
    assert [(s.file, s.line) for s in report.skipped] == [("a.jsonl", n) for n in (2, 4, 5, 6, 7, 8, 9, 10)]
    assert report.num_skipped == 8
    assert str(report.skipped[1]) == "a.jsonl:4: it has no field 'text'"
    assert report.skipped[2].reason == "'text' holds no text but a int"


def test_json_lines_that_are_all_bad_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"body": "x"}\n{"body": "y"}\n')
    with pytest.raises(DataError, match=r"none of its records can be used \(a\.jsonl:1: it has no field 'text'\)"):
        read(tmp_path, "a.jsonl")
    assert read(tmp_path, "a.jsonl", text_field="body")[0] == ["x", "y"]


def test_only_the_first_twenty_faults_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"x\n" * 50 + b'{"text": "y"}')
    _, report = read(tmp_path, "a.jsonl")
    assert report.num_skipped == 50 and len(report.skipped) == 20


def test_an_endless_line_is_skipped_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.data.readers.MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + b"x" * (3 << 20) + b'"}\n{"text": "y"}\n')
    documents, report = read(tmp_path, "a.jsonl")
    assert documents == ["y"]
    assert str(report.skipped[0]) == "a.jsonl:1: the line is longer than 1 MiB"


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None, "", "b"], "n": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    documents, report = read(tmp_path, "a.parquet")
    assert documents == ["a", "b"]
    assert [(s.line, s.reason) for s in report.skipped] == [
        (2, "'text' holds no text but a NoneType"),
        (3, "'text' is empty"),
    ]
    with pytest.raises(DataError, match=r"has the columns text, n and none named 'body'; set `data\.text_field`"):
        read(tmp_path, "a.parquet", text_field="body")


@pytest.mark.parametrize("data", [b"", b"PAR1 nothing PAR1", b"plain text"])
def test_a_parquet_file_cut_short_is_an_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet is not a whole parquet file"):
        read(tmp_path, "a.parquet")


def test_saved_datasets_are_read(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a", "", "b"], "n": [1, 2, 3]})
    rows.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(str(tmp_path / "splits"))
    datasets.DatasetDict(test=rows).save_to_disk(str(tmp_path / "untrained"))
    documents, report = read(tmp_path, "plain")
    assert documents == ["a", "b"]
    assert [(s.file, s.line) for s in report.skipped] == [("plain", 2)]
    assert read(tmp_path, "splits")[0] == ["a", "b"]
    assert read(tmp_path, "splits/test")[0] == ["a", "b"]
    with pytest.raises(DataError, match="has the splits test and none named train"):
        read(tmp_path, "untrained")
    with pytest.raises(DataError, match="none named 'body'"):
        read(tmp_path, "plain", text_field="body")
    (tmp_path / "plain/state.json").write_text("{}")
    with pytest.raises(DataError, match="is not a whole saved dataset"):
        read(tmp_path, "plain")


def test_reading_stops_at_max_bytes_and_says_so(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 10)
    documents, report = read(tmp_path, ".", max_bytes=25)
    assert documents == ["a" * 10, "b" * 10]
    assert report.truncated and "left out by `max_bytes`" in report.sentence()
