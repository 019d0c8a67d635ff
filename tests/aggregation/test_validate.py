from pathlib import Path

import pytest
import torch

from potluck.aggregation.validate import check_update
from potluck.codecs.base import codec
from potluck.codecs.bundle import write_flat, write_tensors
from potluck.types.errors import InvalidUpdate
from potluck.types.params import Layout

layout = Layout.of([("w", (3, 4)), ("b", (4,))])


def test_a_good_update_gives_its_norm(tmp_path: Path) -> None:
    write_flat(tmp_path / "u", "delta", torch.full((16,), 2.0), layout, codec("fp32"))
    assert check_update(tmp_path / "u", "delta", layout) == 8.0
    assert check_update(tmp_path / "u", "delta", layout, max_norm=8.0) == 8.0


def test_a_large_one_is_refused_with_both_numbers(tmp_path: Path) -> None:
    write_flat(tmp_path / "u", "delta", torch.full((16,), 2.0), layout, codec("fp32"))
    with pytest.raises(InvalidUpdate, match=r"delta has the norm 8 and 7\.5 is the most"):
        check_update(tmp_path / "u", "delta", layout, max_norm=7.5)


def test_one_whose_products_would_overflow_is_refused_without_a_limit_too(tmp_path: Path) -> None:
    write_flat(tmp_path / "u", "delta", torch.full((16,), 2e18), layout, codec("fp32"))
    with pytest.raises(InvalidUpdate, match=r"the norm 8e\+18, and beyond 1e\+18 it cannot be joined with others in"):
        check_update(tmp_path / "u", "delta", layout)


def test_nan_and_another_layout_are_refused(tmp_path: Path) -> None:
    good = {"delta/w": torch.zeros(3, 4), "delta/b": torch.zeros(4)}
    write_tensors(tmp_path / "u", {**good, "delta/b": torch.tensor([0, 0, float("nan"), 0])})
    with pytest.raises(InvalidUpdate, match="delta/b holds NaN"):
        check_update(tmp_path / "u", "delta", layout)
    write_tensors(tmp_path / "u", {**good, "delta/w": torch.zeros(4, 3)})
    with pytest.raises(InvalidUpdate, match=r"delta/w is float32 \[4, 3\] and the model's is \[3, 4\]"):
        check_update(tmp_path / "u", "delta", layout)
    with pytest.raises(InvalidUpdate, match="gradient has 0 tensors and the model has 2"):
        check_update(tmp_path / "u", "gradient", layout)


def test_what_is_no_bundle_is_an_invalid_update_too(tmp_path: Path) -> None:
    for content in (b"", b"not a bundle at all", b"POTLUCK\x01" + b"\xff" * 100):
        (tmp_path / "u").write_bytes(content)
        with pytest.raises(InvalidUpdate, match="the update cannot be read: u "):
            check_update(tmp_path / "u", "delta", layout)
