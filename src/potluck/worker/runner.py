"""Does the work a worker is told to do, one task at a time: from inputs on disk to a result at the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from potluck.clock import Clock, Executor
from potluck.codecs.bundle import Bundle, flat_size, pack_tensors, unpack_tensors
from potluck.codecs.delta import WHOLE, layout_of
from potluck.codecs.policy import CodecPolicy
from potluck.codecs.spec import parse_spec
from potluck.protocol import AHEAD, pb, upload_purpose
from potluck.storage.digest import check_digest
from potluck.strategies.replica import TaskCancelled
from potluck.strategies.run import RunSpec
from potluck.strategies.task import Result, TaskFunction, decode_arguments, installed
from potluck.transport.inline import MAX_BUNDLE_BYTES
from potluck.types.errors import (
    CorruptError,
    NotFinite,
    PotluckError,
    PrivacySpent,
    Refused,
    ResourceError,
    StateMissing,
)
from potluck.types.ids import Digest, LeaseId
from potluck.types.untrusted import printable
from potluck.types.vector import Vector
from potluck.worker.feedback import carry_left_over, write_update
from potluck.worker.gate import Gate
from potluck.worker.hollow import HollowTrainer
from potluck.worker.link import Link
from potluck.worker.order import to_begin
from potluck.worker.pieces import Pieces
from potluck.worker.replica import TorchReplica
from potluck.worker.session import Post, lease_id, session_of
from potluck.worker.share import MachineShare
from potluck.worker.sources import Sources
from potluck.worker.state import RunFolder
from potluck.worker.trainer import Trainer
from potluck.worker.versions import add_delta, way_to

MAX_WANTED = 256
_untold = "why is told to the worker's owner only, since the run is private"
recent_leases = 2


class Runner:
    """Holds what is wanted, does it in order, and keeps results until they are acknowledged."""

    def __init__(
        self, *, spec: RunSpec, folder: RunFolder, trainer: Trainer | HollowTrainer, sources: Sources, link: Link,
        clock: Clock, compute: Executor, files: Executor, note: Callable[[str], None],
        share: MachineShare | None = None, pieces: Pieces | None = None, gate: Gate | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.trainer, self.sources, self.link = folder, trainer, sources, link
        self._clock, self._compute, self._files, self._note = clock, compute, files, note
        self._share, self.pieces, self._gate = share, pieces, gate or Gate()
        self._spec, self._up_rules = spec, CodecPolicy.from_json("fp32", spec.up_rules).rules
        self.wanted: dict[LeaseId, pb.Lease] = {}
        self.results: dict[LeaseId, pb.TaskResult] = {}
        self.inline_results: dict[LeaseId, bytearray] = {}  # packed
        self.operands: dict[LeaseId, dict[str, Tensor]] = {}
        self.current: LeaseId | None = None
        self.activity = ("waiting", 0)
        self.adopted = ""
        self.held = False  # nothing is begun
        self.withdraws = ""  # why this worker leaves the run by itself; then nothing is begun either
        self.changed = asyncio.Event()  # something new to report
        self.inline_changed = asyncio.Event()
        self.emitted = asyncio.Event()  # a session has something to send
        self.posts: dict[LeaseId, Post] = {}
        self._mapped: list[Bundle] = []  # what the task under way reads its parameters from
        self._inputs: list[pb.SessionInput] = []  # that the coordinator wants sessions to have
        self._inputs_wake = asyncio.Event()
        self._ahead_wake = asyncio.Event()  # there may be inputs to fetch of work that waits
        self._recent: deque[tuple[Digest, ...]] = deque(maxlen=recent_leases)  # what the last leases needed
        self._unsent: dict[LeaseId, pb.TaskResult] = {}  # whose objects are to be sent, or sent again
        self._sending: dict[LeaseId, asyncio.Task[None]] = {}  # results on their way, while other work goes on
        self._num_sent: dict[LeaseId, int] = {}  # bytes of these
        self._fetching: dict[Digest, asyncio.Event] = {}  # set when the download has ended
        self._awaited: Digest | None = None  # what the task under way waits for
        self._encoded: set[Digest] = set()  # results that are encoded and not yet among `results`
        self._storing = threading.Lock()  # held while a result gets its name, and while objects are collected
        self._saving = asyncio.Lock()
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def restore(self) -> None:
        """Results of an earlier process that nobody acknowledged yet."""
        self.results, self._unsent = await self._files.run(self.folder.load_results)
        await self._gate.restore(self.results, self._unsent)

    # What the coordinator wants

    async def desire(self, desired: pb.Desired) -> None:
        """Take the whole situation in: start what is new, drop what is no longer wanted, adopt what was committed."""
        before, self.wanted = self.wanted, {lease_id(lease): lease for lease in desired.leases[:MAX_WANTED]}
        for id in before.keys() - self.wanted.keys():
            self.operands.pop(id, None)
        for verdict in desired.verdicts:
            if verdict.verdict == "refused":
                reason = printable(f"{verdict.key} of round {verdict.round + 1}: {verdict.reason}", 500)
                self._note(f"the coordinator refused {reason}")
                await self._files.run(self.folder.drop_residual, desired.adopted_version)
            if verdict.verdict == "missing":
                self._send_again((verdict.round, verdict.attempt, verdict.key))
        settled = {(v.round, v.attempt, v.key) for v in desired.verdicts if v.verdict != "missing"}
        gone = [i for i in self.results if i in settled or session_of(i) not in self.wanted]
        gone += [i for i in self._unsent if i not in self.wanted]
        for id in gone:
            self.results.pop(id, None)
            self._unsent.pop(id, None)
            self.inline_results.pop(id, None)
        if self.current is not None and self.current not in self.wanted:
            self.cancel()
        self._inputs = list(desired.inputs[:MAX_WANTED])
        if self._inputs:
            self._inputs_wake.set()
        if gone or desired.adopted_version != self.adopted:
            self.adopted = desired.adopted_version
            await self._tidy([desired.adopted_version, *desired.held_versions[:MAX_WANTED]])
        self._wake.set()
        self._ahead_wake.set()

    def _send_again(self, id: LeaseId) -> None:
        """The coordinator has lost this result's object."""
        if id in self.wanted and id in self.results:
            self._unsent[id] = self.results.pop(id)

    def cancel(self) -> None:
        """The running task ends at its next step, a session also where it waits for an input."""
        self.trainer.cancel()
        for post in list(self.posts.values()):
            post.cancel()

    def hold(self) -> None:
        """Stop training after the step under way and begin nothing more, until `release`. A session goes on."""
        self.held = True
        if self.pieces is not None:
            self.pieces.hold()
        if not self.posts:
            self.trainer.suspend()

    def release(self) -> None:
        self.held = False
        if self.pieces is not None:
            self.pieces.release()
        self._wake.set()

    async def _tidy(self, versions: list[str]) -> None:
        """Drop what nobody asks for any more."""
        leases = list(self.wanted.values())
        if not any(lease.kind == "pinned" for lease in leases):
            await self._files.run(self.folder.snapshot.drop)
        keep = [*versions, *(x.next_version for x in leases), *(x.base_version for x in leases)]
        await self._files.run(self.folder.keep_versions, keep)
        await self._save_results()
        await self._files.run(self._collect)

    def _collect(self) -> None:
        """In a file thread, so on copies of what the event loop changes."""
        with self._storing:
            results = [*list(self.results.values()), *list(self._unsent.values())]
            needed = {Digest(r.object) for r in results if r.object}
            leases = list(self.wanted.values())
            needed |= {Digest(d) for lease in leases for d in (*lease.objects, *lease.keeps)}
            needed |= {Digest(d) for lease in leases for delta in lease.deltas for d in (delta.base, delta.delta)}
            needed |= {digest for digests in list(self._recent) for digest in digests}
            needed |= {digest for post in list(self.posts.values()) for digest in post.objects()}
            needed |= {Digest(d) for given in list(self._inputs) for d in given.objects}
            self.folder.objects.collect((needed | self._encoded | self.sources.digests()).__contains__)

    async def _save_results(self) -> None:
        async with self._saving:  # the later state is written later
            try:
                await self._files.run(self.folder.save_results, dict(self.results), dict(self._unsent))
            except ResourceError as error:  # it costs a restarted worker the work, and this one nothing
                self._note(f"{error}; a result would not survive the end of this process")

    def _post_of(self, given: pb.SessionInput) -> tuple[LeaseId, Post] | None:
        return next(((id, post) for id, post in self.posts.items() if id[2] == given.key), None)

    def input_acks(self) -> list[str]:
        """Of what the coordinator still sends, the inputs that are here."""
        found = ((given, self._post_of(given)) for given in self._inputs)
        return [f"{given.key}/{given.step}" for given, place in found if place and place[1].has_input(given.step)]

    async def _take_inputs(self) -> None:
        """Bring sessions their inputs, one after the other, while the control stream goes on."""
        while True:
            self._inputs_wake.clear()
            for given in list(self._inputs):
                place = self._post_of(given)
                if place is not None and not place[1].has_input(given.step):
                    await self._take_input(given, *place)
            await self._inputs_wake.wait()

    async def _take_input(self, given: pb.SessionInput, id: LeaseId, post: Post) -> None:
        try:
            objects = tuple(check_digest(d) for d in given.objects)
            for digest in objects:
                await self._fetch(digest)
            value = await self._files.run(self._decode, json.loads(given.arguments_json), {})
        except Exception as error:  # the session would wait for this input for ever; it costs that session only
            if id in self.wanted:
                self._fail(self.wanted[id], f"its input of step {given.step} cannot be had: {error}")
                post.cancel()
        else:
            post.put_input(given.step, value, objects)
        if id == self.current:
            self.activity = ("training", 0)
        self.changed.set()

    # Doing it

    async def run(self) -> None:
        """Whatever is wanted, for as long as the worker is here."""
        beside = [asyncio.create_task(self._take_inputs()), asyncio.create_task(self._fetch_ahead())]
        try:
            await self._work()
        finally:
            beside += self._sending.values()
            for each in beside:
                each.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            idle = self.held or self.withdraws
            waiting = [] if idle else to_begin(self.wanted, self.results, self._sending)
            if not waiting:
                self._wake.clear()
                await self._wake.wait()
                continue
            lease = min(waiting, key=lambda x: x.kind != "pure")  # a chain has more to do after it
            self.current = lease_id(lease)
            self._ahead_wake.set()
            try:
                await self._told_if_failed(lease, self._do_or_send_again(lease))
            finally:
                for bundle in self._mapped:  # its file may be written over from now on
                    bundle.close()
                self._mapped.clear()
                self.posts.pop(self.current, None)
                self.current = None
                self.activity = ("waiting", 0)
                self.changed.set()

    async def _told_if_failed(self, lease: pb.Lease, work: Awaitable[None]) -> None:
        try:
            await work
        except TaskCancelled:
            pass
        except PrivacySpent as spent:
            self.withdraws = str(spent)
            self.changed.set()
        except PotluckError as error:
            not_finite, lacks_state = isinstance(error, NotFinite), isinstance(error, StateMissing)
            self._fail(lease, str(error), not_finite=not_finite, lacks_state=lacks_state)
        except Exception as error:  # whatever a task or its libraries raise costs that task, not the worker
            self._note("".join(traceback.format_exception(error)))
            self._fail(lease, f"{type(error).__name__}: {error}")

    def _fail(self, lease: pb.Lease, reason: str, *, not_finite: bool = False, lacks_state: bool = False) -> None:
        if lease_id(lease) not in self.wanted:
            return  # nobody asks any more, so its inputs may be gone
        self._note(f"{lease.task} failed: {reason}")
        self.results[lease_id(lease)] = pb.TaskResult(
            key=lease.key, attempt=lease.attempt, round=lease.round,
            error=printable(reason if self._spec.privacy is None else _untold, 500),
            not_finite=not_finite, lacks_state=lacks_state,
        )  # fmt: skip

    async def _do_or_send_again(self, lease: pb.Lease) -> None:
        answer = self._unsent.get(lease_id(lease))
        if answer is not None and await self._files.run(self._is_whole, lease, answer):
            self._begin_to_send(lease, answer)
        else:
            self._unsent.pop(lease_id(lease), None)
            await self._do(lease)

    def _is_whole(self, lease: pb.Lease, answer: pb.TaskResult) -> bool:
        """Whether a result is here with the state that belongs to it. In a file thread."""
        has_state = not lease.next_version or self.folder.has_version(lease.next_version)
        return has_state and self.folder.objects.has(Digest(answer.object))

    async def _do(self, lease: pb.Lease) -> None:
        function = installed(lease.task)
        if function is None:
            raise Refused(
                f"this worker has no task named {lease.task[:100]!r}; install the version the coordinator runs"
            )
        self._gate.admit_lease(lease, self.sources.most_examples(lease))
        self._recent.append(tuple(check_digest(d) for d in (*lease.objects, *lease.keeps)))
        for digest in [check_digest(d) for d in lease.objects]:
            await self._fetch(digest, lease.deltas)
        operands = await self._wait_operands(lease) if lease.num_inline else {}
        arguments = await self._files.run(self._decode, json.loads(lease.arguments_json), operands)
        self.trainer.num_steps = self.trainer.num_batches = 0
        self.activity = ("training", 0)
        if lease.sequences_per_step:  # whether it is late goes by when it began
            self.changed.set()
        result, seconds = await self._train(function, lease, arguments)
        if lease_id(lease) not in self.wanted:
            raise TaskCancelled
        await self._deliver(lease, result, seconds)

    async def _train(
        self, function: TaskFunction, lease: pb.Lease, arguments: Mapping[str, Any]
    ) -> tuple[Result, float]:
        """What a task gives, and the seconds that it took, those before an interruption included."""
        started = self._clock.now()
        result = await self._compute.run(self._perform, function, lease, arguments, started)
        return result, self._clock.now() - started + self.trainer.seconds_before

    def _is_cut_short(self, id: LeaseId) -> bool:
        """From any thread."""
        lease = self.wanted.get(id)
        return lease is not None and lease.cut_short

    def _perform(
        self, function: TaskFunction, lease: pb.Lease, arguments: Mapping[str, Any], begun_at: float,
        stop_after: int = 0, cut_after: int = 0,
    ) -> Result:  # fmt: skip
        """In the compute thread. Where steps take modelled time, it is cut short after `cut_after` of them."""
        pinned = function.kind != "pure"

        def is_cut_short() -> bool:
            return self.trainer.num_steps >= cut_after if cut_after else self._is_cut_short(lease_id(lease))

        with self.sources.open(lease) as source:
            replica = self.trainer.prepare(
                lease, source, pinned=pinned, begun_at=begun_at, stop_after=stop_after, is_cut_short=is_cut_short
            )
            if lease_id(lease) not in self.wanted or self.held:
                raise TaskCancelled  # `prepare` has forgotten a cancel that came before it
            if function.kind == "session":
                assert isinstance(replica, TorchReplica), "only a pinned task is gone on with"
                post = Post(self._emitted)
                replica.mailbox = self.posts[lease_id(lease)] = post
                self._loop.call_soon_threadsafe(self._inputs_wake.set)  # some may be here already
            result = function.function(replica, **arguments)
            if pinned:
                self.trainer.keep(lease, source)
        return result

    def _emitted(self) -> None:
        """In the compute thread: a session has something to send."""
        self._loop.call_soon_threadsafe(self.emitted.set)

    async def _deliver(self, lease: pb.Lease, result: Result, seconds: float) -> None:
        answer = pb.TaskResult(
            key=lease.key, attempt=lease.attempt, round=lease.round,
            scalars_json=json.dumps(dict(result.scalars)), seconds=seconds,
        )  # fmt: skip
        await self._let_out(lease, answer, result)
        if result.inline:
            answer.num_inline = len(result.inline)
            self.inline_results[lease_id(lease)] = await self._files.run(pack_tensors, result.inline)
            self.inline_changed.set()
        if result.tensors:
            self.activity = ("uploading", 0)
            self._unsent[lease_id(lease)] = answer
            self._encoded.discard(Digest(answer.object))
        else:
            if lease.round == AHEAD:  # more of the same chain follows
                await self._files.run(carry_left_over, self.folder, lease)
            self._report(answer)
        await self._save_results()  # from here on a restart only sends it
        if lease.kind == "pinned":
            await self._files.run(self.folder.snapshot.drop)
        if result.tensors:
            self._begin_to_send(lease, answer)

    async def _let_out(self, lease: pb.Lease, answer: pb.TaskResult, result: Result) -> None:
        """Encode a result's vector, and have its owner's gate pass it before anything of it is sent."""
        if result.tensors:
            answer.object = await self._files.run(self._encode, lease, result.tensors)
        try:
            await self._gate.let_out(lease, answer, result, self.folder.objects, self._num_examples)
        except PotluckError:
            self._encoded.discard(Digest(answer.object))
            if lease.next_version:  # else it would leave with the result of a task that goes on from there
                await self._compute.run(self.trainer.forget, lease.next_version)
            raise

    def _num_examples(self) -> int | None:
        return self.sources.num_examples(num_unused=self.trainer.num_unused)

    def _begin_to_send(self, lease: pb.Lease, answer: pb.TaskResult) -> None:
        id = lease_id(lease)
        self._num_sent[id] = 0
        self._sending[id] = asyncio.create_task(self._bring(lease, answer))

    async def _bring(self, lease: pb.Lease, answer: pb.TaskResult) -> None:
        """Send a result beside whatever else is done."""
        try:
            await self._told_if_failed(lease, self._send(lease, answer))
        finally:
            self._sending.pop(lease_id(lease), None)
            self._num_sent.pop(lease_id(lease), None)
            self._wake.set()
            self.changed.set()

    async def _send(self, lease: pb.Lease, answer: pb.TaskResult) -> None:
        """Bring a result's object to the coordinator, as far as it is not there, and then report it."""
        digest = Digest(answer.object)
        try:
            await self.link.retry(lambda connection: self._push(connection, digest, lease))
        finally:
            self._unsent.pop(lease_id(lease), None)
        self._report(answer)
        await self._save_results()

    def _report(self, answer: pb.TaskResult) -> None:
        self.results[lease_id(answer)] = answer
        self._encoded.discard(Digest(answer.object))

    async def deliver_emissions(self) -> None:
        """Turn what running sessions emitted into results to report."""
        for id, post in list(self.posts.items()):
            lease = self.wanted.get(id)
            for step in [s for s in list(post.emissions) if lease is not None]:
                scalars, tensors = post.emissions[step]
                assert lease is not None
                answer = pb.TaskResult(
                    key=f"{lease.key}@{step}", attempt=lease.attempt, round=lease.round, step=step,
                    scalars_json=json.dumps(dict(scalars)),
                )  # fmt: skip
                try:
                    await self._let_out(lease, answer, Result(scalars, tensors))
                except PotluckError as error:
                    self._fail(lease, str(error))
                    post.cancel()
                    return
                if tensors:
                    await self._push(await self.link.connection(), Digest(answer.object), lease)
                del post.emissions[step]  # not before: the link may break on the way
                self._report(answer)
                self.changed.set()

    async def _push(self, connection: Any, digest: Digest, lease: pb.Lease) -> None:
        id = lease_id(lease)

        def moved(num_bytes: int) -> None:
            if id in self._sending:
                self._num_sent[id] = num_bytes
            else:
                self.activity = ("uploading", num_bytes)

        await self.link.push(
            connection, digest, self.folder.objects.path(digest), upload_purpose(*id), self._files, on_progress=moved
        )

    async def _fetch_ahead(self) -> None:
        """Bring the inputs of work that waits behind the task under way."""
        while True:
            self._ahead_wake.clear()
            for id, lease in list(self.wanted.items()):
                if self.current not in (None, id) and id not in self.results and id not in self._sending:
                    with contextlib.suppress(PotluckError):  # the work itself will meet it
                        for digest in [check_digest(d) for d in lease.objects]:
                            await self._fetch(digest, lease.deltas, is_ahead=True)
            await self._ahead_wake.wait()

    async def _fetch(self, digest: Digest, deltas: Iterable[pb.Delta] = (), *, is_ahead: bool = False) -> None:
        """Have an object here. `is_ahead`: for work that waits, beside the task under way."""
        if not is_ahead:
            self._awaited = digest
        while not self.folder.objects.has(digest):
            if not is_ahead:
                self.activity = ("downloading", 0)
            if (under_way := self._fetching.get(digest)) is not None:
                await under_way.wait()
                continue
            self._fetching[digest] = asyncio.Event()
            try:
                await self._fetch_alone(digest, deltas)
            finally:
                self._fetching.pop(digest).set()

    async def _fetch_alone(self, digest: Digest, deltas: Iterable[pb.Delta]) -> None:
        arrived = 0

        def moved(num_bytes: int) -> None:
            nonlocal arrived
            arrived = num_bytes
            if self._awaited == digest:
                self.activity = ("downloading", num_bytes)

        if self._share is None:
            await self._obtain(digest, deltas, moved)
        else:
            await self._share.fetch(
                digest, self.folder.objects, lambda: self._obtain(digest, deltas, moved), arrived=lambda: arrived,
                told=moved,
            )  # fmt: skip

    async def _obtain(self, digest: Digest, deltas: Iterable[pb.Delta], moved: Callable[[int], None]) -> None:
        """By the differences from a version that is here, where they lead to it; else whole."""
        try:
            for delta in way_to(digest, deltas, self.folder.objects.has):
                await self._download(check_digest(delta.delta), moved)
                await self._files.run(self._apply, delta)
        except (CorruptError, Refused) as error:
            self._note(f"{error}; the whole model is fetched instead")
        if not self.folder.objects.has(digest):
            await self._download(digest, moved)

    def _apply(self, delta: pb.Delta) -> None:
        """In a file thread."""
        add_delta(delta, self.folder.objects, self.trainer.layout, self._storing)

    async def _download(self, digest: Digest, moved: Callable[[int], None]) -> None:
        await self.link.fetch(digest, self.folder.objects, self._files, moved)

    async def _wait_operands(self, lease: pb.Lease) -> dict[str, Tensor]:
        while lease_id(lease) not in self.operands:
            if lease_id(lease) not in self.wanted:
                raise TaskCancelled
            self._wake.clear()
            await self._wake.wait()
        return self.operands.pop(lease_id(lease))

    async def take_operands(self, id: LeaseId, bundle: bytearray) -> None:
        """Inline operands that are complete. CorruptError if they are no bundle."""
        self.operands[id] = await self._files.run(unpack_tensors, bundle, MAX_BUNDLE_BYTES)
        self._wake.set()

    # Values to and from bytes, in a file thread

    def _decode(self, value: Any, operands: Mapping[str, Tensor]) -> Any:
        def params(digest: Digest) -> Vector:
            bundle = Bundle.open(self.folder.objects.path(digest))
            layout = layout_of(bundle, self.trainer.layout)
            bundle.check_layout(WHOLE, layout)
            self._mapped.append(bundle)
            return Vector(layout.numel, lambda start, stop: bundle.flat_slice(WHOLE, layout, start, stop))

        def tensors(digest: Digest) -> Mapping[str, Tensor]:
            with Bundle.open(self.folder.objects.path(digest)) as bundle:
                return bundle.read_all(at_most=self.trainer.layout.numel)

        def inline(index: int) -> Tensor:
            found = operands.get(str(index))
            if found is None:
                raise CorruptError(f"inline operand {index} did not arrive")
            return found

        return decode_arguments(value, params=params, tensors=tensors, inline=inline)

    def _encode(self, lease: pb.Lease, tensors: Mapping[str, Vector | Tensor]) -> Digest:
        ((name, tensor),) = tensors.items()
        vector, layout = Vector.of(tensor), self.trainer.layout.part(lease.part)
        if vector.numel != layout.numel:
            raise ValueError(f"{name} has {vector.numel} elements and {layout.numel} are asked for")
        spec = parse_spec(lease.up_codec or "fp32")
        policy = CodecPolicy(default=spec.codec.name, rules=self._up_rules)
        with self.folder.objects.scratch("result", flat_size(name, layout, policy)) as path:
            write_update(
                path, name, vector, layout=layout, policy=policy, beta=spec.beta, lease=lease, folder=self.folder,
                seed=self._spec.seed,
            )  # fmt: skip
            with self._storing:
                digest = self.folder.objects.adopt(path)
                self._encoded.add(digest)
        return digest

    # What to report

    def progress(self) -> list[pb.Progress]:
        found: list[pb.Progress] = []
        tokens_per_s = self.trainer.tokens_per_s
        if self.current is not None:
            activity, step = self.activity
            if activity == "training":
                step = self._num_steps()
            found.append(_progress(self.current, activity, step, tokens_per_s))
        sent = [(id, number) for id, number in self._num_sent.items() if id != self.current]
        return found + [_progress(id, "uploading", number, tokens_per_s) for id, number in sent]

    def _num_steps(self) -> int:
        """Of the task under way, done so far."""
        return self.trainer.num_steps or self.trainer.num_batches  # validation takes no steps


def _progress(id: LeaseId, activity: str, step: int, tokens_per_s: float) -> pb.Progress:
    _, attempt, key = id
    return pb.Progress(key=key, attempt=attempt, step=step, activity=activity, tokens_per_s=tokens_per_s)
