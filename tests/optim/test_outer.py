"""Every operation against torch.optim, slice by slice."""

import pytest
import torch
from torch import nn

from potluck.optim.outer import adamw, axpy, decay_mask, nesterov, sgd
from potluck.types.params import Layout

layout = Layout.of([("w", (3, 4)), ("b", (5,)), ("e", (2, 2, 2))])
slices = [(0, 7), (7, 14), (14, 25)]


def vectors(steps: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(layout.numel, generator=generator)
    return start, [torch.randn(layout.numel, generator=generator) for _ in range(steps)]


def test_nesterov_is_torch_sgd_bit_for_bit() -> None:
    start, gradients = vectors(5)
    theta, momentum = start.clone(), torch.zeros(layout.numel)
    parameter = nn.Parameter(start.clone())
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.6, nesterov=True, foreach=False)
    for g in gradients:
        parameter.grad = g.clone()
        reference.step()
        outs = [
            nesterov(theta[a:b], momentum[a:b], g[a:b], lr=0.7, momentum_coefficient=0.6, layout=layout, offset=a)
            for a, b in slices
        ]
        theta, momentum = (torch.cat([o[i] for o in outs]) for i in range(2))
    assert torch.equal(theta, parameter.detach())


def test_adamw_is_torch_adamw_with_decay_on_matrices_only() -> None:
    start, gradients = vectors(6)
    parts = [nn.Parameter(start[s.offset : s.stop].view(s.shape).clone()) for s in layout]
    groups = [
        {"params": [p for p in parts if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parts if p.dim() < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    theta, m, v = start.clone(), torch.zeros(layout.numel), torch.zeros(layout.numel)
    for step, g in enumerate(gradients, 1):
        for p, s in zip(parts, layout, strict=True):
            p.grad = (0.25 * g[s.offset : s.stop]).view(s.shape)
        reference.step()
        outs = [
            adamw(
                theta[a:b], m[a:b], v[a:b], g[a:b], lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1,
                step=step, scale=0.25, layout=layout, offset=a,
            )
            for a, b in slices
        ]  # fmt: skip
        theta, m, v = (torch.cat([o[i] for o in outs]) for i in range(3))
    expected = torch.cat([p.detach().reshape(-1) for p in parts])
    assert (theta - expected).abs().max().item() < 1e-6
    assert (theta - start).abs().min().item() > 1e-4


def test_sgd_and_axpy() -> None:
    x, g = torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0])
    assert sgd(x, g, lr=0.5, scale=0.25, layout=layout, offset=0)[0].tolist() == [0.5, 2.25]
    assert axpy(x, g, scale=-1.0, layout=layout, offset=0)[0].tolist() == [-3.0, 4.0]


@pytest.mark.parametrize(("a", "b"), slices)
def test_the_mask_of_a_slice_is_a_slice_of_the_mask(a: int, b: int) -> None:
    whole = decay_mask(layout, 0, layout.numel)
    assert whole.tolist() == [1.0] * 12 + [0.0] * 5 + [1.0] * 8
    assert torch.equal(decay_mask(layout, a, b - a), whole[a:b])
