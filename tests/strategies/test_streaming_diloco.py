"""Streaming DiLoCo beyond its contract: how it deals, that it contains DiLoCo, what overlaps, who joins and is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from contract import references
from pydantic import ValidationError
from worlds import virtual_world

from potluck.aggregation.config import AggregationConfig, Rule
from potluck.clock import run_virtual
from potluck.contract import checks
from potluck.coordinator.events import Event
from potluck.coordinator.plan import ValidationConfig
from potluck.fleet.config import FleetConfig
from potluck.fleet.leases import OpenLease
from potluck.optim.inner import InnerConfig
from potluck.protocol import pb
from potluck.simulator.exact.invariants import Witness
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.storage.ledger import LeaseRow
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.fleet import Fleet, WorkerInfo
from potluck.strategies.streaming_diloco import (
    StreamingDiLoCo,
    StreamingDiLoCoConfig,
    StreamingDiLoCoState,
    fragments,
)
from potluck.strategies.task import BoundTask
from potluck.transport.memory import Link
from potluck.types.errors import RecipeError, Refused, RoundFailed
from potluck.types.ids import WorkerId
from potluck.types.params import Layout, Params
from potluck.types.profile import DeviceProfile


def streaming(**settings: object) -> StreamingDiLoCo:
    return StreamingDiLoCo(StreamingDiLoCoConfig.model_validate({"outer_momentum": 0.6, **settings}))


@pytest.mark.parametrize("sockets", [False, True], ids=["memory", "grpc"])
def test_one_fragment_without_overlap_is_diloco_bit_for_bit(sockets: bool) -> None:
    ours = {"num_inner_steps": 3, "num_fragments": 1, "overlap_steps": 0, "mixing": 0.0}
    one, other = (
        checks.run(Problem(num_rounds=3, up_codec="int8", down_codec="bf16"), make, num_workers=2, sockets=sockets)
        for make in (lambda: streaming(**ours), lambda: DiLoCo(DiLoCoConfig(num_inner_steps=3, outer_momentum=0.6)))
    )
    assert torch.equal(one.params, other.params)
    assert one.round_losses == other.round_losses


def test_layers_are_strided_and_the_rest_fills_up_the_smallest() -> None:
    shapes = [("wte", [50]), ("wpe", [5]), *((f"h.{i}.w", [10]) for i in range(4)), ("ln_f", [2])]
    assert fragments(Layout.of(shapes), 2) == ((0, 2, 4), (1, 3, 5, 6))
    assert fragments(Layout.of(shapes), 1) == ((),)


@pytest.mark.parametrize(("num_layers", "number"), [(2, 3), (3, 10**12)])
def test_more_fragments_than_layers_are_refused(num_layers: int, number: int) -> None:
    layout = Layout.of([(f"h.{i}.w", [4]) for i in range(num_layers)])
    with pytest.raises(RecipeError, match=f"num_fragments is {number} and this model has layers for {num_layers}"):
        fragments(layout, number)


def test_a_fragment_without_a_layer_is_refused() -> None:
    layout = Layout.of([("h.0.w", [4]), ("h.2.w", [4])])
    with pytest.raises(RecipeError, match="num_fragments is 2 and this model has layers for 1; lower it"):
        fragments(layout, 2)


@pytest.mark.parametrize(
    "wrong", [{"num_inner_steps": 7, "num_fragments": 2}, {"num_inner_steps": 8, "overlap_steps": 8}]
)
def test_settings_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="must be"):
        StreamingDiLoCoConfig.model_validate(wrong)


def test_workers_train_on_while_a_fragment_travels() -> None:
    """Segments of 4 steps of 0.1 s, on links on which a fragment takes almost as long up and down."""

    def seconds(overlap: int) -> float:
        got = checks.run(
            Problem(num_rounds=8, validate=False),
            lambda: streaming(num_inner_steps=8, num_fragments=2, overlap_steps=overlap),
            num_workers=2,
            costs=lambda _: lambda lease: lease.num_sequences / 40.0,
        )
        rounds = [at for at, text in got.trace if text.startswith("round ")]
        return (rounds[-1] - rounds[0]) / 7

    assert seconds(0) > 1.5 * 0.4
    assert seconds(4) < 1.05 * 0.4


def test_a_validation_takes_no_longer_than_its_own_work() -> None:
    """Or workers would first train and deliver all that was begun, and have nothing to do meanwhile."""

    def seconds(every: int) -> float:
        got = checks.run(
            Problem(num_rounds=13, validating=ValidationConfig(every_rounds=every)),
            lambda: streaming(num_inner_steps=16, num_fragments=4, overlap_steps=12),
            num_workers=2,
            costs=lambda _: lambda lease: (lease.num_sequences or 4) / 40.0,
        )
        assert set(got.losses) == ({0, 13} if not every else {0, *range(every, 13, every), 13})
        rounds = [at for at, text in got.trace if text.startswith("round ")]
        return rounds[-1] - rounds[0]

    assert seconds(2) - seconds(0) < 6 * 0.1 + 0.1


@pytest.mark.parametrize("down_codec", ["fp32", "int4-delta"])
def test_a_validation_brings_workers_only_what_they_have_not(down_codec: str) -> None:
    """Though the model has moved so far since the last one that no difference would do for it as a whole."""

    def run(*, validate: bool) -> checks.Outcome:
        inner = InnerConfig(lr=0.1, batch_size=4, warmup=0.0, weight_decay=0.0)
        return checks.run(
            Problem(num_rounds=8, validate=validate, inner=inner, up_codec="int4", down_codec=down_codec),
            lambda: streaming(num_inner_steps=4, num_fragments=2, overlap_steps=0),
            num_workers=2,
        )

    with_it, without = run(validate=True), run(validate=False)
    assert torch.equal(with_it.params, without.params) and set(with_it.losses) == {0, 8}
    more = [with_it.bytes_down[worker] - count for worker, count in without.bytes_down.items()]
    fragment_bytes = 4 * with_it.params.numel() / 2 if down_codec == "fp32" else with_it.params.numel() / 2
    assert 0 < max(more) < 1.5 * fragment_bytes


def test_who_dies_for_good_and_who_joins_late_take_no_round_down() -> None:
    async def disturb(world: World) -> None:
        await world.clock.sleep(8.0)
        await world.crash("w3")
        await world.clock.sleep(14.0)
        world.add("w4", cost_s=checks.cost_s)

    got = checks.run(
        Problem(num_rounds=12, validate=False),
        lambda: streaming(num_inner_steps=6, num_fragments=2, overlap_steps=4),
        num_workers=3,
        min_workers=2,
        disturb=disturb,
    )
    told = [text for _, text in got.trace]
    workers = [text.split("  ")[2] for text in told if text.startswith("round ") and "  loss " in text]
    assert not any("discarded" in text for text in told)
    assert got.state.round == 12
    assert "w1, w2" in workers
    assert workers[-1] == "w1, w2, w4"


def test_who_dies_is_missed_before_the_others_have_done_all_that_was_begun_early() -> None:
    """Two segments of 8 s are under way at a time: the others end the one it died in within 8 s, the other in 16."""
    died_at: list[float] = []
    lost: list[Event] = []

    async def disturb(world: World) -> None:
        world.on_event = lambda event: lost.append(event) if event.kind == "lost" else None
        await world.clock.sleep(13.0)
        await world.crash("w3")
        died_at.append(world.clock.time())

    checks.run(
        Problem(num_rounds=8, validate=False),
        lambda: streaming(num_inner_steps=12, num_fragments=2, overlap_steps=6),
        num_workers=3,
        min_workers=2,
        disturb=disturb,
        costs=lambda _: lambda lease: lease.num_sequences / 3.0,
    )
    assert lost[0].detail["worker"] == "w3"
    assert 6.0 <= lost[0].at - died_at[0] < 9.0


class Uneven:
    """A fleet whose second worker takes so many times the steps that it is asked for in the parts of a segment."""

    def __init__(self, fleet: Fleet, before: int, after: int) -> None:
        self._fleet, self._paces = fleet, {"a": before, "b": after}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    async def enqueue(self, tasks: Mapping[WorkerId, BoundTask], *, key: str, **options: Any) -> None:
        pace = self._paces[key[-1]]
        uneven = {
            w: replace(
                x, num_sequences=pace * x.num_sequences,
                arguments={**x.arguments, "num_steps": pace * x.arguments["num_steps"]},
            )
            if w == "w2" else x for w, x in tasks.items()
        }  # fmt: skip
        await self._fleet.enqueue(uneven, key=key, **options)


class UnevenStreaming(StreamingDiLoCo):
    def __init__(self, config: StreamingDiLoCoConfig, before: int, after: int) -> None:
        super().__init__(config)
        self._paces = (before, after)

    async def run_round(self, state: StreamingDiLoCoState, fleet: Fleet) -> StreamingDiLoCoState:
        return await super().run_round(state, cast("Fleet", Uneven(fleet, *self._paces)))


@pytest.mark.parametrize(
    ("overlap", "before"), [(0, 2), (3, 2), (4, 2), (4, 5)],
    ids=["none", "one", "one and a third", "unequal within a segment too"],
)  # fmt: skip
@pytest.mark.parametrize("eager", [False, True], ids=["plain", "eager"])
def test_workers_of_unequal_weight_equal_a_plain_loop(eager: bool, overlap: int, before: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "num_inner_steps": 6, "overlap_steps": overlap, "mixing": 0.5, "outer_momentum": 0.6, "eager": eager
    }  # fmt: skip
    problem = Problem(num_rounds=8)
    problem.store_shards(tmp_path)
    config = StreamingDiLoCoConfig(num_fragments=2, **settings)
    got = checks.run(problem, lambda: UnevenStreaming(config, before, 2), num_workers=2)
    expected, other = (
        references.streaming_diloco(
            problem, **{**settings, "eager": e}, outer_lr=0.7, paces=(1, 2), first_paces=(1, before)
        )
        for e in (eager, not eager)
    )
    assert (got.params - expected).abs().max() < 5e-6
    assert (got.params - other).abs().max() > 1e-3
    assert len(got.kept[WorkerId("w1")]) == (3 if eager else 2)
    # Half of the model is sent at a time.
    assert StreamingDiLoCo(config).kept_vectors == (3.5 if eager else 2.0)


def entering(rule: Rule, *workers: WorkerInfo, round: int = 4) -> dict[WorkerId, tuple[int, int]]:
    """Who takes part in round 4, in which w1 to w4 were training, each with where it enters and since when."""
    members = {WorkerId(f"w{i}"): (0, 0) for i in range(1, 5)}
    nothing = Params(())
    state = StreamingDiLoCoState(params=nothing, momentum=nothing, members=members, round=round)
    fleet = SimpleNamespace(
        run=SimpleNamespace(aggregation=AggregationConfig(rule=rule)), workers=lambda: workers
    )  # of which no more is asked
    strategy = streaming(num_inner_steps=8, num_fragments=2, overlap_steps=4)
    return strategy._members(state, cast(Fleet, fleet))  # pyright: ignore[reportPrivateUsage]


def here(name: str, **how: bool) -> WorkerInfo:
    return WorkerInfo(id=WorkerId(name), profile=DeviceProfile(device="cpu"), **how)


def test_who_joins_enters_where_the_others_are_next() -> None:
    working, new = [here(f"w{i}", under_way=True, holds_state=True) for i in range(1, 5)], here("w5")
    assert entering("mean", *working, new) == {**dict.fromkeys(["w1", "w2", "w3", "w4"], (0, 0)), "w5": (5, 4)}
    assert entering("median", *working, new)["w5"] == (5, 4)  # it does what it can with four
    assert entering("mean", new) == {"w5": (4, 4)}


def test_all_enter_at_once_where_those_who_train_are_too_few_for_the_rule() -> None:
    """Else no round would be committed, and nobody who joins ever counted: krum takes five."""
    working = [here(f"w{i}", under_way=True, holds_state=True) for i in range(1, 5)]
    with pytest.raises(RoundFailed, match="4 of 5 workers are training, too few for krum"):
        entering("krum", *working, here("w5"))
    back = [here(f"w{i}", holds_state=True) for i in range(1, 5)]  # since that round was discarded
    assert entering("krum", *back, here("w5")) == dict.fromkeys(["w1", "w2", "w3", "w4", "w5"], (4, 4))
    assert entering("krum", *back) == dict.fromkeys(["w1", "w2", "w3", "w4"], (0, 0))  # there are not enough anyhow


def test_a_worker_that_takes_the_place_of_one_that_died_is_enough_for_the_rule() -> None:
    """Krum takes five: no round can be committed with the four that are left while a fragment travels."""

    async def disturb(world: World) -> None:
        while sum(event.kind == "round" for event in world.events) < 2:
            await world.clock.sleep(0.1)
        world.add("w6", cost_s=lambda lease: lease.num_sequences / 8.0)
        await world.crash("w2")

    krum = AggregationConfig(rule="krum")
    got = checks.run(
        Problem(num_rounds=6, validate=False, aggregation=krum),
        lambda: streaming(num_inner_steps=4, num_fragments=2, overlap_steps=2),
        num_workers=5,
        min_workers=5,
        disturb=disturb,
        costs=lambda _: lambda lease: lease.num_sequences / 8.0,
    )
    assert len(got.round_losses) == 6


def test_a_chain_is_gone_on_with_in_its_order_after_a_restart() -> None:
    """Also where names of tasks sort otherwise: "10" comes before "9"."""

    def played(disturb: Callable[[World], Awaitable[None]] | None = None) -> checks.Outcome:
        return checks.run(
            Problem(num_rounds=14, validate=False),
            lambda: streaming(num_inner_steps=12, num_fragments=4, overlap_steps=9),
            num_workers=2,
            min_workers=2,
            disturb=disturb,
            costs=lambda _: lambda lease: lease.num_sequences / 3.0,
        )

    async def disturb(world: World) -> None:
        while sum(event.kind == "round" for event in world.events) < 7:
            await world.clock.sleep(0.1)
        await world.crash_coordinator()
        for name in ("w1", "w2"):
            await world.crash(name)
        await world.clock.sleep(1.0)
        await world.start()
        for name in ("w1", "w2"):
            world.switch_on(WorkerId(name))

    calm, got = played(), played(disturb)
    assert torch.equal(got.params, calm.params)


class SlowLink:
    """Three workers, the second with a link on which an update takes longer than the steps of two segments: what it
    trained after it is accepted already when the update comes. Every commit is looked at by a witness."""

    def __init__(self, overlap: int, folder: Path) -> None:
        problem = Problem(num_rounds=8, fleet=FleetConfig(min_workers=3, no_progress_s=60.0, quarantine_after=9))
        self.world = virtual_world(
            problem, streaming(num_inner_steps=8, num_fragments=2, overlap_steps=overlap), folder
        )
        self.witness = Witness(problem.num_shards * problem.sequences_per_shard, problem.seq_len)
        self.num_lost = 0
        self.accepted: list[str] = []  # of w2 when it first lost something
        self.world.on_event = self._heard
        for name in ("w1", "w2", "w3"):
            slow = Link(up_bytes_per_s=2e4, down_bytes_per_s=1e6) if name == "w2" else Link()
            self.world.add(name, link=slow, cost_s=lambda lease: lease.num_sequences / 40.0)
        self.lost: Callable[[], None] = lambda: None  # hears that work was lost, before it is written down

    def _heard(self, event: Event) -> None:
        if self.world.run is None:
            return
        if event.kind == "round":
            self.witness.told(self.world.run, event.detail["round"])
        if event.kind == "lost":
            self.num_lost += 1
            if self.num_lost == 1:
                replies = self.world.run.fleet.ahead.work.attempt.replies
                self.accepted = [name.partition("#")[0] for name in replies if "/w2#" in name]
            self.lost()

    async def first_loss(self) -> None:
        while not self.num_lost:
            await self.world.clock.sleep(0.01)

    def start_again(self, then: Callable[[], None] = lambda: None) -> None:
        """The coordinator dies now."""
        self.world.kill_coordinator()
        self.world.later(1.0, lambda: self.world.restart().add_done_callback(lambda _: then()))

    async def took_part(self) -> list[str]:
        """To the end: whose work counted in each round."""
        while self.world.run is None or not self.world.training_is_over:
            await self.world.clock.sleep(0.01)
            if self.world.run is not None:
                self.witness.glance(self.world.run)
        await self.world.finish()
        return [",".join(event.detail["workers"]) for event in self.world.events if event.kind == "round"]


@pytest.mark.parametrize("overlap", [2, 6], ids=["within a segment", "over two segments"])
@pytest.mark.parametrize("restart", ["none", "before it is written down", "after it is written down"])
def test_nothing_counts_that_follows_a_refused_update(overlap: int, restart: str, tmp_path: Path) -> None:
    async def main() -> list[str]:
        played = SlowLink(overlap, tmp_path)

        def refuse() -> None:
            """The update of "3b", as one whose norm is over the limit."""
            assert played.world.run is not None
            intake = played.world.run.intake
            check = intake._check_object

            def checked(lease: OpenLease, digest: str) -> None:
                if lease.message.key.startswith("3b/w2#"):
                    raise Refused("its norm is over the limit")
                check(lease, digest)

            intake._check_object = checked

        def lost() -> None:
            if restart == "before it is written down" and played.num_lost == 1:
                played.start_again(then=refuse)

        played.lost = lost
        await played.world.start()
        refuse()
        await played.first_loss()
        if restart == "after it is written down":
            await played.world.clock.sleep(0.01)
            played.start_again()
        took_part = await played.took_part()
        assert "4a/w2" in played.accepted
        assert played.num_lost == (2 if restart == "before it is written down" else 1)
        return took_part

    took_part = run_virtual(main())
    assert took_part[:5] == [*["w1,w2,w3"] * 3, "w1,w3", "w1,w3"]
    assert len(took_part) == 8 and took_part[-1] == "w1,w2,w3"


def test_a_task_that_fails_is_held_against_its_worker_once_with_all_that_follows_it(tmp_path: Path) -> None:
    """Their results come in one report: what follows has not the state that was not made."""

    async def main() -> list[str]:
        played = SlowLink(6, tmp_path)
        await played.world.start()
        while played.world.run is None or played.world.run.state is None or played.world.run.state.round < 2:
            await played.world.clock.sleep(0.01)
        run, w2 = played.world.run, WorkerId("w2")
        member, failed = run.roster.members[w2], [x.message for x in run.fleet.book.of(w2)]
        assert len(failed) > 1
        run.intake.report(member, pb.Report(results=[
            pb.TaskResult(round=x.round, attempt=x.attempt, key=x.key, error="no", lacks_state=x is not failed[0])
            for x in failed
        ]))  # fmt: skip
        await played.world.clock.sleep(0.005)
        assert member.strikes == 1
        assert not {x.key for x in failed} & {x.message.key for x in run.fleet.book.of(w2)}
        assert "lacks/w2" not in run.fleet.ahead.work.attempt.decisions
        return await played.took_part()

    assert run_virtual(main())[-1] == "w1,w2,w3"


@pytest.mark.parametrize("restart", [False, True], ids=["none", "once it was handed out"])
def test_nothing_is_handed_out_after_work_that_was_lost_meanwhile(restart: bool, tmp_path: Path) -> None:
    """ "3b" is lost while "4b" is being handed out, which follows it."""

    async def main() -> list[str]:
        played = SlowLink(6, tmp_path)
        await played.world.start()
        run = played.world.run
        assert run is not None
        specs, issue = run.fleet.encoding.specs, run.ledger.issue

        async def losing(task: str, units: Mapping[WorkerId, float], part: Sequence[int]) -> dict[WorkerId, str]:
            if run.state is not None and run.state.round == 3 and not played.num_lost:
                (lease,) = (x for x in run.fleet.book.of(WorkerId("w2")) if x.message.key.startswith("3b/"))
                await run.fleet.lose(lease, "its worker has no more time")
            return await specs(task, units, part)

        def issued(round: int, attempt: int, leases: Iterable[LeaseRow], deal: Any) -> None:
            rows = list(leases)
            issue(round, attempt, rows, deal)
            if restart and any(row.key.startswith("4b/w2#") for row in rows):
                played.start_again()

        run.fleet.encoding.specs, run.ledger.issue = losing, issued
        took_part = await played.took_part()
        assert "4a/w2" in played.accepted
        assert played.num_lost == 1
        return took_part

    took_part = run_virtual(main())
    assert took_part[:5] == [*["w1,w2,w3"] * 3, "w1,w3", "w1,w3"]
    assert len(took_part) == 8 and took_part[-1] == "w1,w2,w3"
