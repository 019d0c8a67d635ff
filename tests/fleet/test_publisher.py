"""Versions as differences: everyone who follows them holds the coordinator's bits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from potluck.clock import ThreadExecutor
from potluck.codecs.bundle import Bundle
from potluck.codecs.delta import WHOLE, max_way, write_sum
from potluck.fleet.publisher import Publisher
from potluck.optim.inner import InnerConfig
from potluck.storage.objects import ObjectStore
from potluck.storage.params import ParamStore
from potluck.strategies.run import Budget, RunFacts
from potluck.strategies.task import encode_arguments
from potluck.types.errors import CorruptError
from potluck.types.ids import Digest
from potluck.types.params import Layout, Params, Tensors

layout = Layout.of([("w", (100, 90)), ("b", (90,))])


class Home:
    def __init__(self, folder: Path, down: str = "int8-delta") -> None:
        self.folder, self.params, self.objects = folder, ParamStore(folder / "params"), ObjectStore(folder / "objects")
        self.down = down
        self.restart()

    def restart(self) -> None:
        nothing = Params(())
        self.facts = RunFacts(
            seed=1, layout=layout, initial=nothing, zeros=nothing, seq_len=8, inner=InnerConfig(),
            budget=Budget(rounds=1), up_codec="fp32", down_codec=self.down,
        )  # fmt: skip
        self.publisher = Publisher(self.facts, self.params, self.objects, self.folder, ThreadExecutor())

    def publish(self, number: int, values: Tensor, name: str = "theta") -> Digest:
        handle = self.params.create(f"v{number}", values)
        asyncio.run(self.publisher.publish([(name, handle)]))
        return self.publisher.digests[handle]

    def read(self, digest: Digest) -> Tensor:
        with Bundle.open(self.objects.path(digest)) as bundle:
            return bundle.decode_flat(WHOLE, layout)


def versions(num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(layout.numel, generator=generator)
    steps = [0.01 * torch.randn(layout.numel, generator=generator) for _ in range(num - 1)]
    return [first + sum(steps[:i], torch.zeros(layout.numel)) for i in range(num)]


def test_a_worker_that_follows_has_the_coordinators_bits_and_errors_do_not_add_up(tmp_path: Path) -> None:
    home, thetas = Home(tmp_path), versions(8)
    held, at = ObjectStore(tmp_path / "worker"), home.publish(0, thetas[0])
    assert torch.equal(home.read(at), thetas[0])
    (tmp_path / "copy").write_bytes(home.objects.path(at).read_bytes())
    assert held.adopt(tmp_path / "copy") == at
    for i, theta in enumerate(thetas[1:], start=1):
        digest = home.publish(i, theta)
        delta = home.publisher.deltas_to([digest])[0]
        assert (delta.target, delta.base) == (digest, at)
        write_sum(tmp_path / "next", held.path(at), home.objects.path(Digest(delta.delta)), layout)
        at = held.adopt(tmp_path / "next")
        assert at == digest
        assert (home.read(digest) - theta).abs().max() < 0.01 * 5 / 127  # what this step alone loses


@pytest.mark.parametrize(
    ("down", "length"), [("fp32-delta", 1), ("bf16-delta", 1), ("int8-delta", 3), ("int4-delta", 7),
                         ("topk(1.5625%)-delta", max_way)],
)  # fmt: skip
def test_the_way_to_the_last_version_is_as_long_as_it_takes_less_than_the_whole(
    down: str, length: int, tmp_path: Path
) -> None:
    home = Home(tmp_path, down)
    digests = [home.publish(i, theta) for i, theta in enumerate(versions(11))]
    way = home.publisher.deltas_to([digests[-1]])
    assert [(d.target, d.base) for d in way] == [(digests[i], digests[i - 1]) for i in range(10, 10 - length, -1)]
    sizes, whole = [home.objects.size(Digest(d.delta)) for d in way], home.objects.size(digests[-1])
    if length > 1:
        assert sum(sizes) < whole
    if length < max_way:
        assert sum(sizes) + sizes[0] >= whole
    facts = home.facts
    assert facts.down_bytes() == sizes[0] and facts.down_bytes(num_behind=length) == sum(sizes)
    assert facts.down_bytes(num_behind=length + 1) == whole


def test_versions_go_on_after_a_restart_as_without_one(tmp_path: Path) -> None:
    thetas = versions(4)
    one, other = Home(tmp_path / "one"), Home(tmp_path / "other")
    straight = [one.publish(i, theta) for i, theta in enumerate(thetas)]
    broken: list[Digest] = []
    for i, theta in enumerate(thetas):
        broken.append(other.publish(i, theta))
        other.restart()
        assert other.publish(i, theta) == broken[-1]  # found, not made again
    assert straight == broken


@pytest.mark.parametrize("content", [b"", b'{"handles": [[', b"[]", b'{"handles": [[[["v0", "x"]], "../y"]]}', b"null"])
def test_a_list_of_versions_that_cannot_be_read_costs_one_whole_version(content: bytes, tmp_path: Path) -> None:
    home, thetas = Home(tmp_path), versions(3)
    home.publish(0, thetas[0])
    (tmp_path / "published.json").write_bytes(content)
    home.restart()
    whole = home.publish(1, thetas[1])
    assert home.publisher.deltas_to([whole]) == [] and torch.equal(home.read(whole), thetas[1])
    assert [d.base for d in home.publisher.deltas_to([home.publish(2, thetas[2])])] == [whole]


@pytest.mark.parametrize("rot", [lambda data: data[:1000], lambda data: data[:-4000] + b"\xff" * 4000])
def test_a_version_that_the_disk_has_lost_costs_one_whole_version(
    rot: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    home, thetas = Home(tmp_path), versions(2)
    path = home.objects.path(home.publish(0, thetas[0]))
    path.write_bytes(rot(path.read_bytes()))
    whole = home.publish(1, thetas[1])
    assert home.publisher.deltas_to([whole]) == [] and torch.equal(home.read(whole), thetas[1])
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_version_far_away_is_sent_whole(tmp_path: Path) -> None:
    home, (first, _) = Home(tmp_path), versions(2)
    home.publish(0, first)
    far = home.publish(1, -first)
    assert torch.equal(home.read(far), -first)
    assert home.publisher.deltas_to([far]) == []


def test_two_arguments_are_two_chains(tmp_path: Path) -> None:
    home, thetas = Home(tmp_path), versions(2)
    control = 100 * torch.ones(layout.numel)
    home.publish(0, thetas[0], "theta")
    home.publish(1, control, "control")
    digest = home.publish(2, thetas[1], "theta")
    assert (home.read(digest) - thetas[1]).abs().max() < 0.01 * 5 / 127


def test_without_deltas_each_version_is_one_object(tmp_path: Path) -> None:
    home, thetas = Home(tmp_path, down="bf16"), versions(2)
    digests = [home.publish(i, theta) for i, theta in enumerate(thetas)]
    assert home.publisher.deltas_to(digests) == []
    assert home.publisher.objects() == set(digests)
    assert not (tmp_path / "published.json").exists()


@pytest.mark.parametrize("down", ["fp32", "int8-delta"])
def test_tensors_that_are_not_the_models_are_whole_and_without_versions(down: str, tmp_path: Path) -> None:
    home = Home(tmp_path, down)
    own = Layout.of([("a", (2, 3)), ("b", (5,))])
    values = [torch.arange(11.0) + i for i in range(2)]
    stacks = [Tensors(home.params.create(f"stack-{i}", each), own) for i, each in enumerate(values)]
    theta = home.publish(0, versions(1)[0])
    asyncio.run(home.publisher.publish([("stacks", stack) for stack in stacks]))
    digests = [home.publisher.digests[stack.params] for stack in stacks]
    assert encode_arguments({"stacks": stacks}, home.publisher.digests).value == {
        "stacks": [{"$object": digest} for digest in digests]
    }
    for digest, each in zip(digests, values, strict=True):
        with Bundle.open(home.objects.path(digest)) as bundle:
            found = bundle.read_all(at_most=11)
            with pytest.raises(CorruptError, match="holds 11 values and 10 are the most"):
                bundle.read_all(at_most=10)
        assert torch.equal(found["params/a"], each[:6].view(2, 3)) and torch.equal(found["params/b"], each[6:])
    assert home.publisher.deltas_to(digests) == []
    assert home.publisher.bases() == ([theta] if down == "int8-delta" else [])
    home.restart()
    asyncio.run(home.publisher.publish([("stacks", stacks[0])]))
    assert home.publisher.digests[stacks[0].params] == digests[0]
    home.publisher.forget({stacks[1].params})
    assert stacks[0].params not in home.publisher.digests
