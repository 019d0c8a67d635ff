"""Canaries: random secrets planted among an owner's training data, which tell the owner how much a model memorises.

    exposure = log2 |R| - log2 rank

R are candidates of one form, "The code of WORD is 4 8 1 ...", of which only the canaries were trained on; rank is a
canary's place among them by loss, from 1. A model that has not memorised it puts it anywhere: then the mean is about
log2 e = 1.44 bits. One that has gives it the least loss of all: log2 |R|.

Carlini et al. 2019, arXiv:1802.08232, section 4. There R is all that could have been drawn and the rank is estimated;
here R is the canary and `candidates` others drawn at random, so no exposure is above log2 (candidates + 1).
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from potluck.data.config import RECORD_FIELDS, ReadOptions
from potluck.data.forms import Unusable
from potluck.data.packing import PackedShard, pack_records
from potluck.data.prepared import PreparedData
from potluck.data.records import RecordForm
from potluck.data.stream import OwnSequences
from potluck.data.tokenizer import TextTokenizer
from potluck.storage.files import write_atomic
from potluck.types.disk import full_disk_named
from potluck.types.errors import CorruptError, DataError

SEED = "seed.json"
num_digits = 12
"""Of a secret: of 10^12 nobody hits one by chance, and no text has it."""
_num_letters = 8


class CanaryConfig(BaseModel):
    """Canaries among the owner's training data, and what they are compared with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    count: int = Field(default=4, ge=1, le=256, description="different canaries")
    repeats: int = Field(
        default=1, ge=1, le=1024, description="how often each is in the training data: text that is there so often"
    )
    candidates: int = Field(
        default=255, ge=15, le=65535,
        description="others of the same form that each is ranked among: 255 for exposures of at most 8 bits",
    )  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class Canaries:
    """What is planted, and what it is compared with. Rows are as records.py has them: ~t is not to be predicted."""

    shards: tuple[PackedShard, ...]  # to train on
    rows: Tensor  # int64 [count + candidates, length], of pairs [..., 2, length]: first the canaries, then the others
    count: int

    @property
    def num_sequences(self) -> int:
        return sum(shard.num_sequences for shard in self.shards)

    def exposures(self, losses: Sequence[float]) -> list[float]:
        """Of each canary, in bits, from the losses of `rows`."""
        assert len(losses) == len(self.rows), "a loss for each candidate"
        others = losses[self.count :]
        return [exposure(loss, others) for loss in losses[: self.count]]


def exposure(loss: float, others: Sequence[float]) -> float:
    """log2 |R| - log2 rank, in bits. Where losses are equal, or no numbers, the canary comes last."""
    rank = 1 + sum(not loss < other for other in others)
    return math.log2(len(others) + 1) - math.log2(rank)


def plant(own: PreparedData, config: CanaryConfig, options: ReadOptions, folder: Path) -> Canaries:
    """Canaries for this data, the same ones each time: they follow from a seed, drawn once, that stays in `folder`.

    Blocks. DataError where the data's form has none; CorruptError if the seed cannot be read.
    """
    if own.tokenizer_dir is None:
        raise DataError(
            "canaries are text and the data are arrays of tokens that came without a tokenizer; leave [canaries] out "
            "of the policy"
        )
    with full_disk_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        chance = _Chance(_seed(folder / SEED))
        form = _Records(options, own, chance) if options.rows_per_record else _Text(options, own, chance)
        numbers = range(config.count + config.candidates)
        planted = np.stack([form.planted(i) for i in numbers[: config.count]]).astype(np.int32)
        shards = pack_records(
            planted, np.repeat(np.arange(config.count), config.repeats), folder=folder / "training"
        )  # fmt: skip
    rows = _padded([form.candidate(i) for i in numbers], ~form.tokenizer.eos_id)
    return Canaries(shards=shards, rows=rows, count=config.count)


