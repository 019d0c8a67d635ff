"""Every strategy through the contract: on the virtual clock over the memory transport, and over gRPC."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from contract import references
from torch import Tensor

from potluck.contract import checks
from potluck.optim.inner import InnerConfig
from potluck.simulator.exact.problem import Problem
from potluck.strategies.async_diloco import AsyncDiLoCo, AsyncDiLoCoConfig
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.fed_avg import FedAvg, FedAvgConfig
from potluck.strategies.strategy import Strategy
from potluck.strategies.streaming_diloco import StreamingDiLoCo, StreamingDiLoCoConfig
from potluck.strategies.sub_gemm.strategy import SubGEMM, SubGEMMConfig
from potluck.strategies.sync_sgd import SyncSGD, SyncSGDConfig
from potluck.strategies.zeroth_order import ZerothOrder, ZerothOrderConfig


@dataclass(frozen=True)
class Case:
    """A strategy, how it is made, and the plain loop it must equal."""

    make: Callable[[], Strategy]
    reference: Callable[[Problem], Tensor]
    num_rounds: int
    tolerance: float = 0.0  # of parameters after a restart: tiles are cut anew, and sums of other tiles round otherwise

    inner: InnerConfig | None = None

    def problem(self, **changes: object) -> Problem:
        if self.inner is not None:
            changes = {"inner": self.inner, **changes}
        return Problem(num_rounds=self.num_rounds, **changes)  # pyright: ignore[reportArgumentType]


pytestmark = pytest.mark.timeout(180)  # over gRPC whole runs take real time, more of it on a busy machine

diloco_settings = {"num_inner_steps": 5, "outer_lr": 0.7, "outer_momentum": 0.6}
async_settings = {"num_inner_steps": 5, "outer_lr": 0.7, "outer_momentum": 0.6}
streaming_settings = {"num_inner_steps": 6, "overlap_steps": 4, "mixing": 0.5, "outer_lr": 0.7, "outer_momentum": 0.6}
zeroth_order_settings = {"num_perturbations": 4, "num_local_steps": 2, "epsilon": 1e-2}
senders = ["async_diloco", "diloco", "streaming_diloco", "sync_sgd"]  # whose workers send updates
cases = {
    "async_diloco": Case(
        make=lambda: AsyncDiLoCo(AsyncDiLoCoConfig(quorum=1.0, **async_settings)),  # pyright: ignore[reportArgumentType]
        reference=lambda problem: references.diloco(problem, **async_settings),  # pyright: ignore[reportArgumentType]
        num_rounds=4,
    ),
    "diloco": Case(
        make=lambda: DiLoCo(DiLoCoConfig(**diloco_settings)),  # pyright: ignore[reportArgumentType]
        reference=lambda problem: references.diloco(problem, **diloco_settings),  # pyright: ignore[reportArgumentType]
        num_rounds=4,
    ),
    "streaming_diloco": Case(
        make=lambda: StreamingDiLoCo(StreamingDiLoCoConfig(num_fragments=2, **streaming_settings)),  # pyright: ignore[reportArgumentType]
        reference=lambda problem: references.streaming_diloco(problem, **streaming_settings),  # pyright: ignore[reportArgumentType]
        num_rounds=8,
    ),
    "fed_avg": Case(
        make=lambda: FedAvg(FedAvgConfig(outer="yogi", proximal=0.5, normalised=True, num_inner_steps=5)),
        reference=lambda problem: references.fed_avg(
            problem, [[5]] * problem.num_rounds, outer="yogi", lr=0.01, proximal=0.5, normalised=True
        ),
        num_rounds=4,
    ),
    "sub_gemm": Case(
        make=lambda: SubGEMM(SubGEMMConfig(head_computes=False, least_side=4)),
        reference=lambda problem: references.sync_sgd(problem)[0],
        num_rounds=12,
        tolerance=1e-5,
    ),
    "zeroth_order": Case(
        make=lambda: ZerothOrder(ZerothOrderConfig(**zeroth_order_settings)),  # pyright: ignore[reportArgumentType]
        reference=lambda problem: references.zeroth_order(problem, **zeroth_order_settings),  # pyright: ignore[reportArgumentType]
        num_rounds=6,
        inner=InnerConfig(optimizer="sgd", weight_decay=0.0, lr=1e-2, batch_size=4, warmup=0.1),
    ),
    "sync_sgd": Case(
        make=lambda: SyncSGD(SyncSGDConfig()),
        reference=lambda problem: references.sync_sgd(problem)[0],
        num_rounds=12,
    ),
}


@pytest.fixture(params=sorted(cases))
def case(request: pytest.FixtureRequest) -> Case:
    return cases[request.param]


@pytest.fixture(params=["memory", "grpc"])
def sockets(request: pytest.FixtureRequest) -> bool:
    return request.param == "grpc"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_one_worker_equals_a_plain_loop(case: Case, family: str, sockets: bool, tmp_path: Path) -> None:
    problem = case.problem(family=family)
    problem.store_shards(tmp_path)
    checks.equals_reference(problem, case.make, case.reference, sockets=sockets)


@pytest.mark.parametrize("name", sorted(set(cases) - {"zeroth_order"}))  # hundreds of rounds: tests/strategies
def test_it_converges_with_losses(name: str, sockets: bool) -> None:
    case = cases[name]
    problem = case.problem(inner=InnerConfig(lr=1e-2, batch_size=8, warmup=0.1))
    problem.num_rounds = case.num_rounds * (1 if sockets else 3)
    checks.survives_losses(problem, case.make, sockets=sockets)


def test_stop_and_resume_changes_nothing(case: Case, sockets: bool) -> None:
    checks.resumes_exactly(case.problem(), case.make, sockets=sockets, tolerance=case.tolerance)


@pytest.mark.parametrize(("up", "down"), [("int4+ef", "int8-delta"), ("topk(25%)+2bit+ef(0.95)", "bf16")])
@pytest.mark.parametrize("name", senders)
def test_error_feedback_and_deltas_go_on_exactly_after_a_restart(name: str, up: str, down: str, sockets: bool) -> None:
    case = cases[name]
    checks.resumes_exactly(case.problem(up_codec=up, down_codec=down), case.make, sockets=sockets)


def test_the_same_seed_gives_the_same_trace(case: Case, sockets: bool) -> None:
    checks.same_trace(case.problem(), case.make, sockets=sockets, tolerance=case.tolerance)


@pytest.mark.parametrize("codecs", [("fp32", "fp32"), ("int8", "bf16")])
@pytest.mark.parametrize("name", senders)
def test_it_moves_what_it_says(name: str, codecs: tuple[str, str], sockets: bool) -> None:
    case, (up, down) = cases[name], codecs
    checks.moves_what_it_says(case.problem(up_codec=up, down_codec=down), case.make, sockets=sockets)


def test_updates_as_they_come_keep_the_contract_too(sockets: bool, tmp_path: Path) -> None:
    """Without a quorum what counts when depends on the clock: one worker is exact, several converge."""
    case = cases["async_diloco"]

    def make() -> Strategy:
        return AsyncDiLoCo(AsyncDiLoCoConfig.model_validate(async_settings))

    problem = case.problem()
    problem.store_shards(tmp_path)
    checks.equals_reference(problem, make, case.reference, sockets=sockets)
    checks.resumes_exactly(case.problem(), make, num_workers=1, sockets=sockets)
    checks.moves_what_it_says(case.problem(), make, num_workers=1, sockets=sockets)
    eager = case.problem(inner=InnerConfig(lr=1e-2, batch_size=8, warmup=0.1))
    eager.num_rounds = 24
    checks.survives_losses(eager, make, sockets=sockets)


def test_sub_gemm_moves_no_objects_of_the_models_size() -> None:
    checks.moves_what_it_says(cases["sub_gemm"].problem(), cases["sub_gemm"].make)


@pytest.mark.parametrize("num_workers", [1, 4])
def test_synchronous_training_equals_one_machine_with_the_whole_batch(num_workers: int, tmp_path: Path) -> None:
    """Loss within 1e-4 at each of 20 steps and 1e-6 relative on the first."""
    problem = Problem(num_rounds=20)
    problem.store_shards(tmp_path)
    _, expected = references.sync_sgd(problem, num_workers)
    got = checks.run(problem, cases["sync_sgd"].make, num_workers=num_workers)
    losses = got.round_losses
    assert len(losses) == 20
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert losses == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0] - 0.05


def test_a_wrong_reference_is_noticed(tmp_path: Path) -> None:
    """The check can fail: with another outer momentum the plain loop ends elsewhere."""
    case = cases["diloco"]
    problem = case.problem()
    problem.store_shards(tmp_path)
    wrong = {**diloco_settings, "outer_momentum": 0.5}
    with pytest.raises(checks.Broken, match="differs from the plain loop"):
        checks.equals_reference(problem, case.make, lambda p: references.diloco(p, **wrong))  # pyright: ignore[reportArgumentType]


def test_a_method_that_keeps_more_than_it_says_is_noticed() -> None:
    class Modest(StreamingDiLoCo):
        kept_vectors = 1.0

    def make() -> Strategy:
        return Modest(StreamingDiLoCoConfig(num_fragments=2, **streaming_settings))  # pyright: ignore[reportArgumentType]

    with pytest.raises(checks.Broken, match=r"keeps \['kept.common', 'kept.local'\] and `kept_vectors` says 1"):
        checks.moves_what_it_says(cases["streaming_diloco"].problem(), make)
