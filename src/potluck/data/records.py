"""Records with answers: instructions, conversations and pairs of preference, as rows of tokens.

    instruct      {"instruction": ..., "input": ... or left out, "output": ...}
    chat          {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
    preference    {"prompt": ..., "chosen": ..., "rejected": ...}, each text or messages

A record is one row, of seq_len + 1 tokens; a preference is two, the chosen one first. A token t that is not to be
predicted is stored as its complement:

    row     ~p_1 .. ~p_n  a_1 .. a_m  ~eos .. ~eos       ~t = -t - 1 < 0
    inputs  t if t >= 0 else ~t = max(t, ~t)             targets that count: those >= 0

Attention is causal, so what stands after an answer needs no mask. A record that is too long loses the beginning of
what stands before its last answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.data.chat import ChatTemplate, Message
from potluck.data.config import RECORD_FIELDS, ReadOptions
from potluck.data.forms import Unusable, checked_text
from potluck.data.tokenizer import TextTokenizer

Rows = NDArray[np.int32]  # [seq_len + 1], or [2, seq_len + 1] for a pair


class RecordForm:
    """Makes rows of records (`forms.Form`)."""

    setting = "data.fields"

    def __init__(self, options: ReadOptions, folder: Path) -> None:
        """`folder` holds the tokenizer. DataError if it or its chat template cannot be used."""
        self._format, self._num_tokens = options.format, options.seq_len + 1
        names = {name: options.fields.get(name, name) for name in RECORD_FIELDS[options.format]}
        self._name = names
        self.optional: Sequence[str] = [names["input"]] if "input" in names else []
        self.required: Sequence[str] = [name for name in names.values() if name not in self.optional]
        self.num_cut = 0  # of the records so far
        self.tokenizer = TextTokenizer.open(folder)
        self._chat = ChatTemplate(folder, options.format)

    def of_row(self, row: Mapping[str, Any]) -> tuple[Rows, int]:
        conversations, num_given = self._conversations({key: row.get(name) for key, name in self._name.items()})
        encoded = [self._chat.encode(messages, first_answer=num_given) for messages in conversations]
        cut = max(0, max(len(one.ids) for one in encoded) - self._num_tokens)  # the same of both rows of a pair
        rows = np.full((len(encoded), self._num_tokens), ~self.tokenizer.eos_id, np.int32)
        for one, into in zip(encoded, rows, strict=True):
            row_of = ~one.ids[cut:]
            whole = [(start - cut, stop - cut) for start, stop in one.answers if start > cut]
            if not whole:
                longest = max(stop - start for one in encoded for start, stop in one.answers[-1:])
                raise Unusable(
                    f"its answer has {longest:,} tokens and {self._num_tokens - 1:,} are the most; raise `data.seq_len`"
                )
            for start, stop in whole:
                row_of[start:stop] = ~row_of[start:stop]
            into[: len(row_of)] = row_of
        self.num_cut += cut > 0
        num_bytes = sum(len(message["content"].encode()) for messages in conversations for message in messages)
        return rows if len(rows) > 1 else rows[0], num_bytes

    def _conversations(self, row: Mapping[str, object]) -> tuple[list[list[Message]], int]:
        """One, or the chosen and the rejected one, and how many messages come before the answers that count."""
        if self._format == "chat":
            return [_conversation(row["messages"], self._name["messages"])], 0
        if self._format == "instruct":
            parts = [checked_text(row["instruction"], repr(self._name["instruction"]))]
            if row["input"] not in (None, ""):
                parts.append(checked_text(row["input"], repr(self._name["input"])))
            answer = checked_text(row["output"], repr(self._name["output"]))
            return [[_message("user", "\n\n".join(parts)), _message("assistant", answer)]], 0
        prompt = _messages(row["prompt"], self._name["prompt"], role="user")
        pair: list[list[Message]] = []
        for key in ("chosen", "rejected"):
            answer = _messages(row[key], self._name[key], role="assistant")
            given = [] if answer[: len(prompt)] == prompt else prompt  # some data sets repeat it
            pair.append(_conversation([*given, *answer], self._name[key]))
        if pair[0] == pair[1]:
            raise Unusable(f"{self._name['chosen']!r} and {self._name['rejected']!r} are the same")
        if min(map(len, pair)) <= len(prompt):
            raise Unusable(f"{self._name['prompt']!r} is not followed by an answer")
        return pair, len(prompt)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _messages(value: object, name: str, *, role: str) -> list[Message]:
    """A list of messages, or text as the one message of `role`."""
    if isinstance(value, str):
        return [_message(role, checked_text(value, repr(name)))]
    if not isinstance(value, list):
        raise Unusable(f"{name!r} holds no messages but a {type(value).__name__}")
    messages: list[Message] = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping):
            raise Unusable(f"message {number} of {name!r} is no message but a {type(message).__name__}")
        by, content = message.get("role"), message.get("content")
        if by not in ("system", "user", "assistant"):
            raise Unusable(f"message {number} of {name!r} is by {str(by)[:50]!r}, not by system, user or assistant")
        messages.append(_message(by, checked_text(content, f"the content of message {number} of {name!r}")))
    return messages


def _conversation(value: object, name: str) -> list[Message]:
    """Turns by user and assistant, after one by system or none, up to the last answer."""
    messages = _messages(value, name, role="user")
    first = 1 if messages and messages[0]["role"] == "system" else 0
    for number, message in enumerate(messages[first:]):
        due = ("user", "assistant")[number % 2]
        if message["role"] != due:
            raise Unusable(
                f"message {first + number + 1} of {name!r} is by {message['role']} where one by {due} is due: "
                "user and assistant take turns, after a first message by system or none"
            )
    last = first + (len(messages) - first) // 2 * 2
    if last == first:
        raise Unusable(f"{name!r} holds no answer")
    return messages[:last]


@dataclass(frozen=True)
class Records:
    """Many records, in a file."""

    rows: NDArray[np.int32]  # [num_records, seq_len + 1], of pairs [num_records, 2, seq_len + 1]
    num_predicted: NDArray[np.int64]  # tokens of each that are
    highest_token: int

    @staticmethod
    def collect(records: Iterable[Rows], path: Path) -> Records:
        """One after the other, into a file at `path`, from which they are mapped."""
        num_predicted: list[int] = []
        shape, highest = (0,), 0
        with path.open("wb") as file:
            for rows in records:
                file.write(rows.tobytes())
                num_predicted.append(int((rows >= 0).sum()))
                shape, highest = rows.shape, max(highest, int(np.maximum(rows, ~rows).max()))
        whole = (len(num_predicted), *shape)
        rows = np.memmap(path, np.int32, "r", shape=whole) if num_predicted else np.empty(whole, np.int32)
        return Records(rows, np.array(num_predicted, np.int64), highest)
