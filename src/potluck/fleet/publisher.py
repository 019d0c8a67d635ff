"""What workers get of the model: handles as objects, each encoded once and served to everyone.

With a delta codec on the downlink, each version is published twice: whole, in fp32, for those who join, and as the
difference to the version before for those who hold that. As many differences are kept as together take less than the
whole; who is further behind fetches that. Which versions there are is written down, since a version cannot be made
again without the one before it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from potluck.clock import Executor
from potluck.codecs.base import codec
from potluck.codecs.bundle import Bundle, Chosen, flat_size, write_flat_slices
from potluck.codecs.delta import CHANGE, WHOLE, longest_way, write_sum
from potluck.protocol import pb
from potluck.storage.digest import check_digest
from potluck.storage.files import write_atomic
from potluck.storage.objects import ObjectStore
from potluck.storage.params import ParamStore
from potluck.strategies.run import RunFacts
from potluck.types.errors import CorruptError, InvalidUpdate, Refused
from potluck.types.ids import Digest
from potluck.types.params import Fragment, Layout, Params, Part, Tensors

_no_name = ""
"""Of what has no version before."""
largest_change = 0.5
"""A version further than this share of its norm from the one before is published whole only."""


@dataclass(frozen=True)
class Delta:
    """`target` is `base` plus the difference in `change`; all three are objects."""

    target: Digest
    base: Digest
    change: Digest


class Publisher:
    def __init__(
        self, run: RunFacts, params: ParamStore, objects: ObjectStore, folder: Path, executor: Executor
    ) -> None:
        self._run, self._params, self._objects = run, params, objects
        self._executor = executor
        self._published: dict[Params, Digest] = {}
        self._latest: dict[str, Digest] = {}  # by the name of the argument that it is
        self._deltas: dict[str, list[Delta]] = {}
        self._path = folder / "published.json"
        if run.down.is_delta:
            self._load()

    @property
    def digests(self) -> dict[Params, Digest]:
        """Every published handle and its object."""
        return self._published

    def objects(self) -> set[Digest]:
        """Everything that is fetched, or needed for the next version."""
        changes = (delta.change for deltas in self._deltas.values() for delta in deltas)
        return {*self._published.values(), *self._latest.values(), *changes}

    def deltas_to(self, digests: Iterable[Digest]) -> list[pb.Delta]:
        """The kept differences that lead to one of these objects."""
        wanted = set(digests)
        found: list[pb.Delta] = []
        for delta in (d for deltas in self._deltas.values() for d in reversed(deltas)):
            if delta.target in wanted:
                wanted.add(delta.base)
                found.append(pb.Delta(target=delta.target, base=delta.base, delta=delta.change))
        return found

    def bases(self) -> list[Digest]:
        """The last version of each argument: what the next one is a difference to."""
        return list(self._latest.values()) if self._run.down.is_delta else []

    async def publish(self, named: Iterable[tuple[str, Params | Part | Tensors]]) -> None:
        """Have these handles as objects. A name is that of the argument: its last version is what a delta is to.

        `Tensors` have no versions: they are published whole.
        """
        for name, given in named:
            if isinstance(given, Tensors):
                await self._publish_whole(given)
                continue
            handle, tensors = (given.params, given.tensors) if isinstance(given, Part) else (given, ())
            known = self._published.get(handle)
            if known is None or not self._objects.has(known):
                known = await self._executor.run(self._encode, name, handle, self._run.layout.part(tensors))
                self._published[handle] = known
            elif self._latest.get(name) == known:
                continue
            if self._run.down.is_delta:
                self._latest[name] = known
                await self._executor.run(self._save)

    async def _publish_whole(self, given: Tensors) -> None:
        known = self._published.get(given.params)
        if known is None or not self._objects.has(known):
            made = await self._executor.run(self._encode, _no_name, given.params, given.layout)
            self._published[given.params] = made
            if self._run.down.is_delta:
                await self._executor.run(self._save)

    def forget(self, keep: set[Params]) -> None:
        """Drop the objects of handles that nobody needs any more: those that are no parts of what is kept."""
        files = {fragment.name for handle in keep for fragment in handle.fragments}
        for handle in [h for h in self._published if not all(f.name in files for f in h.fragments)]:
            del self._published[handle]

    def _encode(self, name: str, handle: Params, layout: Layout) -> Digest:
        base = self._latest.get(name)
        if self._run.down.is_delta and base is not None and self._objects.has(base):
            delta = self._delta_or_none(base, handle, layout)
            if delta is not None:
                self._keep(name, delta, layout)
                return delta.target
        whole = codec("fp32") if self._run.down.is_delta else self._run.down_policy
        with self._scratch(WHOLE, whole, layout) as path, self._params.reading(handle) as read:
            write_flat_slices(path, WHOLE, read, layout, whole)
            return self._objects.adopt(path)

    def _keep(self, name: str, delta: Delta, layout: Layout) -> None:
        num_kept = longest_way(layout, self._run.down_policy)
        self._deltas[name] = [*self._deltas.get(name, []), delta][-num_kept:]

    def _delta_or_none(self, base: Digest, handle: Params, layout: Layout) -> Delta | None:
        try:
            return self._encode_delta(base, handle, layout)
        except (CorruptError, InvalidUpdate):  # the disk has lost the version before
            return None

    def _encode_delta(self, base: Digest, handle: Params, layout: Layout) -> Delta | None:
        """The new version and the way to it; None if it is too far away."""
        squares = [0.0, 0.0]
        with self._scratch(CHANGE, self._run.down_policy, layout) as change:
            with Bundle.open(self._objects.path(base)) as before, self._params.reading(handle) as theta:

                def read(start: int, stop: int) -> Tensor:
                    now = theta(start, stop)
                    difference = before.flat_slice(WHOLE, layout, start, stop).neg_().add_(now)
                    for i, part in enumerate((now, difference)):
                        squares[i] += float(np.square(part.numpy(), dtype=np.float64).sum())
                    return difference

                write_flat_slices(change, CHANGE, read, layout, self._run.down_policy)
            if math.sqrt(squares[1]) > largest_change * math.sqrt(squares[0]):
                return None
            with self._scratch(WHOLE, codec("fp32"), layout) as whole:
                write_sum(whole, self._objects.path(base), change, layout)
                target = self._objects.adopt(whole)
            return Delta(target=target, base=base, change=self._objects.adopt(change))

    def _scratch(self, name: str, chosen: Chosen, layout: Layout) -> AbstractContextManager[Path]:
        return self._objects.scratch(name, flat_size(name, layout, chosen))

    # What must survive the process

    def _save(self) -> None:
        handles = [[[f.to_json() for f in h.fragments], digest] for h, digest in self._published.items()]
        deltas = {name: [[d.target, d.base, d.change] for d in deltas] for name, deltas in self._deltas.items()}
        value = {"handles": handles, "latest": self._latest, "deltas": deltas}
        write_atomic(self._path, json.dumps(value).encode())

    def _load(self) -> None:
        """What an earlier process published, as far as it is still here; nothing if that cannot be read."""
        try:
            value = json.loads(self._path.read_bytes())
            handles = [(_handle(fragments), check_digest(digest)) for fragments, digest in value["handles"]]
            latest = {str(name): check_digest(digest) for name, digest in value["latest"].items()}
            deltas = {str(n): [Delta(*map(check_digest, row)) for row in rows] for n, rows in value["deltas"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, Refused):
            return  # a power cut may leave a file without content: the next version is sent whole
        has = self._objects.has
        self._published = {handle: digest for handle, digest in handles if has(digest)}
        self._latest = {name: digest for name, digest in latest.items() if has(digest)}
        self._deltas = {name: [d for d in found if has(d.change)] for name, found in deltas.items()}


def _handle(fragments: Iterable[list[object]]) -> Params:
    return Params(tuple(Fragment.from_json(row) for row in fragments))
