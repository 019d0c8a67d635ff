"""A coordinator's stores without values: vectors and objects have names and sizes, and to touch them costs time.

    check    bytes of an update / check_bytes_per_s               when it has arrived
    mean     sum of the bytes of all updates / add_bytes_per_s    within the outer step that reads it
    outer    4 N (vectors read and written) / apply_bytes_per_s
    publish  4 N / encode_bytes_per_s

All of it waits for one of `num_threads`, as on a real coordinator. An object's digest is that of its name and size.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from potluck.aggregation.combine import Combined
from potluck.aggregation.report import Report
from potluck.clock import Clock, Executor
from potluck.clock.conversation import Ask, in_turns
from potluck.codecs.base import codec
from potluck.codecs.bundle import flat_size
from potluck.codecs.delta import CHANGE, WHOLE
from potluck.coordinator.kit import Kit
from potluck.fleet.publisher import Delta, Publisher
from potluck.fleet.reduction import Updates
from potluck.storage.checkpoints import Checkpoints
from potluck.storage.digest import digest_bytes, file_name
from potluck.storage.ledger import ReplyRow
from potluck.storage.objects import ObjectStore
from potluck.storage.params import Op, ParamStore
from potluck.strategies.fleet import Reduction
from potluck.strategies.run import RunFacts
from potluck.types.errors import CorruptError
from potluck.types.ids import Digest
from potluck.types.params import Fragment, Layout, Params, type_bytes
from potluck.types.vector import Vector

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CoordinatorMachine:
    """The coordinator's machine: its link in bytes per second, and what its passes over values take in a second.

    The rates of passes are those of `potluck bench aggregate` and `bench transport` on two cores of a server.
    """

    up_bytes_per_s: float = math.inf  # to the workers, all together
    down_bytes_per_s: float = math.inf  # from the workers
    check_bytes_per_s: float = 2e9
    add_bytes_per_s: float = 1.4e9
    apply_bytes_per_s: float = 2e9
    encode_bytes_per_s: float = 1e9
    num_threads: int = 2
    idle_w: float = 0.0
    busy_w: float = 0.0


class Meter:
    """Seconds of work that was not done, until whoever runs it takes them."""

    def __init__(self) -> None:
        self._due_s = 0.0
        self.total_s = 0.0

    def charge(self, seconds: float) -> None:
        self._due_s += seconds
        self.total_s += seconds

    def take(self) -> float:
        due_s, self._due_s = self._due_s, 0.0
        return due_s


class MeteredExecutor:
    """Runs at once, and then takes the time that was charged, as soon as one of its threads is free."""

    def __init__(self, clock: Clock, meter: Meter, num_threads: int = 1) -> None:
        self._clock, self._meter = clock, meter
        self._free_at = [0.0] * num_threads

    async def run(self, fn: Callable[..., T], *args: Any, cost_s: float = 0.0) -> T:
        result = fn(*args)
        taken_s = cost_s + self._meter.take()
        if taken_s:
            now = self._clock.now()
            end = max(now, heapq.heappop(self._free_at)) + taken_s
            heapq.heappush(self._free_at, end)
            await self._clock.sleep(end - now)
        return result

    async def converse(self, work: Callable[[Ask], T]) -> T:
        return await in_turns(work)

    def close(self) -> None:
        pass


def meta_digest(name: str, size: int) -> Digest:
    return digest_bytes(f"{name}/{size}".encode())


class MetaObjects(ObjectStore):
    """Objects that have a size and no bytes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, durable=True)  # no file of it has to be looked after
        self._sizes: dict[Digest, int] = {}

    def place(self, digest: Digest, size: int) -> Digest:
        """The object is here from now on."""
        self._sizes[digest] = size
        return digest

    def put(self, data: bytes) -> Digest:
        return self.place(digest_bytes(data), len(data))

    def path(self, digest: Digest) -> Path:
        return self.root / file_name(digest)

    def has(self, digest: Digest) -> bool:
        return digest in self._sizes

    def size(self, digest: Digest) -> int:
        if digest not in self._sizes:
            raise CorruptError(f"the object {digest} is not among those of {self.root}")
        return self._sizes[digest]

    def verify(self, digest: Digest) -> None:
        self.size(digest)

    def digests(self) -> set[Digest]:
        return set(self._sizes)

    def used_bytes(self) -> int:
        return sum(self._sizes.values())

    def remove(self, digest: Digest) -> None:
        self._sizes.pop(digest, None)

    def collect(self, is_kept: Callable[[Digest], bool], *, partial_age_s: float = 3600.0) -> int:
        return sum(self._sizes.pop(digest) for digest in list(self._sizes) if not is_kept(digest))


