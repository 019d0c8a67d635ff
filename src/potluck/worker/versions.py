"""Versions of the parameters made from one that is here and the differences that lead from it to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from potluck.codecs.base import codec
from potluck.codecs.bundle import Bundle, flat_size
from potluck.codecs.delta import WHOLE, layout_of, write_sum
from potluck.protocol import pb
from potluck.storage.digest import check_digest
from potluck.storage.objects import ObjectStore
from potluck.types.errors import CorruptError
from potluck.types.ids import Digest
from potluck.types.params import Layout

max_way = 8
"""Differences in a row from a version that is here."""


def way_to(digest: Digest, deltas: Iterable[pb.Delta], is_here: Callable[[Digest], bool]) -> list[pb.Delta]:
    """Differences, in the order they are added, from a version that is here to `digest`; none where none lead there."""
    by_target = {delta.target: delta for delta in deltas}
    way: list[pb.Delta] = []
    at = digest
    while not is_here(at):
        delta = by_target.get(at)
        if delta is None or len(way) == max_way:
            return []
        way.insert(0, delta)
        at = check_digest(delta.base)
    return way


def add_delta(delta: pb.Delta, objects: ObjectStore, layout: Layout, naming: AbstractContextManager[object]) -> None:
    """Make the version `delta.target`; `naming` is held while it gets its name. Blocks. CorruptError if the difference
    does not lead where it says.
    """
    base, change = (objects.path(check_digest(d)) for d in (delta.base, delta.delta))
    with Bundle.open(base) as before:
        layout = layout_of(before, layout)
    with objects.scratch("version", flat_size(WHOLE, layout, codec("fp32"))) as path:
        write_sum(path, base, change, layout)
        with naming:
            found = objects.adopt(path)
    if found != delta.target:
        raise CorruptError(f"the difference {delta.delta[:23]} leads to {found[:23]}, not to {delta.target[:23]}")
