"""What a run's folder keeps of its preparation: with it the run goes on where its data and its model's files are not.

    RUN/prepared.json   the catalogue of the data, what is known of it, the model's configuration, its frozen base
    RUN/tokenizer/      in Hugging Face form, where there is one
    RUN/strategy/FILE   a copy of the user's own method

The shards and the base themselves are objects of the run, the first parameters are among its parameters.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.coordinator.deck import Deck
from potluck.coordinator.recipe import STRATEGY_FOLDER, Recipe
from potluck.data.shards import Shard
from potluck.data.tokenizer import copy_tokenizer
from potluck.models.config import BaseFiles
from potluck.storage.files import write_atomic
from potluck.storage.objects import ObjectStore
from potluck.types.errors import CorruptError
from potluck.types.ids import Digest

FILE_NAME = "prepared.json"
TOKENIZER = "tokenizer"


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """The outcome of a preparation, free of paths."""

    training: tuple[Shard, ...]  # none for private data
    held_out: tuple[Shard, ...]
    corpus_digest: str
    facts: dict[str, Any]  # about the data, for people and the model card
    model_config: dict[str, Any]
    has_tokenizer: bool
    base: BaseFiles | None = None

    def deck(self, recipe: Recipe) -> Deck:
        access = recipe.data.access
        return Deck(
            self.training, self.held_out, seed=recipe.seed, shared=access == "shared", private=access == "private",
            owners_hold_out=bool(recipe.data.validation),
        )  # fmt: skip

    def is_whole(self, recipe: Recipe, objects: ObjectStore) -> bool:
        """Whether the base and the shards are here, where it is for the coordinator to have them."""
        if not all(objects.has(Digest(each.digest)) for each in (self.base.objects if self.base else ())):
            return False
        if recipe.data.access != "shared":
            return True
        return all(objects.has(Digest(shard.name)) for shard in (*self.training, *self.held_out))

    def save(self, run_dir: Path, strategy_file: Path | None) -> None:
        if strategy_file is not None:
            copy = run_dir / STRATEGY_FOLDER / strategy_file.name
            copy.parent.mkdir(exist_ok=True)
            if copy != strategy_file:
                shutil.copyfile(strategy_file, copy)
        value = {
            "training": [[s.name, s.num_sequences, s.digest] for s in self.training],
            "held_out": [[s.name, s.num_sequences, s.digest] for s in self.held_out],
            "corpus_digest": self.corpus_digest,
            "facts": self.facts,
            "model_config": self.model_config,
            "has_tokenizer": self.has_tokenizer,
            "base": self.base.model_dump(mode="json") if self.base is not None else None,
        }
        write_atomic(run_dir / FILE_NAME, json.dumps(value).encode())

    @staticmethod
    def load(run_dir: Path) -> Frozen | None:
        """None where there is none. CorruptError if it cannot be read."""
        path = run_dir / FILE_NAME
        if not path.exists():
            return None
        try:
            value: dict[str, Any] = json.loads(path.read_bytes())
            parts = {
                part: tuple(Shard(name=str(n), num_sequences=int(k), digest=str(d)) for n, k, d in value[part])
                for part in ("training", "held_out")
            }
            return Frozen(
                **parts,
                corpus_digest=str(value["corpus_digest"]),
                facts=dict(value["facts"]),
                model_config=dict(value["model_config"]),
                has_tokenizer=bool(value["has_tokenizer"]) and (run_dir / TOKENIZER).is_dir(),
                base=BaseFiles.model_validate(value["base"]) if value.get("base") is not None else None,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptError(
                f"{path} cannot be read ({error}); restore it from a copy, or remove it where the data still is"
            ) from error


def keep_tokenizer(source: Path | None, run_dir: Path) -> Path | None:
    """A copy of the tokenizer in the run's folder."""
    if source is None:
        return None
    copy_tokenizer(source, run_dir / TOKENIZER)
    return run_dir / TOKENIZER
