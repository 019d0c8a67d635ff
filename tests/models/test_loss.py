import pytest
import torch
from models.families import FAMILIES, gpt2
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from potluck.models.build import build
from potluck.models.loss import TokenLoss


def plain(model: nn.Module, tokens: Tensor, reduction: str = "sum") -> Tensor:
    logits = model(input_ids=tokens[:, :-1]).logits
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1), reduction=reduction)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def some_tokens(vocab_size: int = 64) -> Tensor:
    return torch.randint(0, vocab_size, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("divisor", "reduction"), [(33, "mean"), (1, "sum")])
def test_a_whole_loss_is_the_plain_one_bit_for_bit(name: str, divisor: int, reduction: str) -> None:
    one, two = build(FAMILIES[name], seed=1), build(FAMILIES[name], seed=1)
    loss, expected = TokenLoss(one, vocab_size=64)(some_tokens(), divisor=divisor), plain(two, some_tokens(), reduction)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(gradient(one), gradient(two))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("divisor", [1, 33, 50])
@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_a_loss_in_chunks_has_the_plain_loss_and_gradient(name: str, divisor: int, chunk_rows: int) -> None:
    one, two = build(FAMILIES[name], seed=1), build(FAMILIES[name], seed=1)
    chunked = TokenLoss(one, vocab_size=64, max_whole_bytes=0, chunk_bytes=chunk_rows * 4 * 64)
    loss, expected = chunked(some_tokens(), divisor=divisor), plain(two, some_tokens()) / divisor
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    scale = gradient(two).abs().max().item()
    torch.testing.assert_close(gradient(one), gradient(two), rtol=1e-5, atol=1e-6 * scale)


def test_the_chunked_way_is_really_taken_and_never_holds_all_logits() -> None:
    model = build(gpt2(), seed=1)
    sizes: list[int] = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _module, _inputs, output: sizes.append(output.shape[1]))
    loss = TokenLoss(model, vocab_size=64, max_whole_bytes=0)
    loss(some_tokens(), divisor=1)
    loss(some_tokens(), divisor=1)
    assert sizes == [2, 2]  # only the question whether the model is a base and a head, once


def test_a_head_that_does_more_than_multiply_is_left_whole() -> None:
    scaled = build(gpt2(), seed=1)
    forward = scaled.forward

    def capped(**inputs: object) -> object:
        result = forward(**inputs)
        result.logits = torch.tanh(result.logits)
        return result

    scaled.forward = capped
    loss = TokenLoss(scaled, vocab_size=64, max_whole_bytes=0)(some_tokens(), divisor=1)
    assert torch.equal(loss, plain(scaled, some_tokens()))
    assert not torch.allclose(loss, plain(build(gpt2(), seed=1), some_tokens()))


def test_evaluation_drops_nothing_out_and_leaves_no_gradient() -> None:
    model = build(gpt2(resid_pdrop=0.5, embd_pdrop=0.5), seed=1)
    reference = build(gpt2(), seed=1)
    for loss in (TokenLoss(model, vocab_size=64), TokenLoss(model, vocab_size=64, max_whole_bytes=0)):
        got = loss.evaluate(some_tokens())
        assert got.item() == pytest.approx(plain(reference, some_tokens()).item(), rel=1e-6)
        assert model.training and not got.requires_grad


@pytest.mark.parametrize("max_whole_bytes", [0, 1 << 30])
def test_bf16_stays_close_and_evaluates_in_fp32(max_whole_bytes: int) -> None:
    one, two = build(FAMILIES["llama"], seed=1), build(FAMILIES["llama"], seed=1)
    mixed = TokenLoss(one, vocab_size=64, autocast=torch.bfloat16, max_whole_bytes=max_whole_bytes)
    loss, expected = mixed(some_tokens(), divisor=33), plain(two, some_tokens(), "mean")
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float32
    assert 0 < abs(loss.item() - expected.item()) < 0.02
    cosine = torch.cosine_similarity(gradient(one), gradient(two), dim=0)
    assert cosine > 0.99
    assert all(p.grad.dtype == torch.float32 for p in one.parameters() if p.grad is not None)
    assert mixed.evaluate(some_tokens()).item() == pytest.approx(expected.item() * 33, rel=1e-6)
