"""What is wrong with a file of settings, in one sentence: pydantic's findings as subject, value, limit and remedy."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

KINDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number (without a decimal point or exponent)",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "list_type": "a list",
    "tuple_type": "a list",
    "none_required": "left out",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like `name`, or "": one with the same last part, else one spelt alike."""
    known = list(known)
    same = [key for key in known if key.rpartition(".")[2] == name.rpartition(".")[2]]
    if found := difflib.get_close_matches(name, same, n=1, cutoff=0.0):
        return found[0]
    if found := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
        return found[0]
    lasts = {key.rpartition(".")[2]: key for key in reversed(known)}
    found = difflib.get_close_matches(name.rpartition(".")[2], lasts, n=1, cutoff=0.75)
    return lasts[found[0]] if found else ""


def sentence(error: ValidationError, section: str, known: Sequence[str], *, page: str = "docs/recipes.md") -> str:
    """The first thing that is wrong. `known` are the full keys there are, the section's first; `page` has them."""
    faults = error.errors(include_url=False)
    # Of a union's members the one that got furthest into the value knows best what is wrong.
    inside = [fault for fault in faults if _key(section, fault).startswith(_key(section, faults[0]) + "[")]
    unknown = [fault for fault in faults if fault["type"] == "extra_forbidden"]  # rather than the key it stands for
    first = (inside or unknown or faults)[0]
    key, value = _key(section, first), _shown(first["input"])
    if first["type"] == "extra_forbidden":
        near = nearest(key, known)
        return f"{key} is not a key; " + (f"did you mean {near}?" if near else f"see {page}")
    if first["type"] == "missing":
        return f"{key} is missing; see {page}"
    if first["type"] == "value_error":
        return f"{key or 'it'}: {first.get('ctx', {}).get('error', first['msg'])}"
    same = [fault for fault in faults if _key(section, fault) == key]
    limits = list(dict.fromkeys(limit for fault in same if (limit := _limit(fault)) != "left out"))
    return f"{key} is {value} and must be {' or '.join(limits) or 'left out'}"


def _key(section: str, fault: ErrorDetails) -> str:
    """The full key of a fault. Parts that pydantic adds for the members of a union are left out."""
    parts = [section] if section else []
    for part in fault["loc"]:
        if isinstance(part, int):
            parts[-1] = f"{parts[-1]}[{part}]"
        elif part not in ("str", "int", "float", "bool") and "[" not in part and "tuple" not in part:
            parts.append(part)
    return ".".join(parts)


def _limit(fault: ErrorDetails) -> str:
    """What the value must be."""
    kind, context = fault["type"], fault.get("ctx", {})
    if kind in KINDS:
        return KINDS[kind]
    match kind:
        case "greater_than":
            return f"greater than {context['gt']}"
        case "greater_than_equal":
            return f"at least {context['ge']}"
        case "less_than":
            return f"less than {context['lt']}"
        case "less_than_equal":
            return f"at most {context['le']}"
        case "literal_error":
            return str(context["expected"])
        case "string_pattern_mismatch":
            return f"text like {context['pattern']}"
        case _:
            return fault["msg"].removeprefix("Input should be ")


def first_difference(key: str, one: Any, other: Any) -> tuple[str, str, str]:
    """The first key, in full, of two tables under `key` that are unlike, and its two values as one writes them."""
    if isinstance(one, dict) and isinstance(other, dict):
        tables: tuple[dict[str, Any], dict[str, Any]] = (one, other)
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if names:
            return first_difference(f"{key}.{names[0]}", *(table.get(names[0]) for table in tables))
    was, now = ("left out" if value is None else _shown(value) for value in (one, other))
    return key, was, now


def _shown(value: Any) -> str:
    """A value as the user wrote it, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
