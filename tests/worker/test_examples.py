"""On how much of its owner's text a result stands: sequences that were read and used, each counted once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from models.families import FAMILIES
from worker.test_replica import replica_of, seq_len, spec_of

from potluck.data.packing import PackedShard, TokenDocuments, pack
from potluck.data.stream import Sequences
from potluck.optim.dp_sgd import PrivacyConfig
from potluck.protocol import pb
from potluck.storage.objects import ObjectStore
from potluck.strategies import zeroth_order
from potluck.types.errors import InvalidUpdate
from potluck.worker.replica import TorchReplica
from potluck.worker.sources import Sources

SPEC = spec_of(FAMILIES["gpt2"], optimizer="sgd").model_copy(update={"data_access": "private"})
TRAINING = pb.Lease(task="t.t", num_sequences=1000)


def own_text(folder: Path, num_sequences: int, name: str) -> tuple[PackedShard, ...]:
    tokens = np.random.default_rng(1).integers(0, 64, num_sequences * seq_len + 1)
    documents = TokenDocuments.of([tokens], [np.array([len(tokens)])])
    (folder / name).mkdir()
    return pack(documents, [0], seq_len=seq_len, token_type=np.dtype(np.uint16), folder=folder / name)


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    """10 sequences to train on, and 5 that are held out."""
    own: Any = SimpleNamespace(shards=own_text(tmp_path, 10, "a"), validation=own_text(tmp_path, 5, "b"))
    return Sources(spec=SPEC, objects=ObjectStore(tmp_path / "objects"), own=own)


def examples(sources: Sources, lease: pb.Lease, work: Callable[[TorchReplica], object]) -> int | None:
    replica = replica_of(SPEC)
    with sources.open(lease) as fed:
        replica.feed(fed)
        work(replica)
    return sources.num_examples(num_unused=replica.num_left_over)


def steps(num: int) -> Callable[[TorchReplica], object]:
    return lambda replica: [replica.train_step(progress=0.0) for _ in range(num)]


@pytest.mark.parametrize(("num_steps", "expected"), [(1, 4), (2, 8), (3, 10), (9, 10)])
def test_ten_sequences_are_ten_however_often_they_are_read(sources: Sources, num_steps: int, expected: int) -> None:
    assert examples(sources, TRAINING, steps(num_steps)) == expected, "whatever the lease says"


def test_what_was_read_and_not_used_does_not_count(sources: Sources) -> None:
    assert examples(sources, TRAINING, lambda replica: replica.gradient(num_sequences=1)) == 1
    assert examples(sources, TRAINING, lambda replica: replica.gradient(num_sequences=6)) == 6
    with pytest.raises(InvalidUpdate, match="1 sequences, which are no whole number of batches"):
        examples(sources, TRAINING, lambda replica: zeroth_order._sequences(replica.batches(), 1))


def test_held_out_text_counts_as_far_as_it_was_read(sources: Sources) -> None:
    held_out = pb.Lease(task="t.t", held_out=True)
    assert examples(sources, held_out, lambda replica: [replica.evaluate(b) for b in replica.batches()]) == 5
    assert sources.own is not None
    first = sources.own.validation[0].num_sequences
    assert examples(sources, held_out, steps(1)) == first < 5, "a coordinator that has a worker train on it"


def test_text_of_others_is_none_of_the_owners(sources: Sources) -> None:
    assert examples(sources, TRAINING, steps(1)) == 4
    assert examples(sources, pb.Lease(task="t.t"), lambda _: None) is None, "the task before is forgotten"


def test_copies_of_listed_files_are_the_owners_text_too(tmp_path: Path) -> None:
    """A coordinator that calls them listed may deal the same few again and again."""
    rows = np.random.default_rng(1).integers(0, 64, (10, seq_len + 1))
    listed: Any = SimpleNamespace(open=lambda _: Sequences(rows))
    spec = SPEC.model_copy(update={"data_access": "listed"})
    sources = Sources(spec=spec, objects=ObjectStore(tmp_path / "objects"), listed=listed)

    def lease(*spans: tuple[str, int, int], **values: Any) -> pb.Lease:
        dealt = [pb.Span(shard=name, digest=name[:1], start=start, stop=stop) for name, start, stop in spans]
        return pb.Lease(task="t.t", spans=dealt, num_sequences=sum(s.stop - s.start for s in dealt), **values)

    again = lease(*[("a.txt", 0, 2)] * 4)
    assert sources.most_examples(again) == 8
    assert examples(sources, again, steps(2)) == 2
    other_name = lease(("a.txt", 0, 8), ("a copy.txt", 0, 8), ("b.txt", 0, 4))
    found = examples(sources, other_name, steps(5))
    assert found is not None and found <= 10 + 4, "the same file by another name"
    assert examples(sources, lease(("a.txt", 0, 8)), steps(1)) == 4, "what was read so far"
    held_out = lease(("a.txt", 3, 8), held_out=True)
    assert examples(sources, held_out, lambda replica: [replica.evaluate(b) for b in replica.batches()]) == 5


def test_a_task_stands_on_no_more_than_it_is_given_and_its_owner_has(sources: Sources) -> None:
    def most(num_sequences: int, **run: Any) -> int | None:
        spec = SPEC.model_copy(update=run)
        own: Any = SimpleNamespace(num_sequences=10) if run.get("data_access") != "shared" else None
        return Sources(spec=spec, objects=sources.objects, own=own).most_examples(pb.Lease(num_sequences=num_sequences))

    assert [most(number) for number in (4, 40)] == [4, 10]
    assert most(40, data_access="shared") is None
    privacy = PrivacyConfig(max_epsilon=1.0, delta=1e-5, noise_multiplier=1.0, clip=1.0)
    assert most(4, privacy=privacy) == 10, "each of them might be in a sample"
