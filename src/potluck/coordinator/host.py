"""A coordinator on a real network: prepares the run, opens the ports, trains, and leaves a model directory."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from functools import partial

from potluck.clock import Lanes, SystemClock, ThreadExecutor
from potluck.coordinator.changes import Changes, recipe_of
from potluck.coordinator.core import Coordinator
from potluck.coordinator.events import Event, OnEvent, write_metrics
from potluck.coordinator.loop import train
from potluck.coordinator.network import Network
from potluck.coordinator.options import RESULT_FILE, HostOptions, Listening, RunResult, WorkerResult
from potluck.coordinator.prepare import Prepared, prepare, replanned
from potluck.coordinator.result import MODEL, leave_model
from potluck.coordinator.status import snapshot
from potluck.storage.files import FolderLock, write_atomic
from potluck.storage.objects import ObjectStore
from potluck.strategies.state import State
from potluck.transport.grpc.descriptors import raise_limit
from potluck.transport.security.link import parse_address
from potluck.types.errors import RunStopped


async def serve(
    options: HostOptions, *, on_event: OnEvent, on_listening: Callable[[Listening], None] = lambda _: None
) -> RunResult:
    """Host a run to its end. `on_listening` is called as soon as the run can be joined, looked at and stopped.

    PotluckError with what is wrong; RunStopped when too many rounds in a row fail.
    """
    if options.address:
        parse_address(options.address)  # before minutes are spent on data
    raise_limit()  # of open files: each worker takes two
    options.run_dir.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(options.run_dir)
    lanes = Lanes.threads()
    try:
        return await _Hosting(options, lanes, on_event).run(on_listening)
    finally:
        lanes.close()
        lock.release()


class _Hosting:
    """One call of `serve`: what is open while it lasts."""

    def __init__(self, options: HostOptions, lanes: Lanes, on_event: OnEvent) -> None:
        self.options, self.lanes = options, lanes
        self.clock = SystemClock()
        self._on_event = on_event
        self._metrics = options.run_dir / "metrics.jsonl"
        self._writer = ThreadExecutor(1, "metrics")
        self._log_broken = False

    def tell(self, event: Event) -> None:
        self._on_event(event)
        asyncio.ensure_future(self._write(event))  # noqa: RUF006

    async def _write(self, event: Event) -> None:
        """A log that cannot be written does not end a run: if the disk is full, what must be kept says so."""
        try:
            await self._writer.run(write_metrics, self._metrics, event)
        except OSError as error:
            if not self._log_broken:
                self._log_broken = True
                text = f"{self._metrics} cannot be written ({error.strerror}); some events will be missing there"
                self._on_event(Event(kind="note", at=self.clock.time(), text=text))

    async def run(self, on_listening: Callable[[Listening], None]) -> RunResult:
        try:
            return await self._run(on_listening)
        finally:
            await self._writer.run(lambda: None)  # what is queued is written
            self._writer.close()

    async def _run(self, on_listening: Callable[[Listening], None]) -> RunResult:
        folder = self.options.run_dir
        durable = self.options.recipe.checkpoint.durability == "power"
        objects = await self.lanes.compute.run(lambda: ObjectStore(folder / "objects", durable=durable))
        tell = self.tell_soon()
        given = self.options.recipe
        recipe, passed = await self.lanes.ledger.run(recipe_of, folder, given)
        for key in passed:
            tell(f"{key} is as the recipe says, which was edited since `potluck set` changed it")
        prepared = await self.lanes.compute.run(
            lambda: prepare(given, folder, objects, cache_dir=self.options.cache_dir, tell=tell)
        )
        run = await Coordinator.open(
            replanned(prepared.plan, recipe), folder, deck=prepared.deck, objects=objects, clock=self.clock,
            lanes=self.lanes, on_event=self.tell,
        )  # fmt: skip
        gc.freeze()  # what imports made is no garbage: to look through it again would hold the event loop up
        (folder / RESULT_FILE).unlink(missing_ok=True)  # it goes on from here
        network = Network(run, changes=Changes(given, recipe), address=self.options.address, port=self.options.port)
        try:
            join_line = await network.open()
            on_listening(Listening(join_line=join_line, status=partial(snapshot, run), stop=run.stop))
            state = await self._train(run)
            result = await self._result(run, prepared, state)
            run.stop("the run ended")
            return result
        except RunStopped:
            run.stop("the run ended")
            raise
        finally:  # after any other error the workers stay, for the run goes on when it is mended here
            await network.close()
            await run.close()

    def tell_soon(self) -> Callable[[str], None]:
        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            event = Event(kind="note", at=self.clock.time(), text=text)
            loop.call_soon_threadsafe(self.tell, event)

        return tell

    async def _train(self, run: Coordinator) -> State:
        """The main loop, until its end or until someone stops the run; then the state is checkpointed."""
        watching = asyncio.create_task(run.fleet.watch())
        training = asyncio.create_task(train(run))
        try:
            while not training.done() and not run.stop_reason and run.failure is None:
                change = asyncio.ensure_future(run.roster.change())
                await asyncio.wait([training, change, watching], return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                if watching.done():
                    watching.result()
            if not training.done():
                async with run.whole:
                    training.cancel()  # in the middle of a round: what was acknowledged stays in the ledger
                await asyncio.gather(training, return_exceptions=True)
                if run.failure is not None:
                    raise run.failure
                assert run.state is not None or run.stop_reason
                if run.state is None:
                    await run.recover()
                assert run.state is not None
                if run.state.round:
                    await run.checkpoint(run.state)
                return run.state
            return training.result()
        finally:
            for task in (training, watching):
                task.cancel()
            await asyncio.gather(training, watching, return_exceptions=True)

    async def _result(self, run: Coordinator, prepared: Prepared, state: State) -> RunResult:
        losses, spec = run.losses, prepared.plan.spec
        result = RunResult(
            run_id=spec.run_id,
            strategy=self.options.recipe.strategy.name,
            model_dir=str(self.options.run_dir / MODEL),
            rounds=state.round,
            tokens=state.tokens,
            seconds=round(state.seconds, 3),
            initial_val_loss=losses.get(0),
            final_val_loss=losses[max(losses)] if losses else None,
            workers=tuple(
                WorkerResult(
                    id=w["id"],
                    tokens=w["tokens"],
                    bytes_up=w["bytes_up"],
                    bytes_down=w["bytes_down"],
                    owner=run.owners.result(w["id"]),
                )
                for w in run.contributions()
            ),
            num_parameters=prepared.plan.layout.numel,
            run_dir=str(self.options.run_dir),
            stopped=run.stop_reason,
        )
        card = {**result.to_json(), "name": spec.name, "data": prepared.facts, "seq_len": spec.seq_len}
        card = {k: v for k, v in card.items() if k not in ("model_dir", "run_dir")}

        def export() -> None:
            leave_model(
                self.options.run_dir, prepared.plan, self.options.recipe.model, run.params.read(state.params),
                prepared.tokenizer_dir, card,
            )  # fmt: skip

        await self.lanes.compute.run(export)
        write = partial(write_atomic, self.options.run_dir / RESULT_FILE)
        await self.lanes.compute.run(write, json.dumps(result.to_json(), indent=1).encode())
        run.tell("model", f"the model is in {result.model_dir}", path=str(result.model_dir))
        return result
