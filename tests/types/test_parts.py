"""Parts of a model: some tensors of its layout, and handles to their values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from potluck.storage.params import ParamStore
from potluck.types.errors import Refused
from potluck.types.params import Fragment, Layout, Params
from potluck.types.vector import Vector

layout = Layout.of([("a", [2]), ("b", [3]), ("c", [1]), ("d", [4])])


def test_a_part_of_a_layout_is_packed() -> None:
    part = layout.part((0, 2, 3))
    assert [(t.name, t.offset) for t in part] == [("a", 0), ("c", 2), ("d", 3)]
    assert layout.ranges((0, 2, 3)) == ((0, 2), (5, 10))
    assert layout.numbers_of(["a", "c", "d"]) == (0, 2, 3)


def test_no_numbers_and_all_numbers_are_the_whole() -> None:
    assert layout.part(()) is layout
    assert layout.part((0, 1, 2, 3)) is layout
    assert layout.ranges(()) == ((0, 10),)
    assert layout.numbers_of(["a", "b", "c", "d"]) == ()


@pytest.mark.parametrize("place", [-1, 4, 1.0, "1", None])
def test_a_place_that_is_none_is_refused(place: object) -> None:
    """Minus one would be another name for the last."""
    for read in (layout.part, layout.ranges):
        with pytest.raises(Refused, match=f"tensor {place} of a layout of 4 is asked for; name 0 to 3"):
            read([0, place])  # pyright: ignore[reportArgumentType]


def test_part_handles_read_and_replace_slices_of_files(tmp_path: Path) -> None:
    store = ParamStore(tmp_path, fragment_numel=4)
    values = torch.arange(10.0)
    whole, ranges = store.create("whole", values), layout.ranges((0, 2, 3))
    part = whole.part(ranges)
    assert store.read(part).tolist() == [0.0, 1.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    (new,) = store.apply(lambda x, **_: -x, part, name="new", layout=layout.part((0, 2, 3)))
    changed = whole.with_part(ranges, new)
    assert store.read(changed).tolist() == [0.0, -1.0, 2.0, 3.0, 4.0, -5.0, -6.0, -7.0, -8.0, -9.0]
    assert changed.part(ranges) == new  # the very handle again: what is published of it is found
    assert store.read(changed.part(((2, 5),))).tolist() == [2.0, 3.0, 4.0]
    store.remove_except([changed])
    assert store.read(changed)[0] == 0.0


def test_handles_survive_json() -> None:
    for fragment in (Fragment("x", 4), Fragment("x", 2, 1, 4)):
        assert Fragment.from_json(fragment.to_json()) == fragment
    assert Params((Fragment("x", 4),)).part(((0, 4),)) == Params((Fragment("x", 4),))


def test_a_part_of_a_vector_is_read_across_its_ranges() -> None:
    part = Vector.of(torch.arange(10.0)).part(((8, 10), (0, 3)))
    assert part.numel == 5
    assert part.tensor().tolist() == [8.0, 9.0, 0.0, 1.0, 2.0]
    assert part.read(1, 4).tolist() == [9.0, 0.0, 1.0]


def test_vectors_of_parts_are_one_vector_again() -> None:
    whole = torch.arange(10.0)
    ranges = [layout.ranges(part) for part in ((0, 2), (1,))]
    parts = [(each, Vector.of(whole).part(each)) for each in ranges]
    joined = Vector.joined(10, parts)
    wanted = torch.cat([whole[:6], torch.zeros(4)])  # nobody has d
    for size in (1, 3, 10):
        pieces = [joined.read(start, min(start + size, 10)) for start in range(0, 10, size)]
        assert torch.equal(torch.cat(pieces), wanted)
    later = Vector.joined(10, [*parts, (((1, 4),), Vector.of(torch.full((3,), 9.0)))])
    assert later.tensor().tolist() == [0, 9, 9, 9, 4, 5, 0, 0, 0, 0]
    assert not Vector.joined(3, []).tensor().any()
