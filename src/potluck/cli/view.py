"""What a run looks like: a live table where there is a terminal, one line for each event where there is none.

Everything is drawn from the snapshot of `coordinator.status`, so `potluck status` shows the same table. All of it
goes to standard error; standard output belongs to --json.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from potluck.cli.units import format_bytes, format_count, format_seconds
from potluck.coordinator.events import Event, progress_of

Snapshot = Mapping[str, Any]
refresh_s = 0.5
num_operations = 3

STYLES = {
    "joined": "green",
    "left": "yellow",
    "declined": "yellow",
    "lost": "yellow",
    "discarded": "red",
    "rolled_back": "red",
    "waiting": "yellow",
    "checkpoint": "dim",
    "note": "dim",
}
QUIET = frozenset({"listening", "checkpoint", "model"})
"""Kinds that the rounds or the command itself say better."""
usual_factor = 0.5
"""An update that counts by more than this was clipped a little, as rules that clip at the median do to half of them."""


def render(snapshot: Snapshot) -> RenderableType:
    """The whole picture: what the run does, how it goes, one row for each worker."""
    done = [Text(f"after round {o['round']}: {o['text']}") for o in snapshot.get("operations", ())[-num_operations:]]
    return Group(_bar(snapshot), Text(_facts(snapshot)), *done, _workers(snapshot["workers"]))


def _bar(snapshot: Snapshot) -> Table:
    """Name, how far it is, what it does."""
    progress = min(max(snapshot["progress"], 0.0), 1.0)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        Text(f"{snapshot['name']} ({snapshot['strategy']})", style="bold"),
        ProgressBar(total=1.0, completed=progress, width=20),
        f"{progress:.0%}",
        Text(_doing(snapshot)),
    )
    return grid


def _facts(snapshot: Snapshot) -> str:
    facts = [f"round {snapshot['round']}", f"{format_count(snapshot['tokens'])} tokens"]
    if snapshot["loss"] is not None:
        facts.append(f"loss {snapshot['loss']:.4f}")
    if snapshot["validation"]:
        facts.append(f"validation {snapshot['validation'][-1][1]:.4f}")
    left_s = snapshot["seconds_left"]
    facts.append("time left unknown" if left_s is None else f"{format_seconds(left_s)} left")
    return "  ".join(facts)


def _workers(workers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("worker", no_wrap=True)
    table.add_column("device", no_wrap=True)
    table.add_column("precision", no_wrap=True)
    table.add_column("state", ratio=1)
    for name in ("tokens/s", "tokens", "up", "down", "Mbit/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in workers:
        style = "" if worker["connected"] and not worker.get("reason") else "yellow"
        table.add_row(
            Text(worker["id"], style=style),
            worker["device"],
            worker["precision"],
            Text(_state(worker), style=style),
            f"{worker['tokens_per_s']:,.0f}" if worker["tokens_per_s"] else "-",
            format_count(worker["tokens"]),
            format_bytes(worker["bytes_up"]),
            format_bytes(worker["bytes_down"]),
            _rates(worker),
        )
    return table


def _rates(worker: Mapping[str, Any]) -> str:
    """Of the link, up / down, as far as transfers have shown it."""
    rates = [worker.get(f"{way}_bytes_per_s", 0.0) * 8 / 1e6 for way in ("up", "down")]
    return " / ".join(f"{rate:.3g}" if 0 < rate < 999.5 else f"{rate:.0f}" if rate else "-" for rate in rates)


def _state(worker: Mapping[str, Any]) -> str:
    if worker.get("reason"):
        return f"{worker['state']}: {worker['reason']}"
    step = f", step {worker['step']}" if worker["state"] == "training" and worker.get("step") else ""
    return f"{worker['state']}{step}"


def _doing(snapshot: Snapshot) -> str:
    num_connected = sum(bool(worker["connected"]) for worker in snapshot["workers"])
    return f"{snapshot['phase']}; {num_connected} of {len(snapshot['workers'])} workers connected"


def round_line(event: Event, bytes_up: int, bytes_down: int) -> str:
    """The line of a committed round: round, loss (or what of privacy is spent), who reported, bytes, time."""
    detail = event.detail
    reported = ", ".join(detail["workers"])
    moved = f"{format_bytes(bytes_up)} up, {format_bytes(bytes_down)} down"
    figures: Mapping[str, float] = detail.get("figures", {})
    ratio = figures.get("predicted_over_observed")
    took = f"{detail['seconds']:.1f} s" + (f"  predicted/observed {ratio:.2f}" if ratio else "")
    return f"round {detail['round']:>3}  {progress_of(detail['loss'], figures)}  {reported}  {moved}  {took}"


class View:
    """Shows events and, in a terminal, the picture that `status` gives."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._status: Callable[[], Snapshot] | None = None
        self._moved: dict[str, tuple[int, int]] = {}  # bytes up and down by each worker, at the round before

    def watch(self, status: Callable[[], Snapshot] | None) -> None:
        """Draw this run from now on; None for no run."""
        self._status = status
        self._moved = self._totals()

    def event(self, event: Event) -> None:
        """One line that stays."""
        if event.kind in QUIET or (event.kind == "aggregation" and _is_usual(event)):
            return
        text = event.text
        if event.kind == "joined":  # with what it moved before this process, where the run is continued
            self._moved = self._totals() | self._moved
        if event.kind == "round":
            text = round_line(event, *self._moved_since())
        elif event.kind == "left":
            text = f"{event.detail['worker']} is not here any more: {event.detail['reason']}"
        self.say(text, STYLES.get(event.kind, ""))

    def _moved_since(self) -> tuple[int, int]:
        """Bytes up and down by all workers since the round before, or since they joined."""
        before, self._moved = self._moved, self._totals()
        moved = [
            (up - before.get(id, (0, 0))[0], down - before.get(id, (0, 0))[1]) for id, (up, down) in self._moved.items()
        ]
        return sum(up for up, _ in moved), sum(down for _, down in moved)

    def _totals(self) -> dict[str, tuple[int, int]]:
        """Bytes up and down by each worker in the whole run."""
        workers = self._status()["workers"] if self._status else []
        return {worker["id"]: (worker["bytes_up"], worker["bytes_down"]) for worker in workers}

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)

    @asynccontextmanager
    async def showing(self) -> AsyncIterator[None]:
        """Keep the picture up to date within; without a terminal there is none, only the lines."""
        if not self.console.is_terminal:
            yield
            return
        # Refreshed from the event loop only: the snapshot belongs to it.
        live = Live(console=self.console, auto_refresh=False, transient=True, redirect_stdout=False)
        with live:
            task = asyncio.create_task(self._refresh(live))
            try:
                yield
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                live.update("", refresh=True)

    async def _refresh(self, live: Live) -> None:
        while True:
            if self._status is not None:
                live.update(render(self._status()), refresh=True)
            await asyncio.sleep(refresh_s)


def status_text(snapshot: Snapshot, width: int = 100) -> str:
    """The picture as plain text."""
    console = Console(width=width, no_color=True, color_system=None)
    with console.capture() as capture:
        console.print(render(snapshot))
    return capture.get()


def _is_usual(event: Event) -> bool:
    """Whether a rule of aggregation did no more than clip a little."""
    return not event.detail["left_out"] and min(event.detail["scaled"].values(), default=1.0) > usual_factor
