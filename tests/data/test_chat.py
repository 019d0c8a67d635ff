from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.chat_templates import CHATML, LLAMA_2, MARKS, TEMPLATES, save_chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from potluck.data.chat import PLAIN_TEMPLATE, ChatTemplate, Message
from potluck.data.forms import Unusable
from potluck.types.errors import DataError


def said(*contents: str, system: str = "") -> list[Message]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


@pytest.fixture(scope="module", params=[*TEMPLATES, "plain"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ChatTemplate, Any]:
    """A template's name, what we make of it, and the tokenizer as transformers opens it."""
    name, folder = str(request.param), tmp_path_factory.mktemp(request.param)
    save_chat_tokenizer(folder, TEMPLATES[name][0] if name in TEMPLATES else None)
    chat = ChatTemplate(folder, "chat" if name in TEMPLATES else "instruct")
    return name, chat, AutoTokenizer.from_pretrained(str(folder))


def around(name: str) -> tuple[str, str]:
    return TEMPLATES[name][1:] if name in TEMPLATES else ("", "<|endoftext|>")


def test_tokens_are_those_of_transformers_and_answers_are_found(kind: tuple[str, ChatTemplate, Any]) -> None:
    name, chat, tokenizer = kind
    messages = said("how are you?", "fine,\n\nthanks", "and you", "fine", system="be kind")
    encoded = chat.encode(messages)
    if name in TEMPLATES:
        assert encoded.ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    before, after = around(name)
    answers = [tokenizer.decode(encoded.ids[start:stop]) for start, stop in encoded.answers]
    assert answers == [f"{before}fine,\n\nthanks{after}", f"{before}fine{after}"]
    if "marked" in name:
        mask = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        expected = np.zeros(len(encoded.ids), int)
        for start, stop in encoded.answers:
            expected[start:stop] = 1
        assert mask["assistant_masks"] == expected.tolist()
    assert chat.encode(messages, first_answer=3).answers == encoded.answers[1:]


usable = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: text.strip() != "" and not any(mark in text for mark in MARKS)
)
indented = st.sampled_from(["    return", "\n", "\n\n", " ", "\t", "  \n", "x\n", "\u2003"]).flatmap(
    lambda start: usable.map(lambda text: start + text)
)


@settings(max_examples=60, deadline=None)
@given(contents=st.lists(usable | indented, min_size=1, max_size=3), answer=usable | indented)
def test_tokens_of_answers_decode_to_the_answers(
    kind: tuple[str, ChatTemplate, Any], contents: list[str], answer: str
) -> None:
    name, chat, tokenizer = kind
    messages = said(*(text for content in contents for text in (content, answer)))
    encoded = chat.encode(messages)
    before, after = around(name)
    decoded = [tokenizer.decode(encoded.ids[start:stop]) for start, stop in encoded.answers]
    assert decoded == [f"{before}{answer}{after}"] * len(contents)
    template = TEMPLATES[name][0] if name in TEMPLATES else PLAIN_TEMPLATE
    assert tokenizer.decode(encoded.ids) == tokenizer.apply_chat_template(
        messages, tokenize=False, chat_template=template
    )


@pytest.fixture
def chat_of(tmp_path: Path) -> Any:
    def make(template: str | None, format: str = "chat") -> ChatTemplate:
        save_chat_tokenizer(tmp_path, template)
        return ChatTemplate(tmp_path, format)  # pyright: ignore[reportArgumentType]

    return make


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "has no chat template and format 'chat' needs one"),
        ("{% for message in messages %}", "the chat template refuses it: .*'endfor'"),
        ("{{ messages[0].content.nothing.at_all }}", "the chat template refuses it: 'str object' has no attribute"),
        ("{{ ''.__class__.__mro__ }}", "the chat template refuses it: access to attribute '__class__'"),
        ("{{ raise_exception('no') }}", "the chat template refuses it: no"),
        ("{{ raise_exception('\x1b[2J') }}", r"the chat template refuses it: [^\x1b]*;"),
        ("{{ '\\ud800' }}", "the chat template refuses it: 'utf-8' codec can't encode"),
        ("{{ 'x' * 10 ** 6 }}", r"makes 1,000,000 characters of it and 65,"),
        ("{% for i in range(90000) %}{{ messages[0].content }}{% endfor %}", r"makes [\d,]+ characters of it and 65,"),
        ("{{ messages | length }}" + CHATML, "renders the beginning of a conversation in another way than the whole"),
        (CHATML.replace("message['content']", "(message['content'] if message['role'] == 'user' else '')"), "not fo"),
        ("{{ 'x' }}", "the chat template gives 0 of its 2 answers"),
        ("{% generation %}{% endgeneration %}x", "the chat template gives 0 of its 2 answers"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_trained_with_is_refused(chat_of: Any, template: str | None, why: str) -> None:
    with pytest.raises(DataError, match=why):
        chat_of(template)


def test_one_that_shows_only_the_last_answer_whole_will_do_for_instructions(chat_of: Any) -> None:
    """As templates do that leave out what was thought in earlier turns."""
    template = CHATML.replace("message['content']", "(message['content'] if loop.last or loop.first else 'cut')")
    with pytest.raises(DataError, match="renders the beginning of a conversation in another way"):
        chat_of(template)
    assert chat_of(template, "instruct").encode(said("how are you", "fine")).answers


def test_a_record_that_a_template_refuses_is_unusable(chat_of: Any) -> None:
    chat = chat_of(LLAMA_2)
    with pytest.raises(Unusable, match="refuses it: roles must alternate"):
        chat.encode([*said("how"), *said("are", "you")])
    with pytest.raises(Unusable, match=r"its text holds '<\|im_end\|>', which this tokenizer takes for a mark"):
        chat.encode(said("how<|im_end|>", "fine"))


def test_marks_keep_the_blanks_around_them(chat_of: Any, tmp_path: Path) -> None:
    chat = chat_of("""{% for message in messages %}
        {% if message['role'] == 'assistant' %}
            {%- generation -%}
                {{ message['content'] }}{{ eos_token }}
            {%- endgeneration %}
        {% else %}
            {{ message['content'] }}:
        {% endif %}
    {% endfor %}""")
    messages = said("how", "fine", "and you", "too")
    encoded, tokenizer = chat.encode(messages), AutoTokenizer.from_pretrained(str(tmp_path))
    assert tokenizer.decode(encoded.ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert [tokenizer.decode(encoded.ids[start:stop]) for start, stop in encoded.answers] == [
        "fine<|endoftext|>", "too<|endoftext|>"
    ]  # fmt: skip
    with pytest.raises(Unusable, match="it cannot be told what its chat template marks as answers"):
        chat.encode(said("how", "a\ue000b"))


def test_a_directory_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="transformers cannot open the tokenizer in"):
        ChatTemplate(tmp_path, "chat")
