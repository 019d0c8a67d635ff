import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from potluck.data.config import ReadOptions
from potluck.data.listed import ListedFiles
from potluck.data.manifest import make_manifest
from potluck.data.shards import Span
from potluck.data.stream import SpanSource
from potluck.data.tokenizer import train_bpe
from potluck.storage.digest import digest_file
from potluck.types.errors import CorruptError, DataError

OPTIONS = ReadOptions(seq_len=4)


def span(path: Path, root: Path, start: int = 0, stop: int = 1) -> Span:
    return Span(shard=path.relative_to(root).as_posix(), start=start, stop=stop, epoch=0, digest=digest_file(path))


def files(tmp_path: Path, **options: Any) -> ListedFiles:
    settings = {"options": OPTIONS, "vocab_size": 1000, "cache_dir": tmp_path / "cache"} | options
    return ListedFiles(tmp_path / "copies", **settings)


@pytest.fixture
def array(tmp_path: Path) -> Path:
    path = tmp_path / "copies/a.npy"
    path.parent.mkdir()
    np.save(path, np.arange(100, dtype=np.uint16))
    return path


def test_a_copy_is_mapped_and_read_by_spans(tmp_path: Path, array: Path) -> None:
    listed = files(tmp_path)
    whole = span(array, array.parent, 0, 24)
    sequences = listed.open(whole)
    assert len(sequences) == 24 and listed.open(whole) is sequences
    rows = torch.cat(list(SpanSource([whole], listed.open, seed=1, batch_size=5)))
    assert sorted(rows[:, 0].tolist()) == list(range(0, 96, 4))
    assert all(row.tolist() == list(range(row[0], row[0] + 5)) for row in rows)


def test_a_copy_that_differs_is_refused_also_after_it_was_known(tmp_path: Path, array: Path) -> None:
    listed_span = span(array, array.parent)
    files(tmp_path).open(listed_span)
    np.save(array, np.arange(1, 101, dtype=np.uint16))
    os.utime(array, ns=(1, 1))
    told: list[str] = []
    with pytest.raises(CorruptError) as found:
        files(tmp_path, told=told.append).open(listed_span)
    assert str(found.value) == "the copy of 'a.npy' here is another file than is listed; copy the file again"
    (sentence,) = told
    assert sentence.startswith(f"{array} has the digest {digest_file(array)} and {listed_span.digest} is listed;")


def test_a_known_digest_is_not_worked_out_again(tmp_path: Path, array: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed_span = span(array, array.parent)
    files(tmp_path).open(listed_span)
    monkeypatch.setattr("potluck.data.listed.digest_file", None)
    assert len(files(tmp_path).open(listed_span)) == 24
    (tmp_path / "cache/digests.json").write_text("{cut")
    monkeypatch.undo()
    assert len(files(tmp_path).open(listed_span)) == 24


def test_names_never_lead_out_of_the_folder(tmp_path: Path, array: Path) -> None:
    secret = tmp_path / "secret.npy"
    secret.write_bytes(array.read_bytes())
    (tmp_path / "copies/link.npy").symlink_to(secret)
    for name in ("../secret.npy", str(secret), "link.npy"):
        with pytest.raises(CorruptError, match="lies outside the folder of --data; leave this run"):
            files(tmp_path).open(Span(shard=name, start=0, stop=1, epoch=0, digest=digest_file(secret)))


def test_a_missing_copy_is_named(tmp_path: Path, array: Path) -> None:
    with pytest.raises(DataError, match=r"^'b\.npy' is listed in this run and is not here; copy it"):
        files(tmp_path).open(Span(shard="b.npy", start=0, stop=1, epoch=0, digest="sha256:00"))


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, array: Path) -> None:
    told: list[str] = []
    with pytest.raises(DataError) as found:
        files(tmp_path, vocab_size=50, told=told.append).open(span(array, array.parent))
    assert str(found.value) == "the copy of 'a.npy' here cannot be used; its worker's owner is told why"
    assert len(told) == 1 and "holds token 99 and the vocabulary has 50 entries" in told[0]


def test_raw_tokens_are_read_with_the_runs_type(tmp_path: Path, array: Path) -> None:
    raw = array.parent / "a.bin"
    raw.write_bytes(np.arange(9, dtype="<i4").tobytes())
    options = ReadOptions(seq_len=4, token_type="int32")
    sequences = files(tmp_path, options=options).open(span(raw, raw.parent))
    assert sequences.rows.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]


def test_text_is_tokenised_once(tmp_path: Path, array: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = array.parent / "a.jsonl"
    text.write_text('{"text": "one two"}\n{"text": "three"}\n')
    tokenizer = train_bpe(iter(["one two three"] * 3), 280, tmp_path / "tok")
    manifest = make_manifest(array.parent, [text], options=OPTIONS, tokenizer=tokenizer)
    whole = span(text, text.parent)
    first = files(tmp_path, tokenizer=tokenizer).open(whole)
    tokens = [t for part in tokenizer.encode(["one two", "three"]) for t in (*part.tolist(), tokenizer.eos_id)]
    assert manifest.files[0].num_tokens == len(tokens)
    assert first.rows.tolist() == [tokens[i : i + 5] for i in range(0, len(tokens) - 4, 4)]
    monkeypatch.setattr("potluck.data.listed.tokenise", None)
    assert files(tmp_path, tokenizer=tokenizer).open(whole).rows.tolist() == first.rows.tolist()
    with pytest.raises(DataError, match="its worker's owner is told why"):
        files(tmp_path).open(whole)
