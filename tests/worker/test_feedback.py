"""Error feedback: mass is neither lost nor counted twice, whatever becomes of an update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from potluck.codecs.bundle import Bundle
from potluck.codecs.policy import CodecPolicy
from potluck.codecs.spec import parse_spec
from potluck.protocol import AHEAD, FLOATING, pb
from potluck.types.errors import InvalidUpdate
from potluck.types.params import Layout
from potluck.types.vector import Vector
from potluck.worker.feedback import carry_left_over, max_age_commits, max_age_rounds, write_update
from potluck.worker.state import RunFolder

layout = Layout.of([("w", (64, 128)), ("b", (100,))])


def lease(round: int, base: str, beyond: int = 0, part: tuple[int, ...] = ()) -> pb.Lease:
    """As the fleet names work of rounds, and such as belongs to none."""
    key = {0: "inner/w1", AHEAD: f"5b/w1#{round}.0", FLOATING: f"w1#{round:09d}.000000.000003"}[beyond]
    to = f"r{beyond or round}-a0-{key.replace('/', '.')}"
    return pb.Lease(key=key, round=beyond or round, base_version=base, next_version=to, part=part)


class Sender:
    def __init__(self, folder: Path, spec: str, *, beyond: int = 0, part: tuple[int, ...] = ()) -> None:
        self.beyond, self.part = beyond, part
        self.folder, self.spec, self.path = RunFolder(folder), parse_spec(spec), folder / "update"
        self.adopted = ""

    def send(self, round: int, delta: Tensor) -> Tensor:
        """What the coordinator decodes."""
        given, own = lease(round, self.adopted, self.beyond, self.part), layout.part(self.part)
        write_update(
            self.path, "delta", Vector.of(delta), layout=own, policy=CodecPolicy(default=self.spec.codec.name),
            beta=self.spec.beta, lease=given, folder=self.folder, seed=1,
        )  # fmt: skip
        with Bundle.open(self.path) as bundle:
            return bundle.decode_flat("delta", own)

    def send_nothing(self, round: int) -> None:
        """A task without a result, in the middle of a chain."""
        carry_left_over(self.folder, lease(round, self.adopted, self.beyond))

    def commit(self, round: int) -> None:
        self.adopted = lease(round, "", self.beyond).next_version
        self.folder.keep_versions([self.adopted])

    def left_over(self) -> Tensor:
        path = self.folder.residual_path(self.adopted)
        return torch.from_file(str(path), size=layout.numel, dtype=torch.float32)


def deltas(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(layout.numel, generator=generator) for _ in range(num)]


@pytest.mark.parametrize("spec", ["int4+ef", "2bit+ef", "1bit+ef", "topk(1.5625%)+2bit+ef", "powersgd(2)+ef"])
def test_what_was_sent_and_what_is_left_over_add_up(tmp_path: Path, spec: str) -> None:
    sender, given, sent = Sender(tmp_path, spec), deltas(6), torch.zeros(layout.numel)
    for round, delta in enumerate(given):
        sent += sender.send(round, delta)
        sender.commit(round)
    torch.testing.assert_close(sent + sender.left_over(), torch.stack(given).sum(0), rtol=1e-4, atol=1e-4)


def test_an_update_that_did_not_count_leaves_everything_as_it_was(tmp_path: Path) -> None:
    """Dropped, late, or of a discarded round: the same work is done again from the same state, with the same bits."""
    sender = Sender(tmp_path, "topk(1.5625%)+ef")
    first, second = deltas(2)
    sender.send(0, first)
    sender.commit(0)
    before = sender.left_over().clone()
    lost = sender.send(1, second)
    sender.folder.keep_versions([sender.adopted])
    assert torch.equal(sender.left_over(), before)
    assert torch.equal(sender.send(1, second), lost)


def test_beta_forgets_and_a_long_absence_too(tmp_path: Path) -> None:
    sender = Sender(tmp_path, "topk(1.5625%)+ef(0.5)")
    first, zero = deltas(1)[0], torch.zeros(layout.numel)
    sender.send(0, first)
    sender.commit(0)
    left = sender.left_over().clone()
    again = sender.send(1, zero)
    sender.commit(1)
    torch.testing.assert_close(again + sender.left_over(), 0.5 * left)
    assert sender.send(1 + max_age_rounds, zero).abs().sum() > 0
    assert sender.send(2 + max_age_rounds, zero).abs().sum() == 0


@pytest.mark.parametrize(("beyond", "max_age"), [(AHEAD, max_age_rounds), (FLOATING, max_age_commits)])
def test_work_beyond_rounds_keeps_what_is_left_over_for_as_long(tmp_path: Path, beyond: int, max_age: int) -> None:
    sender, given, sent = Sender(tmp_path, "topk(1.5625%)+ef", beyond=beyond), deltas(3), torch.zeros(layout.numel)
    for round, delta in enumerate(given):
        sent += sender.send(round, delta)
        sender.commit(round)
    torch.testing.assert_close(sent + sender.left_over(), torch.stack(given).sum(0), rtol=1e-4, atol=1e-4)
    assert sender.send(2 + max_age, torch.zeros(layout.numel)).abs().sum() > 0
    assert sender.send(3 + max_age, torch.zeros(layout.numel)).abs().sum() == 0


@pytest.mark.parametrize("sends", [False, True], ids=["nothing", "another part"])
def test_what_is_too_old_is_not_made_young_by_work_that_sends(tmp_path: Path, sends: bool) -> None:
    """A fragment's rest is carried from state to state until its turn comes."""
    left: list[float] = []
    for absent in (max_age_rounds, max_age_rounds + 1):
        sender = Sender(tmp_path / str(absent), "topk(1.5625%)+ef", beyond=AHEAD, part=(0,))
        sender.send(1, deltas(1)[0][: layout.tensors[0].numel])
        sender.commit(1)
        if sends:
            sender.part = (1,)
            sender.send(1 + absent, torch.zeros(layout.tensors[1].numel))
        else:
            sender.send_nothing(1 + absent)
        sender.commit(1 + absent)
        sender.part = (0,)
        left.append(sender.send(2 + absent, torch.zeros(layout.tensors[0].numel)).abs().sum().item())
    assert left[0] > 0
    assert left[1] == 0


def test_a_refused_update_resets_what_is_left_over(tmp_path: Path) -> None:
    sender = Sender(tmp_path, "topk(1.5625%)+ef")
    sender.send(0, deltas(1)[0])
    sender.commit(0)
    sender.folder.drop_residual(sender.adopted)
    assert sender.send(1, torch.zeros(layout.numel)).abs().sum() == 0


def test_an_update_that_is_not_finite_leaves_nothing_behind(tmp_path: Path) -> None:
    sender = Sender(tmp_path, "int4+ef")
    with pytest.raises(InvalidUpdate):
        sender.send(0, torch.full((layout.numel,), float("nan")))
    assert not sender.folder.residual_path(lease(0, "").next_version).exists()
    sender.folder.keep_versions([])
    assert list((tmp_path / "local").iterdir()) == []
