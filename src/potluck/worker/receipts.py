"""Receipts: what left this machine, line by line, written before it is sent.

    STATE/receipts/0000000001.jsonl     JSON objects, oldest first; the last file is the one that is written
    STATE/receipts/totals.json          what files that are gone held, summed up for each run

Room is taken ahead, in blocks of zeros that lines are then written over: on a disk that fills up meanwhile the next
lines still fit, and once they do not, nothing is sent any more. A kill leaves whole lines; a power cut may tear the
last one, which readers count and pass over. The oldest of `keep_files` full files is summed up and removed for a new
one: a worker's receipts take 64 MiB at most, which are some 150,000 results.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from potluck.storage.files import write_atomic
from potluck.types.disk import full_disk_named
from potluck.types.errors import CorruptError, ResourceError

FOLDER = "receipts"
file_bytes, keep_files = 4 << 20, 16
block_bytes = 128 << 10
"""Taken at once, when less than half of it is left: on a disk that is full by then, some 200 lines still fit."""

Kind = Literal["enrolment", "profile", "result", "failure", "note", "heartbeats", "pieces"]
Value = int | float | str


class SentTensor(BaseModel):
    """A vector that left as an object, or a tensor that left inline."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    num_bytes: int
    digest: str = ""  # of an object
    codec: str = ""


class Receipt(BaseModel):
    """One line. What is at its default is left out of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    kind: Kind
    time: float  # seconds since 1970
    run: str = ""
    task: str = ""
    round: int | None = None  # as the coordinator counts, from 0; beyond 2^40 where a task belongs to none
    attempt: int | None = None
    key: str = ""
    scalars: dict[str, Value] = {}
    tensors: tuple[SentTensor, ...] = ()
    is_update: bool = False  # trained on the owner's own text
    num_examples: int | None = None  # different sequences of the owner's own text that it stands on
    seconds: float = 0.0  # that the device worked on it
    text: str = ""  # note, failure: the sentence; enrolment: the name
    profile: dict[str, Any] = {}
    strategy_files: dict[str, str] = {}  # beside a profile: digests by name
    num_messages: int = 0  # heartbeats, pieces: since the last such line; 0: they begin
    num_bytes: int = 0

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    def to_line(self) -> bytes:
        return self.model_dump_json(exclude_defaults=True).encode() + b"\n"


class Totals(BaseModel):
    """What left in a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    since: float = 0.0  # seconds since 1970: of its first receipt, and of its last
    until: float = 0.0
    num_results: int = 0
    num_updates: int = 0
    tensor_bytes: int = 0
    num_failures: int = 0
    num_notes: int = 0
    num_messages: int = 0  # heartbeats and pieces
    message_bytes: int = 0

    def plus(self, receipt: Receipt) -> Totals:
        return Totals(
            since=min(self.since or receipt.time, receipt.time),
            until=max(self.until, receipt.time),
            num_results=self.num_results + (receipt.kind == "result"),
            num_updates=self.num_updates + receipt.is_update,
            tensor_bytes=self.tensor_bytes + receipt.tensor_bytes,
            num_failures=self.num_failures + (receipt.kind == "failure"),
            num_notes=self.num_notes + (receipt.kind == "note"),
            num_messages=self.num_messages + receipt.num_messages,
            message_bytes=self.message_bytes + receipt.num_bytes,
        )


