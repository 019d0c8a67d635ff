from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.codecs.bundle import Bundle
from potluck.data.packing import (
    Division,
    TokenDocuments,
    divide,
    divided_texts,
    num_sequences_in,
    pack,
    shard_size,
    tokenise,
)
from potluck.data.tokenizer import train_bpe


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.floats(0.01, 0.5), st.integers(0, 5))
def test_the_held_out_share_is_near_what_was_asked(lengths: list[int], fraction: float, seed: int) -> None:
    division = divide(lengths, fraction, seed)
    assert division == divide(lengths, fraction, seed)
    total = sum(lengths)
    if division.cut_document is None:
        held = sum(lengths[i] for i in division.held_out)
        assert fraction * total / 2 <= held <= fraction * total
    else:
        assert not division.held_out
        held = total - sum(lengths[: division.cut_document]) - division.cut_at
        assert abs(held - fraction * total) <= 1
        assert 0 <= division.cut_at < lengths[division.cut_document]


def test_whole_documents_are_held_out_where_that_is_possible() -> None:
    division = divide([10] * 100, 0.1, seed=1)
    assert division.cut_document is None and len(division.held_out) == 10
    assert divide([10] * 100, 0.1, seed=2) != division
    assert divide([10] * 100, 0.0, seed=1) == Division()


def test_one_document_is_cut_at_a_line_near_the_end() -> None:
    text = "".join(f"line {i:03d}\n" for i in range(100))
    division = divide([len(text)], 0.1, seed=1)
    parts = list(divided_texts([text], division))
    assert [held for _, held in parts] == [False, True]
    assert "".join(part for part, _ in parts) == text
    assert parts[1][0].startswith("line 091\n")


def test_a_cut_holds_out_everything_after_it() -> None:
    parts = list(divided_texts(["aaaa", "bbbb", "cccc"], Division(cut_document=1, cut_at=2)))
    assert parts == [("aaaa", False), ("bb", False), ("bb", True), ("cccc", True)]
    arrays = TokenDocuments.of([np.arange(12)], [np.array([4, 8, 12])])
    training, validation = arrays.divided(Division(cut_document=1, cut_at=2))
    assert [training[i].tolist() for i in range(len(training))] == [[0, 1, 2, 3], [4, 5]]
    assert [validation[i].tolist() for i in range(len(validation))] == [[6, 7], [8, 9, 10, 11]]


def test_arrays_are_divided_by_document() -> None:
    arrays = TokenDocuments.of([np.arange(5), np.arange(10, 13)], [np.array([2, 5]), np.array([3])])
    training, validation = arrays.divided(Division(frozenset({1})))
    assert [training[i].tolist() for i in range(2)] == [[0, 1], [10, 11, 12]]
    assert [validation[i].tolist() for i in range(1)] == [[2, 3, 4]]


def test_every_text_ends_with_the_end_of_text_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.data.packing._batch_chars", 5)
    tokenizer = train_bpe(iter(["hello world"] * 3), 300, tmp_path)
    documents = tokenise(iter(["hello", "wörld world", "x"]), tokenizer, tmp_path / "tokens.bin")
    texts = [tokenizer.decode(documents[i]) for i in range(len(documents))]
    assert texts == ["hello<|endoftext|>", "wörld world<|endoftext|>", "x<|endoftext|>"]
    assert documents.arrays[0].dtype == np.uint16
    assert len(tokenise(iter(()), tokenizer, tmp_path / "none.bin")) == 0


def rows_of(path: Path) -> np.ndarray:
    bundle = Bundle.open(path)
    rows = bundle.tensor("tokens").numpy().copy()
    bundle.close()
    return rows


@pytest.mark.parametrize("num_tokens", [2, 9, 10, 100, 1003])
@pytest.mark.parametrize("kind", [np.uint16, np.int32])
def test_shards_hold_the_stream_and_only_its_tail_is_lost(tmp_path: Path, num_tokens: int, kind: type) -> None:
    seq_len = 4
    stream = np.arange(num_tokens)
    stops = np.unique(np.append(np.arange(7, num_tokens, 7), num_tokens))
    documents = TokenDocuments.of([stream], [stops])
    shards = pack(documents, range(len(documents)), seq_len=seq_len, token_type=np.dtype(kind), folder=tmp_path / "out")
    num_sequences = num_sequences_in(num_tokens, seq_len)
    assert sum(s.num_sequences for s in shards) == num_sequences == (num_tokens - 1) // seq_len
    rows = [row for shard in shards for row in rows_of(shard.path).tolist()]
    assert rows == [stream[i * seq_len : i * seq_len + seq_len + 1].tolist() for i in range(num_sequences)]
    assert all(rows_of(s.path).dtype == kind and s.path.stat().st_size == s.num_bytes for s in shards)


def test_the_order_of_documents_is_the_callers(tmp_path: Path) -> None:
    documents = TokenDocuments.of([np.arange(9)], [np.array([3, 6, 9])])
    (shard,) = pack(documents, [2, 0, 1], seq_len=8, token_type=np.dtype(np.uint16), folder=tmp_path)
    assert rows_of(shard.path).tolist() == [[6, 7, 8, 0, 1, 2, 3, 4, 5]]


def test_equal_text_gives_shards_of_different_names(tmp_path: Path) -> None:
    documents = TokenDocuments.of([np.zeros(1000, np.int64)], [np.array([1000])])
    shards = pack(documents, [0], seq_len=4, token_type=np.dtype(np.uint16), folder=tmp_path)
    assert len({s.digest for s in shards}) == len(shards) > 8


@pytest.mark.parametrize(
    ("num_sequences", "size"), [(1, 1), (8, 1), (50, 7), (200, 8), (1024, 8), (9142, 72), (10**6, 512)]
)
def test_shards_are_small_enough_for_many_workers(num_sequences: int, size: int) -> None:
    assert shard_size(num_sequences) == size
