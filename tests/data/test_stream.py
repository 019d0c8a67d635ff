from pathlib import Path

import numpy as np
import pytest
import torch

from potluck.codecs.bundle import write_tensors
from potluck.data.epoch import epoch_order
from potluck.data.packing import PackedShard, TokenDocuments, pack
from potluck.data.shards import Span
from potluck.data.stream import (
    Cursor,
    PrivateSource,
    Sequences,
    SpanSource,
    held_out_batches,
    open_shard,
    stream_sequences,
)
from potluck.types.errors import CorruptError


def shard_of(num_sequences: int, first: int = 0) -> Sequences:
    return Sequences((first + np.arange(num_sequences * 5, dtype=np.uint16)).reshape(num_sequences, 5))


def test_a_stream_is_cut_without_copying() -> None:
    tokens = np.arange(14, dtype=np.uint16)
    sequences = stream_sequences(tokens, 4)
    assert len(sequences) == 3
    assert sequences.take(np.array([2, 0])).tolist() == [[8, 9, 10, 11, 12], [0, 1, 2, 3, 4]]
    assert np.shares_memory(sequences.rows, tokens)
    assert len(stream_sequences(tokens[:4], 4)) == 0


def test_spans_are_read_in_the_epochs_order_and_fill_batches() -> None:
    shards = {"a": shard_of(6), "b": shard_of(4, 100)}
    spans = [Span(shard="a", start=1, stop=6, epoch=2), Span(shard="b", start=0, stop=2, epoch=0)]
    batches = list(SpanSource(spans, lambda s: shards[s.shard], seed=7, batch_size=3))
    assert [list(b.shape) for b in batches] == [[3, 5], [3, 5], [1, 5]]
    assert all(b.dtype == torch.int64 for b in batches)
    expected = [*shards["a"].rows[epoch_order(7, 2, "a", 6)[1:6]], *shards["b"].rows[epoch_order(7, 0, "b", 4)[:2]]]
    assert torch.cat(batches).tolist() == [row.tolist() for row in expected]


def test_spans_of_an_epoch_cover_the_shard_once() -> None:
    spans = [Span(shard="a", start=a, stop=b, epoch=1) for a, b in ((0, 2), (5, 9), (2, 5))]
    rows = torch.cat(list(SpanSource(spans, lambda _: shard_of(9), seed=1, batch_size=4)))
    assert sorted(rows[:, 0].tolist()) == shard_of(9).rows[:, 0].tolist()


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (5, 5), (-1, 2)])
def test_spans_that_the_shard_does_not_hold_are_refused(start: int, stop: int) -> None:
    source = SpanSource([Span(shard="a", start=start, stop=stop, epoch=0)], lambda _: shard_of(6), seed=1, batch_size=2)
    with pytest.raises(CorruptError, match="of a were dealt and it holds 6"):
        next(source)


def test_validation_is_read_in_stored_order() -> None:
    batches = list(held_out_batches(shard_of(5), 2))
    assert [len(b) for b in batches] == [2, 2, 1]
    assert torch.cat(batches).tolist() == shard_of(5).rows.tolist()


@pytest.fixture
def own_shards(tmp_path: Path) -> tuple[PackedShard, ...]:
    documents = TokenDocuments.of([np.arange(81)], [np.array([81])])
    return pack(documents, [0], seq_len=4, token_type=np.dtype(np.uint16), folder=tmp_path)


def private(shards: tuple[PackedShard, ...], cursor: Cursor | None = None, batch_size: int = 3) -> PrivateSource:
    return PrivateSource(shards, seq_len=4, seed=5, batch_size=batch_size, cursor=cursor or Cursor())


