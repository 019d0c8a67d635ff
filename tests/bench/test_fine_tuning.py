"""`bench fine_tuning`: its runs against plain PEFT, and what it makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench.owned import write_library
from data.chat_templates import CHATML, save_chat_tokenizer
from models.families import llama
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from potluck.bench import fine_tuning as bench
from potluck.bench.convergence import Trained
from potluck.bench.fine_tuning import Job, Lab, Method, Setting, _figures, bench_fine_tuning, methods, pooled  # pyright: ignore
from potluck.bench.rig.owners import packages, write_owners
from potluck.coordinator.deck import Deck
from potluck.coordinator.prepare import prepare
from potluck.data.shards import Span
from potluck.data.stream import SpanSource, open_shard
from potluck.models.build import build
from potluck.models.config import AdapterConfig
from potluck.models.export import save_model_dir
from potluck.models.flat import FlatModel
from potluck.optim.inner import learning_rate
from potluck.storage.objects import ObjectStore
from potluck.types.errors import PotluckError
from potluck.types.ids import Digest, WorkerId

lr = 2e-2
adapter = AdapterConfig(rank=4, alpha=8, target_modules=("q_proj", "v_proj", "down_proj"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("lab")
    tokenizer = save_chat_tokenizer(folder / "tokenizer", CHATML)
    config = llama(vocab_size=tokenizer.vocab_size, max_position_embeddings=256)
    flat = FlatModel(build(config, seed=1))
    save_model_dir(folder / "model", config, flat.params(), flat.layout, folder / "tokenizer", {})
    setting = Setting(
        model=folder / "model", num_records=12, validation=1 / 6, seq_len=192, batch_size=2, num_rounds=3,
        num_inner_steps=2, adapter=adapter, base="fp32", precision="fp32",
    )  # fmt: skip
    library = write_library(folder / "library", num_functions=12)
    owners = write_owners(folder / "owners", num_records=12, validation=1 / 6, seed=5, root=library)
    return Lab(setting, owners, folder, seed=5)


@pytest.fixture(scope="module")
def together(lab: Lab) -> Trained:
    return lab.train(methods["fed_it"], lr)


@pytest.fixture(scope="module")
def in_one_place(lab: Lab) -> Trained:
    return lab.train(methods[pooled], lr)


def test_all_begin_alike_and_are_validated_on_the_same_records(
    lab: Lab, together: Trained, in_one_place: Trained
) -> None:
    alone = lab.train(methods["tools alone"], lr)
    assert together.first_loss == pytest.approx(in_one_place.first_loss, abs=1e-6)
    assert alone.first_loss == pytest.approx(in_one_place.first_loss, abs=1e-6)
    assert in_one_place.loss < in_one_place.first_loss - 0.1
    assert together.loss < together.first_loss - 0.05
    assert alone.loss != pytest.approx(in_one_place.loss, abs=1e-3)
    assert together.bytes_up_per_worker > 0


def test_fed_it_is_fed_avg_of_adapters(lab: Lab, together: Trained) -> None:
    averaged = lab.train(Method(strategy={"name": "fed_avg"}), lr)
    torch.testing.assert_close(averaged.params, together.params, rtol=1e-6, atol=1e-7)


def test_pooled_training_is_that_of_plain_peft(lab: Lab, in_one_place: Trained, tmp_path: Path) -> None:
    recipe = lab.recipe(methods[pooled], lr)
    objects = ObjectStore(tmp_path / "objects")
    prepared = prepare(recipe, tmp_path / "run", objects, cache_dir=tmp_path / "cache", tell=lambda _: None)
    first, inner = prepared.plan.initial(), recipe.strategy.inner
    assert isinstance(first, Tensor)
    model = plain_peft(lab.setting.model, first)
    held_out = validation_rows(prepared.deck, objects)
    assert mean_loss(model, held_out) == pytest.approx(in_one_place.first_loss, abs=1e-5)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1.0, betas=inner.betas, eps=inner.eps, weight_decay=0.0)
    rounds, steps = lab.setting.num_rounds, lab.setting.num_inner_steps * len(packages)
    num_tokens = 0
    for round in range(rounds):
        for step, batch in enumerate(batches_of(prepared.deck, objects, steps * inner.batch_size, inner.batch_size)):
            optimizer.param_groups[0]["lr"] = learning_rate(inner, (round + step / steps) / rounds)
            optimizer.zero_grad()
            plain_loss(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
            optimizer.step()
            num_tokens += int((batch[:, 1:] >= 0).sum())
    assert num_tokens == in_one_place.tokens
    assert mean_loss(model, held_out) == pytest.approx(in_one_place.loss, abs=1e-5)
    assert torch.allclose(parameters_to_vector(trained).detach(), in_one_place.params, atol=2e-5)


def plain_peft(folder: Path, first: Tensor) -> Any:
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=adapter.rank, lora_alpha=int(adapter.alpha), target_modules=list(adapter.target_modules))
    model = inject_adapter_in_model(config, AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32))
    vector_to_parameters(first, [p for p in model.parameters() if p.requires_grad])
    return model


def batches_of(deck: Deck, objects: ObjectStore, num_sequences: int, batch_size: int) -> Iterator[Tensor]:
    """What the one worker reads in a round."""
    spans = deck.deal(WorkerId(pooled), num_sequences)
    deck.settle(spans, consumed=True)
    named = [Span(shard=s.shard, start=s.start, stop=s.stop, epoch=s.epoch, digest=s.digest) for s in spans]
    return SpanSource(named, lambda span: open_part(objects, span.shard), seed=5, batch_size=batch_size)


def open_part(objects: ObjectStore, shard: str) -> Any:
    return open_shard(objects.path(Digest(shard)), seq_len=192, vocab_size=1 << 10, rows_per_record=1)


def validation_rows(deck: Deck, objects: ObjectStore) -> Tensor:
    spans = [span for part in range(deck.num_held_out) for span in deck.held_out(part)]
    return torch.cat([open_part(objects, s.shard).take(np.arange(s.start, s.stop)) for s in spans])


def plain_loss(model: Any, rows: Tensor) -> Tensor:
    """As transformers has it: labels of -100 do not count."""
    return model(input_ids=torch.maximum(rows, ~rows), labels=torch.where(rows >= 0, rows, -100)).loss


@torch.no_grad()
def mean_loss(model: Any, rows: Tensor) -> float:
    return float(plain_loss(model, rows))


def ended(*losses: float) -> list[Trained]:
    return [
        Trained(
            params=torch.zeros(1), loss=loss, first_loss=2.0, tokens=7, bytes_up_per_worker=3e6,
            bytes_down_per_worker=1e6,
        )
        for loss in losses
    ]  # fmt: skip


def test_progress_is_against_pooled_training_of_the_same_seed() -> None:
    figures = _figures(ended(1.2, 1.1), ended(1.0, 1.1), 1e-3)
    assert figures["progress_of_seeds"] == [0.8, 1.0] and figures["progress"] == 0.9
    assert (figures["loss_nats"], figures["megabytes_up"], figures["predicted_tokens"]) == (1.15, 3.0, 7)


def test_the_best_rate_of_the_first_seed_is_that_of_every_other(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    def run(job: Job) -> Trained:
        jobs.append(job)
        return ended(1.0 + abs(job.lr - (2e-3 if job.method == pooled else 1e-3)) * 100 + job.seed / 10)[0]

    monkeypatch.setattr(bench, "_run", run)
    monkeypatch.setattr(bench, "job_pool", lambda processes: ThreadPoolExecutor(1))
    monkeypatch.setattr(bench, "write_owners", lambda folder, **_: [])
    told: list[str] = []
    figures = bench_fine_tuning(seeds=2, only="fed_it", lrs="1e-3;2e-3", rounds=3, model="here", told=told.append)
    assert [(job.method, job.lr, job.seed) for job in jobs] == [
        ("pooled", 1e-3, 1), ("pooled", 2e-3, 1), ("fed_it", 1e-3, 1), ("fed_it", 2e-3, 1),
        ("pooled", 2e-3, 2), ("fed_it", 1e-3, 2),
    ]  # fmt: skip
    assert {job.setting.num_rounds for job in jobs} == {3} and jobs[0].setting.model == Path("here").absolute()
    assert (figures["pooled lr"], figures["fed_it lr"], figures["fed_it progress"]) == (2e-3, 1e-3, 1.0)
    assert figures["pooled loss_nats_of_seeds"] == [1.1, 1.2] and len(told) == 6
    with pytest.raises(
        PotluckError, match=r"there is no method 'fed_afg'; did you mean 'fed_sa'\? there are pooled; windows alone"
    ):
        bench_fine_tuning(only="fed_afg")
    with pytest.raises(PotluckError, match="--lrs is '1e-3,2e-3' and not rates between semicolons"):
        bench_fine_tuning(lrs="1e-3,2e-3", model="here")


def test_a_recorded_run_stays_what_it_is_when_other_rates_are_tried_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(method="flora", lr=1e-3, seed=1, setting=Setting(model=Path("here")), owners=(), folder=Path("there"))
    recorded = job.settings
    monkeypatch.setitem(methods, "flora", replace(methods["flora"], lrs=(1e-3, 5e-3)))
    assert job.settings == recorded
    monkeypatch.setitem(methods, "flora", replace(methods["flora"], codecs=("int8", "bf16")))
    assert job.settings != recorded


def test_every_method_is_a_recipe(lab: Lab) -> None:
    for method in (*methods.values(), Method(inner={"accumulation": 2})):
        recipe = lab.recipe(method, 1e-3)
        assert recipe.data.private == (method.reads == "own")
        assert recipe.strategy.inner.lr == 1e-3
