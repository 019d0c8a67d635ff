"""What a worker wants, does and keeps, with a toy device."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.codecs.bundle import Bundle, pack_tensors
from potluck.protocol import AHEAD, pb
from potluck.simulator.exact.problem import Problem
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.run import RunSpec
from potluck.strategies.task import Result, task
from potluck.types.errors import OwnerRefused, ResourceError
from potluck.types.ids import Digest
from potluck.types.params import Layout
from potluck.worker.gate import Gate
from potluck.worker.link import Link
from potluck.worker.runner import Runner
from potluck.worker.session import lease_id
from potluck.worker.sources import MAX_SHARDS_KEPT, Sources
from potluck.worker.state import RunFolder
from potluck.worker.trainer import Trainer

calls: list[int] = []


@task("toyrun.note")
def note(replica: object, *, number: int) -> Result:
    calls.append(number)
    return Result({"number": number})


@task("toyrun.update", kind="pinned", numbers=("number",), vector="delta")
def update(replica: object, *, number: int) -> Result:
    return Result({"number": number}, {"delta": torch.linspace(-number, number, 4)})


class Device:
    """A replica that only keeps what it is fed."""

    layout = Layout.of([("a", (4,))])
    private = None

    def __init__(self) -> None:
        self.source: Iterable[Tensor] = ()
        self.on_step: Any = None

    def feed(self, source: Iterable[Tensor], is_cut_short: Any) -> None:
        self.source = source

    def cancel(self) -> None:
        pass

    def reset_local_state(self) -> None:
        pass

    def local_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {}

    def restore_local_state(self, tensors: Any, scalars: Any) -> None:
        pass


def spec() -> RunSpec:
    return Problem().plan(DiLoCo(DiLoCoConfig())).spec


def make(folder: Path, trainer: Trainer | None = None) -> Runner:
    home = RunFolder(folder)
    trainer = trainer or Trainer(Device(), home, lambda _: None)  # pyright: ignore[reportArgumentType]
    return Runner(
        spec=spec(), folder=home, trainer=trainer, sources=Sources(spec=spec(), objects=home.objects),
        link=Link(VirtualClock()), clock=VirtualClock(), compute=InlineExecutor(), files=InlineExecutor(),
        note=lambda _: None,
    )  # fmt: skip


def lease(key: str = "k", number: int = 1) -> pb.Lease:
    return pb.Lease(
        key=key, round=0, attempt=0, task="toyrun.note", kind="pure", arguments_json=f'{{"number":{number}}}'
    )


def test_batches_of_a_task_without_steps_count_as_progress(tmp_path: Path) -> None:
    device = Device()
    trainer = Trainer(device, RunFolder(tmp_path), lambda _: None)  # pyright: ignore[reportArgumentType]
    trainer.prepare(lease(), iter([torch.zeros(1), torch.ones(1)]), pinned=False)  # pyright: ignore[reportArgumentType]
    assert trainer.num_batches == 0
    assert len(list(device.source)) == 2
    assert trainer.num_batches == 2


def test_work_that_is_no_longer_wanted_when_the_device_is_ready_is_not_done(tmp_path: Path) -> None:
    calls.clear()

    async def main() -> None:
        runner = make(tmp_path)
        prepare = runner.trainer.prepare

        def dropped_meanwhile(given: pb.Lease, source: Any, **options: Any) -> Any:
            if given.key == "dropped":
                runner.wanted = {lease_id(kept): kept}
            return prepare(given, source, **options)

        runner.trainer.prepare = dropped_meanwhile  # pyright: ignore[reportAttributeAccessIssue]
        kept = lease("kept", 2)
        working = asyncio.create_task(runner.run())
        await runner.desire(pb.Desired(leases=[lease("dropped", 1)]))
        await asyncio.sleep(1)
        assert calls == [2]
        assert [r.key for r in runner.results.values()] == ["kept"]
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    run_virtual(main())


def test_pure_work_goes_before_what_was_begun_ahead(tmp_path: Path) -> None:
    calls.clear()

    async def main() -> None:
        runner = make(tmp_path)
        ahead = [pb.Lease(key=f"{n}b", round=AHEAD, task="toyrun.note", kind="pinned",
                          arguments_json=f'{{"number":{n}}}') for n in (1, 2)]  # fmt: skip
        working = asyncio.create_task(runner.run())
        await runner.desire(pb.Desired(leases=[*ahead, lease("validation", 3)]))
        await asyncio.sleep(1)
        assert calls == [3, 1, 2]
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    run_virtual(main())


def test_operands_go_with_their_lease(tmp_path: Path) -> None:
    async def main() -> None:
        runner = make(tmp_path)
        first, second = lease("first"), lease("second")
        bundle = bytearray(pack_tensors({"0": torch.ones(2)}))
        await runner.take_operands(lease_id(second), bundle)  # may come before its lease
        await runner.desire(pb.Desired(leases=[first, second]))
        await runner.take_operands(lease_id(first), bundle)
        await runner.desire(pb.Desired(leases=[second]))
        assert list(runner.operands) == [lease_id(second)]
        assert runner.operands[lease_id(second)]["0"].tolist() == [1.0, 1.0]

    run_virtual(main())


def test_a_result_on_its_way_is_not_collected(tmp_path: Path) -> None:
    async def main() -> None:
        runner = make(tmp_path)
        digest = runner._encode(lease(), {"delta": torch.arange(4.0)})
        await runner.desire(pb.Desired(adopted_version="v1"))  # which tidies up
        assert runner.folder.objects.has(digest)
        runner._report(pb.TaskResult(key="k", object=digest))
        await runner.desire(pb.Desired(adopted_version="v2", verdicts=[pb.Verdict(key="k", verdict="accepted")]))
        assert not runner.folder.objects.has(digest)

    run_virtual(main())


def test_a_result_survives_a_restart_as_sent_or_not(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    sent, unsent = ({(1, 0, key): pb.TaskResult(key=key, round=1, object=key)} for key in ("sent", "unsent"))
    folder.save_results(sent, unsent)
    assert RunFolder(tmp_path).load_results() == (sent, unsent)
    for broken in (b"", b"[]", b'{"sent": []}', b'{"sent": ["x"], "unsent": []}'):
        (tmp_path / "results.json").write_bytes(broken)
        assert folder.load_results() == ({}, {})


def test_a_full_disk_costs_a_result_s_safety_and_not_the_result(tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise ResourceError("the disk is full")

    async def main() -> None:
        runner, notes = make(tmp_path), list[str]()
        runner._note = notes.append
        runner.folder.save_results = full
        working = asyncio.create_task(runner.run())
        await runner.desire(pb.Desired(leases=[lease("k", 3)]))
        await asyncio.sleep(1)
        assert [r.scalars_json for r in runner.results.values()] == ['{"number": 3}']
        assert notes == ["the disk is full; a result would not survive the end of this process"]
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    run_virtual(main())


def test_an_unsent_result_without_its_state_is_worked_out_again(tmp_path: Path) -> None:
    """What it was computed with would be lost from the next task's beginning."""

    async def main() -> None:
        runner = make(tmp_path)
        digest = runner.folder.objects.put(b"an update")
        answer = pb.TaskResult(key="k", object=digest)
        given = lease()
        assert runner._is_whole(given, answer)
        given.next_version = "r0"
        assert not runner._is_whole(given, answer)
        runner.folder.save_version("r0", {}, {})
        assert runner._is_whole(given, answer)
        runner.folder.objects.remove(digest)
        assert not runner._is_whole(given, answer)

    run_virtual(main())