def test_private_data_is_read_once_per_epoch_for_ever(own_shards: tuple[PackedShard, ...]) -> None:
    assert len(own_shards) > 1
    source = private(own_shards)
    assert source.num_sequences == 20
    rows = torch.cat([next(source) for _ in range(20)])
    assert rows.shape == (60, 5) and rows.dtype == torch.int64
    firsts = rows[:, 0].tolist()
    epochs = [firsts[i : i + 20] for i in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(0, 80, 4)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert all(row.tolist() == list(range(row[0], row[0] + 5)) for row in rows)
    assert source.cursor == Cursor(3, 0)


def test_private_data_counts_how_many_sequences_it_was(own_shards: tuple[PackedShard, ...]) -> None:
    source = PrivateSource(own_shards, seq_len=4, seed=3, batch_size=3, cursor=Cursor(0, 0))
    rows: list[list[int]] = []
    for _ in range(3 * source.num_sequences):
        rows += next(source).tolist()
        assert source.num_different == len({tuple(row) for row in rows})
    assert source.num_different == source.num_sequences


def test_private_data_goes_on_where_its_cursor_stands(own_shards: tuple[PackedShard, ...]) -> None:
    whole = private(own_shards)
    for stop in (1, 6, 7, 13):
        source = private(own_shards)
        before = [next(source) for _ in range(stop)]
        cursor = Cursor.from_json(source.cursor.to_json())
        resumed = private(own_shards, cursor)
        for _ in range(9):
            assert torch.equal(next(resumed), next(source))
        if stop == 1:
            assert torch.equal(before[0], next(whole))


def test_a_batch_larger_than_the_data_spans_epochs(own_shards: tuple[PackedShard, ...]) -> None:
    batch = next(private(own_shards, batch_size=50))
    assert batch.shape == (50, 5)
    assert sorted(batch[:20, 0].tolist()) == sorted(batch[20:40, 0].tolist()) == list(range(0, 80, 4))


def test_a_cursor_past_the_end_starts_the_next_epoch(own_shards: tuple[PackedShard, ...]) -> None:
    assert private(own_shards, Cursor(2, 999)).cursor == Cursor(3, 0)


def test_a_bundle_that_is_no_shard_of_this_run_is_refused(tmp_path: Path) -> None:
    def check(tensor: torch.Tensor, name: str, message: str) -> None:
        path = tmp_path / f"{abs(hash(message))}.bundle"
        write_tensors(path, {name: tensor})
        with pytest.raises(CorruptError, match=message):
            open_shard(path, seq_len=4, vocab_size=10)

    check(torch.zeros(3, 5, dtype=torch.int32), "other", "holds no tokens")
    check(torch.zeros(3, 6, dtype=torch.int32), "tokens", r"holds int32 \[3, 6\]")
    check(torch.zeros(3, 5), "tokens", r"holds float32 \[3, 5\]")
    check(torch.zeros(0, 5, dtype=torch.int32), "tokens", r"holds int32 \[0, 5\]")
    check(torch.full((3, 5), 10, dtype=torch.int32), "tokens", "holds tokens from 10 to 10 and the vocabulary has 10")
    check(torch.full((3, 5), -1, dtype=torch.int32), "tokens", "holds tokens from -1")


def test_complements_are_for_records_only_and_within_the_vocabulary(tmp_path: Path) -> None:
    def opened(rows: list[list[int]], rows_per_record: int = 1, seq_len: int = 2) -> Sequences:
        path = tmp_path / f"{abs(hash(str(rows)))}.bundle"
        write_tensors(path, {"tokens": torch.tensor(rows, dtype=torch.int32)})
        return open_shard(path, seq_len=seq_len, vocab_size=10, rows_per_record=rows_per_record)

    assert opened([[~9, 9, ~0], [~0, 0, 3]]).take(np.array([0])).tolist() == [[-10, 9, -1]]
    with pytest.raises(CorruptError, match="holds tokens from -1 to 9 and the vocabulary"):
        opened([[~0, 9, 1]], rows_per_record=0)
    for row in ([~10, 9, 1], [~0, 10, 1], [-(1 << 31), 1, 1]):
        with pytest.raises(CorruptError, match=r"holds tokens from .* and the vocabulary has 10"):
            opened([row])
    with pytest.raises(CorruptError, match="holds a record without a token to predict"):
        opened([[~1, 1, ~1], [1, ~1, ~1]])
    with pytest.raises(CorruptError, match=r"holds int32 \[1, 3\] and this run needs whole numbers \[any, 2, 3\]"):
        opened([[~1, 1, 1]], rows_per_record=2)


def test_pairs_that_are_dealt_stay_together() -> None:
    pairs = np.arange(7 * 2 * 3, dtype=np.int32).reshape(7, 2, 3)
    spans = [Span(shard="a", start=0, stop=4, epoch=0), Span(shard="a", start=4, stop=7, epoch=0)]
    batches = list(SpanSource(spans, lambda _: Sequences(pairs), seed=1, batch_size=3))
    assert [list(b.shape) for b in batches] == [[3, 2, 3], [3, 2, 3], [1, 2, 3]]
    assert torch.cat(batches).tolist() == pairs[epoch_order(1, 0, "a", 7)].tolist()


def test_a_shard_is_read_back(tmp_path: Path) -> None:
    for kind in (torch.uint16, torch.int32):
        rows = torch.arange(15).reshape(3, 5)
        write_tensors(tmp_path / "s.bundle", {"tokens": rows.to(kind)})
        assert open_shard(tmp_path / "s.bundle", seq_len=4, vocab_size=15).take(np.array([1])).tolist() == [
            [5, 6, 7, 8, 9]
        ]
