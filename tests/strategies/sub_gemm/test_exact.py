"""Ten steps over gRPC while a device dies, one hangs and one lies: the losses and gradients of a plain local run."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from potluck.bench.rig.plain import gradient_errors, plain_steps
from potluck.contract import checks
from potluck.optim.inner import InnerConfig
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.sub_gemm import strategy
from potluck.strategies.sub_gemm.head import HeadModel
from potluck.strategies.sub_gemm.strategy import SubGEMM, SubGEMMConfig

num_steps = 10


class Devices:
    """What threads of devices do instead of `multiply`: from some moment on one of them hangs, and one lies."""

    def __init__(self) -> None:
        self._multiply = strategy.multiply
        self.roles: dict[str, int] = {}  # of threads that lied, and that hung
        self._lock = threading.Lock()
        self.wanted: set[str] = set()
        self.over = threading.Event()

    def __call__(self, a: Tensor, b: Tensor, **how: Any) -> Tensor:
        product, me = self._multiply(a, b, **how), threading.get_ident()
        with self._lock:
            for role in self.wanted - set(self.roles):
                if me not in self.roles.values():
                    self.roles[role] = me
        if self.roles.get("hangs") == me:
            self.over.wait(60)
        if self.roles.get("lies") == me:
            product[-1, -1] += 1e-3 * product.square().mean().sqrt()
        return product


async def wait_round(world: World, number: int) -> None:
    while sum(event.kind == "round" for event in world.events) < number:
        await world.clock.sleep(0.01)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_losses_and_gradients_are_those_of_a_plain_run(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = InnerConfig(lr=3e-3, batch_size=4, warmup=0.1, weight_decay=0.1)
    problem = Problem(num_rounds=num_steps, family=family, inner=inner, validate=False)
    problem.store_shards(tmp_path)
    devices, gradients, whole = Devices(), [], HeadModel.gradient

    def gradient(model: HeadModel, *args: Any, **how: Any) -> Any:
        time.sleep(0.02)
        found = whole(model, *args, **how)
        gradients.append(found[0].clone())
        return found

    monkeypatch.setattr(strategy, "multiply", devices)
    monkeypatch.setattr(HeadModel, "gradient", gradient)

    async def disturb(world: World) -> None:
        await wait_round(world, 1)
        await world.crash("w1")
        devices.wanted.add("lies")
        await wait_round(world, 5)
        devices.wanted.add("hangs")
        await wait_round(world, num_steps)
        devices.over.set()

    got = checks.run(
        problem, lambda: SubGEMM(SubGEMMConfig(head_computes=False, least_side=4)),
        num_workers=4, min_workers=1, disturb=disturb, sockets=True,
    )  # fmt: skip
    rows = problem.dealt([[("w1", inner.sequences_per_step)]] * num_steps)
    steps = plain_steps(problem.model(), [row["w1"] for row in rows], inner)
    assert len(got.round_losses) == len(gradients) == num_steps
    assert any("is not the product of its factors" in text for _, text in got.trace)
    assert set(devices.roles) == {"lies", "hangs"}
    for found, loss, (right, expected) in zip(gradients, got.round_losses, steps, strict=True):
        assert abs(loss - right) <= 1e-5
        assert max(gradient_errors(found, expected).values()) <= 1e-4
