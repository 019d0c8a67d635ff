"""Error feedback: what a codec lost of one update is added to the next.

    a = beta e + x      send C(a)      e = a - decode(C(a))

e is pinned state: it is written beside the one it came from under the name of the state that the task produces, and
adopted with it. So an update that was dropped, late or in a discarded round leaves e, the optimizer and the data as
they were before it, and the work is done again from there: no mass is lost and none counts twice. A refused update
resets e, since what made it invalid may be in it. e lies in a mapped file and costs no memory.

How old e is goes by the rounds in which the task that left it and the one that takes it up were handed out: the names
of the states that they lead to tell them.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch
from torch import Tensor

from potluck.codecs.bundle import write_flat_slices
from potluck.codecs.policy import CodecPolicy
from potluck.protocol import AHEAD, FLOATING, pb
from potluck.storage.files import reserve
from potluck.types.params import Layout, type_bytes
from potluck.types.vector import Vector
from potluck.worker.state import RunFolder

max_age_rounds = 64
"""What was left over longer ago than this belongs to another model by now."""
max_age_commits = 64 * max_age_rounds
"""The same without a barrier: there a round is no more than one update of one among many workers."""
_round_of = re.compile(r"r([0-9]{1,19})-")
_handed_out_in = re.compile(r"#([0-9]{1,19})\.[0-9.]+\Z")  # of work that belongs to no round


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
        carry_left_over(folder, lease, but=folder.residual_path(lease.base_version, lease.part))
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


def carry_left_over(folder: RunFolder, lease: pb.Lease, *, but: Path | None = None) -> None:
    """What nothing was sent of is left over in the next state too. `but`: the file of what was sent."""
    if _is_young(lease):
        folder.carry_residuals(lease.base_version, lease.next_version, but=but)


def _left_over(folder: RunFolder, lease: pb.Lease, layout: Layout) -> Vector | None:
    path = folder.residual_path(lease.base_version, lease.part)
    if not _is_young(lease) or not path.is_file() or path.stat().st_size != layout.numel * type_bytes:
        return None
    return Vector.of(_mapped(path, layout.numel))


def _is_young(lease: pb.Lease) -> bool:
    """Whether what is left over in the state that it starts from still counts."""
    before, now = _made_in(lease.base_version), _made_in(lease.next_version)
    max_age = max_age_commits if lease.round == FLOATING else max_age_rounds
    return before is not None and now is not None and now - before <= max_age


def _made_in(version: str) -> int | None:
    """The round in which the task that leads to this state was handed out."""
    match = _round_of.match(version)
    if match is not None and int(match[1]) >= AHEAD:
        match = _handed_out_in.search(version)
    return int(match[1]) if match is not None else None


def _mapped(path: Path, numel: int) -> Tensor:
    """A file of fp32 as a tensor."""
    return torch.from_file(str(path), shared=True, size=numel, dtype=torch.float32)
