"""The places of the planted faults are still where the bench looks for them."""

from pathlib import Path

import pytest

import potluck
from potluck.bench.planted import Plant, plants


@pytest.mark.parametrize("plant", plants, ids=lambda plant: plant.name)
def test_its_place_is_there_once_and_what_is_planted_is_python(plant: Plant) -> None:
    source = (Path(potluck.__file__).parent / plant.file).read_text(encoding="utf-8")
    assert source.count(plant.right) == 1
    compile(source.replace(plant.right, plant.wrong), plant.file, "exec")


def test_there_are_nineteen_and_their_names_differ() -> None:
    assert len(plants) == len({plant.name for plant in plants}) == 19
