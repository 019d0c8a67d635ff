"""Where the files of many short runs go."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.bench.rig import jobs


def test_files_are_in_memory_only_where_there_is_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jobs, "memory_disk", tmp_path / "none")
    assert jobs.scratch_place(1) is None
    monkeypatch.setattr(jobs, "memory_disk", tmp_path)
    assert jobs.scratch_place(1) == str(tmp_path)
    assert jobs.scratch_place(1 << 60) is None
