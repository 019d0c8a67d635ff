"""Draft export."""
from __future__ import annotations
import json, shutil
from pathlib import Path
from typing import Any
from torch import Tensor
from potluck.models.build import build
from potluck.models.flat import FlatModel
from potluck.types.params import Layout
def save_model_dir(path: Path, config_json: dict[str, Any], vector: Tensor, layout: Layout, tokenizer_dir: Path | None, card: dict[str, Any]) -> None:
    flat = FlatModel(build(config_json), layout=layout)
    flat.load(vector)
    flat.module.save_pretrained(path)
    if tokenizer_dir:
        for f in tokenizer_dir.iterdir():
            shutil.copy(f, path / f.name)
    (path / "README.md").write_text("# model\n" + json.dumps(card))
