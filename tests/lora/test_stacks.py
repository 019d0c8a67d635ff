"""The factors of rounds, added up by who has them: against dense sums in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from potluck.lora.factors import Factors
from potluck.lora.stacks import stack_layout, stacked, with_stacks
from potluck.types.errors import InvalidUpdate
from potluck.types.params import Layout
from potluck.types.vector import Vector

LAYOUT = Layout.of(
    [
        ("one.lora_A.default.weight", (2, 5)), ("one.lora_B.default.weight", (7, 2)), ("one.base_layer.merged", (7, 5)),
        ("two.lora_A.default.weight", (2, 3)), ("two.lora_B.default.weight", (4, 2)), ("two.base_layer.merged", (4, 3)),
    ]
)  # fmt: skip
SHAPES = {"one": (7, 5), "two": (4, 3)}


def drawn(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator)


def test_they_add_up_to_the_dense_sum() -> None:
    generator = torch.Generator().manual_seed(3)
    whole = drawn(LAYOUT.numel, generator=generator)
    expected = {i: whole[t.offset : t.stop].view(t.shape).double() for i, t in enumerate(LAYOUT) if "merged" in t.name}
    stacks: list[dict[str, Tensor]] = []
    for rank in (1, 4, 9):
        changes = [
            Factors(drawn(rank, k, generator=generator), drawn(d, rank, generator=generator), 1.0)
            for d, k in SHAPES.values()
        ]
        flat, layout = stacked(changes), stack_layout(LAYOUT, rank)
        assert flat.shape == (layout.numel,) == (rank * (7 + 5 + 4 + 3),)
        stacks.append({t.name: flat[t.offset : t.stop].view(t.shape) for t in layout})
        for i, each in zip((2, 5), changes, strict=True):
            expected[i] = expected[i] + each.b.double() @ each.a.double()
    found = dict(with_stacks(LAYOUT, Vector.of(whole), stacks))
    assert found.keys() == expected.keys() == {2, 5}
    for i, vector in found.items():
        assert torch.allclose(vector.tensor().double(), expected[i].reshape(-1), atol=1e-5)
        assert torch.equal(vector.read(2, 9), vector.tensor()[2:9])


def test_there_may_be_more_of_them_than_calls_within_calls() -> None:
    """Rounds of rank 1 of a layer of 4096 x 4096 are 1024 before its matrix comes down."""
    stack = {t.name: torch.ones(t.shape) for t in stack_layout(LAYOUT, 1)}
    found = dict(with_stacks(LAYOUT, Vector.of(torch.zeros(LAYOUT.numel)), [stack] * 1500))
    assert all(torch.equal(vector.tensor(), torch.full((vector.numel,), 1500.0)) for vector in found.values())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"two.lora_A.stack": torch.zeros(2, 4)}, r"merged into two is of a weight \[4, 4\] and that is \[4, 3\]"),
        ({"two.lora_A.stack": torch.full((2, 3), torch.nan)}, "A of an adapter has 6 of 6 values that are NaN"),
        ({"two.lora_A.stack": torch.zeros(3, 3)}, "so their ranks are 3 and 2"),
        ({"one.lora_B.stack": None}, "what a round merged has no 'one.lora_B.stack'"),
    ],
)
def test_what_is_not_of_the_layout_is_refused(changed: dict[str, Tensor | None], says: str) -> None:
    layout = stack_layout(LAYOUT, 2)
    stack: dict[str, Tensor | None] = {**{t.name: torch.zeros(t.shape) for t in layout}, **changed}
    given = {name: tensor for name, tensor in stack.items() if tensor is not None}
    with pytest.raises(InvalidUpdate, match=says):
        list(with_stacks(LAYOUT, Vector.of(torch.zeros(LAYOUT.numel)), [given]))
