"""`receipts`: what left this machine, from a worker's own log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from potluck.cli.units import format_bytes
from potluck.types.errors import PotluckError
from potluck.types.untrusted import printable
from potluck.worker.receipts import FOLDER, Receipt, ReceiptBook, Totals

shown = 1000
"""Lines for people at most: the last ones. --json has all."""
beyond_rounds = 1 << 39


def receipts_json(state: Path, run: str | None) -> dict[str, Any]:
    """All receipts, and the sums of those that were removed to make room with them. PotluckError."""
    book, totals, id = _found(state, run)
    receipts = [each.model_dump(exclude_defaults=True) for each in book.receipts(id)]
    sums = {name: each.model_dump() for name, each in totals.items()}
    return {"receipts": receipts, "totals": sums, "unreadable_lines": book.num_unreadable}


def receipts_text(state: Path, run: str | None) -> str:
    book, totals, id = _found(state, run)
    last = deque(book.receipts(id), maxlen=shown + 1)
    lines = [receipt_line(each) for each in list(last)[-shown:]]
    if len(last) > shown:
        lines.insert(0, f"(the last {shown:,}; --json has all)")
    if book.num_unreadable:
        lines.append(f"{book.num_unreadable} lines cannot be read")
    lines += [f"{printable(name, 100) or 'no run'}: {totals_text(each)}" for name, each in totals.items()]
    return "\n".join(lines) + "\n" if lines else "nothing has left this machine\n"


def receipt_line(receipt: Receipt) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(receipt.time))
    return printable(f"{when}  {receipt.run or '-'}  {receipt.kind}  {'; '.join(_parts(receipt))}", 4000)


def _parts(receipt: Receipt) -> Iterator[str]:
    match receipt.kind:
        case "result":
            if receipt.round is not None and receipt.round < beyond_rounds:
                yield f"round {receipt.round + 1}"
            yield receipt.task
            yield ", ".join(f"{name} {value}" for name, value in receipt.scalars.items())
            for tensor in receipt.tensors:
                yield " ".join(filter(None, (tensor.name, format_bytes(tensor.num_bytes), tensor.codec, tensor.digest)))
            if receipt.num_examples is not None:
                yield f"from {receipt.num_examples:,} own sequences"
        case "profile":
            yield ", ".join([*receipt.profile, *(f"file {name}" for name in receipt.strategy_files)])
        case "heartbeats" | "pieces":
            begins = "from now on, counted"
            num = f"{receipt.num_messages:,} messages, {format_bytes(receipt.num_bytes)}, since the line before"
            yield num if receipt.num_messages else begins
        case _:
            yield receipt.text


def totals_text(totals: Totals) -> str:
    return (
        f"{totals.num_results:,} results with {format_bytes(totals.tensor_bytes)} of vectors, of these "
        f"{totals.num_updates:,} updates; {totals.num_failures:,} failures, {totals.num_notes:,} notes; "
        f"{totals.num_messages:,} signs of life and pieces, {format_bytes(totals.message_bytes)}"
    )


def _found(state: Path, run: str | None) -> tuple[ReceiptBook, dict[str, Totals], str]:
    """The receipts of a worker, their sums, and the id of the run that is asked for by id or name; "" for all."""
    if not (state / FOLDER).is_dir():
        raise PotluckError(f"no worker has joined with the state folder {state}; give the one it has with --state")
    book = ReceiptBook(state / FOLDER)
    totals = book.totals()
    book.num_unreadable = 0  # they are read again
    if run is None:
        return book, totals, ""
    ids = [id for id in totals if run in (id, id.rpartition("-")[0])]
    if len(ids) != 1:
        known = ", ".join(printable(id, 100) for id in ids or totals if id) or "none"
        raise PotluckError(f"--run {run} names {len(ids)} of the runs here; give one of these: {known}")
    return book, {ids[0]: totals[ids[0]]}, ids[0]
