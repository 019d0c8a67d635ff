"""What a worker keeps on its disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from potluck.types.errors import ResourceError
from potluck.worker.state import RunFolder


def test_a_state_that_does_not_fit_any_more_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may take the room between the look at it and the write."""

    def full(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
        path.write_bytes(b"part")
        raise SafetensorError("No space left on device (os error 28)")

    folder = RunFolder(tmp_path)
    monkeypatch.setattr("potluck.worker.state.save_file", full)
    with pytest.raises(ResourceError, match=r"cannot be written \(No space left .*\); free some space"):
        folder.save_version("v1", {"m": torch.zeros(10)}, {})
    assert not list((tmp_path / "local").iterdir())
    assert not folder.has_version("v1")
