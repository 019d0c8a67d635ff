"""The state of a run: a frozen dataclass of handles and scalars, hence a checkpoint for free."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

from potluck.types.params import Fragment, Params

S = TypeVar("S", bound="State")


@dataclass(frozen=True, kw_only=True)
class State:
    """What every strategy's state has. Add fields: `Params` handles, numbers, strings, and tuples or dicts of them."""

    params: Params
    round: int = 0  # rounds committed
    tokens: int = 0  # training tokens committed
    seconds: float = 0.0  # time spent in committed rounds
    loss: float = 0.0  # mean training loss of the last round

    def handles(self) -> tuple[Params, ...]:
        """Every handle in the state: what must be kept to restore it."""
        found: list[Params] = []

        def walk(value: Any) -> None:
            match value:
                case Params():
                    found.append(value)
                case dict():
                    for item in value.values():
                        walk(item)
                case tuple() | list():
                    for item in value:
                        walk(item)
                case _:
                    pass

        for field in dataclasses.fields(self):
            walk(getattr(self, field.name))
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        return {field.name: _encode(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls: type[S], value: dict[str, Any]) -> S:
        """The state written by `to_json`. Fields that were added since take their defaults."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: _decode(item) for name, item in value.items() if name in names})


def _encode(value: Any) -> Any:
    match value:
        case Params():
            return {"$params": [[f.name, f.numel] for f in value.fragments]}
        case dict():
            return {str(k): _encode(v) for k, v in value.items()}
        case tuple() | list():
            return [_encode(v) for v in value]
        case _:
            return value


def _decode(value: Any) -> Any:
    match value:
        case {"$params": list(fragments)}:
            return Params(tuple(Fragment(str(name), int(numel)) for name, numel in fragments))
        case dict():
            items: dict[str, Any] = value
            return {k: _decode(v) for k, v in items.items()}
        case list():
            values: list[Any] = value
            return tuple(_decode(v) for v in values)
        case _:
            return value
