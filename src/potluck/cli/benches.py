"""`bench`: every module of `potluck.bench` with a function `bench_NAME` that returns figures by name with units."""

from __future__ import annotations

import ast
import asyncio
import datetime
import importlib
import inspect
import os
import platform
from pathlib import Path
from typing import Any

import psutil

import potluck.bench
from potluck.coordinator.faults import nearest
from potluck.types.errors import PotluckError


def list_benches() -> dict[str, str]:
    """What each bench measures, by name: the first line of its module. Imports none of them."""
    found: dict[str, str] = {}
    for path in sorted(Path(potluck.bench.__path__[0]).glob("[a-z]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        if f"bench_{path.stem}" in functions:
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def run_bench(name: str) -> dict[str, Any]:
    """What `bench NAME --json` prints."""
    known = list_benches()
    if name not in known:
        near = nearest(name, known)
        raise PotluckError(f"there is no bench {name}; " + (f"did you mean {near}?" if near else "see `potluck bench`"))
    figures = getattr(importlib.import_module(f"potluck.bench.{name}"), f"bench_{name}")()
    if inspect.isawaitable(figures):
        figures = asyncio.run(_await(figures))
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"bench": name, "machine": describe_machine(), "date": date, "figures": figures}


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
