"""What owners of instructions get of a library."""

from __future__ import annotations

import ast
import json
import textwrap
from pathlib import Path

import pytest
from bench.owned import write_library

from potluck.bench.fine_tuning import Setting
from potluck.bench.rig.owners import functions, packages, write_owners
from potluck.data.packing import divide
from potluck.types.errors import DataError


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_function_is_its_signature_and_docstring_and_then_its_body() -> None:
    source = '''
class Scale:
    @property
    async def get(
        self, *, default=None,
    ):
        """Where the
        slider is."""
        # asked anew
        if self.at is None:
            return default
        return self.at

    def bare(self):
        return "it has no docstring, so it says not what it does"

    def trivial(self):
        """Not here."""
        raise NotImplementedError("nobody learns from this")

    def short(self):
        """Give it."""
        return 1
'''
    ((given, body),) = functions(source)
    assert given == 'async def get(\n    self, *, default=None,\n):\n    """Where the\n    slider is."""'
    assert body == "# asked anew\nif self.at is None:\n    return default\nreturn self.at"


def test_who_is_given_everything_holds_out_what_is_written_apart(tmp_path: Path) -> None:
    library = write_library(tmp_path / "library", num_functions=12)
    owners = write_owners(tmp_path / "owners", num_records=10, validation=0.2, seed=3, root=library)
    assert [owner.name for owner in owners] == list(packages)
    seen: set[str] = set()
    for owner in owners:
        everything = read(owner.everything)
        division = divide([1] * 10, 0.2, 3)
        assert read(owner.held_out) == [record for i, record in enumerate(everything) if division.is_held_out(i)]
        assert len(read(owner.held_out)) == 2 and len(read(owner.training)) == 8
        assert not seen & {record["input"] for record in everything}
        seen |= {record["input"] for record in everything}
    again = write_owners(tmp_path / "again", num_records=10, validation=0.2, seed=4, root=library)
    assert read(again[0].everything) == read(owners[0].everything)
    assert read(again[0].held_out) != read(owners[0].held_out)
    with pytest.raises(DataError, match="windows has 12 functions in this Python's library and 13 are asked for"):
        write_owners(tmp_path / "more", num_records=13, validation=0.2, seed=3, root=library)


def test_this_library_has_enough_for_everyone(tmp_path: Path) -> None:
    owners = write_owners(tmp_path, num_records=Setting.num_records, validation=Setting.validation, seed=1)
    assert {owner.name: len(read(owner.held_out)) for owner in owners} == dict.fromkeys(packages, 16)
    for owner in owners:
        for record in read(owner.everything):
            assert ast.parse(f"{record['input']}\n{textwrap.indent(record['output'], '    ')}")
