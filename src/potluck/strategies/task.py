"""Tasks: the half of a training method that runs on a device.

    @task("diloco.inner", kind="pinned")
    def inner(replica: Replica, *, theta: Vector, num_steps: int) -> Result: ...

    inner.bind(theta=state.params, num_steps=20)      a `BoundTask`, handed to a fleet verb

A function's name crosses the wire, never its code: a worker runs only functions it has installed. Arguments are
JSON values, `Params` or `Part` handles (the device sees a flat fp32 `Vector`), `Tensors` handles and `ObjectRef`s (the
device sees the tensors of that bundle by their names in it) and tensors (inline: sent with the task, never stored).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from potluck.types.ids import Digest
from potluck.types.params import Params, Part, Tensors
from potluck.types.vector import Vector

Kind = Literal["pure", "pinned", "session"]
FieldKind = Literal["number", "text", "vector", "tensor"]


@dataclass(frozen=True)
class ObjectRef:
    """An object of tensors (a data shard, say), named by its digest."""

    digest: Digest


@dataclass(frozen=True)
class Result:
    """What a task returns: scalars (numbers, short strings) and tensors by name.

    `tensors` holds at most one, of the size of the model (or of the part of it that the task `gives`): a flat fp32
    vector in the layout's order. It is read and encoded with the run's up-codec after the task returned, and travels as
    an object. In `inline` are tensors of any
    shape and number; they travel as they are and are never stored.
    """

    scalars: Mapping[str, float | int | str]
    tensors: Mapping[str, Vector | Tensor] = field(default_factory=dict[str, Vector | Tensor])
    inline: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class ResultField:
    """Something that a task's result holds, as the task declares it."""

    name: str
    kind: FieldKind


@dataclass(frozen=True)
class TaskFunction:
    """An installed task: its name on the wire, its kind, and the function a device calls."""

    name: str
    kind: Kind
    function: Callable[..., Result]
    numbers: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    vector: str = ""
    inline: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[ResultField, ...]:
        """What leaves a device with its result."""
        vectors = (self.vector,) if self.vector else ()
        named: tuple[tuple[FieldKind, tuple[str, ...]], ...] = (
            ("number", self.numbers), ("text", self.texts), ("vector", vectors), ("tensor", self.inline),
        )  # fmt: skip
        return tuple(ResultField(name, kind) for kind, names in named for name in names)

    def bind(self, **arguments: Any) -> BoundTask:
        """Work to hand to a fleet."""
        inspect.signature(self.function).bind(None, **arguments)  # a wrong argument fails here, not on a device
        return BoundTask(task=self.name, kind=self.kind, arguments=arguments)


@dataclass(frozen=True, kw_only=True)
class BoundTask:
    """A task function's name with its arguments, and the data it reads."""

    task: str
    kind: Kind
    arguments: Mapping[str, Any]
    num_sequences: int = 0  # of training data that it consumes
    sequences_per_step: int = 0  # of which it may end after any step, 0 where it may not end early
    held_out_part: int = -1  # which part of the validation data it reads, -1 for none
    part: tuple[int, ...] = ()  # the tensors that its result holds, by their places in the layout; () for all

    def granted(self, num_sequences: int, *, per_step: int = 0) -> BoundTask:
        """The same work with training data: the fleet deals it, or the worker reads on in its own.

        With `per_step` sequences for each step the fleet may have it end early, after a whole number of steps that the
        scalar `num_steps` of its result tells (`Replica.is_cut_short`).
        """
        assert not per_step or num_sequences % per_step == 0, f"{num_sequences} sequences are no steps of {per_step}"
        return replace(self, num_sequences=num_sequences, sequences_per_step=per_step)

    def gives(self, part: Sequence[int]) -> BoundTask:
        """The same work, whose result's vector holds these tensors of the layout only, one after another."""
        return replace(self, part=tuple(part))

    def held_out(self, part: int) -> BoundTask:
        """The same work on one part of the validation data."""
        return replace(self, held_out_part=part)


_installed: dict[str, TaskFunction] = {}
_name_pattern = re.compile(r"[a-z0-9_]+\.[a-z0-9_]+")