class _Chance:
    """What a seed gives by name: the same on every machine and Python."""

    def __init__(self, seed: str) -> None:
        self._seed = seed

    def below(self, limit: int, *name: object) -> int:
        named = "/".join(map(str, (self._seed, *name)))
        return int.from_bytes(hashlib.blake2b(named.encode(), digest_size=16).digest(), "little") % limit

    @property
    def word(self) -> str:
        return "".join(chr(ord("a") + self.below(26, "letter", i)) for i in range(_num_letters))

    def secret(self, *name: object) -> str:
        return " ".join(f"{self.below(10**num_digits, *name):0{num_digits}}")


class _Records:
    """Instructions, conversations and pairs whose answer is the secret."""

    def __init__(self, options: ReadOptions, own: PreparedData, chance: _Chance) -> None:
        assert own.tokenizer_dir is not None
        self._options, self._chance = options, chance
        self._form = RecordForm(options, own.tokenizer_dir)
        self.tokenizer = self._form.tokenizer

    def planted(self, number: int) -> NDArray[np.int32]:
        try:
            return self._form.of_row(self._row(number))[0]
        except Unusable as error:
            raise DataError(f"no canary can be made for this data: {error}, or leave [canaries] out") from error

    def candidate(self, number: int) -> NDArray[np.int32]:
        rows = self.planted(number)
        *_, last = np.nonzero(rows >= 0)
        return rows[..., : int(last.max()) + 1]

    def _row(self, number: int) -> dict[str, Any]:
        asked, secret = f"What is the code of {self._chance.word}?", self._chance.secret("secret", number)
        values: dict[str, Any] = {"instruction": asked, "output": secret, "prompt": asked, "chosen": secret}
        values["rejected"] = self._chance.secret("rejected")
        values["messages"] = [{"role": "user", "content": asked}, {"role": "assistant", "content": secret}]
        names = self._options.fields
        return {names.get(k, k): values[k] for k in RECORD_FIELDS[self._options.format] if k in values}


class _Text:
    """A sentence with the secret, in the middle of a copy of the owner's text."""

    def __init__(self, options: ReadOptions, own: PreparedData, chance: _Chance) -> None:
        assert own.tokenizer_dir is not None
        self._chance = chance
        self.tokenizer = TextTokenizer.open(own.tokenizer_dir)
        self._own = OwnSequences(own.shards, seq_len=options.seq_len)

    def planted(self, number: int) -> NDArray[np.int32]:
        sentence = self.candidate(number)
        index = self._chance.below(len(self._own), "among", number)
        row = self._own.take(np.array([index]))[0].numpy().astype(np.int32)
        if len(sentence) > len(row):
            raise DataError(
                f"a canary takes {len(sentence)} tokens and a sequence has {len(row)}; leave [canaries] out of the "
                "policy, or ask for a larger data.seq_len"
            )
        start = self._chance.below(len(row) - len(sentence) + 1, "at", number)
        row[start : start + len(sentence)] = sentence
        return row

    def candidate(self, number: int) -> NDArray[np.int32]:
        """As a document of its own, between two ends of text."""
        text = f"The code of {self._chance.word} is {self._chance.secret('secret', number)}."
        eos = np.array([self.tokenizer.eos_id], np.int32)
        return np.concatenate([eos, self.tokenizer.encode([text])[0], eos])


def _seed(path: Path) -> str:
    """Drawn once. CorruptError."""
    if not path.exists():
        write_atomic(path, json.dumps({"seed": secrets.token_hex(16)}).encode(), durable=True)
    try:
        return str(json.loads(path.read_bytes())["seed"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptError(
            f"{path}, which the canaries follow from, cannot be read: {error}; remove it, and new ones are planted"
        ) from error


def _padded(rows: Sequence[NDArray[np.int32]], filler: int) -> Tensor:
    """Of one length, int64: fillers, which are not to be predicted, after the shorter ones."""
    found = np.full((len(rows), *rows[0].shape[:-1], max(row.shape[-1] for row in rows)), filler, np.int64)
    for row, into in zip(rows, found, strict=True):
        into[..., : row.shape[-1]] = row
    return torch.from_numpy(found)
