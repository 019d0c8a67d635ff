"""The bench of wrong tiles counts what it says it counts."""

from __future__ import annotations

import pytest

from potluck.bench import lies


def test_figures_have_every_kind_of_lie_and_no_honest_tile_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lies, "timed_shapes", ((64, 64, 64),))
    figures = lies.bench_lies(num_lies=2, num_honest=12, num_timed=1)
    refused = {name: value for name, value in figures.items() if name.endswith("_lies_refused")}
    assert refused == {f"{wire}_{lie}_lies_refused": 2 for wire in lies.WIRES for lie in lies.LIES}
    assert (figures["honest_tiles"], figures["honest_tiles_refused"]) == (12, 0)
    assert figures["tf32_on_fp32_refused"] == 1
    assert figures["bf16_64x64x64_check_by_product"] > 0


def test_a_check_that_accepts_everything_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lies, "timed_shapes", ())
    monkeypatch.setattr(lies, "check_tile", lambda *_args, **_options: None)
    figures = lies.bench_lies(num_lies=1, num_honest=1, num_timed=1)
    assert sum(value for name, value in figures.items() if name.endswith("refused")) == 0
