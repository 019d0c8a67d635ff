import pytest
import torch

from potluck.types.vector import Vector, slice_numel


def test_arithmetic_is_done_when_it_is_read() -> None:
    a, b = torch.arange(10.0), torch.ones(10)
    late = Vector.of(a) - b
    b.fill_(2.0)
    assert torch.equal(late.tensor(), torch.arange(10.0) - 2)
    assert torch.equal(late.read(3, 5), torch.tensor([1.0, 2.0]))
    assert torch.equal((0.5 * (Vector.of(a) + Vector.of(b))).tensor(), (a + 2) / 2)


def test_slices_cover_the_whole_once() -> None:
    numel = 2 * slice_numel + 3
    vector = Vector.of(torch.arange(numel, dtype=torch.float32))
    assert [(start, len(part)) for start, part in vector.slices()] == [
        (0, slice_numel),
        (slice_numel, slice_numel),
        (2 * slice_numel, 3),
    ]
    assert torch.equal(vector.tensor(), torch.arange(numel, dtype=torch.float32))


def test_vectors_of_two_sizes_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="4 and 5 elements"):
        Vector.of(torch.ones(4)) - torch.ones(5)
