"""Records to rows: what is predicted, what is cut, what is skipped and where it is said."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.chat_templates import CHATML, LLAMA_2, save_chat_tokenizer
from datasets import Dataset

from potluck.data.config import DataConfig, ReadOptions
from potluck.data.prepare import prepare_private, prepare_shared
from potluck.data.prepared import PreparedData
from potluck.data.readers import Reader, ReadReport
from potluck.data.records import RecordForm
from potluck.data.sources import find_sources
from potluck.data.stream import Cursor, PrivateSource, held_out_batches, open_shard
from potluck.data.tokenizer import TextTokenizer
from potluck.types.errors import DataError

Rows = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chatml")
    save_chat_tokenizer(folder, CHATML)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    save_chat_tokenizer(folder, None)
    return folder


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def user(content: Any) -> dict[str, Any]:
    return turn("user", content)


def assistant(content: Any) -> dict[str, Any]:
    return turn("assistant", content)


def read(path: Path, tokenizer: Path, format: str, seq_len: int = 100, **options: Any) -> tuple[list[Rows], ReadReport]:
    given = ReadOptions(format=format, seq_len=seq_len, **options)  # pyright: ignore[reportArgumentType]
    sources, unknown = find_sources([path], format=given.format, base=path.parent)
    reader = Reader(sources, unknown=unknown)
    rows = list(reader.records(RecordForm(given, tokenizer)))
    return rows, reader.report()


def lines(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return path


def parts(row: Rows, tokenizer: Path) -> tuple[str, str, str]:
    """What comes before the first predicted token, the predicted ones, and what comes after."""
    opened, at = TextTokenizer.open(tokenizer), np.flatnonzero(row >= 0)
    plain = np.maximum(row, ~row)
    return opened.decode(plain[: at[0]]), opened.decode(row[at]), opened.decode(plain[at[-1] + 1 :])


def test_an_instruction_is_one_turn_of_the_template(tmp_path: Path, chatml: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl",
        {"instruction": "how are you?", "output": "fine"},
        {"instruction": "add", "input": "1, 2", "output": "3"},
        {"instruction": "add", "input": "", "output": "3"},
    )
    rows, report = read(path, chatml, "instruct")
    assert all(row.shape == (101,) and row.dtype == np.int32 for row in rows)
    assert parts(rows[0], chatml)[:2] == (
        "<|im_start|>user\nhow are you?<|im_end|>\n<|im_start|>assistant\n", "fine<|im_end|>\n"
    )  # fmt: skip
    assert set(parts(rows[0], chatml)[2].split("<|endoftext|>")) == {""}
    assert parts(rows[1], chatml)[0] == "<|im_start|>user\nadd\n\n1, 2<|im_end|>\n<|im_start|>assistant\n"
    assert parts(rows[2], chatml)[0] == "<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n"
    assert report == ReadReport(num_documents=3, num_bytes=16 + 10 + 4)


def test_a_plain_template_serves_where_there_is_none_and_fields_may_be_called_otherwise(
    tmp_path: Path, bare: Path
) -> None:
    pq.write_table(pa.table({"q": ["how?"], "context": ["now"], "a": ["so"]}), tmp_path / "a.parquet")
    fields = {"instruction": "q", "input": "context", "output": "a"}
    rows, _ = read(tmp_path / "a.parquet", bare, "instruct", fields=fields)
    before, answer, _ = parts(rows[0], bare)
    assert before == "### Instruction:\nhow?\n\nnow\n\n### Response:\n" and answer == "so<|endoftext|>"
    Dataset.from_dict({"instruction": ["how?"], "output": ["so"]}).save_to_disk(str(tmp_path / "saved"))
    rows, _ = read(tmp_path / "saved", bare, "instruct")
    assert parts(rows[0], bare)[1] == "so<|endoftext|>"
    with pytest.raises(
        DataError, match=r"has the columns q, context, a and none named 'instruction'; set `data\.fields`"
    ):
        read(tmp_path / "a.parquet", bare, "instruct")


def test_every_answer_of_a_conversation_is_predicted(tmp_path: Path, chatml: Path) -> None:
    said = [turn("system", "be kind"), user("how"), assistant("fine"), user("and you"), assistant("too"), user("bye")]
    rows, _ = read(lines(tmp_path / "a.jsonl", {"messages": said}), chatml, "chat")
    assert parts(rows[0], chatml)[1] == "fine<|im_end|>\ntoo<|im_end|>\n"
    assert "bye" not in TextTokenizer.open(chatml).decode(np.maximum(rows[0], ~rows[0])), "nobody answers it"


def test_what_is_too_long_is_cut_on_its_left_or_skipped(tmp_path: Path, chatml: Path) -> None:
    said = [user("x" * 30), assistant("first"), user("y" * 30), assistant("second")]
    path = lines(tmp_path / "a.jsonl", {"messages": said})
    whole, _ = read(path, chatml, "chat", 150)
    num_tokens = int(np.flatnonzero(whole[0] >= 0)[-1]) + 1
    assert parts(whole[0], chatml)[1] == "first<|im_end|>\nsecond<|im_end|>\n"
    exact, _ = read(path, chatml, "chat", num_tokens - 1)
    assert exact[0].tolist() == whole[0][:num_tokens].tolist()
    answers = [parts(whole[0], chatml)[1], "second<|im_end|>\n"]
    for seq_len in range(20, num_tokens - 1):
        rows, _ = read(path, chatml, "chat", seq_len)
        kept = whole[0][num_tokens - seq_len - 1 : num_tokens]
        assert np.array_equal(np.maximum(rows[0], ~rows[0]), np.maximum(kept, ~kept)), "the end of it is there"
        assert parts(rows[0], chatml)[1] in answers, "an answer counts whole or not at all"
    pair = {"prompt": "z" * 50, "chosen": "good", "rejected": "z" * 20}
    (rows,), _ = read(lines(tmp_path / "b.jsonl", pair), chatml, "preference", 60)
    assert parts(rows[0], chatml)[0] == parts(rows[1], chatml)[0], "both follow on the same words"
    with pytest.raises(DataError, match=r"its answer has \d+ tokens and 5 are the most; raise `data.seq_len`"):
        read(path, chatml, "chat", 5)


def test_a_pair_is_two_rows(tmp_path: Path, chatml: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl",
        {"prompt": "how", "chosen": "good", "rejected": "bad"},
        {"prompt": [user("how"), assistant("fine"), user("and")], "chosen": [assistant("good")], "rejected": "bad"},
        {"prompt": [user("how")], "chosen": [user("how"), assistant("good")], "rejected": [assistant("bad")]},
    )
    rows, report = read(path, chatml, "preference")
    assert report.num_documents == 3 and all(row.shape == (2, 101) for row in rows)
    for pair in rows:
        assert [parts(row, chatml)[1] for row in pair] == ["good<|im_end|>\n", "bad<|im_end|>\n"]
        assert parts(pair[0], chatml)[0] == parts(pair[1], chatml)[0]
    assert "fine" in parts(rows[1][0], chatml)[0], "an answer of the prompt is given, not predicted"


GOOD_CHAT = {"messages": [user("how"), assistant("fine")]}
BAD = {
    "chat": [
        ("{", "not JSON"),
        ({"text": "how"}, "it has no field 'messages'"),
        ({"messages": 5}, "'messages' holds no messages but a int"),
        ({"messages": []}, "'messages' holds no answer"),
        ({"messages": [user("how")]}, "'messages' holds no answer"),
        ({"messages": ["how"]}, "message 1 of 'messages' is no message but a str"),
        ({"messages": [turn("tool", "x"), assistant("y")]}, "message 1 of 'messages' is by 'tool'"),
        ({"messages": [user("how"), assistant(None)]}, "content of message 2 of 'messages' holds no text but"),
        ({"messages": [user("how"), assistant(" \n")]}, "the content of message 2 of 'messages' is empty"),
        ({"messages": [user("how"), assistant("\ud800")]}, "message 2 of 'messages' holds half a surrogate pair"),
        ({"messages": [assistant("fine")]}, "message 1 of 'messages' is by assistant where one by user is due"),
        ({"messages": [user("a"), user("b"), assistant("c")]}, "message 2 of 'messages' is by user where one by"),
        ({"messages": [user("a"), turn("system", "b")]}, "message 2 of 'messages' is by system where one by assistant"),
        ({"messages": [user("how"), assistant("x" * 300)]}, "its answer has 302 tokens and 100 are the most"),
        ({"messages": [user("<|im_start|>"), assistant("x")]}, "its text holds '<|im_start|>'"),
    ],
    "instruct": [
        ({"instruction": "how"}, "it has no field 'output'"),
        ({"instruction": "how", "output": ""}, "'output' is empty"),
        ({"instruction": ["how"], "output": "so"}, "'instruction' holds no text but a list"),
        ({"instruction": "how", "input": 4, "output": "so"}, "'input' holds no text but a int"),
        ({"instruction": "\udfff", "output": "so"}, "'instruction' holds half a surrogate pair"),
    ],
    "preference": [
        ({"prompt": "how", "chosen": "so"}, "it has no field 'rejected'"),
        ({"prompt": "how", "chosen": "so", "rejected": "so"}, "'chosen' and 'rejected' are the same"),
        ({"prompt": "how", "chosen": "so", "rejected": " "}, "'rejected' is empty"),
        ({"prompt": [user("how"), assistant("a")], "chosen": "b", "rejected": "c"}, "message 3 of 'chosen' is by"),
        ({"prompt": [user("a"), assistant("b")], "chosen": [user("c")], "rejected": "d"}, "is not followed by|due"),
        ({"prompt": "how", "chosen": "so", "rejected": "x" * 300}, "its answer has 302 tokens"),
    ],
}  # fmt: skip
GOOD = {
    "chat": GOOD_CHAT,
    "instruct": {"instruction": "how", "output": "fine"},
    "preference": {"prompt": "how", "chosen": "fine", "rejected": "not"},
}


@pytest.mark.parametrize("format", BAD)
def test_bad_records_are_skipped_counted_and_told_by_their_place(tmp_path: Path, chatml: Path, format: str) -> None:
    bad = BAD[format]
    path = lines(tmp_path / "mine.jsonl", GOOD[format], *(record for record, _ in bad), GOOD[format])
    rows, report = read(path, chatml, format)
    assert len(rows) == report.num_documents == 2
    assert report.num_skipped == len(report.skipped) == len(bad)
    for number, (skipped, (_, reason)) in enumerate(zip(report.skipped, bad, strict=True), start=2):
        assert (skipped.file, skipped.line) == ("mine.jsonl", number)
        assert any(part in skipped.reason for part in reason.split("|")), skipped.reason
    assert f"; {len(bad)} records or files skipped" in report.sentence() and "mine" not in report.sentence()


def prepared(
    tmp_path: Path, tokenizer: Path, records: list[Any], format: str, *, private: bool = True, seq_len: int = 40
) -> PreparedData:
    path = lines(tmp_path / "mine.jsonl", *records)
    if private:
        options = ReadOptions(format=format, seq_len=seq_len, validation=0.2)  # pyright: ignore[reportArgumentType]
        return prepare_private(
            [path], options, seed=1, base=tmp_path, cache_dir=tmp_path / "own", tokenizer_dir=tokenizer
        )
    section = {"shared": str(path), "format": format, "seq_len": seq_len, "validation": 0.2}
    section["tokenizer"] = {"path": str(tokenizer)}
    return prepare_shared(
        DataConfig.model_validate(section), seed=1, base=tmp_path, cache_dir=tmp_path / "cache", vocab_size=320
    )


@pytest.mark.parametrize("private", [True, False])
def test_conversations_are_prepared_whole_and_once(tmp_path: Path, chatml: Path, private: bool) -> None:
    records = [{"messages": [user(f"how {i}"), assistant(f"fine {i}")]} for i in range(50)]
    data = prepared(tmp_path, chatml, ["{", *records], "chat", private=private)
    assert (data.num_documents, data.num_validation_documents, data.num_dropped_tokens) == (40, 10, 0)
    assert data.num_sequences == 40 and data.num_validation_sequences == 10 and data.report.num_skipped == 1
    assert data.highest_token == TextTokenizer.open(chatml).vocab_size - 1
    rows = np.concatenate(
        [
            open_shard(s.path, seq_len=40, vocab_size=data.vocab_size, rows_per_record=1).rows
            for s in (*data.shards, *data.validation)
        ]
    )
    answers = [parts(row, chatml)[1] for row in rows]
    assert sorted(answers) == sorted(f"fine {i}<|im_end|>\n" for i in range(50)) and answers != sorted(answers)
    assert int((rows >= 0).sum()) == data.num_tokens + data.num_validation_tokens
    assert prepared(tmp_path, chatml, ["{", *records], "chat", private=private) == data, "it is kept"
    short = prepared(tmp_path, chatml, [*records[:2], {"messages": [user("x" * 90), assistant("y")]}], "chat")
    assert (data.report.num_cut, short.report.num_cut) == (0, 1)
    assert short.report.sentence().endswith("; 1 records cut at their beginning")
    assert prepared(tmp_path, chatml, ["{", *records], "chat", private=private, seq_len=41).digest != data.digest


def test_another_template_is_other_data(tmp_path: Path, chatml: Path) -> None:
    save_chat_tokenizer(tmp_path / "other", LLAMA_2)
    records = [GOOD_CHAT] * 10
    digests = {prepared(tmp_path, folder, records, "chat").digest for folder in (chatml, tmp_path / "other")}
    assert len(digests) == 2


def test_held_out_files_of_records(tmp_path: Path, chatml: Path) -> None:
    lines(tmp_path / "held.jsonl", GOOD_CHAT)
    path = lines(tmp_path / "mine.jsonl", GOOD_CHAT, GOOD_CHAT)
    section = {
        "shared": str(path), "validation": [str(tmp_path / "held.jsonl")], "format": "chat", "seq_len": 40,
        "tokenizer": {"path": str(chatml)},
    }  # fmt: skip
    data = prepare_shared(DataConfig.model_validate(section), seed=1, base=tmp_path, cache_dir=tmp_path / "cache")
    assert (data.num_documents, data.num_validation_documents) == (2, 1) and data.report.num_documents == 3


def test_too_few_records_are_one_sentence(tmp_path: Path, chatml: Path) -> None:
    with pytest.raises(DataError, match="the data holds 1 records and none is left for training; add some"):
        prepared(tmp_path, chatml, [GOOD_CHAT], "chat")


def test_pairs_stay_together_in_batches_epochs_and_validation(tmp_path: Path, chatml: Path) -> None:
    records = [{"prompt": f"how {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(25)]
    data = prepared(tmp_path, chatml, records, "preference")
    assert data.num_sequences == 20 and len(data.shards) > 1

    def source(cursor: Cursor | None = None) -> PrivateSource:
        return PrivateSource(
            data.shards, seq_len=40, seed=5, batch_size=3, cursor=cursor or Cursor(), rows_per_record=2
        )

    def numbers(batch: Any) -> list[int]:
        """Of the pairs, each of which must be whole."""
        found: list[int] = []
        for chosen, rejected in batch.numpy():
            (kind, one), (other, two) = (parts(row, chatml)[1].split("<")[0].split() for row in (chosen, rejected))
            assert (kind, other, one) == ("good", "bad", two)
            found.append(int(one))
        return found

    reading = source()
    batches = [next(reading) for _ in range(20)]
    assert all(batch.shape == (3, 2, 41) for batch in batches)
    order = [number for batch in batches for number in numbers(batch)]
    epochs = [order[i : i + 20] for i in (0, 20, 40)]
    assert all(len(set(epoch)) == 20 for epoch in epochs) and epochs[0] != epochs[1]
    assert reading.cursor == Cursor(3, 0)
    assert [numbers(batch) for batch in [next(source(Cursor(1, 1)))]] == [epochs[1][1:4]]
    shards = [open_shard(s.path, seq_len=40, vocab_size=320, rows_per_record=2) for s in data.validation]
    validation = [numbers(batch) for shard in shards for batch in held_out_batches(shard, 2)]
    assert len(validation) > 1
    assert sorted([*epochs[0], *(number for batch in validation for number in batch)]) == list(range(25))
