"""The state of a run: a frozen dataclass of handles and scalars, hence a checkpoint for free."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
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
    loss: float | None = 0.0  # mean training loss of the last round; None where it is withheld

    def handles(self) -> tuple[Params, ...]:
        """Every handle in the state: what must be kept to restore it."""
        return tuple(self.named_handles().values())

    def named_handles(self) -> dict[str, Params]:
        """Every handle under a name of its own: its field's, numbered where the field holds tuples or dicts of them."""
        named: dict[str, Params] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Params):
                named[field.name] = value
            else:
                named |= {f"{field.name}-{i}": handle for i, handle in enumerate(_handles_in(value))}
        return named

    def moved(self: S, to: Mapping[Params, Params]) -> S:
        """The same state with other handles in the place of its own, as after reading a checkpoint."""
        return dataclasses.replace(
            self, **{field.name: _moved(getattr(self, field.name), to) for field in dataclasses.fields(self)}
        )

    def to_json(self) -> dict[str, Any]:
        return {field.name: _encode(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_json(cls: type[S], value: dict[str, Any]) -> S:
        """The state written by `to_json`. Fields that were added since take their defaults."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: _decode(item) for name, item in value.items() if name in names})


def _handles_in(value: Any) -> Iterator[Params]:
    match value:
        case Params():
            yield value
        case dict():
            for item in value.values():
                yield from _handles_in(item)
        case tuple() | list():
            for item in value:
                yield from _handles_in(item)
        case _:
            pass


def _moved(value: Any, to: Mapping[Params, Params]) -> Any:
    match value:
        case Params():
            return to.get(value, value)
        case dict():
            return {k: _moved(v, to) for k, v in value.items()}
        case tuple() | list():
            return tuple(_moved(v, to) for v in value)
        case _:
            return value


def _encode(value: Any) -> Any:
    match value:
        case Params():
            return {"$params": [f.to_json() for f in value.fragments]}
        case dict():
            return {str(k): _encode(v) for k, v in value.items()}
        case tuple() | list():
            return [_encode(v) for v in value]
        case _:
            return value


def _decode(value: Any) -> Any:
    match value:
        case {"$params": list(fragments)}:
            return Params(tuple(Fragment.from_json(row) for row in fragments))
        case dict():
            items: dict[str, Any] = value
            return {k: _decode(v) for k, v in items.items()}
        case list():
            values: list[Any] = value
            return tuple(_decode(v) for v in values)
        case _:
            return value
