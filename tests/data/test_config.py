from typing import Any

import pytest
from pydantic import ValidationError

from potluck.data.config import DataConfig, ReadOptions


def test_a_recipes_section_is_read() -> None:
    config = DataConfig.model_validate(
        {
            "shared": "python-stdlib",
            "tokenizer": {"train": "bpe", "vocab_size": 4096},
            "seq_len": 256,
            "validation": 0.05,
        }
    )
    assert config.access == "shared"
    assert config.paths == ("python-stdlib",)
    assert config.tokenizer.train == "bpe"


def test_the_models_own_tokenizer_has_a_word() -> None:
    config = DataConfig.model_validate({"private": True, "tokenizer": "model"})
    assert config.access == "private" and config.paths == ()
    assert config.tokenizer.train is None and config.tokenizer.path is None


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "exactly one of"),
        ({"shared": "a", "private": True}, "2 are given"),
        ({"shared": "a", "validation": 1.0}, "less than 1"),
        ({"private": True, "validation": ["x.txt"]}, "`shared` data only"),
        ({"private": True, "tokenizer": {"train": "bpe"}}, "can be trained on `shared`"),
        ({"shared": "a", "tokenizer": {"train": "bpe", "path": "t"}}, "not both"),
        ({"shared": "a", "seqlen": 3}, "Extra inputs"),
        ({"shared": "a", "seq_len": 0}, "greater than or equal to 1"),
        ({"shared": "a", "fields": {"output": "o"}}, "`fields` names 'output' and format 'auto' has no fields"),
        ({"shared": "a", "format": "chat", "fields": {"output": "o"}}, "format 'chat' has the fields messages"),
        ({"shared": "a", "format": "instruct", "tokenizer": {"train": "bpe"}}, "trained on text, not on"),
        ({"listed": "a", "format": "chat"}, "format 'chat' goes with `shared` and `private` data"),
    ],
)
def test_a_wrong_section_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate(section)


def test_workers_learn_how_to_read_and_nothing_else() -> None:
    config = DataConfig(private=True, text_field="body", seq_len=8, validation=0.25)
    told = config.read_options().model_dump()
    assert ReadOptions.model_validate({**told, "from_a_later_version": 1}) == config.read_options()
    assert told == {
        "format": "auto",
        "text_field": "body",
        "fields": {},
        "token_type": "uint16",
        "seq_len": 8,
        "validation": 0.25,
        "max_bytes": 0,
    }


def test_every_key_is_described() -> None:
    assert all(field.description for field in DataConfig.model_fields.values())
