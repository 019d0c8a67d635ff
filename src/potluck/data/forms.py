"""What a row of a file becomes: a document, or (records.py) a record with answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Unusable(Exception):
    """Why a row cannot be used. For the data's owner only: it may quote."""


class Form(Protocol[T_co]):
    @property
    def required(self) -> Sequence[str]:
        """The fields that a row must have."""
        ...

    @property
    def optional(self) -> Sequence[str]: ...

    @property
    def setting(self) -> str:
        """The key of a recipe that says how these fields are called."""
        ...

    def of_row(self, row: Mapping[str, Any]) -> tuple[T_co, int]:
        """What it becomes, and how many bytes of text it has. Unusable says why it becomes nothing."""
        ...


@dataclass(frozen=True)
class TextForm:
    """One field holds the document."""

    field: str
    setting: str = "data.text_field"
    optional: Sequence[str] = ()

    @property
    def required(self) -> Sequence[str]:
        return (self.field,)

    def of_row(self, row: Mapping[str, Any]) -> tuple[str, int]:
        text = checked_text(row[self.field], repr(self.field))
        return text, len(text.encode())


def checked_text(value: object, name: str) -> str:
    """Unusable if it is not text, or none that says anything."""
    if not isinstance(value, str):
        raise Unusable(f"{name} holds no text but a {type(value).__name__}")
    if not value.strip():
        raise Unusable(f"{name} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Unusable(f"{name} holds half a surrogate pair, which is not text") from None
    return value
