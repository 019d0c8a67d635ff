"""Adaptive compression: the codec of each worker's update, by its link."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from potluck.clock import InlineExecutor
from potluck.fleet.config import FleetConfig
from potluck.fleet.encoding import UpEncoding, measured
from potluck.fleet.roster import Roster
from potluck.optim.inner import InnerConfig
from potluck.planner.compression import CompressionConfig
from potluck.strategies.run import Budget, RunFacts
from potluck.types.ids import WorkerId
from potluck.types.params import Layout, Params
from potluck.types.profile import DeviceProfile, LinkRates

fast, slow = WorkerId("fast"), WorkerId("slow")


def facts(up: str = "fp32", **compression: object) -> RunFacts:
    nothing = Params(())
    return RunFacts(
        seed=1, layout=Layout.of([("w", (1000, 1000)), ("v", (100, 100))]), initial=nothing, zeros=nothing, seq_len=8,
        inner=InnerConfig(), budget=Budget(rounds=1), up_codec=up, down_codec="fp32",
        compression=CompressionConfig.model_validate(compression),
    )  # fmt: skip


async def specs(
    run: RunFacts, rates: dict[WorkerId, float], part: Sequence[int] = ()
) -> tuple[dict[WorkerId, str], list[str]]:
    roster = Roster(FleetConfig())
    for id, rate in rates.items():
        profile = DeviceProfile(device="cpu", link=LinkRates(up_bytes_per_s=rate))
        member = roster.arrive(id, profile, 0.0)
        for _ in range(3):
            member.observe("diloco.inner", 1.0, 1.0)
    encoding, reasons = UpEncoding(run, roster, InlineExecutor()), list[str]()
    encoding.told = lambda _worker, reason: reasons.append(reason)
    found = await encoding.specs("diloco.inner", dict.fromkeys(rates, 1.0), part)
    assert await encoding.specs("diloco.inner", dict.fromkeys(rates, 1.0), part) == found
    return found, reasons


def test_fixed_takes_the_recipes_way_for_all() -> None:
    found, reasons = asyncio.run(specs(facts("int4+ef"), {fast: 1e9, slow: 1e5}))
    assert found == {fast: "int4+ef", slow: "int4+ef"}
    assert reasons == []


def test_a_slow_link_compresses_and_a_fast_one_does_not_and_each_choice_is_told_once() -> None:
    found, reasons = asyncio.run(specs(facts("int8+ef", mode="adaptive"), {fast: 1e9, slow: 1e5}))
    assert found == {fast: "fp32", slow: "int8+ef"}
    assert len(reasons) == 2 and any("0.8 Mbit/s" in reason for reason in reasons)


def test_what_is_sent_of_a_part_of_the_model_is_as_large_as_that() -> None:
    rates, adaptive = {fast: 1e9, slow: 5e6}, facts("int8+ef", mode="adaptive")
    assert asyncio.run(specs(adaptive, rates))[0][slow] == "int8+ef"
    assert asyncio.run(specs(adaptive, rates, part=(1,)))[0][slow] == "fp32"


def test_the_bound_on_distortion_holds() -> None:
    names = ("fp32", "bf16", "int8", "int4")
    found, _ = asyncio.run(specs(facts(mode="adaptive", candidates=names, max_distortion=1e-5), {fast: 1e9, slow: 1e5}))
    assert found[slow] == "bf16"


@pytest.mark.parametrize(("name", "ratio", "lost"), [("fp32", 1, 0), ("bf16", 0.5, 3e-6), ("int8", 0.25, 8e-5)])
def test_candidates_are_measured(name: str, ratio: float, lost: float) -> None:
    found = measured(name)
    assert found.ratio == pytest.approx(ratio, rel=0.01)
    assert found.distortion == pytest.approx(lost, rel=0.3)
