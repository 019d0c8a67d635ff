"""What passes the gate is what the owner's policy allows, and it is listed before it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worker.test_policy import ALL, DIGEST, RUN

from potluck.clock import InlineExecutor, VirtualClock, run_virtual
from potluck.protocol import pb
from potluck.storage.digest import digest_bytes
from potluck.storage.objects import ObjectStore
from potluck.strategies.diloco import DiLoCo
from potluck.strategies.run import RunSpec
from potluck.strategies.task import Result
from potluck.types.errors import OwnerRefused, ResourceError
from potluck.types.profile import DeviceProfile, LinkRates
from potluck.worker import gate as module
from potluck.worker.gate import Gate
from potluck.worker.policy import Policy
from potluck.worker.receipts import Receipt, ReceiptBook, ReceiptLog, SentTensor

LEASE = pb.Lease(key="inner", round=3, attempt=1, task="fed_avg.inner", num_sequences=40, up_codec="int8+ef")
UPDATE = Result({"num_tokens": 640, "loss_sum": 2.5, "num_steps": 5}, {"delta": torch.ones(4)})
LOSS = Result({"num_tokens": 64, "loss_sum": 2.5})


@dataclass
class Own:
    num_sequences: int = 100


class Place:
    """A gate with the receipts it writes; `folder` is its owner's."""

    def __init__(self, folder: Path, policy: Policy | None, log: ReceiptLog, spec: RunSpec = RUN) -> None:
        self.clock = VirtualClock()
        self.gate = Gate(clock=self.clock, files=InlineExecutor(), policy=policy, receipts=log)
        self.objects = ObjectStore(folder / "objects")
        self.folder, self.spec = folder / "receipts", spec

    def run(self, *steps: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        async def main() -> None:
            await self.gate.admit(self.spec)
            for step in steps:
                await step()

        run_virtual(main())

    async def let_out(
        self, result: Result = UPDATE, lease: pb.Lease = LEASE, num_examples: int | None = 40
    ) -> pb.TaskResult:
        answer = pb.TaskResult(
            key=lease.key, round=lease.round, attempt=lease.attempt, scalars_json=json.dumps(dict(result.scalars)),
            seconds=1.5,
        )  # fmt: skip
        if result.tensors:
            scratch = self.objects.root / "update.tmp"
            scratch.write_bytes(b"encoded")
            answer.object = self.objects.adopt(scratch)
        await self.gate.let_out(lease, answer, result, self.objects, lambda: num_examples)
        return answer

    @property
    def listed(self) -> list[Receipt]:
        return list(ReceiptBook(self.folder).receipts())


@contextmanager
def opened(folder: Path, policy: Policy | None = None, spec: RunSpec = RUN) -> Iterator[Place]:
    with ReceiptLog(folder / "receipts") as log:
        yield Place(folder, policy, log, spec)


# Results


def test_a_result_is_listed_with_all_that_leaves_and_no_more(tmp_path: Path) -> None:
    long = "q" * 1000
    with opened(tmp_path) as place:
        inline = Result({"slopes": "AAAA", "long": long}, inline={"c": torch.ones(3)})
        place.run(place.let_out, lambda: place.let_out(inline, num_examples=None))
        (first, second) = place.listed
    assert first == Receipt(
        kind="result", time=place.clock.epoch, run=RUN.run_id, task="fed_avg.inner", round=3, attempt=1, key="inner",
        scalars={"num_tokens": 640, "loss_sum": 2.5, "num_steps": 5}, is_update=True, num_examples=40, seconds=1.5,
        tensors=(SentTensor(name="delta", num_bytes=7, digest=digest_bytes(b"encoded"), codec="int8+ef"),),
    )  # fmt: skip
    assert second.scalars == {"slopes": "AAAA", "long": f"1,000 characters, {digest_bytes(long.encode())}"}
    assert second.tensors == (SentTensor(name="c", num_bytes=12),)
    assert second.num_examples is None and not second.is_update


def test_a_field_that_may_not_leave_ends_the_membership_and_is_not_listed(tmp_path: Path) -> None:
    with opened(tmp_path, Policy(fields=(*ALL, "accuracy"))) as place:
        place.run(lambda: place.let_out(Result({**UPDATE.scalars, "accuracy": 1.0}, UPDATE.tensors)))
        for more in (
            Result({**UPDATE.scalars, "longest": 9}, UPDATE.tensors), Result(UPDATE.scalars, {"theta": torch.ones(4)}),
            Result(UPDATE.scalars, inline={"sample": torch.ones(4)}),
        ):  # fmt: skip
            place.gate.refusal = None
            with pytest.raises(OwnerRefused, match=r"(longest|theta|sample) would leave and is not among the policy's"):
                place.run(lambda more=more: place.let_out(more))
            assert isinstance(place.gate.refusal, OwnerRefused)
        assert len(place.listed) == 1


@pytest.mark.parametrize(
    ("lease", "result", "num_examples", "leaves"),
    [
        (LEASE, UPDATE, 64, True), (LEASE, UPDATE, 63, False), (LEASE, UPDATE, None, True),
        (LEASE, LOSS, 63, False),  # trained, whatever it sends of it
        (pb.Lease(held_out=True), LOSS, 3, True),  # validation
        (pb.Lease(held_out=True), UPDATE, 3, False), (pb.Lease(held_out=True), Result({"slopes": "AA"}), 3, False),
        (pb.Lease(held_out=True), Result({"a": 1}, inline={"b": torch.ones(1)}), 3, False),
    ],
)  # fmt: skip
def test_an_update_on_too_few_examples_costs_itself(
    tmp_path: Path, lease: pb.Lease, result: Result, num_examples: int | None, leaves: bool
) -> None:
    with opened(tmp_path, Policy(min_examples=64)) as place:
        if leaves:
            place.run(lambda: place.let_out(result, lease, num_examples))
        else:
            with pytest.raises(OwnerRefused, match="fewer of this worker's sequences than the 64"):
                place.run(lambda: place.let_out(result, lease, num_examples))
        assert place.gate.refusal is None
        assert len(place.listed) == leaves


def test_tasks_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with opened(tmp_path, Policy(strategies=("fed_avg",), min_examples=40)) as place:
        place.run()
        gate = place.gate
        gate.admit_lease(LEASE, 40)
        gate.admit_lease(pb.Lease(task="evaluation.loss", held_out=True), 0)
        gate.admit_lease(LEASE, None)  # data that the coordinator dealt
        with pytest.raises(OwnerRefused, match="than the 40 of its"):
            gate.admit_lease(pb.Lease(task="fed_avg.inner", num_sequences=39), 39)
        with pytest.raises(OwnerRefused, match="than the 40 of its"):
            gate.admit_lease(LEASE, 39)  # forty readings of thirty-nine
        assert gate.refusal is None
        with pytest.raises(OwnerRefused, match=r"'diloco\.inner' is no task of what the owner was asked for"):
            gate.admit_lease(pb.Lease(task="diloco.inner", num_sequences=64), 64)
        assert gate.refusal is not None
        gate.admit_data(Own(40))
        gate.admit_data(None)
        with pytest.raises(OwnerRefused, match="holds 39 training sequences and the policy's min_examples is 40"):
            gate.admit_data(Own(39))


def test_updates_of_a_run_are_counted_over_restarts(tmp_path: Path) -> None:
    policy = Policy(max_updates=3)
    with opened(tmp_path, policy) as place:
        second = pb.Lease(key="second", task="fed_avg.inner", num_sequences=40)
        place.run(
            place.let_out, lambda: place.let_out(LOSS, pb.Lease(held_out=True)), lambda: place.let_out(lease=second)
        )
    with opened(tmp_path, policy) as place:
        place.run(place.let_out)
        with pytest.raises(OwnerRefused, match="3 updates of this run have left, as many as"):
            place.gate.admit_lease(LEASE, 40)
        with pytest.raises(OwnerRefused):
            place.run(place.let_out)
        assert place.gate.refusal is not None
    with opened(tmp_path, policy) as place, pytest.raises(OwnerRefused, match="3 updates of this run have left"):
        place.run()
    with opened(tmp_path, policy, RUN.model_copy(update={"run_id": "another"})) as place:
        place.run(place.let_out)


def test_what_is_let_out_twice_because_the_link_broke_counts_once(tmp_path: Path) -> None:
    """An emission of a session is made ready again on the next link. Other bytes under its name are another update."""
    with opened(tmp_path, Policy(max_updates=2)) as place:
        place.run(place.let_out, place.let_out)
        assert [r.num_examples for r in place.listed] == [40]
        other = Result({**UPDATE.scalars, "loss_sum": 2.6}, UPDATE.tensors)
        place.run(lambda: place.let_out(other), lambda: place.let_out(other))
        assert len(place.listed) == 2
        with pytest.raises(OwnerRefused, match="2 updates of this run have left, as many as"):
            place.run(place.let_out)


def test_a_run_that_is_not_allowed_is_refused_with_every_reason(tmp_path: Path) -> None:
    with opened(tmp_path, Policy(strategies=("diloco",), fields=())) as place:
        with pytest.raises(OwnerRefused, match=r"strategy is fed_avg.*; num_tokens, loss_sum, .* does not take part"):
            place.run()
        assert place.listed == []


def test_an_owner_is_asked_for_the_tasks_that_a_run_gives_and_no_other_is_done(tmp_path: Path) -> None:
    def objections(policy: Policy, *tasks: str) -> list[str]:
        spec = RUN.model_copy(update={"strategy": "fed_lora", "tasks": tasks or None})
        with opened(tmp_path, policy, spec) as place:
            return run_virtual(place.gate.objections(spec))

    usual = Policy(fields=ALL)
    private = Policy(fields=("num_tokens", "num_steps", "epsilon", "delta"))
    assert objections(usual, "fed_lora.inner", "fed_lora.loss") == [] == objections(private, "fed_lora.private_inner")
    assert objections(private, "fed_lora.inner") == ["loss_sum would leave and is not among the policy's fields"]
    (why,) = objections(usual)  # it does not say
    assert "has_shrunk" in why and "epsilon" in why and "personal_loss_sum" in why
    assert objections(usual, "diloco.inner") == [], "of another strategy, so that it gives none"
    spec = RUN.model_copy(update={"strategy": "fed_lora", "tasks": ("fed_lora.private_inner", "diloco.inner")})
    with opened(tmp_path, private, spec) as place:
        place.run()
        place.gate.admit_lease(pb.Lease(task="fed_lora.private_inner", num_sequences=4), 4)
        for name in ("fed_lora.inner", "evaluation.loss", "diloco.inner"):
            with pytest.raises(OwnerRefused, match=f"{name}' is no task of what the owner was asked for"):
                place.gate.admit_lease(pb.Lease(task=name, num_sequences=4), 4)


class Mine(DiLoCo):
    """A method in a file of its own that another one's tasks do the work of."""


def test_a_method_of_its_own_gives_the_tasks_of_what_it_is_made_from_too(tmp_path: Path) -> None:
    with ReceiptLog(tmp_path / "receipts") as log:
        gate = Gate(
            clock=VirtualClock(), files=InlineExecutor(), receipts=log, modules={DIGEST: SimpleNamespace(Mine=Mine)}
        )  # fmt: skip
        spec = RUN.model_copy(update={"strategy": "mine.py:Mine", "strategy_digest": DIGEST})
        assert "diloco.inner" in [task.name for task in gate.tasks_of(spec)]
        for others in ({"strategy": "mine.py:Yours"}, {"strategy_digest": DIGEST[:-1] + "b"}):
            assert [task.name for task in gate.tasks_of(spec.model_copy(update=others))] == ["evaluation.loss"]


# Reports


def report(**values: Any) -> pb.Report:
    return pb.Report(**values)


def test_a_result_that_was_not_let_out_is_not_reported(tmp_path: Path) -> None:
    with opened(tmp_path) as place:

        async def main() -> None:
            passed = await place.let_out()
            sent = report(results=[passed, pb.TaskResult(key="other"), pb.TaskResult(key="third", error="no data")])
            await place.gate.pass_report(sent)
            assert [r.key for r in sent.results] == ["inner", "third"]
            await place.gate.pass_report(sent)  # again with the next report: listed once

        place.run(main)
        kinds = [(r.kind, r.key, r.text) for r in place.listed]
    assert kinds == [("result", "inner", ""), ("failure", "third", "no data"), ("heartbeats", "", "")]


def test_sentences_stay_where_the_owner_wants_them_to(tmp_path: Path) -> None:
    failed = pb.TaskResult(key="k", error="ValueError: 'my secret' is no number")
    with opened(tmp_path, Policy(notes=False)) as place:
        sent = report(note="3 records skipped", results=[failed])
        place.run(lambda: place.gate.pass_report(sent))
        assert sent.note == "" and sent.results[0].error == "its owner's policy keeps the reason"
        assert [(r.kind, r.text) for r in place.listed[:1]] == [("failure", sent.results[0].error)]
        declining = pb.WelcomeRequest(is_look=True, declines="the base model is another one")
        place.run(lambda: place.gate.pass_welcome(declining))
        assert declining.declines == "its owner's policy keeps the reason" == place.listed[-1].text
    with opened(tmp_path / "open") as place:
        for note in ("3 records skipped", "3 records skipped", "another"):
            place.run(lambda note=note: place.gate.pass_report(report(note=note)))
        assert [r.text for r in place.listed if r.kind == "note"] == ["3 records skipped", "another"]


def test_where_the_machine_keeps_its_files_does_not_leave_with_a_sentence(tmp_path: Path) -> None:
    with opened(tmp_path) as place:
        gate = place.gate = Gate(
            clock=place.clock, files=InlineExecutor(), receipts=place.gate._receipts,  # pyright: ignore[reportPrivateUsage]
            hidden={Path("/home/anna"): "~", Path("/home/anna/state"): "STATE"},
        )  # fmt: skip
        failed = pb.TaskResult(key="k", error="/home/anna/state/runs/r/x.bundle cannot be read; see /home/anna/notes")
        sent = report(note="/home/anna/state/runs is full", results=[failed])
        declining = pb.WelcomeRequest(declines="not for /home/anna/state")
        place.run(lambda: gate.pass_report(sent), lambda: gate.pass_welcome(declining))
        assert sent.results[0].error == "STATE/runs/r/x.bundle cannot be read; see ~/notes"
        assert (sent.note, declining.declines) == ("STATE/runs is full", "not for STATE")
        assert not [r for r in place.listed if "anna" in r.text]


def test_of_the_machine_only_what_may_leaves(tmp_path: Path) -> None:
    profile = DeviceProfile(device="cpu", host_name="darkstar", free_memory_bytes=5)
    with opened(tmp_path, Policy(profile=("device", "link"))) as place:
        told = place.gate.told_of(profile)
        assert told == {"device": "cpu", "link": {"up_bytes_per_s": 0.0, "down_bytes_per_s": 0.0, "rtt_s": 0.0}}
        assert DeviceProfile.from_json(told).device == "cpu"
        request = pb.WelcomeRequest(
            profile_json=json.dumps(told), strategies=[pb.StrategyFile(name="a.py", digest="blake3:1")]
        )
        faster = json.dumps({**told, "link": {"up_bytes_per_s": 7.0}})
        place.run(
            lambda: place.gate.pass_welcome(request), lambda: place.gate.pass_welcome(request),
            lambda: place.gate.pass_report(report(profile_json=faster)), lambda: place.gate.introduce("anna"),
        )  # fmt: skip
        found = [r for r in place.listed if r.kind != "heartbeats"]
    assert [(r.kind, r.profile, r.strategy_files, r.text) for r in found] == [
        ("profile", told, {"a.py": "blake3:1"}, ""), ("profile", {"link": {"up_bytes_per_s": 7.0}}, {}, ""),
        ("enrolment", {}, {}, "anna"),
    ]  # fmt: skip
    assert LinkRates.from_json(found[1].profile["link"]).up_bytes_per_s == 7.0


def test_signs_of_life_and_pieces_are_summed_up(tmp_path: Path) -> None:
    frames: list[bytes] = []
    with opened(tmp_path) as place:

        async def main() -> None:
            async def send(frame: bytes) -> None:
                assert [r.kind for r in place.listed if r.kind == "pieces"] != [], "listed before the first one leaves"
                frames.append(frame)

            passing = place.gate.passing_pieces(send)
            for _ in range(10):
                await place.gate.pass_report(report(sequence=1))
                await passing(b"12345")
            await place.clock.sleep(module.summary_s)
            await place.gate.pass_report(report(sequence=1))
            await place.gate.close()

        place.run(main)
        found = [(r.kind, r.num_messages, r.num_bytes) for r in place.listed]
    assert frames == [b"12345"] * 10
    assert found == [
        ("heartbeats", 0, 0), ("pieces", 0, 0), ("heartbeats", 10, 20), ("heartbeats", 1, 2), ("pieces", 10, 50)
    ]  # fmt: skip


def test_a_full_disk_stops_what_would_leave_unlisted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise ResourceError("the disk is full")

    with opened(tmp_path) as place:
        place.run()
        monkeypatch.setattr(ReceiptLog, "append", full)
        for step in (
            place.let_out, lambda: place.gate.pass_report(report(note="hello")), lambda: place.gate.introduce("anna"),
            lambda: place.gate.pass_welcome(pb.WelcomeRequest(profile_json='{"device": "cpu"}')),
        ):  # fmt: skip
            with pytest.raises(ResourceError):
                place.run(step)
        monkeypatch.undo()
        failed = report(results=[pb.TaskResult(key="inner", round=3, attempt=1)])
        place.run(lambda: place.gate.pass_report(failed))
        assert not failed.results, "it was never let out"


# After a restart


def test_results_of_an_earlier_process_pass_only_as_the_policy_is_now(tmp_path: Path) -> None:
    kept: dict[str, pb.TaskResult] = {}
    with opened(tmp_path) as place:

        async def main() -> None:
            for key, fields, num in (("a", {}, 40), ("b", {"accuracy": 1.0}, 40), ("c", {}, 3)):
                lease = pb.Lease(key=key, task="fed_avg.inner", num_sequences=40)
                kept[key] = await place.let_out(Result({**UPDATE.scalars, **fields}, UPDATE.tensors), lease, num)

        place.run(main)
    kept["d"] = pb.TaskResult(key="d")  # of a process that kept no receipts
    kept["e"] = pb.TaskResult(key="e", error="it failed")

    def ids() -> dict[Any, pb.TaskResult]:
        return {(0, 0, key): result for key, result in kept.items()}

    for policy, passing in ((None, "abce"), (Policy(fields=ALL, min_examples=20), "ae"), (Policy(fields=()), "e")):
        with opened(tmp_path, policy) as place:
            sent, unsent = ids(), ids()

            async def again(place: Place = place, sent: Any = sent, unsent: Any = unsent) -> None:
                place.gate._spec = RUN  # pyright: ignore[reportPrivateUsage]
                await place.gate.restore(sent, unsent)

            run_virtual(again())
            assert "".join(key for _, _, key in sent) == passing == "".join(key for _, _, key in unsent)
            message = report(results=list(sent.values()))
            run_virtual(place.gate.pass_report(message))
            assert "".join(r.key for r in message.results) == passing


def test_without_policy_and_receipts_all_passes(tmp_path: Path) -> None:
    gate, sent = Gate(), report(results=[pb.TaskResult(key="k")], note="x", profile_json="{}")

    async def main() -> None:
        await gate.admit(RUN)
        await gate.introduce("anna")
        gate.admit_lease(pb.Lease(task="anything"), 0)
        await gate.let_out(LEASE, pb.TaskResult(), UPDATE, ObjectStore(tmp_path), lambda: 1 / 0)  # pyright: ignore
        await gate.pass_report(sent)
        await gate.close()

    run_virtual(main())
    assert sent == report(results=[pb.TaskResult(key="k")], note="x", profile_json="{}")
