"""What is drawn, drawn to text: from snapshots with known values."""

from __future__ import annotations

import asyncio
import io
import re
from typing import Any

from rich.console import Console

from potluck.cli.view import View, status_text
from potluck.coordinator.events import Event


def worker(id: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": id, "device": "cpu", "device_name": "", "precision": "fp32", "connected": True, "state": "training",
        "reason": "", "tokens_per_s": 1234.4, "step": 7, "tokens": 56_000, "rounds": 1, "bytes_up": 1_500_000,
        "bytes_down": 2_500_000, "up_bytes_per_s": 1.5e6, "down_bytes_per_s": 11.9e6, "note": "", **changes,
    }  # fmt: skip


def snapshot(*workers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "run_id": "mine-1", "name": "mine", "strategy": "diloco", "phase": "round 13", "round": 12,
        "tokens": 983_040, "budget": {"tokens": 2_000_000}, "progress": 0.4915, "seconds": 60.0,
        "seconds_left": 125.0, "loss": 3.21094, "validation": [[0, 8.3], [10, 3.4]], "epochs": [],
        "workers": list(workers), **changes,
    }  # fmt: skip


def rows(text: str) -> list[list[str]]:
    """Lines as cells."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


def test_the_picture_has_run_and_workers() -> None:
    text = status_text(snapshot(worker("anna"), worker("bert", device="cuda:0", precision="bf16-mixed")), width=120)
    first, facts, header, anna, bert = rows(text)
    assert first[0] == "mine (diloco)"
    assert first[2:] == ["49%", "round 13; 2 of 2 workers connected"]
    assert facts == ["round 12", "983 k tokens", "loss 3.2109", "validation 3.4000", "2 min 05 s left"]
    assert header == ["worker", "device", "precision", "state", "tokens/s", "tokens", "up", "down", "Mbit/s"]
    assert anna == ["anna", "cpu", "fp32", "training, step 7", "1,234", "56.0 k", "1.50 MB", "2.50 MB", "12 / 95.2"]
    assert bert[:3] == ["bert", "cuda:0", "bf16-mixed"]


def test_a_worker_that_is_away_and_one_that_is_not_trusted() -> None:
    away = worker("anna", connected=False, state="away for 4 s", tokens_per_s=0.0)
    bad = worker("bert", state="quarantined", reason="3 refused results in a row", tokens_per_s=0.0)
    text = status_text(snapshot(away, bad, phase="1 of 2 workers"), width=120)
    first, _, _, anna, bert = rows(text)
    assert anna[3:5] == ["away for 4 s", "-"]
    assert bert[3] == "quarantined: 3 refused results in a row"
    assert first[-1] == "1 of 2 workers; 1 of 2 workers connected"


def test_a_run_that_has_not_begun() -> None:
    text = status_text(
        snapshot(round=0, tokens=0, progress=0.0, seconds_left=None, loss=None, validation=[]), width=120
    )
    first, facts, *_ = rows(text)
    assert first[1] == "0%"
    assert facts == ["round 0", "0 tokens", "time left unknown"]


def test_ids_are_shown_as_they_are() -> None:
    assert "[red]x[/red]" in status_text(snapshot(worker("[red]x[/red]")), width=120)


def event(kind: str, text: str = "", **detail: Any) -> Event:
    return Event(kind=kind, at=0.0, text=text, detail=detail)


def plain() -> tuple[View, io.StringIO]:
    stream = io.StringIO()
    return View(Console(file=stream, width=60, force_terminal=False)), stream


def test_without_a_terminal_every_event_is_one_line() -> None:
    async def main() -> str:
        view, stream = plain()
        async with view.showing():
            state = snapshot(worker("anna", bytes_up=1000, bytes_down=5000), worker("bert", bytes_up=0, bytes_down=0))
            view.watch(lambda: state)
            view.event(event("joined", "anna joined (cpu)", worker="anna"))
            state["workers"][0]["bytes_up"] = 1_001_000
            state["workers"][1]["bytes_down"] = 2_000_000
            view.event(event("round", "x", round=3, loss=2.5, workers=["anna", "bert"], tokens=9, seconds=1.25))
            view.event(event("round", "x", round=4, loss=2.25, workers=["anna"], tokens=9, seconds=2.0))
            view.event(event("checkpoint", "saved", path="x"))
            view.event(event("left", "x", worker="bert", reason="its connection ended"))
            view.event(event("discarded", "round 5 discarded: 0 of 2 replies, which is a line longer than the console"))
        return stream.getvalue()

    assert asyncio.run(main()).splitlines() == [
        "anna joined (cpu)",
        "round   3  loss 2.5000  anna, bert  1.00 MB up, 2.00 MB down  1.2 s",
        "round   4  loss 2.2500  anna  0 B up, 0 B down  2.0 s",
        "bert is not here any more: its connection ended",
        "round 5 discarded: 0 of 2 replies, which is a line longer than the console",
    ]


def test_what_was_moved_before_the_run_was_continued_counts_in_no_round() -> None:
    view, stream = plain()
    state = snapshot()
    view.watch(lambda: state)
    state["workers"] = [worker("anna", bytes_up=81_000_000, bytes_down=43_000_000)]
    view.event(event("joined", "anna joined (cpu)", worker="anna"))
    state["workers"] = [worker("anna", bytes_up=82_000_000, bytes_down=45_000_000)]
    view.event(event("joined", "anna is back (cpu)", worker="anna"))  # in mid-round: what it moved still counts
    view.event(event("round", "x", round=61, loss=2.5, workers=["anna"], tokens=9, seconds=1.25))
    assert stream.getvalue().splitlines()[-1] == "round  61  loss 2.5000  anna  1.00 MB up, 2.00 MB down  1.2 s"


def test_in_a_terminal_lines_stay_above_the_picture() -> None:
    async def main() -> str:
        stream = io.StringIO()
        view = View(Console(file=stream, width=120, force_terminal=True, color_system=None))
        view.watch(lambda: snapshot(worker("anna")))
        async with view.showing():
            await asyncio.sleep(0.05)
            view.event(event("joined", "anna joined (cpu)", worker="anna"))
            await asyncio.sleep(0.05)
        return stream.getvalue()

    text = asyncio.run(main())
    assert "mine (diloco)" in text
    assert "anna joined (cpu)" in text
    assert text.index("mine (diloco)") < text.index("anna joined (cpu)")
    assert text.rindex("anna joined (cpu)") < text.rindex("mine (diloco)"), "the picture is drawn again below the line"


def test_clipping_a_little_is_no_news() -> None:
    def said(left_out: list[str], scaled: dict[str, float]) -> str:
        out = io.StringIO()
        detail = {"rule": "norm_clipping", "left_out": left_out, "scaled": scaled}
        View(Console(file=out)).event(Event(kind="aggregation", at=0.0, text="the rule did it", detail=detail))
        return out.getvalue()

    assert said([], {"anna": 0.99, "bert": 0.6}) == ""
    assert said([], {"anna": 0.99, "bert": 0.4}) == "the rule did it\n"
    assert said(["anna"], {}) == "the rule did it\n"