def task(
    name: str, *, kind: Kind = "pure", numbers: tuple[str, ...] = (), texts: tuple[str, ...] = (), vector: str = "",
    inline: tuple[str, ...] = (),
) -> Callable[[Callable[..., Result]], TaskFunction]:  # fmt: skip
    """Install a function under `method.verb`, so that devices may run it.

    `numbers` are the scalars of its result that the coordinator counts on: a reply without them is refused. With
    `texts` (scalars that are text), the `vector` in its tensors and the tensors `inline` they are all that its result
    holds: an owner is asked for these before anything is trained, and what is not declared may be refused afterwards.
    """
    assert _name_pattern.fullmatch(name), f"a task is named method.verb, not {name!r}"

    def install(function: Callable[..., Result]) -> TaskFunction:
        before = _installed.get(name)
        assert before is None or before.function.__module__ == function.__module__, f"two tasks are named {name}"
        installed = TaskFunction(name, kind, function, numbers, texts, vector, inline)
        _installed[name] = installed
        return installed

    return install


def installed(name: str) -> TaskFunction | None:
    """The task of that name, or None: the caller refuses the lease."""
    return _installed.get(name)


@dataclass(frozen=True, kw_only=True)
class EncodedArguments:
    """Arguments as they travel: JSON, the objects it names, and inline tensors by position."""

    value: Any
    objects: tuple[Digest, ...]
    inline: tuple[Tensor, ...]


def encode_arguments(arguments: Mapping[str, Any], publish: Mapping[Params, Digest]) -> EncodedArguments:
    """Replace handles by object names. `publish` maps each `Params` among the arguments to its published object."""
    objects: list[Digest] = []
    inline: list[Tensor] = []

    def walk(value: Any) -> Any:
        match value:
            case None | bool() | int() | float() | str():
                return value
            case Params() | Part():
                digest = publish[value.params if isinstance(value, Part) else value]
                objects.append(digest)
                return {"$params": digest}
            case Tensors(params=params):
                objects.append(publish[params])
                return {"$object": publish[params]}
            case ObjectRef(digest=digest):
                objects.append(digest)
                return {"$object": digest}
            case Tensor():
                inline.append(value)
                return {"$inline": len(inline) - 1}
            case Mapping():
                return {str(k): walk(v) for k, v in value.items()}
            case Sequence():
                return [walk(v) for v in value]
            case _:
                raise TypeError(f"a task argument cannot be a {type(value).__name__}")

    value = walk(dict(arguments))
    return EncodedArguments(value=value, objects=tuple(dict.fromkeys(objects)), inline=tuple(inline))


def handles(arguments: Mapping[str, Any]) -> tuple[tuple[str, Params | Part | Tensors], ...]:
    """Every `Params`, `Part` or `Tensors` among the arguments once, with the argument it is in, so that it can be
    published first.

    Parts are named by their first tensor too: each is published as differences to the same part before.
    """
    found: dict[Params | Part | Tensors, str] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, Params | Tensors):
            found.setdefault(value, name)
        elif isinstance(value, Part):
            found.setdefault(value, f"{name}.{value.tensors[0]}" if value.tensors else name)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                walk(name or str(key), item)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(name, item)

    walk("", arguments)
    return tuple((name, handle) for handle, name in found.items())


def decode_arguments(
    value: Any,
    *,
    params: Callable[[Digest], Vector],
    tensors: Callable[[Digest], Mapping[str, Tensor]],
    inline: Callable[[int], Tensor],
) -> Any:
    """The device's side of `encode_arguments`."""
    match value:
        case {"$params": str(digest)} if len(value) == 1:
            return params(Digest(digest))
        case {"$object": str(digest)} if len(value) == 1:
            return tensors(Digest(digest))
        case {"$inline": int(index)} if len(value) == 1:
            return inline(index)
        case dict():
            items: dict[str, Any] = value
            return {k: decode_arguments(v, params=params, tensors=tensors, inline=inline) for k, v in items.items()}
        case list():
            values: list[Any] = value
            return [decode_arguments(v, params=params, tensors=tensors, inline=inline) for v in values]
        case _:
            return value
