"""Which strategies there are: the shipped ones by name, and a user's own as `file.py:Class`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from potluck.strategies.strategy import Strategy
from potluck.strategies.task import TaskFunction
from potluck.types.errors import RecipeError

STRATEGY_PARTS = ("Config", "State", "init", "run_round", "estimate")
"""What a class must have to be taken for a strategy."""
shipped = {
    "async_diloco": "potluck.strategies.async_diloco:AsyncDiLoCo",
    "diloco": "potluck.strategies.diloco:DiLoCo",
    "streaming_diloco": "potluck.strategies.streaming_diloco:StreamingDiLoCo",
    "fed_dpo": "potluck.strategies.fed_dpo:FedDPO",
    "fed_lora": "potluck.strategies.fed_lora:FedLoRA",
    "fed_avg": "potluck.strategies.fed_avg:FedAvg",
    "sparse_diloco": "potluck.strategies.sparse_diloco:SparseDiLoCo",
    "sub_gemm": "potluck.strategies.sub_gemm.strategy:SubGEMM",
    "sync_sgd": "potluck.strategies.sync_sgd:SyncSGD",
    "zeroth_order": "potluck.strategies.zeroth_order:ZerothOrder",
}


def strategy_type(name: str, *, base: Path | None = None) -> type[Strategy]:
    """The class of a strategy. `name` is a shipped one or `file.py:Class`, the file relative to `base`. RecipeError."""
    if ".py:" in name:
        file, _, class_name = name.rpartition(":")
        module = load_file((base or Path()) / file)
        return _pick(module, class_name, file)
    if name not in shipped:
        near = difflib.get_close_matches(name, shipped, n=1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"there are {', '.join(sorted(shipped))}, or your own file.py:Class"
        )
        raise RecipeError(f"strategy.name is {name!r}, which is not a shipped strategy; {hint}")
    module_name, _, class_name = shipped[name].partition(":")
    return _pick(importlib.import_module(module_name), class_name, module_name)


def config_type(name: str, *, base: Path | None = None) -> type[BaseModel]:
    """The settings a strategy takes: the `[strategy]` section without `name` and `inner`."""
    return strategy_type(name, base=base).Config


def install_tasks(name: str) -> None:
    """Import a shipped strategy and validation, so that their tasks are installed. A user's file is loaded apart."""
    importlib.import_module("potluck.strategies.evaluation")
    if name in shipped:
        importlib.import_module(shipped[name].partition(":")[0])


def tasks_of(kind: type[Strategy]) -> tuple[TaskFunction, ...]:
    """What workers of a run with this strategy are given to do: the tasks that its module (and those of the classes
    it is derived from) defines or imports, and validation.
    """
    modules = [sys.modules[each.__module__] for each in kind.__mro__ if each is not object]
    return tasks_in(*modules)


def tasks_in(*modules: Any) -> tuple[TaskFunction, ...]:
    """The tasks that modules define or import, and validation."""
    evaluation = importlib.import_module("potluck.strategies.evaluation")
    found = (value for module in (*modules, evaluation) for value in vars(module).values())
    return tuple(dict.fromkeys(value for value in found if isinstance(value, TaskFunction)))


def load_file(path: Path) -> Any:
    """Import a user's strategy file by path, once for each content of it."""
    if not path.is_file():
        raise RecipeError(
            f"strategy file {path} does not exist; check its path (in a recipe it is relative to the recipe)"
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    module_name = f"potluck_user_{path.stem}_{digest[:16]}"
    known = sys.modules.get(module_name)
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(module_name, None)
        raise RecipeError(f"strategy file {path} does not load: {type(error).__name__}: {error}") from error
    return module


def _pick(module: Any, class_name: str, where: str) -> type[Strategy]:
    found = getattr(module, class_name, None)
    if found is None:
        raise RecipeError(f"{where} has no class {class_name!r}; name it as file.py:Class")
    missing = [name for name in STRATEGY_PARTS if not hasattr(found, name)]
    if missing:
        raise RecipeError(f"{where}:{class_name} is not a strategy: it lacks {', '.join(missing)}")
    return found
