"""A training problem so small that a whole run takes a second, with everything a plain PyTorch loop needs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from potluck.aggregation.config import AggregationConfig
from potluck.codecs.bundle import write_tensors
from potluck.coordinator.deck import Deck
from potluck.coordinator.plan import CheckpointConfig, Plan, ValidationConfig
from potluck.data.dealer import Dealer, DealState
from potluck.data.epoch import epoch_order
from potluck.data.packing import pack_records
from potluck.data.prepared import PreparedData
from potluck.data.readers import ReadReport
from potluck.data.shards import Shard
from potluck.fleet.config import FleetConfig
from potluck.models.adapters import inject
from potluck.models.build import build, layout_of
from potluck.models.config import AdapterConfig, BaseFiles, BasePrecision, ModelConfig
from potluck.models.flat import FlatModel
from potluck.optim.inner import InnerConfig
from potluck.storage.digest import digest_bytes
from potluck.storage.objects import ObjectStore
from potluck.strategies.run import Budget, RunSpec
from potluck.strategies.strategy import HeadStrategy, Strategy, kept_vectors, merges_adapters, privacy, tasks_given
from potluck.types.ids import Digest
from potluck.types.params import Layout

vocab_size = 32
num_prompt = 3
"""Tokens that both answers of a pair begin with and that are not predicted."""


@dataclass(kw_only=True)
class Problem:
    """Sequences that follow a rule (next = 3 * token + 1 or 2, mod 32), and a tiny model that can learn it.

    With `adapter` only LoRA adapters learn it, on that model as it begins, held in the precision `base`. With `pairs`
    each is an answer to its first tokens beside one that does not follow the rule. With `private` each worker has
    records of its own (`own_records`), and holds out none.
    """

    family: str = "gpt2"
    num_rounds: int = 3
    seq_len: int = 8
    num_shards: int = 8
    sequences_per_shard: int = 32
    seed: int = 7
    inner: InnerConfig = field(default_factory=lambda: InnerConfig(lr=3e-3, batch_size=4, warmup=0.1, weight_decay=0.1))
    fleet: FleetConfig = field(default_factory=lambda: FleetConfig(no_progress_s=60.0))
    validate: bool = True
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validating: ValidationConfig = field(default_factory=lambda: ValidationConfig(every_rounds=0))
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    up_codec: str = "fp32"
    down_codec: str = "fp32"
    adapter: AdapterConfig | None = None
    base: BasePrecision = "fp32"
    pairs: bool = False
    private: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.shards = [self._sequences(generator) for _ in range(self.num_shards)]
        self.validation = self._sequences(generator)

    def _sequences(self, generator: torch.Generator) -> Tensor:
        """int32 [sequences_per_shard, seq_len + 1], or of pairs [sequences_per_shard, 2, seq_len + 1]"""
        chosen = self._chosen(generator)
        if not self.pairs:
            return chosen
        rejected = torch.randint(0, vocab_size, chosen.shape, generator=generator, dtype=torch.int32)
        rejected[:, :num_prompt] = chosen[:, :num_prompt]
        found = torch.stack([chosen, rejected], dim=1)
        found[..., :num_prompt] = ~found[..., :num_prompt]
        return found

    def _chosen(self, generator: torch.Generator) -> Tensor:
        columns = [torch.randint(0, vocab_size, (self.sequences_per_shard,), generator=generator)]
        for _ in range(self.seq_len):
            step = torch.randint(1, 3, columns[0].shape, generator=generator)
            columns.append((3 * columns[-1] + step) % vocab_size)
        return torch.stack(columns, dim=1).to(torch.int32)

    # For a plain loop

    def config_json(self) -> dict[str, Any]:
        if self.family == "gpt2":
            shape = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": self.seq_len}
            return {
                "model_type": "gpt2", **shape, "vocab_size": vocab_size, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
            }  # fmt: skip
        return {
            "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab_size,
            "max_position_embeddings": self.seq_len, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
        }  # fmt: skip

    def model(self, *, merges: bool = False) -> nn.Module:
        """The model as the run starts it: by PEFT's own hand where adapters are plain ones; all else is frozen."""
        model = build(self.config_json(), seed=self.seed)
        if self.adapter is None:
            return model
        if merges or self.adapter.lower_ranks:
            return self._begun(inject(model, self.adapter, merges=merges))
        from peft import LoraConfig, inject_adapter_in_model

        settings = LoraConfig(
            r=self.adapter.rank, lora_alpha=self.adapter.alpha, use_rslora=self.adapter.rslora,  # pyright: ignore[reportArgumentType]
            target_modules=list(self.adapter.target_modules), fan_in_fan_out=self.family == "gpt2",
        )  # fmt: skip
        inject_adapter_in_model(settings, model)
        return self._begun(model)

    def _begun(self, model: nn.Module) -> nn.Module:
        flat = FlatModel(model)
        flat.load(self._initial_adapters(flat.layout))
        return model

    def dealt(self, rounds: Sequence[Sequence[tuple[str, int]]]) -> list[dict[str, Tensor]]:
        """The sequences that workers read when `rounds` asks for (worker, num_sequences) in turn, all consumed."""
        shards = [Shard(name=str(i), num_sequences=len(s), digest=str(i)) for i, s in enumerate(self.shards)]
        dealer, state = Dealer(shards, seed=self.seed), DealState()
        read: list[dict[str, Tensor]] = []
        for asked in rounds:
            spans = {}
            for worker, num_sequences in asked:
                state, spans[worker] = dealer.deal(state, worker, num_sequences)
            rows = {
                worker: torch.cat(
                    [
                        self.shards[int(s.shard)][
                            torch.as_tensor(
                                epoch_order(self.seed, s.epoch, self._names()[int(s.shard)], self.sequences_per_shard)[
                                    s.start : s.stop
                                ].copy()
                            )
                        ]
                        for s in given
                    ]
                ).long()
                for worker, given in spans.items()
            }
            for given in spans.values():
                state = dealer.settle(state, given, consumed=True)
            read.append(rows)
        return read

    def batches(self, num_sequences: int, worker: str = "w1") -> Iterator[Tensor]:
        """What one worker alone reads, in batches of the inner batch size. int64 [batch, seq_len + 1]"""
        (read,) = self.dealt([[(worker, num_sequences)]])
        yield from read[worker].split(self.inner.batch_size)

    def _names(self) -> list[str]:
        """Digests of the shards as objects: the order within an epoch depends on the name."""
        assert self._digests is not None, "the shards have not been stored yet"
        return self._digests

    _digests: list[str] | None = None

    # For a run

    def _initial_adapters(self, layout: Layout) -> Tensor:
        from potluck.models.adapters import initial_adapters

        return initial_adapters(layout, seed=self.seed)

    def _data_options(self) -> dict[str, Any]:
        format = "preference" if self.pairs else "instruct" if self.private else "auto"
        return {"format": format}

    def _write_base(self, objects: ObjectStore) -> BaseFiles | None:
        if self.adapter is None:
            return None
        from potluck.models.base import write_base

        model = ModelConfig(config=self.config_json(), adapter=self.adapter, base=self.base)
        return write_base(model, self.config_json(), objects, seed=self.seed, object_bytes=4096)

    def base_files(self, objects: ObjectStore) -> list[Path]:
        """Those of the frozen base, which it writes there; none without adapters."""
        base = self._write_base(objects)
        return [objects.path(Digest(each.digest)) for each in base.objects] if base else []

    def make_deck(self, objects: ObjectStore) -> Deck:
        self._write_base(objects)
        self._digests = [self._store(objects, s) for s in self.shards]
        training = [
            Shard(name=d, num_sequences=len(s), digest=d) for d, s in zip(self._digests, self.shards, strict=True)
        ]
        held_out: list[Shard] = []
        if self.private:
            return Deck([], [], seed=self.seed, shared=False, private=True, owners_hold_out=False)
        if self.validate:
            digest = self._store(objects, self.validation)
            held_out = [Shard(name=digest, num_sequences=len(self.validation), digest=digest)]
        return Deck(training, held_out, seed=self.seed, shared=True)

    def store_shards(self, folder: Path) -> None:
        """Learn the shards' names without a run: a plain loop needs them for the order of the data."""
        self.make_deck(ObjectStore(folder))

    def _store(self, objects: ObjectStore, tokens: Tensor) -> str:
        path = objects.root / "problem.tmp"
        write_tensors(path, {"tokens": tokens})
        return objects.adopt(path)

    def own_records(self, number: int, folder: Path) -> PreparedData:
        """Those of the worker of that number: a shard of the sequences."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = self.shards[number]
        packed = pack_records(rows.numpy(), np.arange(len(rows)), folder=folder)
        digest = digest_bytes(rows.numpy().tobytes())
        return PreparedData(
            digest=digest, corpus_digest=digest, folder=folder, seq_len=self.seq_len, vocab_size=vocab_size,
            highest_token=vocab_size - 1, shards=packed, validation=(), num_documents=len(rows),
            num_validation_documents=0, num_tokens=rows.numel(), num_validation_tokens=0, num_dropped_tokens=0,
            report=ReadReport(),
        )  # fmt: skip

    def plan(self, strategy: Strategy) -> Plan:
        merges = merges_adapters(strategy)
        model = self.model(merges=merges)
        layout = layout_of(model)
        with tempfile.TemporaryDirectory() as folder:
            base = self._write_base(ObjectStore(Path(folder)))
        spec = RunSpec(
            run_id="contract", name="contract", seed=self.seed, strategy=type(strategy).__name__,
            tasks=tasks_given(strategy),
            model_config_json=self.config_json(), layout=layout.to_json(), seq_len=self.seq_len, inner=self.inner,
            data_access="private" if self.private else "shared", data_options=self._data_options(),
            privacy=privacy(strategy),
            heartbeat_s=self.fleet.heartbeat_s, adapter=self.adapter, base=base,
            merges_adapters=merges,
            snapshot_every_steps=self.fleet.snapshot_every_steps,
            devices_hold_model=not isinstance(strategy, HeadStrategy), kept_vectors=kept_vectors(strategy),
        )  # fmt: skip
        return Plan(
            spec=spec, strategy=strategy, layout=layout, initial=FlatModel(model).params,
            budget=Budget(rounds=self.num_rounds), fleet=self.fleet, checkpoint=self.checkpoint,
            validation=self.validating, aggregation=self.aggregation, up_codec=self.up_codec,
            down_codec=self.down_codec, open_objects=[Digest(each.digest) for each in base.objects] if base else (),
        )  # fmt: skip
