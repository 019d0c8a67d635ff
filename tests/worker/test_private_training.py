"""Private steps of a replica: against a plain loop with PEFT, and what they give away."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from worker.test_adapters import adapted, plain_peft
from worker.test_replica import seq_len, some_batches

from potluck.lora.places import adapted_layers, part_of
from potluck.models.adapters import initial_adapters
from potluck.optim.accounting import PrivateSteps, epsilon
from potluck.optim.dp_sgd import PrivacyConfig, RandomBytes, normal
from potluck.optim.inner import learning_rate
from potluck.protocol import pb
from potluck.strategies.run import RunSpec
from potluck.types.errors import CorruptError, DataError, PrivacySpent, Refused
from potluck.worker.privacy_ledger import PrivacyLedger
from potluck.worker.private_training import PrivateTraining
from potluck.worker.replica import TorchReplica
from potluck.worker.state import RunFolder
from potluck.worker.trainer import Trainer

num_records = 40
config = PrivacyConfig(max_epsilon=50.0, delta=1e-5, noise_multiplier=0.8, clip=0.05)


def seeded(seed: int) -> RandomBytes:
    return np.random.default_rng(seed).bytes


def private_spec(
    family: str, folder: Path, privacy: PrivacyConfig = config, **changes: Any
) -> tuple[RunSpec, list[Path]]:
    spec, base = adapted(family, "fp32", folder, **changes)
    facts = {**spec.model_dump(), "data_access": "private", "data_options": {"format": "instruct"}, "privacy": privacy}
    return RunSpec.model_validate(facts), base


def replica_in(
    folder: Path, spec: RunSpec, base: list[Path], random_bytes: RandomBytes, *, num_records: int = num_records
) -> TorchReplica:
    assert spec.privacy is not None
    ledger = PrivacyLedger.open(PrivacyLedger.path(folder, spec.run_id), spec.privacy, has_begun=False)
    private = PrivateTraining(
        spec.privacy, ledger, num_records=num_records, batch_size=spec.inner.sequences_per_step,
        random_bytes=random_bytes,
    )  # fmt: skip
    return TorchReplica(spec, base=base, private=private)


def factors_b(replica: TorchReplica) -> tuple[int, ...]:
    rank = max(len(spec.shape) and spec.shape[0] for spec in replica.layout if ".lora_A." in spec.name)
    return part_of(adapted_layers(replica.layout).values(), ("b",), rank)


def samples() -> list[Tensor]:
    """Of any size, none among them; in each record another number of tokens is to be predicted."""
    rows = torch.cat(some_batches(6))
    for i, row in enumerate(rows):
        row[: 1 + i % 4] = ~row[: 1 + i % 4]
    return list(rows.split([5, 0, 1, 9, 4, 5]))


def plain_loop(spec: RunSpec, given: list[Tensor], random_bytes: RandomBytes) -> nn.Module:
    """Each record alone, clipped, summed and noised by hand."""
    assert spec.privacy is not None
    model, privacy = plain_peft(spec), spec.privacy
    trained = [p for name, p in model.named_parameters() if ".lora_B." in name]
    optimizer = torch.optim.AdamW(trained, betas=spec.inner.betas, eps=spec.inner.eps, weight_decay=0.1)
    for i, sample in enumerate(given):
        summed = [torch.zeros_like(p, dtype=torch.float64) for p in trained]
        for row in sample:
            model.zero_grad()
            logits = model(input_ids=torch.maximum(row, ~row)[None, :-1]).logits[0]
            cross_entropy(logits, row[1:].clamp(min=-1), ignore_index=-1).backward()
            own = [p.grad.double() for p in trained if p.grad is not None]
            factor = min(1.0, privacy.clip / math.sqrt(sum(float(g.square().sum()) for g in own)))
            summed = [s + factor * g for s, g in zip(summed, own, strict=True)]
        for parameter, s in zip(trained, summed, strict=True):
            noise = torch.from_numpy(normal(s.numel(), random_bytes)).view(s.shape)
            scale = privacy.noise_multiplier * privacy.clip
            parameter.grad = ((s + scale * noise) / spec.inner.sequences_per_step).float()
        optimizer.param_groups[0]["lr"] = learning_rate(spec.inner, i / len(given))
        optimizer.step()
    return model


@pytest.mark.parametrize("family", ["gpt2", "llama", "llama-tied"])
def test_steps_are_those_of_a_loop_over_records(family: str, tmp_path: Path) -> None:
    spec, base = private_spec(family, tmp_path, weight_decay=0.1)
    replica, given = replica_in(tmp_path, spec, base, seeded(9)), samples()
    first = initial_adapters(replica.layout, seed=spec.seed)
    replica.load(first)
    replica.feed(given)
    replica.train_only(factors_b(replica))
    steps = [replica.train_step(progress=i / len(given)) for i in range(len(given))]
    model = plain_loop(spec, given, seeded(9))
    wanted = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])
    got = replica.params().read(0, replica.layout.numel)
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
    for tensor in replica.layout:
        now, before = (vector[tensor.offset : tensor.stop] for vector in (got, first))
        assert torch.equal(now, before) == (".lora_A." in tensor.name)
    # Neither how many records a sample had nor how long they were is to be seen, and losses not at all.
    assert {s.num_tokens for s in steps} == {spec.inner.sequences_per_step * seq_len}
    assert all(math.isnan(s.loss) for s in steps)
    assert replica.private is not None and replica.private.ledger.num_steps == len(given)


def test_a_sample_larger_than_a_micro_batch_and_one_as_large_are_the_same(tmp_path: Path) -> None:
    found: list[Tensor] = []
    for batch_size, accumulation in ((1, 4), (2, 2), (4, 1)):
        spec, base = private_spec("llama", tmp_path / str(batch_size), batch_size=batch_size, accumulation=accumulation)
        replica = replica_in(tmp_path / str(batch_size), spec, base, seeded(2))
        replica.load(initial_adapters(replica.layout, seed=3))
        replica.feed(samples())
        replica.train_only(factors_b(replica))
        for _ in range(4):
            replica.train_step(progress=0.5)
        found.append(replica.params().read(0, replica.layout.numel))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-6)


def test_records_fewer_than_a_step_takes_are_all_taken(tmp_path: Path) -> None:
    spec, base = private_spec("llama", tmp_path)
    private = replica_in(tmp_path, spec, base, seeded(1), num_records=3).private
    assert private is not None and private.rate == 1.0
    layer = nn.Linear(1, 1, bias=False)
    (found,) = private.gradients([layer], [], lambda _: torch.zeros(0))
    assert float(found) == pytest.approx(config.noise_multiplier * config.clip * normal(1, seeded(1))[0] / 3)


def ready(
    folder: Path, random_bytes: RandomBytes | None = None, privacy: PrivacyConfig = config
) -> TorchReplica:  # fmt: skip
    spec, base = private_spec("llama", folder, privacy)
    replica = replica_in(folder, spec, base, random_bytes or seeded(1))
    replica.load(initial_adapters(replica.layout, seed=3))
    replica.feed(samples())
    replica.train_only(factors_b(replica))
    return replica


def num_counted(folder: Path) -> int:
    path = PrivacyLedger.path(folder, "r")
    return sum(row[0] for row in json.loads(path.read_bytes())["steps"]) if path.exists() else 0


def test_a_task_gets_neither_losses_nor_records_nor_plain_gradients(tmp_path: Path) -> None:
    replica = ready(tmp_path)
    asked: list[Callable[[], object]] = [
        lambda: replica.evaluate(samples()[0]), lambda: replica.gradient(num_sequences=4),
        lambda: next(replica.batches()),
    ]  # fmt: skip
    for ask in asked:
        with pytest.raises(Refused, match="trains with differential privacy"):
            ask()
    replica.train_only(())  # A as well
    with pytest.raises(Refused, match=r"was to train .*lora_A.*, and it trains the factors B"):
        replica.train_step(progress=0.0)
    assert num_counted(tmp_path) == 0
    spec, base = private_spec("llama", tmp_path)
    with pytest.raises(AssertionError):
        TorchReplica(spec, base=base)


def test_a_model_that_overflows_takes_its_step_like_any_other(tmp_path: Path) -> None:
    """That a loss was not finite would be something about records."""
    replica = ready(tmp_path)
    replica.load(torch.full((replica.layout.numel,), 1e38))
    assert math.isnan(replica.train_step(progress=0.5).loss)
    assert num_counted(tmp_path) == 1


class Killed(BaseException):
    """The process is gone at this moment."""


@pytest.mark.parametrize("place", range(6))
def test_a_step_counts_from_before_its_noise_is_drawn(place: int, tmp_path: Path) -> None:
    plain, num_drawn = seeded(1), 0

    def random_bytes(size: int) -> bytes:
        nonlocal num_drawn
        num_drawn += 1
        assert num_counted(tmp_path) == 2, "noise is drawn that nothing on the disk tells of"
        if num_drawn > place:
            raise Killed
        return plain(size)

    ready(tmp_path, plain).train_step(progress=0.5)
    again = ready(tmp_path, random_bytes)
    with pytest.raises(Killed):
        again.train_step(progress=0.5)
    assert num_counted(tmp_path) == 2
    ready(tmp_path, plain).train_step(progress=0.5)
    assert num_counted(tmp_path) == 3


def test_a_step_that_is_not_written_down_draws_no_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def random_bytes(_: int) -> bytes:
        raise AssertionError("noise was drawn")

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    replica = ready(tmp_path, random_bytes)
    monkeypatch.setattr("potluck.worker.privacy_ledger.write_atomic", killed)
    with pytest.raises(Killed):
        replica.train_step(progress=0.5)
    assert num_counted(tmp_path) == 0


def test_it_stops_before_the_budget_is_exceeded(tmp_path: Path) -> None:
    """By itself after the last step that the budget pays for, and again after a restart."""
    left = 3
    steps = PrivateSteps(num_steps=left, rate=4 / num_records, noise_multiplier=config.noise_multiplier)
    tight = config.model_copy(update={"max_epsilon": epsilon([steps], config.delta) + 1e-3})
    replica = ready(tmp_path, privacy=tight)
    assert replica.private is not None and replica.private.num_steps_left == left
    for _ in range(left):
        assert not replica.is_cut_short
        replica.train_step(progress=0.5)
    assert replica.is_cut_short and replica.private.num_steps_left == 0
    assert replica.epsilon == epsilon([steps], config.delta)
    before = replica.params().read(0, replica.layout.numel)
    for stubborn in (replica, ready(tmp_path, privacy=tight)):
        with pytest.raises(PrivacySpent, match=r"more privacy than the run's epsilon of \S+ \(\d\.\d+ is spent\)"):
            stubborn.train_step(progress=0.5)
        assert num_counted(tmp_path) == left
    assert torch.equal(replica.params().read(0, replica.layout.numel), before)


class Samples:
    """What a task is given."""

    @property
    def cursor(self) -> dict[str, Any]:
        return {}

    def __iter__(self) -> Iterator[Tensor]:
        return iter(samples())

    def seek(self, cursor: dict[str, Any]) -> None:
        assert cursor == {}


def test_what_goes_on_from_private_steps_needs_their_ledger(tmp_path: Path) -> None:
    lease = pb.Lease(task="fed_lora.private_inner", kind="pinned", next_version="1")
    notes: list[str] = []
    folder = RunFolder(tmp_path / "run")
    trainer = Trainer(ready(tmp_path), folder, notes.append)
    replica: Any = trainer.prepare(lease, Samples(), pinned=True)
    replica.train_only(factors_b(ready(tmp_path)))
    replica.load(torch.zeros(replica.layout.numel))
    replica.train_step(progress=0.5)
    assert not folder.has_states
    trainer.keep(lease, Samples())
    assert folder.has_states
    ledger = PrivacyLedger.open(PrivacyLedger.path(tmp_path, "r"), config, has_begun=True)
    assert ledger.knows("1") and not ledger.knows("2")
    assert notes[-1].startswith("privacy: epsilon ") and "at delta 1e-05 is spent, in 1 steps" in notes[-1]
    PrivacyLedger.path(tmp_path, "r").unlink()
    afresh = Trainer(ready(tmp_path), folder, notes.append)
    with pytest.raises(CorruptError, match="its ledger of spent privacy counts no step"):
        afresh.prepare(pb.Lease(kind="pinned", base_version="1", next_version="2"), Samples(), pinned=True)


def test_a_ledger_that_is_older_than_the_state_is_not_gone_on_with(tmp_path: Path) -> None:
    """A copy of it was put back: what the steps since have spent would be spent once more."""
    replica, path = ready(tmp_path), PrivacyLedger.path(tmp_path, "r")
    replica.train_step(progress=0.5)
    older = path.read_bytes()
    replica.train_step(progress=0.5)
    state = replica.local_state()
    path.write_bytes(older)
    later = ready(tmp_path)
    later.restore_local_state(*state)
    with pytest.raises(CorruptError, match="has had 2 private steps and its ledger of spent privacy counts 1: it is"):
        later.train_step(progress=0.5)
    assert path.read_bytes() == older


def test_a_worker_opens_what_it_has_or_refuses(tmp_path: Path) -> None:
    spec, _ = private_spec("llama", tmp_path)
    plain = spec.model_copy(update={"privacy": None})
    assert PrivateTraining.open(plain, tmp_path, num_records=0, has_begun=False) is None
    with pytest.raises(DataError, match="trains on private records and none were given"):
        PrivateTraining.open(spec, tmp_path, num_records=0, has_begun=False)
    with pytest.raises(CorruptError, match="is missing"):
        PrivateTraining.open(spec, tmp_path, num_records=num_records, has_begun=True)
    private = PrivateTraining.open(spec, tmp_path, num_records=num_records, has_begun=False)
    assert private is not None and private.rate == 4 / num_records
    private.gradients([nn.Linear(1, 1)], [], lambda _: torch.zeros(0))
    with pytest.raises(Refused, match="and now would without"):
        PrivateTraining.open(plain, tmp_path, num_records=num_records, has_begun=True)


@pytest.mark.parametrize(
    "changes",
    [{"data_access": "shared"}, {"data_options": {"format": "auto"}}, {"data_options": {"format": "preference"}},
     {"adapter": None}, {"privacy": {**config.model_dump(), "delta": 1.0}},
     {"data_options": {"format": "instruct", "max_bytes": 1 << 20}},
     {"data_options": {"format": "instruct", "max_bytes": "1000"}}],
)  # fmt: skip
def test_a_run_that_cannot_be_private_is_not_believed(changes: dict[str, Any], tmp_path: Path) -> None:
    spec, _ = private_spec("llama", tmp_path)
    with pytest.raises(ValueError, match="privacy"):
        RunSpec.model_validate({**spec.model_dump(), **changes})
