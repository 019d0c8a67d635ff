"""Error feedback: what a codec lost of one update is added to the next.

    a = beta e + x      send C(a)      e = a - decode(C(a))

e is pinned state: it is written beside the one it came from under the name of the state that the task produces, and
adopted with it. So an update that was dropped, late or in a discarded round leaves e, the optimizer and the data as
they were before it, and the work is done again from there: no mass is lost and none counts twice. A refused update
resets e, since what made it invalid may be in it. e lies in a mapped file and costs no memory.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch
from torch import Tensor

from potluck.codecs.bundle import write_flat_slices
from potluck.codecs.policy import CodecPolicy
from potluck.protocol import pb
from potluck.storage.files import reserve
from potluck.types.params import Layout, type_bytes
from potluck.types.vector import Vector
from potluck.worker.state import RunFolder

max_age_rounds = 64
"""What was left over longer ago than this belongs to another model by now."""
_round_of = re.compile(r"r([0-9]{1,19})-")  # work beyond rounds has a number of 13 digits


def write_update(
    path: Path, name: str, vector: Vector, *, layout: Layout, policy: CodecPolicy, beta: float, lease: pb.Lease,
    folder: RunFolder, seed: int,
) -> None:  # fmt: skip
    """Write a result's vector; with `beta` above 0 what this loses is kept. InvalidUpdate if it is not finite.

    `layout` is that of the part of the model that the lease asks for; what is left over of other parts stays.
    """
    noise = int.from_bytes(hashlib.sha256(f"{seed}/{lease.round}/{lease.key}".encode()).digest()[:8], "little")
    before = _left_over(folder, lease, layout) if lease.next_version else None
    if lease.part:
        sent = folder.residual_path(lease.base_version, lease.part)
        folder.carry_residuals(lease.base_version, lease.next_version, but=sent)
    if not beta or not lease.next_version:  # what an earlier round left over is sent along
        total = vector if before is None else vector + before
        write_flat_slices(path, name, total.read, layout, policy, seed=noise)
        return
    after_path = folder.residual_path(lease.next_version, lease.part)
    scratch = after_path.with_suffix(".unfinished")
    reserve(scratch, layout.numel * type_bytes)
    after = _mapped(scratch, layout.numel)
    total = vector if before is None else vector + beta * before
    write_flat_slices(path, name, total.read, layout, policy, seed=noise, residual=after)
    scratch.replace(after_path)


def _left_over(folder: RunFolder, lease: pb.Lease, layout: Layout) -> Vector | None:
    match = _round_of.match(lease.base_version)
    path = folder.residual_path(lease.base_version, lease.part)
    is_young = match is not None and lease.round - int(match[1]) <= max_age_rounds
    if not is_young or not path.is_file() or path.stat().st_size != layout.numel * type_bytes:
        return None
    return Vector.of(_mapped(path, layout.numel))


def _mapped(path: Path, numel: int) -> Tensor:
    """A file of fp32 as a tensor."""
    return torch.from_file(str(path), shared=True, size=numel, dtype=torch.float32)
