from pathlib import Path

import pytest
import torch

from potluck.strategies.registry import load_file, strategy_type
from potluck.strategies.task import ObjectRef, Result, decode_arguments, encode_arguments, handles, installed, task
from potluck.types.errors import RecipeError
from potluck.types.ids import Digest
from potluck.types.params import Fragment, Params
from potluck.types.vector import Vector

one = Params((Fragment("one", 4),))
two = Params((Fragment("two-a", 2), Fragment("two-b", 2)))


@task("test_task.echo")
def echo(replica: object, *, theta: object, scale: float = 1.0) -> Result:
    return Result({"scale": scale})


def test_a_bound_task_checks_its_arguments_at_once() -> None:
    bound = echo.bind(theta=one, scale=2.0).granted(8)
    assert (bound.task, bound.kind, bound.num_sequences, bound.held_out_part) == ("test_task.echo", "pure", 8, -1)
    with pytest.raises(TypeError):
        echo.bind(theta=one, wrong=1)
    assert installed("test_task.echo") is echo
    assert installed("test_task.other") is None


def test_arguments_travel_as_names_and_come_back_as_tensors() -> None:
    arguments = {"theta": one, "list": [two, one, 1.5, None], "shard": ObjectRef(Digest("d:s")), "x": torch.ones(2)}
    assert handles(arguments) == (("theta", one), ("list", two))
    encoded = encode_arguments(arguments, {one: Digest("d:1"), two: Digest("d:2")})
    assert encoded.objects == ("d:1", "d:2", "d:s")
    assert len(encoded.inline) == 1
    back = decode_arguments(
        encoded.value,
        params=lambda digest: Vector.of(torch.full((1,), float(digest[-1]))),
        tensors=lambda digest: {"name": torch.tensor([7])},
        inline=lambda index: encoded.inline[index],
    )
    assert back["theta"].tensor().item() == 1.0
    assert [back["list"][0].tensor().item(), back["list"][1].tensor().item(), *back["list"][2:]] == [
        2.0,
        1.0,
        1.5,
        None,
    ]
    assert back["shard"]["name"].item() == 7
    assert torch.equal(back["x"], torch.ones(2))


def test_an_argument_that_cannot_travel_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="cannot be a set"):
        encode_arguments({"x": {1, 2}}, {})


def test_a_strategy_is_found_by_name_or_file(tmp_path: Path) -> None:
    assert strategy_type("diloco").__name__ == "DiLoCo"
    with pytest.raises(RecipeError, match="did you mean 'diloco'"):
        strategy_type("dilcoo")
    with pytest.raises(RecipeError, match="does not exist"):
        strategy_type("nowhere.py:Mine", base=tmp_path)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(RecipeError, match="does not load: ModuleNotFoundError"):
        load_file(tmp_path / "broken.py")
    (tmp_path / "empty.py").write_text("class Mine: pass\n")
    with pytest.raises(RecipeError, match="lacks Config, State, init, run_round, estimate"):
        strategy_type("empty.py:Mine", base=tmp_path)
    with pytest.raises(RecipeError, match="has no class 'Other'"):
        strategy_type("empty.py:Other", base=tmp_path)