class MetaParams(ParamStore):
    """Vectors that have a name and a length; each is one file."""

    def __init__(self, root: Path, machine: CoordinatorMachine, meter: Meter) -> None:
        super().__init__(root, durable=True)
        self._machine, self.meter = machine, meter
        self._files: dict[str, int] = {}  # elements of each
        self._means: dict[Params, float] = {}  # seconds to read those that are computed when they are read

    def create(self, name: str, vector: Vector | Tensor) -> Params:
        return self._made(name, vector.numel() if isinstance(vector, Tensor) else vector.numel)

    def find(self, name: str, numel: int) -> Params | None:
        params = _whole(name, numel)
        return params if self._files.get(name) == numel else None

    def zeros(self, name: str, numel: int) -> Params:
        return self._made(name, numel)

    def mean(self, name: str, numel: int, read_s: float) -> Params:
        """A vector that is computed each time it is read, until it is settled."""
        params = self._made(name, numel)
        self._means[params] = read_s
        return params

    def apply(
        self, op: Op, *handles: Params, name: str, layout: Layout, num_outputs: int = 1, **scalars: Any
    ) -> tuple[Params, ...]:
        for handle in handles:
            self._read(handle)
        moved_bytes = type_bytes * handles[0].numel * (len(handles) + num_outputs)
        self.meter.charge(moved_bytes / self._machine.apply_bytes_per_s)
        return tuple(self._made(f"{name}-{i}", handles[0].numel) for i in range(num_outputs))

    def norm(self, params: Params) -> float:
        self._read(params)
        self.meter.charge(type_bytes * params.numel / self._machine.apply_bytes_per_s)
        return 1.0

    def distance(self, one: Params, other: Params, *, at_most: int) -> float:
        """The same at all times, so that no run is found to diverge."""
        return 1.0

    def settle(self, handles: Iterable[Params]) -> None:
        for params in handles:
            self.meter.charge(self._means.pop(params, 0.0))

    def check(self, params: Params) -> None:
        for fragment in params.fragments:
            if self._files.get(fragment.name) != fragment.in_file:
                raise CorruptError(f"the vector {fragment.name} is not among those of {self.root}")

    def remove_except(self, handles: Iterable[Params]) -> int:
        kept = set(handles)
        self.settle(kept)
        names = {fragment.name for params in kept for fragment in params.fragments}
        gone = [name for name in self._files if name not in names]
        self._means.clear()
        return sum(type_bytes * self._files.pop(name) for name in gone)

    def _read(self, params: Params) -> None:
        self.check(params)
        self.meter.charge(self._means.get(params, 0.0))

    def _made(self, name: str, numel: int) -> Params:
        params = _whole(name, numel)
        self._files[name] = numel
        return params


def _whole(name: str, numel: int) -> Params:
    return Params((Fragment(name, numel),))


