"""Documents from text files, JSON lines, parquet files and saved `datasets` directories; nothing is held whole.

A text file is one document. Longer than 1 MiB, it becomes several, cut at blank lines where there are any. In JSON
lines and tables each row is one, or whatever a `Form` makes of it. A row that cannot be used is skipped, counted and
reported with its place; a source without a single usable one is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from potluck.data.forms import Form, TextForm, Unusable
from potluck.data.sources import Source, unreadable
from potluck.types.errors import DataError

MAX_DOCUMENT_BYTES = 1 << 20  # of a text file; records of other formats are taken as they are
MAX_LINE_BYTES = 64 << 20
_max_reported = 20
T = TypeVar("T")


@dataclass(frozen=True)
class Skipped:
    """Something that could not be used. `line` counts from 1 (a row of a table too); 0 means the whole file."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}" if self.line else f"{self.file}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class ReadReport:
    """What reading brought. `skipped` is for the data's owner only: it names files; `sentence()` does not."""

    num_documents: int = 0
    num_bytes: int = 0  # of text, in UTF-8
    num_skipped: int = 0
    skipped: tuple[Skipped, ...] = ()  # the first 20
    truncated: bool = False  # `max_bytes` was reached
    num_cut: int = 0  # records that lost their beginning, for they are longer than a sequence

    @property
    def is_flawed(self) -> bool:
        """Whether something of it was left out that `max_bytes` does not explain."""
        return self.num_skipped + self.num_cut > 0

    def sentence(self) -> str:
        """Counts only: fit to be sent to others."""
        end = ", the rest left out by `max_bytes`" if self.truncated else ""
        skipped = f"; {self.num_skipped:,} records or files skipped" if self.num_skipped else ""
        cut = f"; {self.num_cut:,} records cut at their beginning" if self.num_cut else ""
        return f"{self.num_documents:,} documents, {self.num_bytes / 1e6:.1f} MB of text{end}{skipped}{cut}"

    def joined(self, other: ReadReport) -> ReadReport:
        """Of two readings together."""
        return ReadReport(
            num_documents=self.num_documents + other.num_documents,
            num_bytes=self.num_bytes + other.num_bytes,
            num_skipped=self.num_skipped + other.num_skipped,
            skipped=(*self.skipped, *other.skipped)[:_max_reported],
            truncated=self.truncated or other.truncated,
            num_cut=self.num_cut + other.num_cut,
        )

    def to_json(self) -> dict[str, Any]:
        skipped = [[s.file, s.line, s.reason] for s in self.skipped]
        return {
            "num_documents": self.num_documents,
            "num_bytes": self.num_bytes,
            "num_skipped": self.num_skipped,
            "skipped": skipped,
            "truncated": self.truncated,
            "num_cut": self.num_cut,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> ReadReport:
        skipped = tuple(Skipped(str(f), int(n), str(r)) for f, n, r in value["skipped"])
        return ReadReport(
            num_documents=int(value["num_documents"]),
            num_bytes=int(value["num_bytes"]),
            num_skipped=int(value["num_skipped"]),
            skipped=skipped,
            truncated=bool(value["truncated"]),
            num_cut=int(value["num_cut"]),
        )


@dataclass
class Reader:
    """Reads documents and keeps count. Each pass over the same sources gives the same documents."""

    sources: Sequence[Source]
    text_field: str = "text"
    max_bytes: int = 0
    unknown: Sequence[Path] = ()
    _num_documents: int = 0
    _num_bytes: int = 0
    _num_skipped: int = 0
    _skipped: list[Skipped] = field(default_factory=list[Skipped])
    _truncated: bool = False

    def report(self) -> ReadReport:
        """Of the last pass."""
        return ReadReport(
            num_documents=self._num_documents,
            num_bytes=self._num_bytes,
            num_skipped=self._num_skipped,
            skipped=tuple(self._skipped),
            truncated=self._truncated,
        )

    def documents(self) -> Iterator[str]:
        """One pass. DataError if a named file cannot be used, or if nothing at all was found."""
        return self.records(TextForm(self.text_field))

    def records(self, form: Form[T]) -> Iterator[T]:
        """As `documents`, with what `form` makes of each row. Only `TextForm` goes with text files."""
        self._num_documents = self._num_bytes = self._num_skipped = 0
        self._skipped, self._truncated = [], False
        for path in self.unknown:
            self._skip(path.name, 0, f"files named {path.suffix or 'without an ending'} are of no known kind")
        for source in self.sources:
            before, skipped_before = self._num_documents, len(self._skipped)
            try:
                for document, num_bytes in self._read(source, form):
                    if self.max_bytes and self._num_bytes + num_bytes > self.max_bytes and self._num_documents:
                        self._truncated = True
                        return
                    self._num_documents += 1
                    self._num_bytes += num_bytes
                    yield document
            except OSError as error:
                self._fault(source, unreadable(source.path, error))
            except DataError as error:
                self._fault(source, error)
            else:
                if self._num_documents == before and source.named:
                    reasons = self._skipped[skipped_before:]
                    why = f"none of its records can be used ({reasons[0]})" if reasons else "it is empty"
                    raise DataError(f"{source.path} holds no text: {why}; mend it or leave it out")
        if not self._num_documents:
            why = f"; the first of {self._num_skipped} faults: {self._skipped[0]}" if self._skipped else ""
            raise DataError(f"{len(self.sources)} data files were read and none holds text{why}")

    def _fault(self, source: Source, error: DataError) -> None:
        if source.named:
            raise error
        self._skip(source.name, 0, str(error))

    def _skip(self, file: str, line: int, reason: str) -> None:
        self._num_skipped += 1
        if len(self._skipped) < _max_reported:
            self._skipped.append(Skipped(file, line, reason))

    def _read(self, source: Source, form: Form[T]) -> Iterator[tuple[T, int]]:
        match source.kind:
            case "text":
                return (form.of_row({form.required[0]: text}) for text in self._text(source))
            case "jsonl":
                return self._json_lines(source, form)
            case "parquet":
                return self._parquet(source, form)
            case "datasets":
                return self._saved_dataset(source, form)
            case "tokens":
                raise AssertionError("arrays of tokens are opened, not read")

    def _text(self, source: Source) -> Iterator[str]:
        """A file that is not text is found out before its first document is handed on, if it is not a long one."""
        offset, rest = 0, b""
        with source.path.open("rb") as file:
            while True:
                block = file.read(MAX_DOCUMENT_BYTES - len(rest))
                data = rest + block
                if not data:
                    return
                at_end = len(data) < MAX_DOCUMENT_BYTES
                cut = len(data) if at_end else _cut(data)
                text = _decode(source.path, data[:cut], offset)
                if text.strip():
                    yield text
                offset, rest = offset + cut, data[cut:]
                if at_end:
                    return

    def _json_lines(self, source: Source, form: Form[T]) -> Iterator[tuple[T, int]]:
        with source.path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    self._skip(source.name, number, f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE_BYTES)
                    continue
                if not line.strip():
                    continue
                try:
                    value: Any = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                except (ValueError, RecursionError) as error:
                    self._skip(source.name, number, f"not JSON: {error}")
                    continue
                if not isinstance(value, dict):
                    self._skip(source.name, number, f"a JSON object is needed, not a {type(value).__name__}")
                elif missing := [name for name in form.required if name not in value]:
                    self._skip(source.name, number, f"it has no field {missing[0]!r}")
                else:
                    yield from self._usable(source, number, value, form)

    def _usable(self, source: Source, number: int, row: Mapping[str, Any], form: Form[T]) -> Iterator[tuple[T, int]]:
        try:
            made = form.of_row(row)
        except Unusable as reason:
            self._skip(source.name, number, str(reason))
        else:
            yield made

    def _parquet(self, source: Source, form: Form[T]) -> Iterator[tuple[T, int]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(source.path) as file:
                columns = _columns(source, file.schema_arrow.names, form)
                number = 0
                for batch in file.iter_batches(batch_size=256, columns=columns):
                    for row in batch.to_pylist():
                        number += 1
                        yield from self._usable(source, number, row, form)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise DataError(
                f"{source.path} is not a whole parquet file: {_first_line(error)}; write it again"
            ) from error

    def _saved_dataset(self, source: Source, form: Form[T]) -> Iterator[tuple[T, int]]:
        import datasets

        try:
            loaded: Any = datasets.load_from_disk(str(source.path))
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise DataError(
                f"{source.path} is not a whole saved dataset: {_first_line(error)}; save it again with `save_to_disk`"
            ) from error
        if isinstance(loaded, datasets.DatasetDict):
            splits = [str(name) for name in loaded]
            if "train" not in splits:
                raise DataError(
                    f"{source.path} has the splits {', '.join(splits)} and none named train; name one's folder"
                )
            loaded = loaded["train"]
        columns = _columns(source, list(loaded.column_names), form)
        for number, row in enumerate(loaded.select_columns(columns), start=1):
            yield from self._usable(source, number, row, form)


def _columns(source: Source, there: Sequence[str], form: Form[Any]) -> list[str]:
    """Those of a table that the form reads."""
    if missing := [name for name in form.required if name not in there]:
        raise DataError(
            f"{source.path} has the columns {', '.join(there[:20])} and none named {missing[0]!r}; set `{form.setting}`"
        )
    return [*form.required, *(name for name in form.optional if name in there)]


def _cut(data: bytes) -> int:
    """Where a long text is cut: after the last blank line, else line, of its second half, else between characters."""
    half = len(data) // 2
    for mark in (b"\n\n", b"\n\r\n", b"\n"):
        at = data.rfind(mark, half)
        if at >= 0:
            return at + len(mark)
    cut = len(data)
    while cut > len(data) - 4 and data[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1 if data[cut - 1] >= 0xC0 else cut


def _decode(path: Path, data: bytes, offset: int) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        at, what = offset + error.start, f"byte 0x{data[error.start]:02x} is not valid UTF-8"
    else:
        zero = data.find(0)
        if zero < 0:
            return text.removeprefix("\ufeff") if offset == 0 else text
        at, what = offset + zero, "a zero byte"
    raise DataError(f"{path} is not text: {what} at byte offset {at:,}; convert it to UTF-8 or leave it out")


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:200]