class Strict(Gate):
    """Of an owner who lets no update out but those of zeros."""

    async def let_out(
        self, lease: pb.Lease, answer: pb.TaskResult, result: Result, objects: Any, num_examples: Any
    ) -> None:  # fmt: skip
        if result.scalars["number"]:
            raise OwnerRefused("an update would stand on too little")


def test_what_a_refused_update_leaves_goes_into_no_other(tmp_path: Path) -> None:
    """Neither its state nor what its codec lost, wherever the coordinator has the next task go on from."""

    def leave(number: int, base: str) -> pb.Lease:
        arguments = f'{{"number":{number}}}'
        return pb.Lease(
            key=f"k{number}", task="toyrun.update", kind="pinned", arguments_json=arguments, base_version=base,
            next_version=f"r{number}-a0-k", up_codec="int4+ef",
        )  # fmt: skip

    async def main() -> list[float]:
        runner = make(tmp_path)
        runner._gate = Strict()
        working = asyncio.create_task(runner.run())
        refused, after = leave(7, ""), leave(0, "r7-a0-k")
        await runner.desire(pb.Desired(leases=[refused], held_versions=[refused.next_version]))
        await asyncio.sleep(1)
        assert [r.error for r in runner.results.values()] == ["an update would stand on too little"]
        assert not runner.folder.has_version(refused.next_version)
        assert runner.folder.residuals(refused.next_version) == []
        await runner.desire(pb.Desired(leases=[after], held_versions=[refused.next_version]))
        await asyncio.sleep(1)
        (sent,) = runner._unsent.values()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        with Bundle.open(runner.folder.objects.path(Digest(sent.object))) as bundle:
            return bundle.decode_flat("delta", Device.layout).tolist()

    assert run_virtual(main()) == [0.0] * 4


def test_only_the_shards_read_last_are_kept(tmp_path: Path) -> None:
    sources = make_sources(tmp_path)
    for number in range(3 * MAX_SHARDS_KEPT):
        sources._shards_read[f"sha256:{number:064x}"] = None  # pyright: ignore[reportArgumentType]
    kept = sources.digests()
    assert len(kept) == MAX_SHARDS_KEPT
    assert f"sha256:{3 * MAX_SHARDS_KEPT - 1:064x}" in kept


def make_sources(folder: Path) -> Sources:
    return Sources(spec=spec(), objects=RunFolder(folder).objects)