class MetaPublisher(Publisher):
    """Versions of a known size; with a delta codec each is published both ways, as real ones are."""

    def __init__(
        self, run: RunFacts, params: MetaParams, objects: MetaObjects, folder: Path, executor: Executor, charge_s: float
    ) -> None:
        super().__init__(run, params, objects, folder, executor)
        self._places, self._meter, self._charge_s = objects, params.meter, charge_s
        self._sizes: dict[Layout, tuple[int, int]] = {}

    def _encode(self, name: str, handle: Params, layout: Layout) -> Digest:
        self._meter.charge(self._charge_s * layout.numel / self._run.layout.numel)
        version = "+".join(f"{f.name}:{f.start}" for f in handle.fragments)
        if layout not in self._sizes:
            whole = codec("fp32") if self._run.down.is_delta else self._run.down_policy
            change_bytes = flat_size(CHANGE, layout, self._run.down_policy) if self._run.down.is_delta else 0
            self._sizes[layout] = (flat_size(WHOLE, layout, whole), change_bytes)
        whole_bytes, change_bytes = self._sizes[layout]
        target = self._places.place(meta_digest(version, whole_bytes), whole_bytes)
        base = self._latest.get(name)
        if self._run.down.is_delta and base is not None and self._places.has(base):
            change = self._places.place(meta_digest(f"{version}-change", change_bytes), change_bytes)
            delta = Delta(target=target, base=base, change=change)
            self._keep(name, delta, layout)
        return target

    def _save(self) -> None:
        """Nothing of it outlives the process."""


class MetaUpdates(Updates):
    """Every update is fine, and so is their mean; to read them takes time."""

    def __init__(self, run: RunFacts, params: MetaParams, objects: MetaObjects, machine: CoordinatorMachine) -> None:
        super().__init__(run, params, objects)
        self._vectors, self._machine = params, machine

    def check(self, object: Digest, name: str, max_norm: float, part: Sequence[int] = ()) -> None:
        self._vectors.meter.charge(self._objects.size(object) / self._machine.check_bytes_per_s)

    def reduce(self, rows: Sequence[ReplyRow], reduction: Reduction, name: str) -> Combined:
        numel = self._run.layout.part(reduction.part).numel
        read_s = type_bytes * numel * len(rows) / self._machine.add_bytes_per_s
        report = Report(rule=self._run.aggregation.rule, factors=(1.0,) * len(rows), num_passes=1.0)
        return Combined(params=self._vectors.mean(name, numel, read_s), report=report)


class MetaCheckpoints(Checkpoints):
    """Checkpoints of which only the names are kept."""

    def __init__(self, folder: Path, params: ParamStore, *, keep: int) -> None:
        super().__init__(folder, params, keep=keep)
        self._names: tuple[str, ...] = ()

    def save(
        self, name: str, manifest: Mapping[str, Any], handles: Mapping[str, Params], *, prune: bool = True
    ) -> Path:
        self._names = (*self._names, name)[-self.keep :]
        return self.folder / name

    def load_latest(self) -> None:
        return None

    def remove_where(self, unwanted: Callable[[Mapping[str, Any]], bool]) -> None:
        pass

    def names(self) -> tuple[str, ...]:
        return self._names


class MetaKit(Kit):
    """The parts of a coordinator on such a machine; the work they do not do is charged to `meter`."""

    def __init__(self, machine: CoordinatorMachine, objects: MetaObjects) -> None:
        self.machine, self.meter, self._objects = machine, Meter(), objects

    def params(self, folder: Path, *, durable: bool) -> MetaParams:
        self._params = MetaParams(folder, self.machine, self.meter)
        return self._params

    def checkpoints(self, folder: Path, params: ParamStore, *, keep: int) -> MetaCheckpoints:
        return MetaCheckpoints(folder, params, keep=keep)

    def publisher(
        self, run: RunFacts, params: ParamStore, objects: ObjectStore, folder: Path, executor: Executor
    ) -> MetaPublisher:
        charge_s = type_bytes * run.layout.numel / self.machine.encode_bytes_per_s
        return MetaPublisher(run, self._params, self._objects, folder, executor, charge_s)

    def updates(self, run: RunFacts, params: ParamStore, objects: ObjectStore) -> MetaUpdates:
        return MetaUpdates(run, self._params, self._objects, self.machine)
