"""A worker's insides without values: the shipping runner does its tasks on a model that has only a layout.

A task function runs once for each kind of lease, on a replica that counts what it would compute; what it returned holds
for every worker that is given the same. Each of them is charged

    t = FLOPs / (flops duty)        planner/flops.py; `flops` what its device reaches in training

Sessions are not modelled: they wait for values.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from potluck.clock import Clock
from potluck.clock.conversation import Ask, in_turns
from potluck.codecs.base import codec
from potluck.codecs.bundle import flat_size
from potluck.codecs.delta import WHOLE
from potluck.codecs.policy import CodecPolicy
from potluck.codecs.spec import parse_spec
from potluck.data.shards import Span
from potluck.planner.flops import step_work
from potluck.planner.memory import ModelDims
from potluck.protocol import pb
from potluck.simulator.large.meta import MetaObjects, meta_digest
from potluck.storage.digest import check_digest
from potluck.strategies.replica import Kept, Loss, Mailbox, Replica, Step
from potluck.strategies.run import RunSpec
from potluck.strategies.task import Result, TaskFunction, decode_arguments
from potluck.types.errors import Refused
from potluck.types.ids import Digest, LeaseId
from potluck.types.params import Layout
from potluck.types.vector import Vector
from potluck.worker.runner import Runner
from potluck.worker.snapshots import SnapshotFile
from potluck.worker.sources import Fed, Sources
from potluck.worker.state import Results, RunFolder
from potluck.worker.trainer import Source, Trainer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Deed:
    """What a task came to: its result, and the work it was."""

    result: Result
    flops: float
    num_steps: int
    num_tokens: int


class AllKept(Kept):
    """A state that holds whatever is asked for, without values."""

    def __getitem__(self, name: str) -> Tensor:
        return self.make(name)


class CountingReplica:
    """A replica that counts. `num_sequences`: what it was given of held-out data."""

    def __init__(self, spec: RunSpec, layout: Layout, num_sequences: int) -> None:
        self.layout, self._spec, self._num_sequences = layout, spec, num_sequences
        self._dims = ModelDims.of(spec.model_config_json, layout.numel)
        self._loss = math.log(self._dims.vocab_size)
        self._step = self._train_work(spec.inner.sequences_per_step)
        self.flops, self.num_steps, self.num_tokens = 0.0, 0, 0
        self.kept = AllKept(layout.numel, "meta")

    @property
    def weights(self) -> Tensor:
        raise Refused("the method writes weights itself, and this simulation has none; use another strategy")

    @property
    def mailbox(self) -> Mailbox:
        raise Refused("a session needs values, and this simulation has none; use a strategy without sessions")

    @property
    def is_cut_short(self) -> bool:
        return False

    @property
    def epsilon(self) -> float | None:
        return None if self._spec.privacy is None else 0.0

    def batches(self) -> Iterator[Tensor]:
        size = self._spec.inner.batch_size
        for start in range(0, self._num_sequences, size):
            rows = min(size, self._num_sequences - start)
            yield torch.empty((rows, self._spec.seq_len + 1), dtype=torch.int64, device="meta")

    def first(self) -> Vector:
        return without_values(self.layout)

    def load(self, theta: Vector | Tensor) -> None:
        pass

    def params(self) -> Vector:
        return without_values(self.layout)

    def steer(
        self, *, anchor: Vector | None = None, pull: float = 0.0, shift: Vector | None = None,
        pressed: Sequence[tuple[int, int]] = (), press: float = 0.0,
    ) -> None:  # fmt: skip
        pass

    def train_only(self, part: Sequence[int]) -> None:
        pass

    def prefer(self, *, beta: float) -> None:
        pass

    def forget_moments(self) -> None:
        pass

    def use_rank(self, rank: int) -> None:
        pass

    def train_step(self, *, progress: float) -> Step:
        self.flops += self._step
        self.num_steps += 1
        num_tokens = self._spec.inner.sequences_per_step * self._spec.seq_len
        self.num_tokens += num_tokens
        return Step(loss=self._loss, num_tokens=num_tokens)

    def gradient(self, *, num_sequences: int) -> tuple[Tensor, Loss]:
        self.flops += self._train_work(num_sequences)
        self.num_steps += 1
        num_tokens = num_sequences * self._spec.seq_len
        self.num_tokens += num_tokens
        return torch.empty(self.layout.numel, device="meta"), Loss(self._loss * num_tokens, num_tokens)

    def evaluate(self, tokens: Tensor) -> Loss:
        num_tokens = tokens.shape[0] * self._spec.seq_len
        self.flops += self._train_work(tokens.shape[0]) / 3  # forward only
        return Loss(self._loss * num_tokens, num_tokens)

    def _train_work(self, num_sequences: int) -> float:
        return step_work(self._dims, seq_len=self._spec.seq_len, num_tokens=num_sequences * self._spec.seq_len).flops


def without_values(layout: Layout) -> Vector:
    def read(start: int, stop: int) -> Tensor:
        return torch.empty(stop - start, device="meta")

    return Vector(layout.numel, read)


class Deeds:
    """What tasks come to, each kind worked out once for the whole fleet."""

    def __init__(self, spec: RunSpec, layout: Layout) -> None:
        self.spec, self.layout = spec, layout
        self.policy_rules = CodecPolicy.from_json("fp32", spec.up_rules).rules
        self._done: dict[tuple[str, str, int], Deed] = {}
        self._sizes: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self.whole_bytes = flat_size(WHOLE, layout, codec("fp32"))

    def of(self, function: TaskFunction, lease: pb.Lease, arguments: Mapping[str, Any]) -> Deed:
        held_out = sum(s.stop - s.start for s in lease.spans) if lease.held_out else 0
        key = (lease.task, lease.arguments_json, held_out)
        if key not in self._done:
            replica = CountingReplica(self.spec, self.layout, held_out)
            seen: Replica = replica
            result = function.function(seen, **arguments)
            if len(self._done) > 1024:
                self._done.clear()
            self._done[key] = Deed(
                result=result, flops=replica.flops, num_steps=replica.num_steps, num_tokens=replica.num_tokens
            )
        return self._done[key]

    def update_bytes(self, name: str, up_codec: str, part: Sequence[int]) -> int:
        """What a result's vector takes on the way up."""
        key = (name, up_codec, tuple(part))
        if key not in self._sizes:
            policy = CodecPolicy(default=parse_spec(up_codec or "fp32").codec.name, rules=self.policy_rules)
            self._sizes[key] = flat_size(name, self.layout.part(part), policy)
        return self._sizes[key]


