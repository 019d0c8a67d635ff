"""`digest`: the names by which an owner's policy allows strategy files and base models."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import get_args

from potluck.models.base import write_base
from potluck.models.config import AdapterConfig, BasePrecision, ModelConfig
from potluck.models.family import model_config, tokenizer_folder
from potluck.storage.digest import digest_file
from potluck.storage.objects import ObjectStore
from potluck.types.errors import ModelError, PotluckError


def digest_lines(path: Path) -> list[str]:
    """Of a strategy file its digest; of a model directory the digest of the base that it becomes in each precision.

    A base is written to a temporary folder and removed again, one precision after the other.
    """
    if path.is_file():
        return [str(digest_file(path))]
    if not path.is_dir():
        raise PotluckError(f"{path} does not exist; give a strategy file or a model directory")
    return [f"{_base_digest(path, precision)}  {precision}" for precision in get_args(BasePrecision)]


def _base_digest(path: Path, precision: BasePrecision) -> str:
    adapter = AdapterConfig(target_modules=("any",))  # a base is written only below adapters, and is the same for all
    model = ModelConfig(path=str(path), base=precision, adapter=adapter)
    if not model.from_weights:
        raise ModelError(f"{path} holds no weights; give a whole model directory")
    config = model_config(model, tokenizer_folder(model), seq_len=1)
    with tempfile.TemporaryDirectory() as folder:
        return str(write_base(model, config, ObjectStore(Path(folder)), seed=0).digest)
