"""Conversations to tokens, and which of them are answers: by the tokenizer's own chat template.

Where the template marks answers (`{% generation %}`), its marks hold. Where it does not, what it makes of a
conversation is compared with what it makes of its beginnings:

    render(m_1 .. m_i, and the opening of an answer)   a beginning of   render(m_1 .. m_i+1)   a beginning of all

and the answer is what the second has more than the first. So the tokens before an answer are those that the model is
given when it is asked. A template whose beginnings differ is refused.

A template is a program, and comes from the coordinator: transformers runs it in its sandbox, what it may give is
bounded, and each of its faults becomes a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.data.config import Format
from potluck.data.forms import Unusable
from potluck.types.errors import DataError
from potluck.types.untrusted import printable

Message = dict[str, str]  # role and content

PLAIN_TEMPLATE = """\
{% for message in messages %}\
{{ '\\n\\n' if not loop.first else '' }}\
{{ {'system': '', 'user': '### Instruction:\\n', 'assistant': '### Response:\\n'}[message['role']] }}\
{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '' }}\
{% endfor %}\
{{ '\\n\\n### Response:\\n' if add_generation_prompt else '' }}"""
"""Where a tokenizer brings none, for instructions and preferences."""

_marks = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_start, _stop = "\ue000", "\ue001"  # for private use; text that holds them cannot be told from the marks
_probe: tuple[Message, ...] = (
    {"role": "user", "content": "What is the sky like?"},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "And the grass?"},
    {"role": "assistant", "content": "Green."},
)
_free_chars, _chars_per_char = 1 << 16, 4  # what a template may give: that many, and that many for each it is given


@dataclass(frozen=True)
class Encoded:
    """ids: int32 [num_tokens]. Answer i is ids[start:stop] of `answers[i]`, its closing tokens included."""

    ids: NDArray[np.int32]
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A tokenizer with its chat template, in a directory in Hugging Face form."""

    def __init__(self, folder: Path, format: Format) -> None:
        """DataError if the template cannot be used, or `format` is chat and there is none."""
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # each kind of tokenizer fails in its own way
            raise DataError(
                f"transformers cannot open the tokenizer in {folder}: {_first_line(error)}; give another tokenizer"
            ) from error
        self._tokenizer: Any = loaded
        own: Any = self._tokenizer.chat_template
        own = own.get("default") if isinstance(own, dict) else own
        if not isinstance(own, str) and format == "chat":
            raise DataError(
                f"the tokenizer in {folder} has no chat template and format 'chat' needs one; give another tokenizer, "
                "or use format 'instruct'"
            )
        self._template = own if isinstance(own, str) else PLAIN_TEMPLATE
        self._marking = _marking(self._template)
        special = [str(t) for t in self._tokenizer.added_tokens_decoder.values() if t.special]
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._probe(folder, _probe if format == "chat" else _probe[:2])

    def _probe(self, folder: Path, messages: Sequence[Message]) -> None:
        try:
            encoded = self.encode(messages)
            for (start, stop), message in zip(encoded.answers, messages[1::2], strict=True):
                if message["content"] not in self._tokenizer.decode(encoded.ids[start:stop]):
                    raise Unusable(f"the answer {message['content']!r} is not found in what it gives")
        except (Unusable, ValueError) as error:
            raise DataError(
                f"the chat template in {folder} cannot be trained with: {error}; give a tokenizer with another one"
            ) from error

    def encode(self, messages: Sequence[Message], *, first_answer: int = 0) -> Encoded:
        """Of a conversation that ends with an answer. `first_answer`: answers in messages before it do not count.

        Unusable if the template refuses it, or it cannot be told which tokens are answers.
        """
        for message in messages:
            if found := self._special.search(message["content"]):
                raise Unusable(f"its text holds {found[0]!r}, which this tokenizer takes for a mark of its own")
        at = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        count = sum(i >= first_answer for i in at)
        ids, stops = self._tokens(self._by_marks(messages) if self._marking else self._by_beginnings(messages, at))
        answers = tuple(zip(stops[::2], stops[1::2], strict=False))
        shown = sum(start < stop for start, stop in answers)
        if not shown == len(answers) == len(at):
            raise Unusable(f"the chat template gives {shown} of its {len(at)} answers")
        return Encoded(np.array(ids, np.int32), answers[len(at) - count :])

    def _by_marks(self, messages: Sequence[Message]) -> list[str]:
        pieces = re.split(f"[{_start}{_stop}]", self._render(messages, self._marking))
        if "".join(pieces) != self._render(messages) or len(pieces) % 2 == 0:
            raise Unusable("it cannot be told what its chat template marks as answers")
        return list(accumulate(pieces))

    def _by_beginnings(self, messages: Sequence[Message], at: Sequence[int]) -> list[str]:
        texts: list[str] = []
        for i in at:
            texts += [self._render(messages[:i], opens=True), self._render(messages[: i + 1])]
        if not all(longer.startswith(text) for text, longer in pairwise(texts)):
            raise Unusable("the chat template renders the beginning of a conversation in another way than the whole")
        return texts

    def _tokens(self, texts: list[str]) -> tuple[list[int], list[int]]:
        """Tokens of the last of these texts, each a beginning of the next, and how many of them each has."""
        parts = self._ids(texts)
        whole = parts[-1]
        if all(whole[: len(part)] == part for part in parts):
            return whole, [len(part) for part in parts]
        # A token would reach into an answer, and the model is given those of what comes before it: so cut there.
        pieces = self._ids([longer[len(text) :] for text, longer in pairwise(["", *texts])])
        joined = [token for piece in pieces for token in piece]
        if self._tokenizer.decode(joined) != self._tokenizer.decode(whole):
            raise Unusable("a token reaches from what stands before an answer into it")
        return joined, list(accumulate(len(piece) for piece in pieces))

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def _render(self, messages: Sequence[Message], template: str = "", *, opens: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), chat_template=template or self._template, tokenize=False, add_generation_prompt=opens
            )
            text.encode()  # half a surrogate pair is no text
        except Exception as error:  # a template is a program, and fails as programs do
            raise Unusable(f"the chat template refuses it: {_first_line(error)}") from error
        most = _free_chars + _chars_per_char * sum(len(message["content"]) for message in messages)
        if len(text) > most:
            raise Unusable(f"the chat template makes {len(text):,} characters of it and {most:,} are allowed")
        return text


def _marking(template: str) -> str:
    """The template with its marks turned to characters, and blanks as they were; "" where it has none."""

    def turned(mark: re.Match[str]) -> str:
        if mark[2]:
            return f"{{%{mark[1]} endif %}}{{{{ '{_stop}' }}}}{{% endif {mark[3]}%}}"
        return f"{{%{mark[1]} if true %}}{{{{ '{_start}' }}}}{{% if true {mark[3]}%}}"

    marking, number = _marks.subn(turned, template)
    return marking if number else ""


def _first_line(error: Exception) -> str:
    return printable((str(error) or type(error).__name__).split("\n", 1)[0], 200)