class DeviceCompute:
    """The executor of one simulated device: a task takes what its work takes there, unless it is interrupted."""

    def __init__(self, clock: Clock, flops: float, told: Callable[[float, float], None]) -> None:
        self._clock, self._flops, self._told = clock, flops, told
        self._due_flops, self._slowness = 0.0, 1.0
        self._waiting: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ends_at = 0.0

    def charge(self, flops: float) -> None:
        self._due_flops += flops

    async def run(self, fn: Callable[..., T], *args: Any, cost_s: float = 0.0) -> T:
        result = fn(*args)
        begun, due_flops = self._clock.now(), self._due_flops
        self._due_flops = 0.0
        try:
            await self._pass(cost_s + due_flops / self._flops)
        finally:
            self._told(begun, self._clock.now())
        return result

    @property
    def is_hung(self) -> bool:
        return math.isinf(self._slowness)

    async def _pass(self, seconds: float) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        self._end_after(seconds * self._slowness if seconds else 0.0)
        try:
            await self._waiting
        finally:
            self._end_after(math.inf)
            self._waiting = None

    def _end_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ends_at = self._clock.now() + seconds
        if seconds < math.inf:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.interrupt)

    def interrupt(self) -> None:
        """What runs ends now."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def slow_down(self, factor: float) -> None:
        """From now on everything takes `factor` times what it should, also what runs; inf for a device that hangs."""
        was, self._slowness = self._slowness, factor
        if self._waiting is not None and not math.isinf(was):
            self._end_after(max(self._ends_at - self._clock.now(), 0.0) / was * factor)

    async def converse(self, work: Callable[[Ask], T]) -> T:
        return await in_turns(work)

    def close(self) -> None:
        pass


class Inline:
    """An executor that takes no time at all."""

    async def run(self, fn: Callable[..., T], *args: Any, cost_s: float = 0.0) -> T:
        return fn(*args)

    async def converse(self, work: Callable[[Ask], T]) -> T:
        return await in_turns(work)

    def close(self) -> None:
        pass


class NoSnapshot(SnapshotFile):
    """A task that a crash ends is begun again."""

    def num_steps(self, task: str) -> int:
        return 0

    def drop(self) -> None:
        pass


class MetaFolder(RunFolder):
    """What a worker keeps, without a disk. It outlives the worker's process as a disk would."""

    def __init__(self, root: Path) -> None:
        self.places = MetaObjects(root / "objects")
        super().__init__(root, self.places)
        self.snapshot = NoSnapshot(root, self.places.spares)
        self._versions: set[str] = set()
        self._sent: dict[LeaseId, pb.TaskResult] = {}
        self._unsent: dict[LeaseId, pb.TaskResult] = {}

    def residual_path(self, version: str, part: Sequence[int] = ()) -> Path:
        return self.root / version

    def carry_residuals(self, version: str, to: str, *, but: Path | None = None) -> None:
        pass

    def drop_residual(self, version: str) -> None:
        pass

    def has_version(self, version: str) -> bool:
        return version in self._versions

    def save_version(self, version: str, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        self._versions.add(version)

    def load_version(self, version: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {}

    def keep_versions(self, keep: Iterable[str]) -> None:
        self._versions &= set(keep)

    def save_results(self, sent: Results, unsent: Results) -> None:
        self._sent, self._unsent = dict(sent), dict(unsent)

    def load_results(self) -> tuple[dict[LeaseId, pb.TaskResult], dict[LeaseId, pb.TaskResult]]:
        return dict(self._sent), dict(self._unsent)


class MetaSources(Sources):
    """Data that is read as it is dealt, without its content."""

    @contextmanager
    def open(self, lease: pb.Lease) -> Iterator[Fed]:
        if self.spec.data_access == "shared":
            for span in lease.spans:
                digest = check_digest(span.shard)
                self._shards_read.pop(digest, None)
                self._shards_read[digest] = None
        yield Fed(iter(()))

    def _sequences(self, span: Span) -> Any:
        raise AssertionError("data without content is read")


class MetaTrainer(Trainer):
    """Keeps versions by name; `begun` hears of every task that starts."""

    def __init__(self, folder: MetaFolder, layout: Layout, compute: DeviceCompute, begun: Callable[[], None]) -> None:
        self._folder, self._own_layout, self._compute, self._begun = folder, layout, compute, begun
        self.num_steps = self.num_batches = 0
        self.tokens_per_s = 0.0
        self._resumable = None

    @property
    def layout(self) -> Layout:
        return self._own_layout

    @property
    def adapter_rank(self) -> int:
        """Not known: of unequal ranks its worker is given the lowest."""
        return 0

    @property
    def num_unused(self) -> int:
        return 0

    def cancel(self) -> None:
        self._compute.interrupt()

    def suspend(self) -> None:
        self._compute.interrupt()

    def prepare(
        self, lease: pb.Lease, source: Source, *, pinned: bool, begun_at: float | None = None, stop_after: int = 0,
        is_cut_short: Callable[[], bool] = lambda: False,
    ) -> Any:  # fmt: skip
        self._begun()

    def keep(self, lease: pb.Lease, source: Source) -> None:
        if lease.next_version:
            self._folder.save_version(lease.next_version, {}, {})


class MetaRunner(Runner):
    """The shipping runner; where it would touch values it looks up sizes."""

    def __init__(self, deeds: Deeds, *, folder: MetaFolder, compute: DeviceCompute, **parts: Any) -> None:
        super().__init__(spec=deeds.spec, folder=folder, compute=compute, **parts)
        self._deeds, self._device, self._places = deeds, compute, folder.places

    def _perform(
        self, function: TaskFunction, lease: pb.Lease, arguments: Mapping[str, Any], begun_at: float,
        stop_after: int = 0, cut_after: int = 0,
    ) -> Result:  # fmt: skip
        with self.sources.open(lease) as source:
            self.trainer.prepare(lease, source, pinned=function.kind != "pure")
            deed = self._deeds.of(function, lease, arguments)
            self._device.charge(deed.flops)
            self.trainer.num_steps = deed.num_steps
            if function.kind != "pure":
                self.trainer.keep(lease, source)
        return deed.result

    def _decode(self, value: Any, operands: Mapping[str, Tensor]) -> Any:
        layout = self.trainer.layout
        return decode_arguments(
            value, params=lambda _: without_values(layout), tensors=lambda _: {}, inline=lambda i: operands[str(i)]
        )

    def _encode(self, lease: pb.Lease, tensors: Mapping[str, Vector | Tensor]) -> Digest:
        (name,) = tensors
        size = self._deeds.update_bytes(name, lease.up_codec, lease.part)
        digest = meta_digest(f"{lease.round}/{lease.attempt}/{lease.key}", size)
        self._encoded.add(digest)
        return self._places.place(digest, size)

    def _apply(self, delta: pb.Delta) -> None:
        self._places.place(check_digest(delta.target), self._deeds.whole_bytes)
