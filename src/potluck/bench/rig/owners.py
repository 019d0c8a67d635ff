"""Owners of text that is unlike each other's: how functions of some packages of Python's standard library are written.

    instruction     Write the body of this Python function.
    input           its signature and its docstring
    output          its body

Nobody has a function, or a body, that another has. All of it is a function of the Python version alone, and who holds
out what of the seed too.
"""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from potluck.data.packing import divide
from potluck.data.stdlib import stdlib_files, stdlib_root
from potluck.storage.digest import digest_bytes
from potluck.types.errors import DataError

INSTRUCTION = "Write the body of this Python function."
most_given_chars, least_answer_chars, most_answer_chars = 240, 20, 240
_library: Mapping[str, str] = {
    "windows": "tkinter turtle curses",
    "concurrency": "asyncio concurrent multiprocessing threading _threading_local queue sched selectors socket "
    "socketserver ssl subprocess pty signal contextlib weakref _weakrefset tempfile shutil os pathlib",
    "internet": "email mailbox http urllib html xml xmlrpc wsgiref ftplib imaplib poplib smtplib nntplib telnetlib cgi "
    "mimetypes netrc base64 quopri uu ipaddress uuid webbrowser",
    "numbers": "_pydecimal decimal datetime _pydatetime _strptime calendar fractions statistics random numbers "
    "collections _collections_abc enum operator functools heapq bisect colorsys string _pyio codecs array copy",
    "tools": "unittest logging importlib distutils inspect pydoc pdb bdb doctest ast symtable dis optparse argparse "
    "traceback pickle pickletools trace cProfile profile pstats warnings typing zipimport pkgutil runpy tokenize",
}
packages = {owner: frozenset(names.split()) for owner, names in _library.items()}
"""Top-level names of the library, by owner. Not all Python versions have each of them."""


@dataclass(frozen=True)
class Owner:
    """Files of instruct records. Whoever is given `everything` with this share and seed trains on `training`."""

    name: str
    everything: Path
    training: Path
    held_out: Path


def write_owners(
    folder: Path, *, num_records: int, validation: float, seed: int, root: Path | None = None
) -> list[Owner]:
    """Give each owner so many records, of which it holds `validation` out. `root` is where the library is.

    DataError if that has too few.
    """
    owners: list[Owner] = []
    for name, records in _records(stdlib_root() if root is None else root).items():
        if len(records) < num_records:
            raise DataError(
                f"{name} has {len(records)} functions in this Python's library and {num_records} are asked for; ask "
                "for fewer"
            )
        lines = [json.dumps(record) for record in records[:num_records]]
        is_held = divide([1] * num_records, validation, seed).held_out_records(num_records)
        parts = {
            "everything": lines,
            "training": [line for line, held in zip(lines, is_held, strict=True) if not held],
            "held_out": [line for line, held in zip(lines, is_held, strict=True) if held],
        }
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        for part, kept in parts.items():
            (place / f"{part}.jsonl").write_text("".join(f"{line}\n" for line in kept), encoding="utf-8", newline="\n")
        owners.append(Owner(name, **{part: place / f"{part}.jsonl" for part in parts}))
    return owners


def _records(root: Path) -> dict[str, list[dict[str, str]]]:
    """Of each owner, in an order that says nothing of where they were."""
    found: dict[str, list[dict[str, str]]] = {name: [] for name in packages}
    seen: set[str] = set()
    for path in stdlib_files(root):
        top = path.relative_to(root).parts[0].removesuffix(".py")
        owner = next((name for name, theirs in packages.items() if top in theirs), None)
        if owner is None:
            continue
        for given, body in functions(path.read_text(encoding="utf-8", errors="replace")):
            if given not in seen and body not in seen:
                seen |= {given, body}
                found[owner].append({"instruction": INSTRUCTION, "input": given, "output": body})
    return {
        name: sorted(records, key=lambda record: digest_bytes(record["input"].encode()))
        for name, records in found.items()
    }


def functions(source: str) -> Iterator[tuple[str, str]]:
    """Signature with docstring, and body without indentation, of each function that has both and is neither long nor
    trivial. SyntaxError."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or ast.get_docstring(node) is None:
            continue
        docstring, body = node.body[0], node.body[1:]
        if not body or body[0].lineno <= (docstring.end_lineno or 0):
            continue
        if len(body) == 1 and isinstance(body[0], ast.Pass | ast.Raise):
            continue
        whole = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).split("\n")
        num_given = (docstring.end_lineno or 0) - node.lineno + 1
        given = "\n".join(whole[:num_given]).strip()
        answer = textwrap.dedent("\n".join(whole[num_given:])).strip("\n")
        if len(given) <= most_given_chars and least_answer_chars <= len(answer) <= most_answer_chars:
            yield given, answer
