"""What each accepted update should be: its task done once more, by a worker to which nothing ever happens.

It holds the pinned state that every worker should have after what was accepted of it, and does each accepted task from
there, on the data that the lease grants and as many steps as counted: the update must be the accepted one,
bit for bit. So inner optimizers, error feedback, snapshots and data positions came through every crash, also where the
work was divided in another way than without faults. What error feedback keeps is checked by its equation, since this
worker's code is that of all of them:

    decode(update) + e' = x + beta e        x: what the task returned, e and e': left over before and after it
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.codecs.bundle import Bundle
from potluck.codecs.delta import WHOLE, layout_of
from potluck.codecs.policy import CodecPolicy
from potluck.codecs.spec import parse_spec
from potluck.protocol import pb
from potluck.simulator.exact.invariants import Violated
from potluck.storage.digest import digest_file
from potluck.storage.ledger import ReplyRow
from potluck.storage.objects import ObjectStore
from potluck.strategies.registry import install_tasks
from potluck.strategies.run import RunSpec
from potluck.strategies.task import decode_arguments, installed
from potluck.types.errors import StateMissing
from potluck.types.ids import Digest
from potluck.types.params import Layout
from potluck.types.vector import Vector
from potluck.worker.feedback import carry_left_over, write_update
from potluck.worker.replica import TorchReplica
from potluck.worker.sources import Sources
from potluck.worker.state import RunFolder
from potluck.worker.trainer import Trainer


class Reference:
    """`folder` is its own. `check` every accepted reply, round by round, and then `adopt` what the round committed."""

    def __init__(self, spec: RunSpec, folder: Path, *, base: Sequence[Path] = ()) -> None:
        install_tasks(spec.strategy)
        self._spec, self._folder = spec, RunFolder(folder)
        self._trainer = Trainer(TorchReplica(spec, base=base), self._folder, lambda _: None, now=lambda: 0.0)
        self._rules = CodecPolicy.from_json("fp32", spec.up_rules).rules
        self._unsure: dict[str, tuple[pb.Lease, ReplyRow]] = {}  # tasks that may have begun afresh, by what they left

    @property
    def _layout(self) -> Layout:
        return self._trainer.layout

    def check(self, lease: pb.Lease, row: ReplyRow, objects: ObjectStore, *, may_be_fresh: bool) -> None:
        """`objects` are the coordinator's. `may_be_fresh`: the worker may have lost its state. Violated."""
        fresh = pb.Lease()
        fresh.CopyFrom(lease)
        fresh.base_version = ""
        is_open = may_be_fresh and bool(lease.base_version)
        if self._matches(lease, row, objects):
            if is_open and not row.object:  # it sent nothing: what comes after it will tell how it began
                self._unsure[lease.next_version] = (fresh, row)
            return
        if is_open and self._matches(fresh, row, objects):
            return
        before = self._unsure.pop(lease.base_version, None)
        if before is not None and self._matches(*before, objects) and self._matches(lease, row, objects):
            return
        raise Violated(f"the update of {lease.key} in round {lease.round} is not what its task makes of its data")

    def adopt(self, versions: dict[str, str]) -> None:
        """The committed states: others are not needed any more."""
        self._folder.keep_versions(versions.values())

    def _matches(self, lease: pb.Lease, row: ReplyRow, objects: ObjectStore) -> bool:
        function = installed(lease.task)
        assert function is not None
        trainer, num_steps = self._trainer, int(row.scalars.get("num_steps", 0))
        with (
            Sources(spec=self._spec, objects=objects).open(lease) as source,
            _arguments(lease, objects, self._layout) as arguments,
        ):
            replica = trainer.prepare(
                lease, source, pinned=True,
                is_cut_short=lambda: bool(lease.sequences_per_step) and trainer.num_steps >= num_steps,
            )  # fmt: skip
            try:
                result = function.function(replica, **arguments)
            except StateMissing:
                return False
            trainer.keep(lease, source)
            if dict(result.scalars) != dict(row.scalars):
                return False
            if not result.tensors:
                carry_left_over(self._folder, lease)
                return not row.object
            ((name, tensor),) = result.tensors.items()
            return self._encoded(lease, row, objects, name, Vector.of(tensor))

    def _encoded(self, lease: pb.Lease, row: ReplyRow, objects: ObjectStore, name: str, vector: Vector) -> bool:
        spec = parse_spec(lease.up_codec or "fp32")
        path = self._folder.root / "update"
        path.unlink(missing_ok=True)
        layout = self._layout.part(lease.part)
        write_update(
            path, name, vector, layout=layout, policy=CodecPolicy(default=spec.codec.name, rules=self._rules),
            beta=spec.beta, lease=lease, folder=self._folder, seed=self._spec.seed,
        )  # fmt: skip
        if digest_file(path) != row.object:
            return False
        if spec.beta:
            self._check_feedback(lease, objects.path(Digest(row.object)), name, vector, spec.beta)
        return True

    def _check_feedback(self, lease: pb.Lease, update: Path, name: str, vector: Vector, beta: float) -> None:
        layout = self._layout.part(lease.part)
        with Bundle.open(update) as bundle:
            decoded = bundle.flat_slice(name, layout, 0, layout.numel)
        got = decoded + self._left_over(lease.next_version, lease.part)
        wanted = vector.read(0, layout.numel) + beta * self._left_over(lease.base_version, lease.part)
        if not torch.allclose(got, wanted, rtol=1e-4, atol=1e-6 * float(wanted.abs().max())):
            raise Violated(
                f"error feedback of {lease.key} in round {lease.round} loses {(got - wanted).abs().max().item():.2e}"
            )

    def _left_over(self, version: str, part: Sequence[int]) -> Tensor:
        path = self._folder.residual_path(version, part)
        if not version or not path.is_file():
            return torch.zeros(self._layout.part(part).numel)
        return torch.from_numpy(np.fromfile(path, dtype=np.float32))


@contextmanager
def _arguments(lease: pb.Lease, objects: ObjectStore, layout: Layout) -> Iterator[dict[str, Any]]:
    """Of a task that takes handles and values."""

    def params(digest: Digest) -> Vector:
        with Bundle.open(objects.path(digest)) as bundle:
            own = layout_of(bundle, layout)
            return Vector.of(bundle.flat_slice(WHOLE, own, 0, own.numel))

    def tensors(digest: Digest) -> Mapping[str, Tensor]:
        with Bundle.open(objects.path(digest)) as bundle:
            return bundle.read_all()

    def none(_: object) -> Any:
        raise NotImplementedError(f"{lease.task} takes inline tensors; teach the reference to read them")

    yield decode_arguments(json.loads(lease.arguments_json), params=params, tensors=tensors, inline=none)