class _SummedUp(BaseModel):
    """`totals.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    through: int = 0  # the number of the last file that is in the sums
    runs: dict[str, Totals] = {}

    @staticmethod
    def load(folder: Path) -> _SummedUp:
        path = folder / "totals.json"
        try:
            return _SummedUp.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return _SummedUp()
        except ValidationError as error:
            raise CorruptError(f"{path} cannot be read; move it away to begin anew, without the oldest sums") from error

    def save(self, folder: Path) -> None:
        write_atomic(folder / "totals.json", self.model_dump_json().encode(), durable=True)


class ReceiptLog:
    """Appends receipts. One process at a time; its methods block and may be called from any thread."""

    def __init__(
        self, folder: Path, *, file_bytes: int = file_bytes, keep_files: int = keep_files,
        block_bytes: int = block_bytes,
    ) -> None:  # fmt: skip
        """ResourceError if the disk has no room for a first block."""
        self.folder = folder
        self._file_bytes, self._keep_files, self._block_bytes = file_bytes, keep_files, block_bytes
        self._lock = threading.Lock()
        with full_disk_named(folder, block_bytes):
            folder.mkdir(parents=True, exist_ok=True)
        files = _files(folder)
        self._open(files[-1] if files else _path(folder, _SummedUp.load(folder).through + 1))

    def __enter__(self) -> ReceiptLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, *receipts: Receipt, durable: bool = False) -> None:
        """`durable`: safe from a power cut too. ResourceError where the disk is full: nothing may be sent then."""
        lines = b"".join(each.to_line() for each in receipts)
        with self._lock:
            if self._end and self._end + len(lines) > self._file_bytes:
                self._begin_another()
            self._write(lines)
            if durable:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._file.close()

    def _open(self, path: Path) -> None:
        self._path = path
        with full_disk_named(path, self._block_bytes):
            self._file: BinaryIO = path.open("r+b" if path.exists() else "x+b", buffering=0)
        try:
            content = self._file.read()
            self._room, self._end = len(content), len(content.rstrip(b"\0"))
            if self._end and content[self._end - 1] != ord("\n"):
                self._write(b"\n")  # after a torn line
            self._take_room(1)
        except BaseException:
            self._file.close()
            raise

    def _begin_another(self) -> None:
        path, file, room, end = self._path, self._file, self._room, self._end
        try:
            self._open(_path(self.folder, _number(path) + 1))
        except BaseException:  # on a full disk the old one goes on
            self._path, self._file, self._room, self._end = path, file, room, end
            raise
        file.truncate(end)
        file.close()
        for spent in _files(self.folder)[: -self._keep_files]:
            _sum_up(self.folder, spent)

    def _write(self, data: bytes) -> None:
        self._take_room(len(data))
        with full_disk_named(self._path, len(data)):  # some disks need room to write over zeros
            self._put(self._end, data)
        self._end += len(data)

    def _take_room(self, num_bytes: int) -> None:
        """Have that many bytes beyond the last line, and more."""
        left = self._room - self._end - num_bytes
        if left >= self._block_bytes // 2:
            return
        more = max(self._block_bytes, -left)
        try:
            with full_disk_named(self._path, more):
                self._put(self._room, bytes(more))
            self._room += more
        except ResourceError:
            if left < 0:
                raise

    def _put(self, at: int, data: bytes) -> None:
        self._file.seek(at)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]


class ReceiptBook:
    """What a folder of receipts says; a worker may write to it meanwhile. All methods block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_unreadable = 0  # lines, of what was read so far

    def receipts(self, run: str = "") -> Iterator[Receipt]:
        """Oldest first; of one run, if it is named."""
        for path in _files(self.folder):
            yield from (each for each in self._read(path, run.encode()) if not run or each.run == run)

    def totals(self) -> dict[str, Totals]:
        """By run, of all receipts there ever were; "" for what belongs to none."""
        before = _SummedUp.load(self.folder)
        files = [path for path in _files(self.folder) if _number(path) > before.through]
        return _summed((each for path in files for each in self._read(path)), before.runs)

    def _read(self, path: Path, part: bytes = b"") -> Iterator[Receipt]:
        """The receipts whose lines have `part` in them: to read one takes 40 us."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # summed up meanwhile
            return
        for line in content.rstrip(b"\0").split(b"\n"):
            if not line or part not in line:
                continue
            try:
                yield Receipt.model_validate_json(line)
            except ValidationError:
                self.num_unreadable += 1


def _sum_up(folder: Path, path: Path) -> None:
    """Add a file to the totals and remove it. A kill on the way counts nothing twice."""
    before = _SummedUp.load(folder)
    if _number(path) > before.through:
        runs = _summed(ReceiptBook(folder)._read(path), before.runs)  # pyright: ignore[reportPrivateUsage]
        _SummedUp(through=_number(path), runs=runs).save(folder)
    path.unlink(missing_ok=True)


def _summed(receipts: Iterable[Receipt], before: Mapping[str, Totals]) -> dict[str, Totals]:
    totals = dict(before)
    for receipt in receipts:
        totals[receipt.run] = totals.get(receipt.run, Totals()).plus(receipt)
    return totals


def _files(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(path for path in folder.glob("*.jsonl") if path.stem.isdecimal())


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:010}.jsonl"


def _number(path: Path) -> int:
    return int(path.stem)
