"""Training on answers only, against plain transformers with labels of -100 where nothing is to be predicted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES
from torch import Tensor
from worker.test_replica import replica_of, seq_len, spec_of

from potluck.codecs.bundle import write_tensors
from potluck.models.build import build
from potluck.models.loss import TokenLoss, inputs_of, num_predicted
from potluck.protocol import pb
from potluck.storage.objects import ObjectStore
from potluck.strategies.replica import Loss
from potluck.strategies.run import RunSpec
from potluck.types.errors import CorruptError, DataError
from potluck.worker.sources import Sources

END = 0


def some_records(count: int, *, seed: int = 1, vocab_size: int = 64) -> Tensor:
    """Rows [count, seq_len + 1]: a prompt, one answer or two with a question between, and padding."""
    chance = torch.Generator().manual_seed(seed)

    def below(most: int) -> int:
        return int(torch.randint(0, most, (1,), generator=chance))

    rows = torch.randint(1, vocab_size, (count, seq_len + 1), generator=chance)
    for row in rows:
        start, stop = 1 + below(5), seq_len + 1 - below(4)
        row[:start] = ~row[:start]
        if below(2):
            row[start + 1 : start + 3] = ~row[start + 1 : start + 3]
        row[stop:] = ~END
    return rows


def plain_loss(model: Any, rows: Tensor, num_items: int) -> Tensor:
    """What the Trainer of transformers has: padding masked, labels shifted by the model, over all that count."""
    padded = rows == ~END
    labels = torch.where(rows >= 0, rows, -100)
    inputs = torch.where(rows >= 0, rows, ~rows)
    mask = (~padded).long()
    return model(input_ids=inputs, attention_mask=mask, labels=labels, num_items_in_batch=num_items).loss


def answers_spec(name: str, **inner: Any) -> RunSpec:
    return spec_of(FAMILIES[name], **inner).model_copy(update={"data_options": {"format": "chat"}})


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_steps_are_those_of_transformers(name: str, accumulation: int) -> None:
    settings = {"optimizer": "sgd", "lr": 0.5, "clip": 0.0, "warmup": 0.0, "schedule": "constant", "weight_decay": 0.0}
    spec = answers_spec(name, accumulation=accumulation, **settings)
    batches = [some_records(4, seed=seed) for seed in range(4 * accumulation)]
    replica = replica_of(spec)
    replica.feed(batches)
    model = build(FAMILIES[name], seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(4):
        mine = batches[step * accumulation : (step + 1) * accumulation]
        num_items = sum(num_predicted(batch) for batch in mine)
        losses = [plain_loss(model, batch, num_items) for batch in mine]
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        took = replica.train_step(progress=step / 4)
        assert took.num_tokens == num_items < sum(batch[:, 1:].numel() for batch in mine)
        assert took.loss == pytest.approx(sum(loss.item() for loss in losses), rel=1e-6)
        torch.testing.assert_close(
            replica.params().tensor(),
            torch.cat([p.detach().reshape(-1) for p in model.parameters()]),
            rtol=1e-5,
            atol=1e-6,
        )
    rows = torch.cat(batches)
    with torch.no_grad():
        expected = plain_loss(model, rows, 1).item()
    assert replica.evaluate(rows) == Loss(pytest.approx(expected, rel=1e-6), num_predicted(rows))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"max_whole_bytes": 0, "chunk_bytes": 7 * 4 * 64}, {"max_whole_bytes": 0}])
@pytest.mark.parametrize("divisor", [1, 33, 36])
def test_loss_and_gradient_are_those_of_transformers(name: str, options: dict[str, int], divisor: int) -> None:
    """In both forms of the loss; 36 is all tokens of the batch, which are more than those predicted."""
    one, two, rows = build(FAMILIES[name], seed=1), build(FAMILIES[name], seed=1), some_records(3)
    loss = TokenLoss(one, vocab_size=64, marked=True, **options)(rows, divisor=divisor)
    expected = plain_loss(two, rows, divisor)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for got, wanted in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-5, atol=1e-6 * wanted.grad.abs().max().item())


def test_the_gradient_of_a_sum_is_over_answers() -> None:
    replica, rows = replica_of(answers_spec("llama")), some_records(6)
    replica.feed([rows[:4], rows[4:]])
    summed, loss = replica.gradient(num_sequences=6)
    model = build(FAMILIES["llama"], seed=1)
    expected = plain_loss(model, rows, 1)
    expected.backward()
    assert loss == Loss(pytest.approx(expected.item(), rel=1e-6), num_predicted(rows))
    wanted = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(summed, wanted, rtol=1e-5, atol=1e-6 * wanted.abs().max().item())


@pytest.mark.parametrize("options", [{}, {"max_whole_bytes": 0}])
def test_where_every_token_is_predicted_it_is_the_loss_of_text(options: dict[str, int]) -> None:
    rows = inputs_of(some_records(3))
    text, marked = (build(FAMILIES["gpt2"], seed=1) for _ in range(2))
    losses = [
        TokenLoss(model, vocab_size=64, marked=model is marked, **options)(rows, divisor=50) for model in (text, marked)
    ]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for one, two in zip(text.parameters(), marked.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("options", [{}, {"max_whole_bytes": 0}])
def test_a_micro_batch_without_a_token_to_predict_adds_nothing(options: dict[str, int]) -> None:
    model, rows = build(FAMILIES["llama"], seed=1), some_records(3)
    none = torch.where(rows >= 0, ~rows, rows)
    loss = TokenLoss(model, vocab_size=64, marked=True, **options)
    alone = loss(none, divisor=9)
    alone.backward()
    assert alone.item() == 0 and all(not p.grad.any() for p in model.parameters())
    assert loss.evaluate(none).item() == 0


def test_nor_does_it_in_a_step_and_a_step_of_nothing_else_is_one_sentence() -> None:
    spec = answers_spec("gpt2", optimizer="sgd", lr=0.5, accumulation=2)
    rows = some_records(4)
    none = torch.where(rows >= 0, ~rows, rows)
    one, two = (
        replica_of(spec),
        replica_of(spec.model_copy(update={"inner": spec.inner.model_copy(update={"accumulation": 1})})),
    )
    one.feed([rows, none])
    two.feed([rows])
    assert one.train_step(progress=0.0) == two.train_step(progress=0.0)
    assert torch.equal(one.params().tensor(), two.params().tensor())
    for step in (lambda: one.train_step(progress=0.5), lambda: one.gradient(num_sequences=8)):
        one.feed([none, none])
        with pytest.raises(DataError, match="holds no token to predict"):
            step()
    assert torch.equal(one.params().tensor(), two.params().tensor())


def test_shared_records_come_to_the_replica_as_they_were_packed(tmp_path: Path) -> None:
    """And a shard that a coordinator sends where text was agreed on, or the other way round, is refused."""
    objects, rows = ObjectStore(tmp_path), some_records(10)
    write_tensors(tmp_path / "shard", {"tokens": rows.int()})
    digest = objects.adopt(tmp_path / "shard")
    spec = answers_spec("llama", optimizer="sgd")
    lease = pb.Lease(num_sequences=10, spans=[pb.Span(shard=digest, start=0, stop=10)])
    with Sources(spec=spec, objects=objects).open(lease) as fed:
        batches = list(fed)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(torch.cat(batches).tolist()) == sorted(rows.tolist())
    replica = replica_of(spec)
    replica.feed(batches)
    assert replica.train_step(progress=0.0).num_tokens == num_predicted(batches[0])
    for format, why in (("text", "holds tokens from -"), ("preference", r"needs whole numbers \[any, 2, 13\]")):
        other = spec.model_copy(update={"data_options": {"format": format}})
        with Sources(spec=other, objects=objects).open(lease) as fed, pytest.raises(CorruptError, match=why):
            list(fed)


def test_a_model_never_sees_a_complement() -> None:
    seen: list[Tensor] = []
    model = build(FAMILIES["llama"], seed=1)
    model.get_input_embeddings().register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    for options in ({}, {"max_whole_bytes": 0}):
        loss = TokenLoss(model, vocab_size=64, marked=True, **options)
        loss(some_records(3), divisor=1)
        loss.evaluate(some_records(3))
    assert len(seen) >= 4 and all(tokens.min() >= 0 for tokens in seen)
