"""Tokenizers: trained here (byte-level BPE) or taken from a directory, and sent to workers as one object.

A directory is in Hugging Face form: `AutoTokenizer.from_pretrained` opens it. It is read here through its
`tokenizer.json` alone, so reading it runs no code of its own.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from potluck.storage.digest import digest_bytes
from potluck.types.errors import CorruptError, DataError
from potluck.types.ids import Digest

END_OF_TEXT = "<|endoftext|>"
MAX_PACKED_BYTES = 256 << 20
_files = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)


class TextTokenizer:
    """Text to tokens and back. Special tokens that appear in a text are taken as text."""

    def __init__(self, tokenizer: Tokenizer, *, eos_id: int, folder: Path) -> None:
        self._tokenizer = tokenizer
        self.eos_id = eos_id
        self.folder = folder
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @staticmethod
    def open(folder: Path) -> TextTokenizer:
        """DataError if the folder holds no tokenizer that can be used, or one without an end-of-text token."""
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # `tokenizers` raises bare Exception for every fault of a file
            raise DataError(f"{folder} holds no usable tokenizer.json: {error}; give another tokenizer") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        eos = _end_of_text(folder)
        eos_id = tokenizer.token_to_id(eos) if eos else None
        if eos_id is None:
            raise DataError(
                f"the tokenizer in {folder} has no end-of-text token; set eos_token in its tokenizer_config.json"
            )
        return TextTokenizer(tokenizer, eos_id=eos_id, folder=folder)

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Tokens of each text, without any special token."""
        return [np.array(e.ids, dtype=np.int32) for e in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode([int(t) for t in tokens], skip_special_tokens=False)

    def digest(self) -> Digest:
        """Of the directory's tokenizer files."""
        return digest_bytes(pack_tokenizer(self.folder))


def train_bpe(texts: Iterator[str], vocab_size: int, folder: Path) -> TextTokenizer:
    """Train a byte-level BPE tokenizer and save it. Equal texts in equal order give equal files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    settings: dict[str, Any] = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", special)
    return TextTokenizer.open(folder)


def copy_tokenizer(source: Path, folder: Path) -> TextTokenizer:
    """The tokenizer files of a model's or tokenizer's directory, converted if it has no tokenizer.json."""
    if not source.is_dir():
        raise DataError(
            f"{source} is not a directory and a tokenizer is one; give the directory of a tokenizer or model"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if (source / "tokenizer.json").is_file():
        for name in _files:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    else:
        from transformers import AutoTokenizer

        try:
            AutoTokenizer.from_pretrained(str(source), local_files_only=True).save_pretrained(str(folder))
        except Exception as error:  # each kind of tokenizer fails in its own way
            raise DataError(
                f"{source} holds no tokenizer that can be loaded: {str(error).splitlines()[0][:200]}; "
                "give one with a tokenizer.json"
            ) from error
    return TextTokenizer.open(folder)


def pack_tokenizer(folder: Path) -> bytes:
    """All tokenizer files of a directory as one object. Equal files give equal bytes."""
    files = {name: (folder / name).read_bytes() for name in _files if (folder / name).is_file()}
    return json.dumps({name: base64.b64encode(data).decode() for name, data in files.items()}).encode()


def unpack_tokenizer(data: bytes, folder: Path) -> TextTokenizer:
    """Write a packed tokenizer to a directory. CorruptError if it is too big or holds anything else."""
    if len(data) > MAX_PACKED_BYTES:
        raise CorruptError(
            f"a tokenizer of {len(data):,} bytes was sent and {MAX_PACKED_BYTES:,} are the most; use another"
        )
    try:
        packed: Any = json.loads(data)
        if not isinstance(packed, dict) or not set(packed) <= set(_files):
            raise ValueError("it holds other files than a tokenizer's")
        files = {str(name): base64.b64decode(content, validate=True) for name, content in packed.items()}
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptError(f"the tokenizer that was sent cannot be unpacked: {error}; send it again") from error
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return TextTokenizer.open(folder)


def _end_of_text(folder: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            settings: Any = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise DataError(f"{folder / name} is not JSON: {error}; give another tokenizer") from error
        token: Any = settings.get("eos_token") if isinstance(settings, dict) else None
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8", newline="\n")
