"""The lines of metrics.jsonl."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from potluck.coordinator.events import Event, write_metrics


def test_each_event_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, Event(kind="round", at=5.0, text="round 1", detail={"round": 1, "loss": 2.5}))
    write_metrics(path, Event(kind="note", at=6.5, text="building the model"))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"time": 5.0, "kind": "round", "text": "round 1", "round": 1, "loss": 2.5},
        {"time": 6.5, "kind": "note", "text": "building the model"},
    ]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_the_file_with_the_join_line_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, Event(kind="listening", at=0.0, text="x", detail={"join_line": "potluck://x:1/secret"}))
    assert path.stat().st_mode & 0o777 == 0o600
