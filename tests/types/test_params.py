from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.types.params import Layout

layout = Layout.of([("a", (2, 3)), ("none", (0,)), ("b", ()), ("c", (5,)), ("end", (4, 0))])


def test_tensors_follow_each_other() -> None:
    assert [(t.name, t.offset, t.stop) for t in layout] == [
        ("a", 0, 6), ("none", 6, 6), ("b", 6, 7), ("c", 7, 12), ("end", 12, 12),
    ]  # fmt: skip
    assert layout.numel == 12
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout(()).numel == 0


def test_the_tensors_of_a_slice() -> None:
    assert [(t.name, low, high) for t, low, high in layout.overlapping(4, 8)] == [
        ("a", 4, 6), ("b", 6, 7), ("c", 7, 8),
    ]  # fmt: skip
    assert list(layout.overlapping(12, 20)) == list(layout.overlapping(3, 3)) == []
    assert list(Layout(()).overlapping(0, 5)) == []


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, 3), max_size=8), st.integers(0, 15), st.integers(0, 15))
def test_slices_cover_each_element_once(sizes: list[int], start: int, stop: int) -> None:
    several = Layout.of([(f"t{i}", (n,)) for i, n in enumerate(sizes)])
    covered = [(t.name, i) for t, low, high in several.overlapping(start, stop) for i in range(low, high)]
    owners = [(t.name, i) for t in several for i in range(t.offset, t.stop)]
    assert covered == [(name, i) for name, i in owners if start <= i < stop]
