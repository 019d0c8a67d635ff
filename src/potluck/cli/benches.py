"""`bench`: every module of `potluck.bench` with a function `bench_NAME` that returns figures by name with units."""

from __future__ import annotations

import asyncio
import datetime
import importlib
import inspect
import math
import os
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import psutil

import potluck.bench
from potluck.types.errors import PotluckError
from potluck.types.mistakes import nearest


def list_benches() -> dict[str, str]:
    """What each bench measures, by name: the first line of its module. Imports none of them."""
    found: dict[str, str] = {}
    for path in sorted(Path(potluck.bench.__path__[0]).glob("[a-z]*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(rf"^(async )?def bench_{path.stem}\(", text, re.MULTILINE):
            found[path.stem] = text.removeprefix('"""').partition("\n")[0].removesuffix('"""')
    return found


def bench_function(name: str) -> Callable[..., Any]:
    """PotluckError where there is none. `sub-gemm` is `sub_gemm`."""
    name, known = name.replace("-", "_"), list_benches()
    if name not in known:
        near = nearest(name, known)
        raise PotluckError(f"there is no bench {name}; " + (f"did you mean {near}?" if near else "see `potluck bench`"))
    return getattr(importlib.import_module(f"potluck.bench.{name}"), f"bench_{name}")


def run_bench(
    name: str, arguments: Sequence[str] = (), *, told: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """What `bench NAME --json` prints. `arguments` are options of that bench, as `--key value`. `told` hears how a long
    one gets on."""
    function = bench_function(name)
    options = parse_options(name, function, arguments)
    if "told" in inspect.signature(function).parameters:
        options["told"] = told
    figures = function(**options)
    if inspect.isawaitable(figures):
        figures = asyncio.run(_await(figures))
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"bench": name, "machine": describe_machine(), "date": date, "figures": figures}


def parse_options(name: str, function: Callable[..., Any], arguments: Sequence[str]) -> dict[str, Any]:
    """`--key value` or `--key=value` for the keyword parameters of `function` that hold one number, word or truth."""
    types = option_types(function)
    found: dict[str, Any] = {}
    left = list(arguments)
    while left:
        given, equals, value = left.pop(0).partition("=")
        key = given.removeprefix("--").replace("-", "_")
        if not given.startswith("--") or key not in types:
            options = [f"--{option.replace('_', '-')}" for option in types]
            near = nearest(given, options)
            hint = f"did you mean {near}?" if near else f"it has {', '.join(options) or 'none'}"
            raise PotluckError(f"bench {name} has no option {given}; {hint}")
        if not equals and not left:
            raise PotluckError(f"{given} has no value; give one after it")
        text = value if equals else left.pop(0)
        what, parse = _readers[types[key]]
        try:
            found[key] = parse(text)
        except (ValueError, KeyError) as error:
            raise PotluckError(f"{given} is {text!r} and not {what}; give {what}") from error
    return found


def _count(text: str) -> int:
    """Every whole number that a bench takes counts something."""
    if not 1 <= (number := int(text)) <= most_counted:
        raise ValueError
    return number


def _measure(text: str) -> float:
    if not 0.0 < (number := float(text)) < math.inf:
        raise ValueError
    return number


most_counted = 10**12
_readers: dict[type, tuple[str, Callable[[str], Any]]] = {
    int: ("a whole number of 1 or more", _count),
    float: ("a number above 0", _measure),
    str: ("a word", str),
    bool: ("true or false", lambda text: {"true": True, "false": False}[text.lower()]),
}


def option_types(function: Callable[..., Any]) -> dict[str, type]:
    """The keyword parameters that can be given on the command line."""
    hints = get_type_hints(function)
    found: dict[str, type] = {}
    for key, parameter in inspect.signature(function).parameters.items():
        kinds = [kind for kind in get_args(hints[key]) or (hints[key],) if kind is not type(None)]
        if parameter.kind is parameter.KEYWORD_ONLY and len(kinds) == 1 and kinds[0] in _readers:
            found[key] = kinds[0]
    return found


async def _await(awaitable: Any) -> Any:
    return await awaitable


def describe_machine() -> dict[str, Any]:
    """What a figure depends on."""
    import torch

    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def processor_name() -> str:
    """The processor's name as far as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
