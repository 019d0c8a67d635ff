import base64
import json
from pathlib import Path

import pytest

from potluck.data.tokenizer import (
    END_OF_TEXT,
    TextTokenizer,
    copy_tokenizer,
    pack_tokenizer,
    train_bpe,
    unpack_tokenizer,
)
from potluck.types.errors import CorruptError, DataError

TEXTS = [f"def f{i}(x):\n    return x + {i}  # größer\n" for i in range(50)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_bpe(iter(TEXTS), 400, path)
    return path


def test_training_is_repeatable(folder: Path, tmp_path: Path) -> None:
    again = train_bpe(iter(TEXTS), 400, tmp_path / "again")
    assert pack_tokenizer(folder) == pack_tokenizer(tmp_path / "again")
    assert again.digest() == TextTokenizer.open(folder).digest()
    other = train_bpe(iter(TEXTS), 300, tmp_path / "other")
    assert other.digest() != again.digest() and other.vocab_size == 300


def test_text_survives_and_transformers_agrees(folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = TextTokenizer.open(folder), AutoTokenizer.from_pretrained(folder)
    text = "def größer(x):\n\treturn '日本' + x\n  "
    (tokens,) = ours.encode([text])
    assert ours.decode(tokens) == text == theirs.decode(tokens.tolist())
    assert theirs(text)["input_ids"] == tokens.tolist()
    assert len(theirs) == ours.vocab_size
    assert theirs.eos_token_id == ours.eos_id == 0
    assert len(tokens) < len(text.encode())


def test_a_special_token_in_a_text_is_only_text(folder: Path) -> None:
    ours = TextTokenizer.open(folder)
    (tokens,) = ours.encode([f"a{END_OF_TEXT}b"])
    assert ours.eos_id not in tokens
    assert ours.decode(tokens) == f"a{END_OF_TEXT}b"


def test_a_tokenizer_travels_as_one_object(folder: Path, tmp_path: Path) -> None:
    packed = pack_tokenizer(folder)
    arrived = unpack_tokenizer(packed, tmp_path / "there")
    assert pack_tokenizer(tmp_path / "there") == packed
    assert arrived.encode(TEXTS[:1])[0].tolist() == TextTokenizer.open(folder).encode(TEXTS[:1])[0].tolist()


@pytest.mark.parametrize(
    "data",
    [
        b"not json",
        b"[1]",
        json.dumps({"../evil": ""}).encode(),
        json.dumps({"config.json": ""}).encode(),
        json.dumps({"tokenizer.json": "%%%"}).encode(),
        json.dumps({"tokenizer.json": 5}).encode(),
        b"[" * 200_000,
    ],
)
def test_a_bad_object_is_refused_and_writes_nothing(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CorruptError, match="cannot be unpacked"):
        unpack_tokenizer(data, tmp_path / "there")
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_is_too_big_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.data.tokenizer.MAX_PACKED_BYTES", 10)
    with pytest.raises(CorruptError, match="of 11 bytes was sent and 10 are the most"):
        unpack_tokenizer(b"x" * 11, tmp_path)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    broken = json.dumps({"tokenizer.json": base64.b64encode(b"{}").decode()}).encode()
    with pytest.raises(DataError, match=r"holds no usable tokenizer\.json"):
        unpack_tokenizer(broken, tmp_path)


def test_a_tokenizer_without_an_end_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="has no end-of-text token"):
        TextTokenizer.open(tmp_path)


def test_a_models_directory_gives_its_tokenizer_only(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in folder.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    (model / "model.safetensors").write_bytes(b"weights")
    copied = copy_tokenizer(model, tmp_path / "copy")
    assert copied.vocab_size == TextTokenizer.open(folder).vocab_size
    assert sorted(p.name for p in (tmp_path / "copy").iterdir()) == sorted(p.name for p in folder.iterdir())


def test_an_older_form_is_converted(folder: Path, tmp_path: Path) -> None:
    """GPT-2's own directories may hold only a vocabulary and merges."""
    old = tmp_path / "old"
    old.mkdir()
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(m) if isinstance(m, list) else m for m in model["merges"])
    (old / "merges.txt").write_text("#version: 0.2\n" + merges + "\n", encoding="utf-8")
    (old / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    copied = copy_tokenizer(old, tmp_path / "copy")
    assert copied.encode(TEXTS[:1])[0].tolist() == TextTokenizer.open(folder).encode(TEXTS[:1])[0].tolist()


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a directory and a tokenizer is one"):
        copy_tokenizer(tmp_path / "none", tmp_path / "copy")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no tokenizer that can be loaded"):
        copy_tokenizer(tmp_path / "empty", tmp_path / "copy")
