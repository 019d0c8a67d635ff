"""The gate: all that leaves a worker passes here, where its owner's policy is asked and a receipt is written first.

Results pass one by one (`let_out`), before anything of them is sent; everything else passes with the report that it
is part of (`pass_report`), where a result that was not let out is held back. What is asked for, and whatever says only
that a worker is alive and how far it is, is counted, not listed.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from potluck.clock import Clock, Executor
from potluck.fleet.roster import LeaseId
from potluck.protocol import pb
from potluck.storage.digest import digest_bytes
from potluck.storage.objects import ObjectStore
from potluck.strategies.registry import shipped, strategy_type, tasks_in, tasks_of
from potluck.strategies.run import RunSpec
from potluck.strategies.task import Result, TaskFunction
from potluck.types.errors import OwnerRefused
from potluck.types.ids import Digest
from potluck.types.profile import DeviceProfile
from potluck.worker.policy import Policy
from potluck.worker.receipts import Kind, Receipt, ReceiptBook, ReceiptLog, SentTensor, Value

MAX_TEXT = 200
"""Characters of a scalar that is text, up to which a receipt has it as it is; of longer ones it has the digest."""
MAX_LET_OUT = 4096
"""Results that may wait to be sent, or for their verdict."""
summary_s = 600.0
"""Between two lines about what is counted."""
silent = "its owner's policy keeps the reason"
Send = Callable[[bytes], Awaitable[None]]


class OwnData(Protocol):
    """How many training sequences the owner's own text has."""

    @property
    def num_sequences(self) -> int: ...


@dataclass
class _Counted:
    """Since a line about it was written."""

    listed_at: float
    num_messages: int = 0
    num_bytes: int = 0


