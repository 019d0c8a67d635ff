"""What workers get of the model: handles as objects, each encoded once and served to everyone."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from potluck.clock import Executor
from potluck.codecs.base import codec
from potluck.codecs.bundle import write_flat_slices
from potluck.storage.objects import ObjectStore
from potluck.storage.params import ParamStore
from potluck.strategies.run import RunFacts
from potluck.types.ids import Digest
from potluck.types.params import Params


class Publisher:
    def __init__(
        self, run: RunFacts, params: ParamStore, objects: ObjectStore, scratch: Path, executor: Executor
    ) -> None:
        self._run, self._params, self._objects = run, params, objects
        self._scratch, self._executor = scratch, executor
        self._published: dict[Params, Digest] = {}

    @property
    def digests(self) -> dict[Params, Digest]:
        """Every published handle and its object."""
        return self._published

    async def publish(self, handles: Iterable[Params]) -> None:
        """Have these handles as objects, in the codec of the run's downlink."""
        for handle in dict.fromkeys(handles):
            if handle not in self._published or not self._objects.has(self._published[handle]):
                self._published[handle] = await self._executor.run(self._encode, handle)

    def forget(self, keep: set[Params]) -> None:
        """Drop the objects of handles that nobody needs any more."""
        for handle in [h for h in self._published if h not in keep]:
            del self._published[handle]

    def _encode(self, handle: Params) -> Digest:
        path = self._scratch / f"publish-{handle.fragments[0].name}"
        read = partial(self._params.read_slice, handle)
        write_flat_slices(path, "params", read, self._run.layout, codec(self._run.down_codec))
        return self._objects.adopt(path)
