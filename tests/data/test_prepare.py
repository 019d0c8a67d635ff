import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck.data.config import DataConfig, ReadOptions
from potluck.data.packing import PackedShard
from potluck.data.prepare import prepare_private, prepare_shared
from potluck.data.prepared import PreparedData
from potluck.data.stream import open_shard
from potluck.data.tokenizer import TextTokenizer, train_bpe
from potluck.types.errors import DataError, ResourceError

BPE = {"train": "bpe", "vocab_size": 300}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(f"document {i} " + " ".join(f"word{j * i % 17}" for j in range(60)) + "\n")
    return folder


def prepare(corpus: Path, seed: int = 1, cache: str = "cache", **section: Any) -> PreparedData:
    config = DataConfig.model_validate(
        {"shared": str(corpus), "tokenizer": BPE, "seq_len": 16, "validation": 0.1} | section
    )
    return prepare_shared(config, seed=seed, base=corpus.parent, cache_dir=corpus.parent / cache)


def stream(shards: tuple[PackedShard, ...], data: PreparedData) -> list[int]:
    """The tokens that the sequences came from."""
    tokens: list[int] = []
    for shard in shards:
        rows = open_shard(shard.path, seq_len=data.seq_len, vocab_size=data.vocab_size).rows
        assert rows.shape == (shard.num_sequences, data.seq_len + 1)
        for row in rows.tolist():
            assert not tokens or tokens[-1] == row[0], "neighbours share one token"
            tokens += row if not tokens else row[1:]
    return tokens


def documents(tokens: list[int], data: PreparedData) -> list[str]:
    assert data.tokenizer_dir is not None
    return TextTokenizer.open(data.tokenizer_dir).decode(tokens).split("<|endoftext|>")


def test_every_document_is_in_one_part_and_whole(corpus: Path) -> None:
    data = prepare(corpus)
    originals = {path.read_text() for path in corpus.iterdir()}
    training, validation = (documents(stream(s, data), data) for s in (data.shards, data.validation))
    assert set(training[:-1]) | set(validation[:-1]) <= originals
    assert not set(training[:-1]) & set(validation[:-1])
    # At the end of a stream less than one sequence is dropped.
    assert len(training) >= data.num_documents - 1 and len(validation) >= data.num_validation_documents - 1
    assert data.num_documents + data.num_validation_documents == 40
    assert data.num_validation_documents == 4
    assert 0 <= data.num_dropped_tokens < 2 * data.seq_len
    kept = data.num_sequences * 16 + 1 + data.num_validation_sequences * 16 + 1
    assert kept + data.num_dropped_tokens == data.num_tokens + data.num_validation_tokens
    assert data.report.num_documents == 40


def test_training_documents_are_shuffled_by_the_seed(corpus: Path) -> None:
    first = documents(stream(prepare(corpus).shards, prepare(corpus)), prepare(corpus))
    assert first[:-1] != sorted(first[:-1], key=lambda d: int(d.split()[1]))
    other = prepare(corpus, seed=2)
    assert documents(stream(other.shards, other), other) != first


def test_equal_input_gives_equal_shards_and_everything_else_another_digest(corpus: Path) -> None:
    first = prepare(corpus)
    again = prepare(corpus, cache="another")
    assert [s.digest for s in again.shards] == [s.digest for s in first.shards]
    assert again.digest == first.digest and again.folder != first.folder
    others = [
        prepare(corpus, seed=2),
        prepare(corpus, seq_len=8),
        prepare(corpus, validation=0.2),
        prepare(corpus, tokenizer={"train": "bpe", "vocab_size": 280}),
    ]
    (corpus / "00.txt").write_text("changed")
    others.append(prepare(corpus))
    assert len({first.digest, *(o.digest for o in others)}) == 6
    assert others[-1].corpus_digest != first.corpus_digest == others[0].corpus_digest


