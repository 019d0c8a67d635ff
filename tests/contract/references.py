"""Plain PyTorch loops to hold the strategies against. Nothing here is Potluck's but the problem's data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from potluck.optim.inner import learning_rate
from potluck.optim.normal import normal
from potluck.simulator.exact.problem import Problem


def trained(model: nn.Module) -> list[nn.Parameter]:
    """All parameters, or those of the adapters where there are any."""
    return [p for p in model.parameters() if p.requires_grad]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trained(model)])


def make_adamw(model: nn.Module, problem: Problem) -> torch.optim.AdamW:
    inner = problem.inner
    matrices = [p for p in trained(model) if p.dim() >= 2]
    others = [p for p in trained(model) if p.dim() < 2]
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
        nn.utils.clip_grad_norm_(trained(model), problem.inner.clip)
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
        vector_to_parameters(theta.detach().clone(), trained(model))
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


def fragments(model: nn.Module) -> list[list[nn.Parameter]]:
    found: list[list[nn.Parameter]] = [[], []]
    for name, parameter in model.named_parameters():
        found[next(p for part, p in fragment_of.items() if part in name)].append(parameter)
    return found


def streaming_diloco(
    problem: Problem, *, num_inner_steps: int, overlap_steps: int, mixing: float, outer_lr: float,
    outer_momentum: float, eager: bool = False, paces: Sequence[int] = (1,), first_paces: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Two fragments, step by step: what is sent is taken up `overlap_steps` later. Worker i takes `paces[i]` steps
    where one is said, and before it takes something up `first_paces[i]`, the same unless given; updates weigh by all.
    """
    first_paces = first_paces or paces
    models, batch = [problem.model() for _ in paces], problem.inner.batch_size
    inner, pieces = [make_adamw(model, problem) for model in models], [fragments(model) for model in models]
    common = [nn.Parameter(parameters_to_vector(piece).detach()) for piece in pieces[0]]
    outer = [torch.optim.SGD([c], lr=outer_lr, momentum=outer_momentum, nesterov=True) for c in common]
    received = [[c.detach().clone() for c in common] for _ in paces]
    own, others = ([[torch.zeros_like(c) for c in common] for _ in paces] for _ in range(2))
    num_steps, num_rounds, made = num_inner_steps // 2, problem.num_rounds, list[Tensor]()
    behind, rest = divmod(overlap_steps, num_steps)
    asked = [
        [(f"w{i + 1}", pace * n * batch) for i, pace in enumerate(each)]
        for n, each in ((rest, first_paces), (num_steps - rest, paces)) * num_rounds if n
    ]  # fmt: skip
    dealt = iter(problem.dealt(asked))
    for round in range(num_rounds):
        p, back, mean = round % 2, round - behind - 1, torch.zeros_like(common[round % 2])
        read = [next(dealt) for n in (rest, num_steps - rest) if n]
        weights = [f * rest + p * (num_steps - rest) for f, p in zip(first_paces, paces, strict=True)]
        for i, pace in enumerate(paces):
            batches, num_first = torch.cat([rows[f"w{i + 1}"] for rows in read]).split(batch), first_paces[i] * rest
            for step, tokens in enumerate(batches):
                if step == num_first and back >= 0:
                    q, new = back % 2, made[back]
                    others[i][q] = received[i][q] - new - own[i][q]
                    received[i][q] = new
                    mixed = mixing * parameters_to_vector(pieces[i][q]).detach() + (1 - mixing) * new
                    vector_to_parameters(mixed, pieces[i][q])
                said = step / first_paces[i] if step < num_first else rest + (step - num_first) / pace
                train_step(models[i], inner[i], tokens, problem, (round + said / num_steps) / num_rounds)
            delta = received[i][p] - parameters_to_vector(pieces[i][p]).detach()
            mean += weights[i] / sum(weights) * delta
            if eager:
                own[i][p] = outer_lr * (1 + outer_momentum) / len(paces) * delta
                vector_to_parameters(received[i][p] - others[i][p] - own[i][p], pieces[i][p])
        common[p].grad = mean
        outer[p].step()
        made.append(common[p].detach().clone())
    for c, piece in zip(common, pieces[0], strict=True):
        vector_to_parameters(c.detach(), piece)
    return flat(models[0])


def zeroth_order(
    problem: Problem, *, num_perturbations: int, num_local_steps: int, epsilon: float
) -> Tensor:  # fmt: skip
    """One worker whose local steps the coordinator repeats. Seeds as the method derives them from the run's."""
    model = problem.model()
    theta = flat(model).clone()
    batches = problem.batches(problem.num_rounds * num_local_steps * problem.inner.batch_size)

    def loss_at(point: Tensor, batch: Tensor) -> float:
        vector_to_parameters(point.clone(), model.parameters())
        with torch.no_grad():
            logits = model(input_ids=batch[:, :-1]).logits
        return float(cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1)))

    for round in range(problem.num_rounds):
        lr = learning_rate(problem.inner, round / problem.num_rounds)
        for step in range(num_local_steps):
            batch, moved = next(batches), torch.zeros_like(theta)
            for p in range(num_perturbations):
                digest = blake2b(f"{problem.seed}/{round}/{step}/{p}".encode(), digest_size=8).digest()
                z = normal(int.from_bytes(digest, "little"), 0, len(theta))
                slope = (loss_at(theta + epsilon * z, batch) - loss_at(theta - epsilon * z, batch)) / (2 * epsilon)
                moved += slope / num_perturbations * z
            theta = theta - lr * moved
    return theta


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
            vector_to_parameters(theta.detach().clone(), trained(model))
            begun = [p.detach().clone() for p in trained(model)]

            def pull(begun: list[Tensor] = begun) -> Tensor:
                pairs = zip(trained(model), begun, strict=True)
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
    decays = torch.cat([torch.full((p.numel(),), inner.weight_decay * (p.dim() >= 2)) for p in trained(model)])
    for round, rows in enumerate(problem.dealt(asked)):
        moves, changes = torch.zeros_like(theta), torch.zeros_like(theta)
        for i in range(num_workers):
            y, rates = theta.clone(), 0.0
            for k, tokens in enumerate(rows[f"w{i + 1}"].split(batch)):
                rate = learning_rate(inner, (round + k / num_inner_steps) / problem.num_rounds)
                vector_to_parameters(y.clone(), trained(model))
                model.zero_grad()
                logits = model(input_ids=tokens[:, :-1]).logits
                cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1)).backward()
                nn.utils.clip_grad_norm_(trained(model), inner.clip)
                g = torch.cat([p.grad.reshape(-1) for p in trained(model) if p.grad is not None])
                y = y - rate * (g + decays * y - own[i] + c)
                rates += rate
            new = own[i] - c + (theta - y) / rates
            moves += (y - theta) / num_workers
            changes += (new - own[i]) / num_workers
            own[i] = new
        theta = theta + lr * moves
        c = c + changes
    return theta
