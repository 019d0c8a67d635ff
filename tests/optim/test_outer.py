from typing import Any

import pytest
import torch
from torch import Tensor

from potluck.optim.outer import adamw, axpy, delayed_nesterov, nesterov, sgd
from potluck.types.params import Layout

layout = Layout.of([("w", (11, 13)), ("b", (11,)), ("s", ()), ("v", (3, 5, 7)), ("n", (9,))])


def vector(seed: int) -> Tensor:
    return torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed))


def parts(flat: Tensor) -> list[Tensor]:
    return [flat[t.offset : t.stop].reshape(t.shape) for t in layout]


def flat(tensors: list[Any]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(part.clone()) for part in parts(vector(0))]


def groups(parameters: list[torch.nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def give(parameters: list[torch.nn.Parameter], gradient: Tensor) -> None:
    for parameter, part in zip(parameters, parts(gradient), strict=True):
        parameter.grad = part.clone()


def sliced(op: Any, *vectors: Tensor, size: int, **scalars: Any) -> list[Tensor]:
    """Run `op` as the parameter store does."""
    outputs = [
        op(*(v[start : start + size].clone() for v in vectors), layout=layout, offset=start, **scalars)
        for start in range(0, layout.numel, size)
    ]
    return [torch.cat(pieces) for pieces in zip(*outputs, strict=True)]


@pytest.mark.parametrize("size", [layout.numel, 50])
@pytest.mark.parametrize("momentum_coefficient", [0.0, 0.9])
def test_nesterov_is_pytorch_sgd_bit_for_bit(size: int, momentum_coefficient: float) -> None:
    reference = parameters()
    optimizer = torch.optim.SGD(reference, lr=0.7, momentum=momentum_coefficient, nesterov=momentum_coefficient > 0)
    theta, momentum = vector(0), torch.zeros(layout.numel)
    for step in range(5):
        delta = vector(10 + step)
        give(reference, delta)
        optimizer.step()
        theta, momentum = sliced(
            nesterov, theta, momentum, delta, size=size, lr=0.7, momentum_coefficient=momentum_coefficient
        )
        assert torch.equal(theta, flat(reference))


def test_fedavg_is_nesterov_without_momentum_at_rate_one() -> None:
    local, theta = vector(1), vector(0)
    moved, _ = nesterov(
        theta, torch.zeros_like(theta), theta - local, lr=1.0, momentum_coefficient=0.0, layout=layout, offset=0
    )
    assert moved == pytest.approx(local, abs=1e-6)


@pytest.mark.parametrize("size", [layout.numel, 50])
def test_adamw_is_pytorch_adamw(size: int) -> None:
    reference = parameters()
    optimizer = torch.optim.AdamW(groups(reference, 0.1), lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    theta, first, second = vector(0), torch.zeros(layout.numel), torch.zeros(layout.numel)
    for step in range(1, 21):
        summed, lr = vector(10 + step) * 512, 3e-3 / step
        give(reference, summed * (0.25 / 512))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        theta, first, second = sliced(
            adamw, theta, first, second, summed, size=size,
            lr=lr, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, scale=0.25 / 512,
        )  # fmt: skip
        torch.testing.assert_close(theta, flat(reference), rtol=1e-6, atol=1e-7)
    for mine, key in [(first, "exp_avg"), (second, "exp_avg_sq")]:
        torch.testing.assert_close(mine, flat([optimizer.state[p][key] for p in reference]), rtol=1e-6, atol=1e-8)
    assert not torch.allclose(theta, vector(0), atol=1e-3)


@pytest.mark.parametrize("size", [layout.numel, 50])
def test_sgd_is_pytorch_sgd(size: int) -> None:
    reference = parameters()
    optimizer = torch.optim.SGD(groups(reference, 0.1), lr=0.05)
    theta = vector(0)
    for step in range(10):
        give(reference, vector(10 + step) * 0.25)
        optimizer.step()
        (theta,) = sliced(sgd, theta, vector(10 + step), size=size, lr=0.05, weight_decay=0.1, scale=0.25)
        torch.testing.assert_close(theta, flat(reference), rtol=1e-6, atol=1e-6)


def test_axpy() -> None:
    (got,) = axpy(vector(0), vector(1), a=-2.0, layout=layout, offset=0)
    torch.testing.assert_close(got, vector(1) - 2 * vector(0))


def test_decay_is_for_matrices_only() -> None:
    expected = torch.cat([torch.full((t.numel,), 0.0 if len(t.shape) >= 2 else 1.0) for t in layout])
    for offset, numel in [(0, layout.numel), (0, 1), (100, 100), (143, 12), (150, 110), (layout.numel, 0)]:
        ones, still = torch.ones(numel), torch.zeros(numel)
        (theta,) = sgd(ones, still, lr=1.0, weight_decay=1.0, layout=layout, offset=offset)
        assert torch.equal(theta, expected[offset : offset + numel])


@pytest.mark.parametrize("spread", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (4,), (3, 1), (2, 2)])
def test_a_cycle_of_delayed_nesterov_is_a_step_of_pytorch_sgd_with_the_mean(
    sizes: tuple[int, ...], spread: float
) -> None:
    """In whatever parts the four updates of a cycle come. Of the momentum the steps within a cycle take what is old."""
    num_updates, cycles = sum(sizes), 3
    reference = parameters()
    optimizer = torch.optim.SGD(reference, lr=0.7, momentum=0.6, nesterov=True)
    theta, momentum, at_end = vector(0), torch.zeros(layout.numel), vector(0)
    for cycle in range(cycles):
        updates = [vector(100 * cycle + i) for i in range(num_updates)]
        mean = torch.stack(updates).mean(dim=0)
        give(reference, mean)
        optimizer.step()
        before = momentum
        gathered, done = torch.zeros(layout.numel), 0
        for size in sizes:
            part = torch.stack(updates[done : done + size]).mean(dim=0)
            is_last = done + size == num_updates
            share = spread * size / num_updates if not is_last else 1 - spread * done / num_updates
            theta, changed = sliced(
                delayed_nesterov, theta, gathered, momentum, part, size=50, lr=0.7, momentum_coefficient=0.6,
                momentum_share=share, ends_cycle=is_last, scale=size / num_updates,
            )  # fmt: skip
            gathered, momentum = (gathered, changed) if is_last else (changed, momentum)
            done += size
        taken_early = spread * (num_updates - sizes[-1]) / num_updates
        at_end -= 0.7 * (mean + 0.6 * (taken_early * before + (1 - taken_early) * momentum))
        torch.testing.assert_close(theta, at_end, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(momentum, 0.6 * before + mean, rtol=1e-5, atol=1e-5)
    if spread == 0.0 or len(sizes) == 1:
        torch.testing.assert_close(theta, flat(reference), rtol=1e-5, atol=1e-5)
