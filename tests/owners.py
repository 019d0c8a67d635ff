"""Runs on records that owners bring in files of their own, for tests of any part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.chat_templates import CHATML, VOCAB_SIZE, save_chat_tokenizer

from potluck.coordinator.deck import Deck
from potluck.coordinator.plan import Plan
from potluck.data.tokenizer import pack_tokenizer
from potluck.fleet.config import FleetConfig
from potluck.models.config import AdapterConfig
from potluck.optim.inner import InnerConfig
from potluck.simulator.exact.problem import Problem
from potluck.storage.digest import digest_bytes
from potluck.storage.objects import ObjectStore
from potluck.strategies.strategy import Strategy

adapter = AdapterConfig(rank=4, alpha=8, target_modules=("q_proj", "v_proj"))
NUM_ROUNDS = 4


class Owned(Problem):
    """Owners bring records in files of their own, of which they hold some out."""

    format = "instruct"
    template: str | None = CHATML

    def config_json(self) -> dict[str, Any]:
        return {**super().config_json(), "vocab_size": VOCAB_SIZE}

    def _data_options(self) -> dict[str, Any]:
        return {"format": self.format, "seq_len": self.seq_len, "validation": 0.2}

    def tokenizer(self, folder: Path) -> bytes:
        save_chat_tokenizer(folder, self.template)
        return pack_tokenizer(folder)

    def begin(self, folder: Path) -> Owned:
        self.packed = self.tokenizer(folder)
        return self

    def make_deck(self, objects: ObjectStore) -> Deck:
        super().make_deck(objects)
        objects.put(self.packed)
        return Deck([], [], seed=self.seed, shared=False, private=True)

    def plan(self, strategy: Strategy) -> Plan:
        plan, digest = super().plan(strategy), digest_bytes(self.packed)
        spec = plan.spec.model_copy(update={"tokenizer_object": digest})
        return replace(plan, spec=spec, open_objects=(*plan.open_objects, digest))


def problem_of(kind: type[Problem] = Problem, **changes: Any) -> Any:
    """A run of `NUM_ROUNDS` rounds that trains adapters on a tiny Llama."""
    given: dict[str, Any] = {
        "family": "llama", "adapter": adapter, "num_rounds": NUM_ROUNDS,
        "inner": InnerConfig(lr=5e-2, batch_size=4, warmup=0.0),
        "fleet": FleetConfig(min_workers=2, no_progress_s=20.0, quarantine_after=2, max_discarded_rounds=2),
        **changes,
    }  # fmt: skip
    return kind(**given)


def records(path: Path, answers: list[str]) -> Path:
    path.write_text("\n".join(json.dumps({"instruction": "say", "output": answer}) for answer in answers))
    return path