def test_the_cache_is_used_and_a_broken_one_is_made_again(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(corpus)
    with monkeypatch.context() as patch:
        patch.setattr("potluck.data.prepare._make", None)
        assert prepare(corpus) == first
    path = first.shards[0].path
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert prepare(corpus) == first
    assert path.read_bytes() == whole
    (first.folder / "prepared.json").write_text("{")
    assert prepare(corpus) == first
    assert [p.name for p in first.folder.parent.iterdir()] == [first.folder.name], "nothing is left lying about"


def test_the_tokenizer_learns_nothing_from_validation_documents(corpus: Path) -> None:
    held = corpus.parent / "held.txt"
    held.write_text("zyzzyva " * 200)
    data = prepare(corpus, validation=["held.txt"])
    tokenizer = TextTokenizer.open(data.folder / "tokenizer")
    assert len(tokenizer.encode([" zyzzyva"])[0]) > 4
    assert data.num_documents == 40 and data.num_validation_documents == 1
    assert data.report.num_documents == 41
    assert set(documents(stream(data.validation, data), data)[0].split()[:5]) == {"zyzzyva"}


def test_validation_files_are_taken_out_of_the_training_data(corpus: Path) -> None:
    data = prepare(corpus, validation=["corpus/03.txt", "corpus/1*.txt"])
    assert data.num_documents == 29 and data.num_validation_documents == 11
    with pytest.raises(DataError, match="none is left to train on"):
        prepare(corpus, validation=["corpus"])


def test_a_single_file_is_cut_for_validation(corpus: Path) -> None:
    lines = [f"line {i} of a book\n" for i in range(500)]
    (corpus.parent / "book.txt").write_text("".join(lines))
    data = prepare(corpus.parent / "book.txt")
    training, validation = (documents(stream(s, data), data)[0] for s in (data.shards, data.validation))
    assert training.startswith("line 0 of") and validation.startswith("line 4")
    assert not set(training.splitlines()[:-1]) & set(validation.splitlines()[:-1])


def test_no_validation_is_possible(corpus: Path) -> None:
    data = prepare(corpus, validation=0)
    assert data.validation == () and data.num_validation_tokens == 0 and data.num_documents == 40


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"seq_len": 100_000}, r"training tokens and one sequence needs 100,001; add text or lower `data\.seq_len`"),
        ({"seq_len": 1000, "validation": 0.03}, r"tokens for validation and one sequence needs 1,001; raise"),
        ({"tokenizer": "model"}, "text needs a tokenizer and this model comes without one"),
        ({"tokenizer": {"path": "nowhere"}}, "nowhere is not a directory and a tokenizer is one"),
        ({"shared": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_data_that_cannot_be_prepared(corpus: Path, section: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare(corpus, **section)
    assert not (corpus.parent / "cache").exists() or list((corpus.parent / "cache").iterdir()) == []


def test_a_full_disk_is_named(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("potluck.data.prepare.pack", full)
    with pytest.raises(ResourceError, match=r"cache has [\d,]+ bytes free and more is needed"):
        prepare(corpus)
    assert list((corpus.parent / "cache").iterdir()) == []


PREPARE_ELSEWHERE = """
import sys
from pathlib import Path
from potluck.data.config import DataConfig
from potluck.data.prepare import prepare_shared
corpus = Path(sys.argv[1])
config = DataConfig.model_validate(
    {"shared": str(corpus), "tokenizer": {"train": "bpe", "vocab_size": 300}, "seq_len": 16, "validation": 0.1}
)
data = prepare_shared(config, seed=1, base=corpus.parent, cache_dir=corpus.parent / "cache")
print(data.folder, [s.digest for s in data.shards], all(s.path.is_file() for s in data.shards))
"""


def test_processes_may_prepare_the_same_data_at_once(corpus: Path) -> None:
    command = [sys.executable, "-c", PREPARE_ELSEWHERE, str(corpus)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    got = [process.communicate(timeout=50)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    data = prepare(corpus)
    expected = f"{data.folder} {[s.digest for s in data.shards]} True\n"
    assert got == [expected] * 3
    assert len(list((corpus.parent / "cache").iterdir())) == 1


def test_private_data_is_prepared_with_the_tokenizer_that_was_sent(corpus: Path, tmp_path: Path) -> None:
    tokenizer = train_bpe(iter(["document word"] * 20), 280, tmp_path / "sent")
    (corpus / "bad.txt").write_bytes(b"\xff")
    data = prepare_private(
        [corpus],
        ReadOptions(seq_len=16, validation=0.1),
        seed=1,
        base=tmp_path,
        cache_dir=tmp_path / "own",
        tokenizer_dir=tmp_path / "sent",
    )
    assert data.vocab_size == tokenizer.vocab_size and data.num_documents == 36
    assert [s.file for s in data.report.skipped] == ["bad.txt"]
    assert set(documents(stream(data.shards, data), data)[:-1]) <= {p.read_text() for p in corpus.glob("[0-9]*.txt")}


def test_tokens_must_fit_the_models_vocabulary(corpus: Path) -> None:
    config = DataConfig.model_validate({"shared": str(corpus), "tokenizer": BPE, "seq_len": 16})
    options: dict[str, Any] = {"seed": 1, "base": corpus, "cache_dir": corpus.parent / "cache"}
    data = prepare_shared(config, **options)
    assert data.highest_token < data.vocab_size
    assert prepare_shared(config, **options, vocab_size=data.highest_token + 1) == data
    with pytest.raises(
        DataError, match=r"holds token \d+ and the model's vocabulary has 50 entries; use the model's own"
    ):
        prepare_shared(config, **options, vocab_size=50)


def test_arrays_of_tokens_need_no_tokenizer(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "a.npy", rng.integers(0, 100, 5000).astype(np.uint16))
    config = DataConfig(shared="a.npy", seq_len=4, validation=0.1)
    options: dict[str, Any] = {"seed": 1, "base": tmp_path, "cache_dir": tmp_path / "cache"}
    data = prepare_shared(config, **options, vocab_size=100)
    assert data.tokenizer_dir is None and data.vocab_size == 100
    assert data.num_tokens + data.num_validation_tokens == 5000
    assert 250 <= data.num_validation_tokens <= 500
    got = stream(data.shards, data)
    assert sorted(got)[:5] == [0] * 5 and max(got) < 100
    with pytest.raises(DataError, match="arrays of tokens need a tokenizer or a model"):
        prepare_shared(config, **options)
    with pytest.raises(DataError, match=r"a\.npy holds token 99 and the vocabulary has 50 entries"):
        prepare_shared(config, **options, vocab_size=50)


def test_documents_in_arrays_end_at_the_tokenizers_end_of_text(corpus: Path, tmp_path: Path) -> None:
    tokenizer = train_bpe(iter(["a b c"] * 9), 280, tmp_path / "tok")
    parts = [np.append(t, tokenizer.eos_id) for t in tokenizer.encode([f"number {i}" for i in range(100)])]
    np.save(tmp_path / "a.npy", np.concatenate(parts).astype(np.uint16))
    config = DataConfig.model_validate(
        {"shared": "a.npy", "seq_len": 8, "tokenizer": {"path": "tok"}, "validation": 0.1}
    )
    data = prepare_shared(config, seed=1, base=tmp_path, cache_dir=tmp_path / "cache")
    assert data.num_documents + data.num_validation_documents == 100
    training = documents(stream(data.shards, data), data)[:-1]
    assert set(training) <= {f"number {i}" for i in range(100)} and training != sorted(training)


@pytest.mark.slow
def test_the_demo_corpus(tmp_path: Path) -> None:
    config = DataConfig.model_validate({"shared": "python-stdlib", "tokenizer": {"train": "bpe", "vocab_size": 4096}})
    told: list[str] = []
    data = prepare_shared(config, seed=1, base=tmp_path, cache_dir=tmp_path, tell=told.append)
    assert data.vocab_size == 4096
    assert 64 <= len(data.shards) <= 256
    assert 0.025 < data.num_validation_tokens / (data.num_tokens + data.num_validation_tokens) < 0.06
    assert data.report.num_skipped == 0
    assert told == ["reading the data", "training the tokenizer", "tokenising", "packing sequences"]
