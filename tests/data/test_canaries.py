"""Canaries: planted in the form of the data, the same ones each time, and ranked as Carlini et al. do."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.chat_templates import CHATML, save_chat_tokenizer

from potluck.data.canaries import SEED, CanaryConfig, exposure, plant
from potluck.data.config import ReadOptions
from potluck.data.prepare import prepare_private
from potluck.data.prepared import PreparedData
from potluck.data.stream import OwnSequences, PrivateSource
from potluck.data.tokenizer import TextTokenizer
from potluck.types.errors import CorruptError, DataError

SECRET = re.compile(r"\d(?: \d){11}")
CONFIG = CanaryConfig(count=3, repeats=2, candidates=16)
RECORDS: dict[str, Any] = {
    "instruct": {"question": "say yes", "output": "yes"},
    "chat": {"messages": [{"role": "user", "content": "say yes"}, {"role": "assistant", "content": "yes"}]},
    "preference": {"prompt": "say yes", "chosen": "yes", "rejected": "no"},
    "auto": {"text": "yes and no and yes. " * 20},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_chat_tokenizer(folder, CHATML)
    return folder


def options_for(format: str, seq_len: int = 100) -> ReadOptions:
    fields = {"instruction": "question"} if format == "instruct" else {}
    return ReadOptions.model_validate({"format": format, "fields": fields, "seq_len": seq_len, "validation": 0.2})


def own_data(folder: Path, options: ReadOptions, tokenizer: Path) -> PreparedData:
    (folder / "mine.jsonl").write_text("\n".join([json.dumps(RECORDS[options.format])] * 20))
    return prepare_private(
        [folder / "mine.jsonl"], options, seed=1, base=folder, cache_dir=folder / "own", tokenizer_dir=tokenizer
    )


@pytest.mark.parametrize("format", RECORDS)
def test_they_are_planted_in_the_form_of_the_data(format: str, tokenizer: Path, tmp_path: Path) -> None:
    options, opened = options_for(format), TextTokenizer.open(tokenizer)
    own = own_data(tmp_path, options, tokenizer)
    canaries = plant(own, CONFIG, options, tmp_path / "canaries")
    planted = OwnSequences(canaries.shards, seq_len=100, rows_per_record=options.rows_per_record)
    rows = planted.take(np.arange(len(planted))).numpy()
    assert canaries.num_sequences == len(rows) == 6
    assert rows.shape[1:] == ((2, 101) if format == "preference" else (101,))

    def secret(row: np.ndarray[Any, Any]) -> str:
        """What is predicted of it, in records; the chosen answer of a pair."""
        row = row[0] if row.ndim == 2 else row
        (found,) = SECRET.findall(opened.decode(row[row >= 0] if options.rows_per_record else row))
        return found

    secrets = [secret(row) for row in rows]
    assert len({*secrets}) == 3 and all(secrets.count(each) == 2 for each in secrets)
    candidates = [secret(row) for row in canaries.rows.numpy()]
    assert {*candidates[:3]} == {*secrets} and len({*candidates}) == 19
    if options.rows_per_record:
        assert canaries.rows.shape[-1] < 101, "what follows the answer is not evaluated"
    else:
        assert all(" and " in opened.decode(row) for row in rows), "among the owner's own text"

    again = plant(own, CONFIG, options, tmp_path / "canaries")
    assert [shard.digest for shard in again.shards] == [shard.digest for shard in canaries.shards]
    assert np.array_equal(again.rows, canaries.rows)
    more = plant(own, CanaryConfig(count=4, candidates=15), options, tmp_path / "canaries")
    assert np.array_equal(more.rows, canaries.rows), "those of before are among more of them"
    other = plant(own, CONFIG, options, tmp_path / "others")
    assert not {secret(row) for row in other.rows.numpy()} & {*candidates}


def test_they_are_read_with_the_owners_text_and_do_not_count_as_it(tokenizer: Path, tmp_path: Path) -> None:
    options = options_for("instruct")
    own = own_data(tmp_path, options, tokenizer)
    canaries = plant(own, CONFIG, options, tmp_path / "canaries")
    source = PrivateSource(
        (*own.shards, *canaries.shards), seq_len=100, seed=1, batch_size=11, rows_per_record=1, num_planted=6
    )
    read = [next(source), next(source)]
    assert own.num_sequences == 16 and source.num_sequences == 22 and source.cursor.epoch == 1
    assert source.num_different == 16
    digits = [SECRET.findall(TextTokenizer.open(tokenizer).decode(row[row >= 0].numpy())) for b in read for row in b]
    assert sum(map(len, digits)) == 6


def test_exposure_is_what_the_rank_says() -> None:
    others = [1.0, 2.0, 3.0]
    assert exposure(0.5, others) == 2.0
    assert exposure(1.5, others) == 1.0
    assert exposure(2.5, others) == pytest.approx(math.log2(4 / 3))
    assert exposure(9.0, others) == 0.0
    assert exposure(1.0, [1.0] * 3) == 0.0, "equal losses tell nothing"
    assert exposure(math.nan, others) == 0.0 == exposure(1.0, [math.nan] * 3)
    unknown = [exposure(i + 0.5, range(255)) for i in range(-1, 255)]  # each rank once
    assert sum(unknown) / len(unknown) == pytest.approx(math.log2(math.e), abs=0.05)
    assert max(unknown) == 8.0 and min(unknown) == 0.0


def test_what_has_no_canaries_is_one_sentence(tokenizer: Path, tmp_path: Path) -> None:
    for format, says in (
        ("instruct", "no canary can be made for this data: its answer has"), ("auto", "a sequence has 9; leave"),
    ):  # fmt: skip
        options = options_for(format, seq_len=8)
        with pytest.raises(DataError, match=says):
            plant(own_data(tmp_path, options, tokenizer), CONFIG, options, tmp_path / "canaries")
    np.save(tmp_path / "tokens.npy", np.arange(200, dtype=np.uint16), allow_pickle=False)
    options = options_for("auto", seq_len=8)
    own = prepare_private(
        [tmp_path / "tokens.npy"], options, seed=1, base=tmp_path, cache_dir=tmp_path / "own", tokenizer_dir=None,
        vocab_size=320,
    )  # fmt: skip
    with pytest.raises(DataError, match="arrays of tokens that came without a tokenizer"):
        plant(own, CONFIG, options, tmp_path / "canaries")


def test_a_seed_that_cannot_be_read_is_not_replaced(tokenizer: Path, tmp_path: Path) -> None:
    options = options_for("chat")
    own = own_data(tmp_path, options, tokenizer)
    plant(own, CONFIG, options, tmp_path / "canaries")
    (tmp_path / "canaries" / SEED).write_text("{}")
    with pytest.raises(CorruptError, match=r"seed\.json, which the canaries follow from, cannot be read"):
        plant(own, CONFIG, options, tmp_path / "canaries")
    assert (tmp_path / "canaries" / SEED).read_text() == "{}"
