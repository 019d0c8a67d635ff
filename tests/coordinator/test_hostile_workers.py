"""A member with a valid certificate that lies: the run goes on without it, whatever it says."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from worlds import virtual_world

from potluck.clock import run_virtual
from potluck.codecs.base import codec
from potluck.codecs.bundle import write_flat
from potluck.coordinator.plan import Plan
from potluck.coordinator.service import MAX_TRANSFERS
from potluck.fleet.config import FleetConfig
from potluck.fleet.roster import Roster
from potluck.optim.inner import InnerConfig
from potluck.protocol import pb, upload_purpose, version
from potluck.protocol.frames import pack_chunk, pack_data
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.strategy import Strategy
from potluck.strategies.zeroth_order import ZerothOrder, ZerothOrderConfig
from potluck.transport.connection import Connection, Peer
from potluck.transport.memory import Link
from potluck.transport.objects import _crowd
from potluck.types.errors import ConnectionLost, Refused
from potluck.types.ids import WorkerId
from potluck.types.params import Layout
from potluck.types.profile import DeviceProfile

Lie = Callable[[pb.Lease, pb.TaskResult], pb.TaskResult]
"""What the liar reports for a lease, made from an honest answer."""


class Liar:
    """A worker by the protocol alone: takes every lease and answers at once."""

    def __init__(self, world: World, folder: Path, lie: Lie, *, spoil: Callable[[bytes], bytes]) -> None:
        self.world, self.folder, self.lie, self.spoil = world, folder, lie, spoil
        self.id = WorkerId("liar")
        self.verdicts: list[pb.Verdict] = []
        self.refusals: list[str] = []
        self.num_leases = 0
        folder.mkdir()

    async def work(self) -> None:
        while True:
            try:
                connection = await self.world.network.connect(Peer(id=self.id), Link())
                await self._serve(connection)
            except ConnectionLost:
                pass
            except Refused as refused:
                self.refusals.append(str(refused))
            await self.world.clock.sleep(0.2)

    async def _serve(self, connection: Connection) -> None:
        await connection.call("Welcome", pb.WelcomeRequest(version=version()).SerializeToString())
        control = await connection.open("Control")
        results: dict[str, pb.TaskResult] = {}
        seen: set[tuple[int, int, str]] = set()
        sending = asyncio.create_task(self._beat(control, results))
        try:
            while (message := await control.receive()) is not None:
                desired = pb.Desired.FromString(message)
                self.verdicts += desired.verdicts
                for lease in desired.leases:
                    id = (lease.round, lease.attempt, lease.key)
                    if id not in seen:
                        seen.add(id)
                        self.num_leases += 1
                        result = self.lie(lease, await self._honest(connection, lease))
                        results[lease.key] = result
                        await control.send(pb.Report(results=results.values()).SerializeToString())
        finally:
            sending.cancel()

    async def _beat(self, control: Any, results: dict[str, pb.TaskResult]) -> None:
        while True:
            await self.world.clock.sleep(1.0)
            await control.send(pb.Report(results=results.values()).SerializeToString())

    async def _honest(self, connection: Connection, lease: pb.Lease) -> pb.TaskResult:
        result = pb.TaskResult(key=lease.key, attempt=lease.attempt, round=lease.round, seconds=0.1)
        num_tokens = (lease.num_sequences or sum(s.stop - s.start for s in lease.spans)) * 8
        numbers = {"num_tokens": num_tokens, "loss_sum": 2.0 * num_tokens, "num_steps": num_tokens // 32}
        result.scalars_json = json.dumps(numbers)
        if not lease.held_out:
            layout = self.world.plan.layout
            result.object = await self._upload(connection, lease, layout)
        return result

    async def _upload(self, connection: Connection, lease: pb.Lease, layout: Layout) -> str:
        path = self.folder / "update"
        write_flat(path, "delta", torch.full((layout.numel,), 1e-4), layout, codec("fp32"))
        data = self.spoil(path.read_bytes())
        digest = "blake3:" + blake3(data).hexdigest()
        put = await connection.open("PutObject")
        purpose = upload_purpose(lease.round, lease.attempt, lease.key)
        await put.send(pb.ObjectInfo(digest=digest, size=len(data), purpose=purpose).SerializeToString())
        ack = pb.PutAck.FromString(await put.receive() or b"")
        if not ack.done:
            await put.send(pack_chunk(0, data))
            while (message := await put.receive()) is not None and not pb.PutAck.FromString(message).done:
                pass
        await put.close()
        return digest


def scalars(**values: Any) -> Lie:
    """An honest result with other numbers; None for one that is left out."""

    def lie(lease: pb.Lease, result: pb.TaskResult) -> pb.TaskResult:
        said: dict[str, Any] = {**json.loads(result.scalars_json), **values}
        result.scalars_json = json.dumps({k: v for k, v in said.items() if v is not None})
        return result

    return lie


def text(scalars_json: str) -> Lie:
    def lie(lease: pb.Lease, result: pb.TaskResult) -> pb.TaskResult:
        result.scalars_json = scalars_json
        return result

    return lie


def changed(**values: Any) -> Lie:
    """An honest result with other fields."""

    def lie(lease: pb.Lease, result: pb.TaskResult) -> pb.TaskResult:
        for name, value in values.items():
            setattr(result, name, value)
        return result

    return lie


def honest(lease: pb.Lease, result: pb.TaskResult) -> pb.TaskResult:
    return result


def same(update: bytes) -> bytes:
    return update


def run_with(
    folder: Path,
    lie: Lie,
    spoil: Callable[[bytes], bytes] = same,
    *,
    validate: bool = True,
    kind: type[Problem] = Problem,
    strategy: Strategy | None = None,
    **fleet: Any,
) -> tuple[World, Liar]:
    """Two honest workers and the liar, to the end of a run of four rounds."""
    strategy = strategy or DiLoCo(DiLoCoConfig(num_inner_steps=2, min_reply_fraction=0.3))
    problem = kind(num_rounds=4, validate=validate)
    problem.fleet = FleetConfig(
        min_workers=2, no_progress_s=20.0, max_update_norm=50.0, quarantine_after=2, max_discarded_rounds=2, **fleet
    )

    async def main() -> tuple[World, Liar]:
        world = virtual_world(problem, strategy, folder)
        await world.start()
        liar = Liar(world, folder / "liar", lie, spoil=spoil)
        lying = asyncio.create_task(liar.work())
        await world.clock.sleep(0.5)
        for name in ("w1", "w2"):
            world.add(name, cost_s=lambda _: 1.0)
        try:
            await asyncio.wait_for(world.finish(), 900.0)
        finally:
            lying.cancel()
            await asyncio.gather(lying, return_exceptions=True)
        return world, liar

    return run_virtual(main())


def test_what_is_honest_by_the_protocol_is_accepted(tmp_path: Path) -> None:
    """The liar of these tests is a full worker as long as it does not lie."""
    world, liar = run_with(tmp_path, honest)
    assert liar.num_leases >= 4 and not liar.refusals
    assert {v.verdict for v in liar.verdicts} == {"accepted"}
    rounds = [e for e in world.events if e.kind == "round"]
    assert all("liar" in e.detail["workers"] for e in rounds) and len(rounds) == 4


@pytest.mark.parametrize(
    "lie",
    [
        scalars(num_tokens=0), scalars(num_tokens=-5), scalars(num_tokens=10**9), scalars(num_tokens=None),
        scalars(num_tokens=1), scalars(num_tokens=63), scalars(num_tokens=65),
        scalars(num_tokens=1.5), scalars(num_tokens="9"), scalars(num_tokens=True), scalars(loss_sum=None),
        scalars(loss_sum="much"), scalars(loss_sum=10**400), scalars(loss_sum=math.nan), scalars(loss_sum=math.inf),
        scalars(loss_sum=1e308), scalars(loss_sum=True), scalars(loss_sum=[1.0]), text("[" * 60000), text("{"),
        text("[]"), text("7"), text('{"num_tokens": ' + "9" * 5000 + "}"), text('{"\\ud800": []}'),
        text('{"x": ["\\ud800"]}'), text(json.dumps({"s": "x" * 70000})),
        changed(object=""), changed(error="\x1b[31mno\n" * 1000),
    ],
)  # fmt: skip
def test_lies_in_a_result_are_refused(tmp_path: Path, lie: Lie) -> None:
    """Two steps of four sequences of eight tokens were granted."""
    world, liar = run_with(tmp_path, lie)
    assert len([e for e in world.events if e.kind == "round"]) == 4
    assert world.last is not None and world.last.roster.members[liar.id].quarantined
    assert not liar.refusals, "a stream broke, so a check failed instead of refusing"
    assert all(str(e.text).isprintable() for e in world.events)
    assert all(e.detail["workers"] == ["w1", "w2"] for e in world.events if e.kind == "round")


@pytest.mark.parametrize(
    "lie",
    [
        scalars(num_steps=0), scalars(num_steps=-1), scalars(num_steps=3), scalars(num_steps=1.0),
        scalars(num_steps=1), scalars(num_steps=2, num_tokens=32), scalars(num_steps=1, num_tokens=33),
        scalars(num_steps=None), scalars(num_steps="2"), scalars(num_steps=True, num_tokens=32),
    ],
)  # fmt: skip
def test_lies_of_a_task_that_may_end_early_are_refused(tmp_path: Path, lie: Lie) -> None:
    """Two steps of four sequences of eight tokens were granted: data is dealt by what it says."""
    world, liar = run_with(tmp_path, lie, balance="time")
    assert world.last is not None and world.last.roster.members[liar.id].quarantined
    assert all(e.detail["workers"] == ["w1", "w2"] for e in world.events if e.kind == "round")


class Answers(Problem):
    """Data of records: how many of a record's tokens are predicted, its worker says."""

    def plan(self, strategy: Strategy) -> Plan:
        plan = super().plan(strategy)
        return replace(plan, spec=plan.spec.model_copy(update={"data_options": {"format": "chat"}}))


