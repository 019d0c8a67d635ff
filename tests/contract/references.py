"""Plain PyTorch loops to hold the strategies against. Nothing here is Potluck's but the problem's data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from potluck.optim.inner import learning_rate
from potluck.simulator.exact.problem import Problem


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def make_adamw(model: nn.Module, problem: Problem) -> torch.optim.AdamW:
    inner = problem.inner
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": inner.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=inner.lr, betas=inner.betas, eps=inner.eps)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, problem: Problem, p: float, *,
    extra: Callable[[], Tensor] | None = None,
) -> float:  # fmt: skip
    """`extra` is added to the loss that is minimised, not to the one that is returned."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(problem.inner, p)
    optimizer.zero_grad()
    logits = model(input_ids=batch[:, :-1]).logits
    loss = cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
    (loss + extra() if extra else loss).backward()
    if problem.inner.clip:
        nn.utils.clip_grad_norm_(model.parameters(), problem.inner.clip)
    optimizer.step()
    return loss.item()


def diloco(problem: Problem, *, num_inner_steps: int, outer_lr: float, outer_momentum: float) -> Tensor:
    """One worker: H inner AdamW steps, then torch's Nesterov SGD on the pseudo-gradient."""
    model = problem.model()
    inner = make_adamw(model, problem)
    theta = nn.Parameter(flat(model).clone())
    outer = torch.optim.SGD([theta], lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
    batches = problem.batches(problem.num_rounds * num_inner_steps * problem.inner.batch_size)
    for round in range(problem.num_rounds):
        nn.utils.vector_to_parameters(theta.detach().clone(), model.parameters())
        start, stop = round / problem.num_rounds, (round + 1) / problem.num_rounds
        for step in range(num_inner_steps):
            train_step(model, inner, next(batches), problem, start + (stop - start) * step / num_inner_steps)
        theta.grad = theta.detach() - flat(model)
        outer.step()
    return theta.detach()


fragment_of = {"h.0.": 0, "h.1.": 1, "wte": 0, "wpe": 1, "ln_f": 1} | {
    "layers.0.": 0, "layers.1.": 1, "embed_tokens": 0, "model.norm": 0, "lm_head": 1
}  # fmt: skip
"""How the layers of the problem's two models are dealt to two fragments, and the rest, the largest first."""


def streaming_diloco(
    problem: Problem, *, num_inner_steps: int, overlap_steps: int, mixing: float, outer_lr: float, outer_momentum: float
) -> Tensor:
    """One worker and two fragments, step by step: what is sent is taken up `overlap_steps` later."""
    model = problem.model()
    inner = make_adamw(model, problem)
    pieces: list[list[nn.Parameter]] = [[], []]
    for name, parameter in model.named_parameters():
        pieces[next(p for part, p in fragment_of.items() if part in name)].append(parameter)
    common = [[nn.Parameter(x.detach().clone()) for x in piece] for piece in pieces]
    outer = [torch.optim.SGD(c, lr=outer_lr, momentum=outer_momentum, nesterov=True) for c in common]
    num_steps, num_rounds = num_inner_steps // 2, problem.num_rounds
    batches = problem.batches(num_rounds * num_steps * problem.inner.batch_size)
    received = [[x.detach().clone() for x in piece] for piece in pieces]
    on_the_way: dict[int, tuple[int, list[Tensor]]] = {}
    for step in range(num_rounds * num_steps):
        if step in on_the_way:
            p, new = on_the_way.pop(step)
            received[p] = new
            for mine, theirs in zip(pieces[p], new, strict=True):
                mine.data.copy_(mixing * mine.data + (1 - mixing) * theirs)
        train_step(model, inner, next(batches), problem, step / (num_rounds * num_steps))
        if (step + 1) % num_steps == 0:
            p = step // num_steps % 2
            for x, base, mine in zip(common[p], received[p], pieces[p], strict=True):
                x.grad = base - mine.detach()
            outer[p].step()
            on_the_way[step + 1 + overlap_steps] = p, [x.detach().clone() for x in common[p]]
    whole = {id(mine): x for p in range(2) for mine, x in zip(pieces[p], common[p], strict=True)}
    return torch.cat([whole[id(p)].detach().reshape(-1) for p in model.parameters()])


def sync_sgd(problem: Problem, num_workers: int = 1) -> tuple[Tensor, list[float]]:
    """A plain loop whose batch is what all workers read in that step. Parameters and the loss of every step."""
    model = problem.model()
    optimizer = make_adamw(model, problem)
    asked = [(f"w{i + 1}", problem.inner.sequences_per_step) for i in range(num_workers)]
    losses: list[float] = []
    for step, rows in enumerate(problem.dealt([asked] * problem.num_rounds)):
        batch = torch.cat([rows[worker] for worker, _ in asked])
        losses.append(train_step(model, optimizer, batch, problem, step / problem.num_rounds))
    return flat(model), losses


def fed_avg(
    problem: Problem,
    steps: Sequence[Sequence[int]],
    *,
    outer: str = "sgd",
    lr: float = 1.0,
    momentum: float = 0.0,
    proximal: float = 0.0,
    normalised: bool = False,
    tau: float = 1e-3,
) -> Tensor:
    """Worker i takes `steps[round][i]` steps; updates weigh by steps or, normalised, alike: batches are equal."""
    model, batch = problem.model(), problem.inner.batch_size
    inner = [make_adamw(model, problem) for _ in steps[0]]
    theta = nn.Parameter(flat(model).clone())
    sgd = torch.optim.SGD([theta], lr=lr, momentum=momentum)
    m, v = torch.zeros_like(theta), torch.full_like(theta, tau**2)
    asked = [[(f"w{i + 1}", n * batch) for i, n in enumerate(each)] for each in steps]
    for round, (each, rows) in enumerate(zip(steps, problem.dealt(asked), strict=True)):
        start, stop = round / problem.num_rounds, (round + 1) / problem.num_rounds
        mean = torch.zeros_like(theta)
        for i, num_steps in enumerate(each):
            nn.utils.vector_to_parameters(theta.detach().clone(), model.parameters())
            begun = [p.detach().clone() for p in model.parameters()]

            def pull(begun: list[Tensor] = begun) -> Tensor:
                pairs = zip(model.parameters(), begun, strict=True)
                return proximal / 2 * sum(((p - q) ** 2).sum() for p, q in pairs)  # pyright: ignore[reportReturnType]

            for k, tokens in enumerate(rows[f"w{i + 1}"].split(batch)):
                progress = start + (stop - start) * k / num_steps
                train_step(model, inner[i], tokens, problem, progress, extra=pull if proximal else None)
            delta = theta.detach() - flat(model)
            if normalised:
                mean += delta / num_steps / len(each) * (sum(each) / len(each))
            else:
                mean += delta * num_steps / sum(each)
        if outer == "sgd":
            theta.grad = mean
            sgd.step()
            continue
        m = 0.9 * m + 0.1 * mean
        v = {
            "adam": 0.99 * v + 0.01 * mean**2,
            "yogi": v - 0.01 * mean**2 * torch.sign(v - mean**2),
            "adagrad": v + mean**2,
        }[outer]
        theta.data -= lr * m / (v.sqrt() + tau)
    return theta.detach()


def scaffold(problem: Problem, *, num_workers: int, num_inner_steps: int, lr: float = 1.0) -> Tensor:
    """SCAFFOLD with option II, as its Algorithm 1 is printed; the gradients are clipped, the corrections are not."""
    model, batch, inner = problem.model(), problem.inner.batch_size, problem.inner
    theta = flat(model).clone()
    c, own = torch.zeros_like(theta), [torch.zeros_like(theta) for _ in range(num_workers)]
    asked = [[(f"w{i + 1}", num_inner_steps * batch) for i in range(num_workers)]] * problem.num_rounds
    decays = torch.cat([torch.full((p.numel(),), inner.weight_decay * (p.dim() >= 2)) for p in model.parameters()])
    for round, rows in enumerate(problem.dealt(asked)):
        moves, changes = torch.zeros_like(theta), torch.zeros_like(theta)
        for i in range(num_workers):
            y, rates = theta.clone(), 0.0
            for k, tokens in enumerate(rows[f"w{i + 1}"].split(batch)):
                rate = learning_rate(inner, (round + k / num_inner_steps) / problem.num_rounds)
                nn.utils.vector_to_parameters(y.clone(), model.parameters())
                model.zero_grad()
                logits = model(input_ids=tokens[:, :-1]).logits
                cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), inner.clip)
                g = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
                y = y - rate * (g + decays * y - own[i] + c)
                rates += rate
            new = own[i] - c + (theta - y) / rates
            moves += (y - theta) / num_workers
            changes += (new - own[i]) / num_workers
            own[i] = new
        theta = theta + lr * moves
        c = c + changes
    return theta
