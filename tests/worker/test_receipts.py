"""The log of what left: whole after every death, bounded, and never behind what is sent."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from potluck.types.errors import CorruptError, ResourceError
from potluck.worker import receipts
from potluck.worker.receipts import Receipt, ReceiptBook, ReceiptLog, SentTensor, Totals


def result(number: int, run: str = "r") -> Receipt:
    return Receipt(
        kind="result", time=1000.0 + number, run=run, task="fed_avg.inner", round=number, attempt=0, key="inner",
        scalars={"num_tokens": 640, "loss_sum": 0.1 + number, "slopes": "AAAA"}, is_update=True, num_examples=20,
        tensors=(SentTensor(name="delta", num_bytes=100, digest="blake3:" + "0" * 64, codec="int8+ef"),), seconds=1.5,
    )  # fmt: skip


def append(folder: Path, *given: Receipt) -> None:
    with ReceiptLog(folder) as log:
        log.append(*given)


def until_it_fails(log: ReceiptLog, error: type[BaseException]) -> int:
    """How many were listed before."""
    for number in range(100):
        try:
            log.append(result(number))
        except error:
            return number
    raise AssertionError("it never failed")


def test_what_was_appended_is_read_also_by_the_next_process(tmp_path: Path) -> None:
    given = [
        result(0), Receipt(kind="note", time=1.0, run="r", text="3 records skipped"),
        Receipt(kind="profile", time=2.0, profile={"device": "cpu", "link": {"rtt_s": 0.1}}, strategy_files={"a": "b"}),
        Receipt(kind="heartbeats", time=3.0, run="r", num_messages=7, num_bytes=900), result(1, "s"),
    ]  # fmt: skip
    for each in given:
        with ReceiptLog(tmp_path) as log:
            log.append(each, durable=True)
            assert list(ReceiptBook(tmp_path).receipts())[-1] == each, "while it is open"
    assert list(ReceiptBook(tmp_path).receipts()) == given
    assert list(ReceiptBook(tmp_path).receipts("s")) == given[-1:]
    (path,) = tmp_path.iterdir()
    lines = path.read_bytes().rstrip(b"\0").splitlines()
    assert json.loads(lines[1]) == {"kind": "note", "time": 1.0, "run": "r", "text": "3 records skipped"}


@pytest.mark.parametrize(
    "torn", [b'{"kind":"note","ti', b"\xff\xff", b"{}\n", b'{"kind":"gossip","time":1}', b"[" * 50]
)
def test_a_torn_line_is_counted_and_costs_no_other(tmp_path: Path, torn: bytes) -> None:
    append(tmp_path, result(0))
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    end = len(content.rstrip(b"\0"))
    path.write_bytes(content[:end] + torn + content[end + len(torn) :])
    append(tmp_path, result(1))
    book = ReceiptBook(tmp_path)
    assert list(book.receipts()) == [result(0), result(1)]
    assert book.num_unreadable == 1


def test_numbers_that_are_none_come_back(tmp_path: Path) -> None:
    given = Receipt(kind="result", time=1.0, scalars={"loss_sum": float("inf")})
    append(tmp_path, given)
    assert list(ReceiptBook(tmp_path).receipts()) == [given]


def test_old_files_are_summed_up_and_removed(tmp_path: Path) -> None:
    with ReceiptLog(tmp_path, file_bytes=4096, keep_files=2, block_bytes=512) as log:
        for number in range(100):
            log.append(result(number, "r" if number % 2 else "s"))
    kept = list(ReceiptBook(tmp_path).receipts())
    assert kept == [result(n, "r" if n % 2 else "s") for n in range(100 - len(kept), 100)]
    assert 10 < len(kept) < 60 and sum(p.stat().st_size for p in tmp_path.iterdir()) < 3 * 4096
    expected = Totals(
        since=1001.0, until=1099.0, num_results=50, num_updates=50, tensor_bytes=5000,
    )  # fmt: skip
    assert ReceiptBook(tmp_path).totals() == {
        "r": expected, "s": expected.model_copy(update={"since": 1000.0, "until": 1098.0})
    }  # fmt: skip


def test_a_kill_between_the_sums_and_the_removal_counts_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"file_bytes": 1024, "keep_files": 1, "block_bytes": 128}
    unlink = Path.unlink

    def killed(path: Path, **options: Any) -> None:
        if path.suffix == ".jsonl":
            raise KeyboardInterrupt
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", killed)
    with ReceiptLog(tmp_path, **small) as log:
        number = until_it_fails(log, KeyboardInterrupt)
    monkeypatch.setattr(Path, "unlink", unlink)
    assert ReceiptBook(tmp_path).totals()["r"].num_results == number, "the last was not written, so it was not sent"
    with ReceiptLog(tmp_path, **small) as log:
        for more in range(30):
            log.append(result(number + more))
    assert ReceiptBook(tmp_path).totals()["r"].num_results == number + 30
    (tmp_path / "totals.json").write_text("{")
    with pytest.raises(CorruptError, match=r"totals.json cannot be read; move it away"):
        ReceiptBook(tmp_path).totals()


def test_on_a_full_disk_lines_go_on_into_the_room_that_was_taken_and_then_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = ReceiptLog._put

    def full(self: ReceiptLog, at: int, data: bytes) -> None:
        if at + len(data) > self._room:
            raise OSError(errno.ENOSPC, "no space left")
        put(self, at, data)

    with ReceiptLog(tmp_path, block_bytes=2048) as log:
        monkeypatch.setattr(ReceiptLog, "_put", full)
        num_listed = until_it_fails(log, ResourceError)
        assert 3 <= num_listed <= 2048 // len(result(0).to_line())
        with pytest.raises(ResourceError, match=r"0000000001.jsonl has [0-9,]+ bytes free and 2,048 bytes are needed"):
            log.append(result(99))
        monkeypatch.setattr(ReceiptLog, "_put", put)
        log.append(result(num_listed))
    assert [r.round for r in ReceiptBook(tmp_path).receipts()] == list(range(num_listed + 1))


def test_no_room_for_a_first_block_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(ReceiptLog, "_put", full)
    with pytest.raises(ResourceError, match="bytes are needed; free some space"):
        ReceiptLog(tmp_path / "receipts")
    assert receipts.file_bytes * receipts.keep_files == 64 << 20
