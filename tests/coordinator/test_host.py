"""A host and its workers in one event loop, over real sockets with mutual TLS: nothing may block it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from e2e.processes import write_corpus, write_recipe

from potluck.coordinator.events import Event
from potluck.coordinator.host import serve
from potluck.coordinator.options import HostOptions, Listening, RunResult
from potluck.coordinator.recipe import load_recipe
from potluck.worker.join import work
from potluck.worker.options import JoinOptions


def test_the_event_loop_never_stalls(tmp_path: Path, stall_watchdog: Callable[[float], None]) -> None:
    write_corpus(tmp_path / "texts")
    model = 'config = { model_type = "gpt2", n_layer = 2, n_embd = 256, n_head = 2, n_positions = 32 }'
    recipe = load_recipe(write_recipe(tmp_path / "tiny.toml", 'shared = "texts"', model=model))
    events: list[Event] = []

    async def main() -> RunResult:
        stop: list[asyncio.Task[str]] = []

        def listening(run: Listening) -> None:
            for name in ("anna", "bert"):
                options = JoinOptions(link=run.join_line, state_dir=tmp_path / name, name=name, num_threads=1)
                stop.append(asyncio.create_task(work(options, told=lambda _: None)))

        options = HostOptions(recipe=recipe, run_dir=tmp_path / "run", cache_dir=tmp_path / "cache")
        result = await serve(options, on_event=events.append, on_listening=listening)
        assert await asyncio.gather(*stop) == ["the run ended"] * 2
        return result

    result = asyncio.run(main())
    assert result.rounds == 4
    assert result.stopped == ""
    assert {w.id for w in result.workers} == {"anna", "bert"}
    assert [e.detail["workers"] for e in events if e.kind == "round"] == [["anna", "bert"]] * 4
    assert list(tmp_path.rglob("spare")) and not list(tmp_path.rglob("spare/*"))  # used while it ran, gone with it