class Gate:
    """Of one worker; open where there is neither policy nor receipts.

    `modules`: what the strategy files that its owner allows define, by their digests. `hidden`: folders here, and what
    sentences that leave call them.
    """

    def __init__(
        self, *, clock: Clock | None = None, files: Executor | None = None, policy: Policy | None = None,
        receipts: ReceiptLog | None = None, modules: Mapping[str, Any] | None = None,
        hidden: Mapping[Path, str] | None = None,
    ) -> None:  # fmt: skip
        self.policy = policy or Policy()
        self.refusal: OwnerRefused | None = None  # why the worker is to leave
        self._clock, self._files, self._receipts = clock, files, receipts
        self._is_open = policy is None and receipts is None
        self._modules = modules or {}
        self._hidden = sorted(((str(path), name) for path, name in (hidden or {}).items()), key=lambda x: -len(x[0]))
        self._spec: RunSpec | None = None
        self._tasks: frozenset[str] = frozenset()
        self._num_updates = 0
        self._let_out: dict[LeaseId, bytes] = {}  # as they were; the last is last
        self._listed_failures: set[LeaseId] = set()
        self._listed_profile: dict[str, Any] = {}  # as it was told so far
        self._listed_files: dict[str, str] = {}
        self._listed_note = ""
        self._counted: dict[Kind, _Counted] = {}

    # What may run

    async def admit(self, spec: RunSpec) -> None:
        """OwnerRefused for a run that the policy does not allow."""
        if self._is_open:
            return
        if objections := await self.objections(spec):
            raise OwnerRefused(f"{'; '.join(objections)}: this worker does not take part")
        if self.policy.max_updates is not None and (self._spec is None or self._spec.run_id != spec.run_id):
            self._num_updates = await self._in_thread(self._updates_before, spec.run_id)
        self.policy.check_number(self._num_updates)
        self._spec, self._tasks = spec, frozenset(task.name for task in self.tasks_of(spec))

    async def objections(self, spec: RunSpec) -> list[str]:
        """Why the policy does not allow a run, a sentence for each reason."""
        return await self._in_thread(lambda: self.policy.objections(spec, self.tasks_of(spec)))

    def _updates_before(self, run_id: str) -> int:
        """That left in this run already."""
        totals = ReceiptBook(self._receipts.folder).totals() if self._receipts is not None else {}
        return totals[run_id].num_updates if run_id in totals else 0

    def tasks_of(self, spec: RunSpec) -> tuple[TaskFunction, ...]:
        """What the run may give: those of its strategy, or of these the ones that it says it does."""
        if spec.strategy_digest:
            module = self._modules.get(spec.strategy_digest)
            kind = getattr(module, spec.strategy.rpartition(":")[2], None)
            found = tasks_of(kind) if isinstance(kind, type) else tasks_in()
        else:
            found = tasks_of(strategy_type(spec.strategy)) if spec.strategy in shipped else tasks_in()
        return found if spec.tasks is None else tuple(task for task in found if task.name in spec.tasks)

    def admit_data(self, own: OwnData | None) -> None:
        """OwnerRefused where the owner's text is so little that no update could ever leave."""
        if own is not None and own.num_sequences < self.policy.min_examples:
            raise OwnerRefused(
                f"the text given here holds {own.num_sequences:,} training sequences and the policy's min_examples is "
                f"{self.policy.min_examples:,}, so no update could leave; give more --data, or lower it"
            )

    def admit_lease(self, lease: pb.Lease, most_examples: int | None) -> None:
        """OwnerRefused for a task that is not the run's strategy's, or whose result could not leave.

        It will stand on so many of the owner's sequences at most, None for others' text.
        """
        if self._is_open:
            return
        asked = self.policy.strategies is not None or self.policy.fields is not None
        if asked and lease.task not in self._tasks:
            self._refuse(OwnerRefused(f"{lease.task[:100]!r} is no task of what the owner was asked for"))
        if lease.num_sequences and not lease.held_out:
            self._check_number()
            if most_examples is not None:
                self.policy.check_examples(most_examples)

    @property
    def lets_pieces(self) -> bool:
        """Whether pieces of the coordinator's products may be done: their result is named `c`."""
        return self.policy.fields is None or "c" in self.policy.fields

    # Results

    async def let_out(
        self, lease: pb.Lease, answer: pb.TaskResult, result: Result, objects: ObjectStore,
        num_examples: Callable[[], int | None],
    ) -> None:  # fmt: skip
        """List a result of which nothing was sent yet. OwnerRefused if it may not leave, ResourceError if the disk is
        full. `num_examples`: different sequences of the owner's own text that it stands on, None for others' text.

        One that was let out already, and whose link broke before it was sent, is neither listed nor counted again.
        """
        if self._is_open:
            return
        sent = answer.SerializeToString()
        if not result.inline and self._let_out.get(_id(answer)) == sent:
            return
        examples = num_examples()
        is_update = bool(result.tensors) or (examples is not None and not (lease.held_out and _is_only_numbers(result)))
        receipt = self._receipt(
            "result", task=lease.task, round=answer.round, attempt=answer.attempt, key=answer.key,
            scalars={name: _listed_value(value) for name, value in result.scalars.items()},
            tensors=await self._in_thread(_sent_tensors, lease, answer, result, objects), is_update=is_update,
            num_examples=examples, seconds=answer.seconds,
        )  # fmt: skip
        self._check(receipt)
        await self._append(receipt, durable=True)
        self._num_updates += is_update
        self._let_out[_id(answer)] = sent
        for id in list(self._let_out)[:-MAX_LET_OUT]:
            del self._let_out[id]

    def _check(self, receipt: Receipt) -> None:
        try:
            self.policy.check_fields([*receipt.scalars, *(tensor.name for tensor in receipt.tensors)])
        except OwnerRefused as refused:
            self._refuse(refused)
        if receipt.is_update:
            self._check_number()
        self._check_examples(receipt)

    def _check_examples(self, receipt: Receipt) -> None:
        if receipt.is_update and receipt.num_examples is not None:
            self.policy.check_examples(receipt.num_examples)

    def _check_number(self) -> None:
        try:
            self.policy.check_number(self._num_updates)
        except OwnerRefused as refused:
            self._refuse(refused)

    def _refuse(self, refused: OwnerRefused) -> None:
        """Not this result only: the worker is to leave."""
        self.refusal = refused
        raise refused

    async def restore(self, *kept: dict[LeaseId, pb.TaskResult]) -> None:
        """Drop the results of an earlier process that were not let out, or that the policy allows no more."""
        if self._is_open or self._receipts is None or not any(kept):
            return
        wanted = {id for results in kept for id in results}
        book = ReceiptBook(self._receipts.folder)
        found = await self._in_thread(lambda: {_id(r): r for r in book.receipts(self._run_id) if _id(r) in wanted})
        for results in kept:
            for id, answer in list(results.items()):
                if not answer.error and not self._still_allows(found.get(id)):
                    del results[id]
        self._let_out |= {id: result.SerializeToString() for results in kept for id, result in results.items()}

    def _still_allows(self, receipt: Receipt | None) -> bool:
        if receipt is None or receipt.kind != "result":
            return False
        try:
            self.policy.check_fields([*receipt.scalars, *(tensor.name for tensor in receipt.tensors)])
            self._check_examples(receipt)
        except OwnerRefused:
            return False
        return True

    # Everything else

    async def introduce(self, name: str) -> None:
        """The name that a worker asks for when it enrols is about to leave."""
        if not self._is_open:
            await self._append(self._receipt("enrolment", text=name))

    def told_of(self, profile: DeviceProfile) -> dict[str, Any]:
        """What the coordinator may be told of this machine."""
        return {name: value for name, value in profile.to_json().items() if self.policy.tells(name)}

    async def pass_welcome(self, request: pb.WelcomeRequest) -> None:
        """As `pass_report`, for a profile and the digests of strategy files, or for why the worker takes no part."""
        if self._is_open:
            return
        if request.declines:
            request.declines = self._sentence(request.declines)
            await self._append(self._receipt("note", text=request.declines))
        await self._list_profile(request.profile_json, {each.name: each.digest for each in request.strategies})

    async def pass_report(self, report: pb.Report) -> None:
        """Take out of a report what may not leave, and list the rest. ResourceError if the disk is full."""
        if self._is_open:
            return
        for result in report.results:
            if result.error:
                result.error = self._sentence(result.error)
        report.note = self._sentence(report.note) if self.policy.notes else ""
        held_back = [r for r in report.results if not r.error and _id(r) not in self._let_out]
        for result in held_back:
            report.results.remove(result)
        await self._list_failures(report.results)
        if report.note and report.note != self._listed_note:
            await self._append(self._receipt("note", text=report.note))
            self._listed_note = report.note
        if report.profile_json:
            await self._list_profile(report.profile_json, {})
        await self._count("heartbeats", report.ByteSize())

    def _sentence(self, text: str) -> str:
        """As it may leave: where this machine keeps its files, and so who works there, is in none."""
        if not self.policy.notes:
            return silent
        for path, name in self._hidden:
            text = text.replace(path, name)
        return text

    async def _list_failures(self, results: Iterable[pb.TaskResult]) -> None:
        failed = {_id(result): result for result in results if result.error}
        self._listed_failures &= failed.keys()
        for id in failed.keys() - self._listed_failures:
            round, attempt, key = id
            await self._append(self._receipt("failure", round=round, attempt=attempt, key=key, text=failed[id].error))
            self._listed_failures.add(id)

    async def _list_profile(self, profile_json: str, files: dict[str, str]) -> None:
        """Of a profile that was told before, what has changed."""
        profile: dict[str, Any] = json.loads(profile_json or "{}")
        before = self._listed_profile
        changed = {name: value for name, value in profile.items() if before.get(name) != value}
        if changed or not files.items() <= self._listed_files.items():
            await self._append(self._receipt("profile", profile=changed, strategy_files=files))
        self._listed_profile, self._listed_files = {**before, **profile}, {**self._listed_files, **files}

    def passing_pieces(self, send: Send) -> Send:
        """`send`, for frames of pieces: products of what the coordinator sent. They are counted."""
        if self._is_open:
            return send

        async def counted(frame: bytes) -> None:
            await self._count("pieces", len(frame))
            await send(frame)

        return counted

    async def _count(self, kind: Kind, num_bytes: int) -> None:
        """One more is about to leave: the first is listed before it does, the sums later."""
        counted = self._counted.get(kind)
        if counted is None or not 0 <= self._now() - counted.listed_at < summary_s:
            await self._list_counted(kind)
            counted = self._counted[kind] = _Counted(self._now())
        counted.num_messages += 1
        counted.num_bytes += num_bytes

    async def _list_counted(self, kind: Kind) -> None:
        counted = self._counted.get(kind) or _Counted(0.0)
        await self._append(self._receipt(kind, num_messages=counted.num_messages, num_bytes=counted.num_bytes))

    async def close(self) -> None:
        """List what was counted. ResourceError if the disk is full."""
        for kind in self._counted:
            await self._list_counted(kind)
        self._counted.clear()

    # How

    @property
    def _run_id(self) -> str:
        return self._spec.run_id if self._spec is not None else ""

    def _now(self) -> float:
        assert self._clock is not None, "a gate that lists has a clock"
        return self._clock.time()

    def _receipt(self, kind: Kind, **values: Any) -> Receipt:
        return Receipt(kind=kind, time=self._now(), run=self._run_id, **values)

    async def _append(self, receipt: Receipt, *, durable: bool = False) -> None:
        receipts = self._receipts
        if receipts is not None:
            await self._in_thread(lambda: receipts.append(receipt, durable=durable))

    async def _in_thread(self, fn: Callable[..., Any], *args: Any) -> Any:
        assert self._files is not None, "a gate that asks or lists has a thread for files"
        return await self._files.run(fn, *args)


def _id(result: pb.TaskResult | Receipt) -> LeaseId:
    return (result.round or 0, result.attempt or 0, result.key)


def _is_only_numbers(result: Result) -> bool:
    return not result.tensors and not result.inline and not any(isinstance(v, str) for v in result.scalars.values())


def _listed_value(value: Value) -> Value:
    if not isinstance(value, str) or len(value) <= MAX_TEXT:
        return value
    return f"{len(value):,} characters, {digest_bytes(value.encode(errors='replace'))}"


def _sent_tensors(
    lease: pb.Lease, answer: pb.TaskResult, result: Result, objects: ObjectStore
) -> tuple[SentTensor, ...]:
    inline = (SentTensor(name=name, num_bytes=tensor.nbytes) for name, tensor in result.inline.items())
    if not answer.object:
        return tuple(inline)
    num_bytes = objects.path(Digest(answer.object)).stat().st_size
    codec = lease.up_codec or "fp32"
    (name,) = result.tensors
    return (SentTensor(name=name, num_bytes=num_bytes, digest=answer.object, codec=codec), *inline)
