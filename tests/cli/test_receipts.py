"""What an owner reads of what left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from potluck.cli import receipts as module
from potluck.cli.receipts import receipt_line, receipts_json, receipts_text
from potluck.types.errors import PotluckError
from potluck.worker.receipts import FOLDER, Receipt, ReceiptLog, SentTensor

RESULT = Receipt(
    kind="result", time=0.0, run="tiny-1", task="fed_avg.inner", round=2, attempt=0, key="inner", is_update=True,
    scalars={"num_tokens": 640, "loss_sum": 2.5}, num_examples=1200, seconds=1.0,
    tensors=(SentTensor(name="delta", num_bytes=12_345, digest="blake3:ab", codec="int8+ef"),),
)  # fmt: skip
NOTE = Receipt(kind="note", time=0.0, run="tiny-1", text="3 skipped\x1b[2J")


@pytest.mark.parametrize(
    ("receipt", "says"),
    [
        (
            RESULT,
            "tiny-1  result  round 3; fed_avg.inner; num_tokens 640, loss_sum 2.5; delta 12.3 kB int8+ef blake3:ab; "
            "from 1,200 own sequences",
        ),
        (RESULT.model_copy(update={"round": (1 << 40) - 1, "tensors": (), "num_examples": None}),
         "tiny-1  result  fed_avg.inner; num_tokens 640, loss_sum 2.5"),
        (NOTE, "tiny-1  note  3 skipped [2J"),
        (Receipt(kind="enrolment", time=0.0, text="anna"), "-  enrolment  anna"),
        (Receipt(kind="profile", time=0.0, profile={"device": "cpu", "duty": 1.0}, strategy_files={"a.py": "blake3:1"}),
         "-  profile  device, duty, file a.py"),
        (Receipt(kind="heartbeats", time=0.0, run="r"), "r  heartbeats  from now on, counted"),
        (Receipt(kind="pieces", time=0.0, run="r", num_messages=1500, num_bytes=4000),
         "r  pieces  1,500 messages, 4.00 kB, since the line before"),
    ],
)  # fmt: skip
def test_a_line_says_what_left(receipt: Receipt, says: str) -> None:
    assert receipt_line(receipt) == f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(0))}  {says}"


def test_runs_are_listed_with_their_sums_and_the_last_lines_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PotluckError, match="no worker has joined with the state folder"):
        receipts_text(tmp_path, None)
    with ReceiptLog(tmp_path / FOLDER) as log:
        assert receipts_text(tmp_path, None) == "nothing has left this machine\n"
        log.append(RESULT, NOTE, RESULT.model_copy(update={"run": "other"}))
    assert len(receipts_text(tmp_path, None).splitlines()) == 3 + 2
    of_one = receipts_text(tmp_path, "tiny").splitlines()
    assert receipts_text(tmp_path, "tiny-1").splitlines() == of_one
    with pytest.raises(PotluckError, match="--run tin names 0 of the runs here; give one of these: tiny-1, other"):
        receipts_text(tmp_path, "tin")
    assert len(of_one) == 3 and of_one[-1] == (
        "tiny-1: 1 results with 12.3 kB of vectors, of these 1 updates; 0 failures, 1 notes; 0 signs of life and "
        "pieces, 0 B"
    )
    monkeypatch.setattr(module, "shown", 2)
    assert receipts_text(tmp_path, None).splitlines()[0] == "(the last 2; --json has all)"
    found = receipts_json(tmp_path, "other")
    assert [Receipt.model_validate(line).run for line in found["receipts"]] == ["other"]
    assert list(found["totals"]) == ["other"] and found["totals"]["other"]["num_updates"] == 1