@pytest.mark.parametrize("balance", ["none", "time"])
@pytest.mark.parametrize(("num_tokens", "is_believed"), [(8, True), (40, True), (64, True), (7, False), (65, False)])
def test_answers_have_at_least_one_token_and_at_most_all(
    tmp_path: Path, num_tokens: int, is_believed: bool, balance: str
) -> None:
    """Two steps of four records of eight tokens were granted."""
    lie = scalars(num_tokens=num_tokens, num_steps=2)
    world, liar = run_with(tmp_path, lie, validate=False, kind=Answers, balance=balance)
    assert world.last is not None and world.last.roster.members[liar.id].quarantined != is_believed
    assert {v.verdict for v in liar.verdicts} == ({"accepted"} if is_believed else {"refused"})


class Plain(Problem):
    """Steps as `zeroth_order` takes them."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, inner=InnerConfig(optimizer="sgd", weight_decay=0.0, batch_size=4))


def test_a_result_without_the_text_that_its_task_declares_is_refused(tmp_path: Path) -> None:
    strategy = ZerothOrder(ZerothOrderConfig(num_perturbations=2, num_local_steps=2, min_reply_fraction=0.3))
    for number, lie in enumerate((honest, scalars(slopes=7))):
        world, liar = run_with(tmp_path / str(number), lie, validate=False, kind=Plain, strategy=strategy)
        assert world.last is not None and world.last.roster.members[liar.id].quarantined
        assert {v.verdict for v in liar.verdicts} == {"refused"}
        assert all("its slopes is" in v.reason and "must be text" in v.reason for v in liar.verdicts)


def test_half_of_the_work_is_taken_for_half(tmp_path: Path) -> None:
    world, liar = run_with(tmp_path, scalars(num_steps=1, num_tokens=32), validate=False, balance="time")
    assert {v.verdict for v in liar.verdicts} == {"accepted"}
    rounds = [e for e in world.events if e.kind == "round"]
    assert all(e.detail["cut_short"] == {"liar": 1} for e in rounds) and len(rounds) == 4
    assert rounds[0].text.endswith("liar cut short by 1 steps")
    assert world.last is not None and world.last.deck.account()[0]["consumed"] == 4 * (2 * 8 + 4)


def filled(value: float) -> Callable[[bytes], bytes]:
    """The update with one value all over."""
    honest_value, other = struct.pack("<f", 1e-4), struct.pack("<f", value)
    return lambda update: update.replace(honest_value, other)


@pytest.mark.parametrize(
    "spoil",
    [
        filled(math.nan), filled(math.inf), filled(1e30), filled(1.0), lambda update: update[:-4],
        lambda update: update + bytes(64), lambda update: bytes(100), lambda update: update.replace(b"delta", b"gamma"),
        lambda update: update.replace(b"fp32", b"int8"), lambda update: update.replace(b"[16,", b"[61,"),
    ],
)  # fmt: skip
def test_updates_that_would_spoil_the_model_are_refused(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    world, liar = run_with(tmp_path, honest, spoil, validate=False)
    assert len([e for e in world.events if e.kind == "round"]) == 4
    assert not liar.refusals
    assert world.last is not None and world.last.roster.members[liar.id].quarantined


def attacked(folder: Path, attack: Callable[[World, Connection], Awaitable[Any]]) -> tuple[World, Any]:
    """A run of four rounds by two honest workers while a third member does as `attack` says."""
    problem = Problem(num_rounds=4, validate=False)
    problem.fleet = FleetConfig(min_workers=2, no_progress_s=20.0, max_discarded_rounds=2)

    async def main() -> tuple[World, Any]:
        world = virtual_world(problem, DiLoCo(DiLoCoConfig(num_inner_steps=2, min_reply_fraction=0.3)), folder)
        await world.start()
        for name in ("w1", "w2"):
            world.add(name, cost_s=lambda _: 10.0)
        await world.clock.sleep(1.0)
        connection = await world.network.connect(Peer(id=WorkerId("flood")), Link())
        found = await attack(world, connection)
        await connection.close()
        await asyncio.wait_for(world.finish(), 900.0)
        return world, found

    world, found = run_virtual(main())
    assert len([e for e in world.events if e.kind == "round"]) == 4
    assert not [e for e in world.events if e.kind == "discarded"]
    return world, found


hello = pb.WelcomeRequest(version=version()).SerializeToString()


def test_a_flood_of_welcomes_waits_and_is_refused(tmp_path: Path) -> None:
    async def attack(world: World, connection: Connection) -> list[float]:
        start, answered = world.clock.now(), list[float]()

        async def welcome() -> None:
            await connection.call("Welcome", hello)
            answered.append(world.clock.now() - start)

        results = await asyncio.gather(*(welcome() for _ in range(1000)), return_exceptions=True)
        assert len([r for r in results if isinstance(r, Refused)]) == 1000 - len(answered)
        return answered

    world, answered = attacked(tmp_path, attack)
    assert len(answered) == 21 and answered[-1] == pytest.approx(10.0, abs=0.5)
    assert len([e for e in world.events if e.kind == "joined"]) == 21 + 2


def test_a_flood_of_reports_makes_its_sender_wait_and_fills_no_log(tmp_path: Path) -> None:
    async def attack(world: World, connection: Connection) -> float:
        await connection.call("Welcome", hello)
        control, start = await connection.open("Control"), world.clock.now()
        for number in range(20_000):
            await asyncio.wait_for(control.send(pb.Report(note=f"{number} {'x' * 10_000}").SerializeToString()), 600.0)
            if world.clock.now() - start > 20.0:
                return number / (world.clock.now() - start)
        raise AssertionError("nothing made the flood wait")

    world, reports_per_s = attacked(tmp_path, attack)
    assert reports_per_s < 100
    assert len([e for e in world.events if e.kind == "note"]) < 30


def test_a_flood_of_control_streams_waits_and_fills_no_log(tmp_path: Path) -> None:
    async def attack(world: World, connection: Connection) -> float:
        await connection.call("Welcome", hello)
        start = world.clock.now()
        for _ in range(100):
            control = await connection.open("Control")
            await control.send(pb.Report().SerializeToString())
            await control.close()
        return world.clock.now() - start

    world, took_s = attacked(tmp_path, attack)
    left = [e for e in world.events if e.kind == "left" and e.detail["worker"] == "flood"]
    assert len(left) == 100 and took_s == pytest.approx(48.0, abs=1.0)


def test_long_reports_count_as_many(tmp_path: Path) -> None:
    async def attack(world: World, connection: Connection) -> float:
        await connection.call("Welcome", hello)
        control, start = await connection.open("Control"), world.clock.now()
        long = pb.Report(note="x" * (3 << 20)).SerializeToString()
        for _ in range(10):
            await asyncio.wait_for(control.send(long), 600.0)
        return world.clock.now() - start

    assert attacked(tmp_path, attack)[1] == pytest.approx(4.0, abs=0.1)  # of which none without


def test_inline_results_that_nobody_asked_for_are_not_kept(tmp_path: Path) -> None:
    """Kept, so many unfinished ones would end the stream."""

    async def attack(world: World, connection: Connection) -> bool:
        await connection.call("Welcome", hello)
        data = await connection.open("Data")
        for number in range(200):
            head = {"lease": [0, 0, f"k{number}"], "offset": 0, "total": 1 << 20}
            await data.send(pack_data(head, b"some"))
        reading = asyncio.ensure_future(data.receive())
        await world.clock.sleep(0.5)
        is_open = not reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await data.send(pack_data({"lease": [0, 0, "inner/w1"], "offset": 0, "total": 1 << 30}, b"some"))
        with pytest.raises(Refused, match="claims 1073741824 bytes"):
            await data.receive()
        return is_open

    assert attacked(tmp_path, attack)[1]


def test_a_worker_has_one_stream_for_inline_results(tmp_path: Path) -> None:
    """So what it leaves unfinished is bounded, however many streams it opens."""

    async def attack(world: World, connection: Connection) -> int:
        await connection.call("Welcome", hello)
        streams = [await connection.open("Data") for _ in range(20)]
        await world.clock.sleep(0.5)
        ended = [asyncio.ensure_future(stream.receive()) for stream in streams]
        await world.clock.sleep(0.5)
        num_open = sum(not read.done() for read in ended)
        for read in ended:
            read.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        return num_open

    assert attacked(tmp_path, attack)[1] == 1


def test_invented_progress_holds_no_round_for_ever(tmp_path: Path) -> None:
    """A member that takes work and says each second that it is a step further, or back."""

    async def attack(world: World, connection: Connection) -> list[str]:
        await connection.call("Welcome", hello)
        control = await connection.open("Control")
        leases: dict[str, pb.Lease] = {}

        async def hear() -> None:
            while (message := await control.receive()) is not None:
                leases.clear()
                leases.update((lease.key, lease) for lease in pb.Desired.FromString(message).leases)

        hearing = asyncio.create_task(hear())
        for second in range(400):
            progress = [
                pb.Progress(key=x.key, attempt=x.attempt, activity="training", step=second % 2) for x in leases.values()
            ]
            await control.send(pb.Report(progress=progress).SerializeToString())
            await world.clock.sleep(1.0)
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        return [str(e.text) for e in world.events if e.kind == "lost"]

    world, lost = attacked(tmp_path, attack)
    assert lost and all(text.startswith("flood has made no progress for") for text in lost)
    assert max(e.detail["seconds"] for e in world.events if e.kind == "round") < 120.0


def test_a_worker_has_so_many_object_streams_and_none_that_stands_still(tmp_path: Path) -> None:
    async def attack(world: World, connection: Connection) -> tuple[int, int, list[str]]:
        await connection.call("Welcome", hello)
        streams = [await connection.open("PutObject") for _ in range(3 * MAX_TRANSFERS)]
        ends = [asyncio.ensure_future(stream.receive()) for stream in streams]
        await world.clock.sleep(1.0)
        num_open = sum(not end.done() for end in ends)
        await world.clock.sleep(20.0)
        await asyncio.gather(*ends, return_exceptions=True)
        return num_open, _crowd._num, [str(end.exception()) for end in ends]

    _, (num_open, num_left, reasons) = attacked(tmp_path, attack)
    assert (num_open, num_left) == (MAX_TRANSFERS, 0)
    assert sorted(set(reasons)) == [
        "a transfer of flood stood still for 20 s", "flood has 8 transfers under way; end one or wait"
    ]  # fmt: skip


def test_who_never_has_its_state_is_left_out_like_any_whose_work_fails(tmp_path: Path) -> None:
    """Once it is no fault: a disk was lost. Where nobody waits for it, it would be given work at once, for ever."""
    world, liar = run_with(tmp_path, changed(error="it is gone", lacks_state=True))
    assert world.last is not None and world.last.roster.members[liar.id].quarantined
    assert liar.num_leases == 3


def test_right_numbers_do_not_make_up_for_a_wrong_update() -> None:
    """Tasks that send no update go between those that do, in streaming methods and where a round is validated."""
    roster = Roster(FleetConfig(quarantine_after=3))
    member = roster.arrive(WorkerId("liar"), DeviceProfile(device="cpu"), 0.0)
    for _ in range(2):
        roster.refused(member, "nonsense", 0.0, is_update=True)
        roster.succeeded(member, is_update=False)
    assert member.strikes == 2
    roster.succeeded(member, is_update=True)
    assert member.strikes == 0
    for _ in range(3):
        roster.refused(member, "nonsense", 0.0, is_update=True)
        roster.succeeded(member, is_update=False)
    assert member.quarantined == "3 refused results in a row, the last: nonsense"
