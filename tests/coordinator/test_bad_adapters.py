"""Bad input of a run that fine-tunes adapters: whoever brought it reads a sentence, and the others go on."""

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
from coordinator.test_adapters import ADAPTER, prepared, recipe_of
from coordinator.test_hostile_workers import Liar, filled, honest, same
from e2e.processes import write_corpus, write_recipe
from e2e.test_data_access import FLEET, model_dir  # noqa: F401
from e2e.test_fed_lora import STRATEGY, instructions
from models.families import llama
from owners import NUM_ROUNDS, Owned, adapter, problem_of, records
from worlds import virtual_world

from potluck.clock import run_virtual
from potluck.coordinator.events import Event
from potluck.coordinator.host import serve
from potluck.coordinator.options import HostOptions, Listening, RunResult
from potluck.coordinator.recipe import load_recipe
from potluck.models.build import build
from potluck.protocol import pb
from potluck.simulator.exact.problem import Problem
from potluck.simulator.exact.world import World
from potluck.strategies.fed_lora import FedLoRA, FedLoRAConfig
from potluck.strategies.run import RunSpec
from potluck.types.errors import DataError, ModelError, Refused
from potluck.types.ids import Digest, WorkerId
from potluck.types.params import Layout
from potluck.worker.join import work
from potluck.worker.options import JoinOptions


def strategy_of(rule: str) -> FedLoRA:
    return FedLoRA(FedLoRAConfig.model_validate({"rule": rule, "num_inner_steps": 2, "min_reply_fraction": 0.3}))


def play(
    problem: Problem, folder: Path, *, rule: str = "fed_it", owners: dict[str, tuple[Path, ...]],
    disturb: Callable[[World], Awaitable[None]] | None = None,
) -> tuple[World, dict[str, BaseException]]:  # fmt: skip
    """The world after a whole run, and what workers ended with by themselves."""
    ended: dict[str, BaseException] = {}

    async def main() -> World:
        world = virtual_world(problem, strategy_of(rule), folder)
        for name, data in owners.items():
            world.add(name, data=data, cost_s=lambda _: 1.0)
        await world.clock.sleep(1.0)
        await world.start()
        if disturb is not None:
            await disturb(world)
        while not world.training_is_over:
            await world.clock.sleep(0.5)
            ended.update(ended_workers(world))
        state = await world.finish()
        assert world.last is not None and torch.isfinite(world.last.params.read(state.params)).all()
        return world

    return run_virtual(asyncio.wait_for(main(), 900.0)), ended


def ended_workers(world: World) -> dict[str, BaseException]:
    """What workers ended with by themselves; their machines are off from then on."""
    found: dict[str, BaseException] = {}
    for name, host in world.hosts.items():
        if host.task is not None and host.task.done() and (error := host.task.exception()) is not None:
            found[name] = error
            world.kill(name)
    return found


def rounds_of(world: World) -> list[list[str]]:
    """Who took part in each."""
    return [list(event.detail["workers"]) for event in world.events if event.kind == "round"]


# What owners bring


def test_owners_whose_records_cannot_be_used_are_told_and_the_others_train(tmp_path: Path) -> None:
    good = {
        name: records(tmp_path / f"{name}.jsonl", [f"{name} {i}" if i != 6 else "" for i in range(24)])
        for name in ("anna", "bert")
    }
    bad = {
        "blank": (records(tmp_path / "blank.jsonl", ["", " \n", ""]),),
        "empty": (records(tmp_path / "empty.jsonl", []),),
        "one": (records(tmp_path / "one.jsonl", ["only"]),),
        "prose": (tmp_path / "prose.jsonl",),
        "nothing": (),
    }
    (tmp_path / "prose.jsonl").write_text("Dear diary,\n")
    owners = {**{name: (path,) for name, path in good.items()}, **bad}
    problem = problem_of(Owned, private=True, seq_len=32).begin(tmp_path / "tok")
    world, ended = play(problem, tmp_path / "world", owners=owners)

    assert rounds_of(world) == [["anna", "bert"]] * NUM_ROUNDS and world.last is not None
    assert world.last.losses[NUM_ROUNDS] < world.last.losses[0]
    assert {name: type(error) for name, error in ended.items()} == dict.fromkeys(bad, DataError)
    for name, words in (
        ("blank", "blank.jsonl:1: 'output' is empty"), ("empty", "empty.jsonl holds no text: it is empty"),
        ("one", "holds 1 records and none is left for"), ("prose", "prose.jsonl:1"),
        ("nothing", "trains on private text and none was given; start the worker with --data"),
    ):  # fmt: skip
        assert words in str(ended[name])
    assert any("anna.jsonl:7: 'output' is empty" in note for note in world.hosts[WorkerId("anna")].notes)
    told = [event.text for event in world.events]
    assert [text for text in told if "1 records or files skipped" in text and "anna" in text]
    assert not [text for text in told if ".jsonl" in text], "the name of an owner's file left it"


def test_a_worker_that_is_sent_a_tokenizer_without_a_chat_template_says_so(tmp_path: Path) -> None:
    """A coordinator refuses such a run at its start; a worker does not rely on that."""
    problem = problem_of(Owned, private=True, seq_len=32)
    problem.format, problem.template = "chat", None
    turns = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "yes"}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 9))

    async def main() -> tuple[BaseException, World]:
        world = virtual_world(problem.begin(tmp_path / "tok"), strategy_of("fed_it"), tmp_path / "world")
        await world.start()
        world.add("anna", data=(tmp_path / "chats.jsonl",))
        await world.clock.sleep(5.0)
        assert not world.training_is_over, "others could still come"
        error = ended_workers(world)["anna"]
        await world.shut_down()
        return error, world

    error, world = run_virtual(main())
    assert isinstance(error, DataError)
    assert "has no chat template and format 'chat' needs one; give another tokenizer" in str(error)
    assert not rounds_of(world)


# What workers send


class Adapters(Liar):
    """Its updates are of the part that is asked for, or of adapters of another rank."""

    other_rank = 0

    async def _honest(self, connection: Any, lease: pb.Lease) -> pb.TaskResult:
        layout = self.world.plan.layout.part(lease.part)
        if self.other_rank:
            layout = Layout.of(
                [(spec.name, tuple(self.other_rank if n == adapter.rank else n for n in spec.shape)) for spec in layout]
            )
        self.layout = layout
        return await super()._honest(connection, lease)

    async def _upload(self, connection: Any, lease: pb.Lease, layout: Layout) -> str:
        return await super()._upload(connection, lease, self.layout)


def one_nan(update: bytes) -> bytes:
    at = update.rfind(struct.pack("<f", 1e-4))
    return update[:at] + struct.pack("<f", math.nan) + update[at + 4 :]


@pytest.mark.parametrize("rule", ["fed_it", "fed_ex", "flora", "het_lora"])
@pytest.mark.parametrize(
    ("spoil", "other_rank", "words"),
    [
        (one_nan, 0, "holds NaN or infinity"), (filled(math.inf), 0, "holds NaN or infinity"),
        (filled(1e38), 0, "cannot be joined with others in fp32"), (filled(1e20), 0, "cannot be joined with others"),
        (same, 8, "[8, 16] and the model's is [4, 16]"), (same, 1, "[1, 16] and the model's is [4, 16]"),
    ],
    ids=["nan", "inf", "huge", "large", "rank-8", "rank-1"],
)  # fmt: skip
def test_adapters_that_cannot_be_joined_are_refused(
    rule: str, spoil: Callable[[bytes], bytes], other_rank: int, words: str, tmp_path: Path
) -> None:
    liars: list[Liar] = []

    async def lie(world: World) -> None:
        liar = Adapters(world, tmp_path / "liar", honest, spoil=spoil)
        liar.other_rank = other_rank
        liars.append(liar)
        assert world.life is not None
        world.life.spawn(liar.work())

    problem = problem_of(validate=False)
    world, ended = play(problem, tmp_path / "world", rule=rule, owners={"anna": (), "bert": ()}, disturb=lie)
    (liar,) = liars
    rounds = rounds_of(world)
    assert len(rounds) == NUM_ROUNDS and rounds[-1] == ["anna", "bert"] and not ended
    assert not any(liar.id in workers for workers in rounds)
    refused = [verdict.reason for verdict in liar.verdicts if verdict.verdict == "refused"]
    assert refused and all(words in reason for reason in refused), refused
    assert world.last is not None and world.last.roster.members[liar.id].quarantined


# Another base model


def test_a_run_does_not_go_on_with_another_base(tmp_path: Path) -> None:
    write_corpus(tmp_path / "texts", num_files=4)
    stored = tmp_path / "stored"
    build(llama(vocab_size=512), seed=4).save_pretrained(stored)  # pyright: ignore[reportCallIssue]
    recipe = recipe_of(tmp_path, f'path = "{stored}"\n' + ADAPTER.replace("c_attn", "q_proj"))
    plan, objects = prepared(recipe, tmp_path)
    base, before = plan.plan.spec.base, (tmp_path / "run" / "prepared.json").read_bytes()
    assert base is not None
    build(llama(vocab_size=512), seed=5).save_pretrained(stored)  # pyright: ignore[reportCallIssue]
    assert prepared(recipe, tmp_path)[0].plan.spec.base == base, "the run has what it needs of the first one"
    objects.remove(Digest(base.objects[0].digest))
    with pytest.raises(
        ModelError, match=f"the base {base.digest}, of which files are missing there, and .* gives blake"
    ):
        prepared(recipe, tmp_path)
    assert (tmp_path / "run" / "prepared.json").read_bytes() == before
    build(llama(vocab_size=512), seed=4).save_pretrained(stored)  # pyright: ignore[reportCallIssue]
    assert prepared(recipe, tmp_path)[0].plan.spec.base == base


def test_a_base_that_changed_on_a_workers_disk_is_fetched_again(tmp_path: Path) -> None:
    async def spoil(world: World) -> None:
        base = world.plan.spec.base
        assert base is not None
        while not rounds_of(world):
            await world.clock.sleep(0.5)
        await world.crash("anna")
        (path,) = world.disk("anna").glob(f"runs/*/objects/{base.objects[0].digest.replace(':', '-')}")
        content = path.read_bytes()
        path.write_bytes(content[:-4] + bytes(4))
        world.switch_on(WorkerId("anna"))

    world, ended = play(problem_of(), tmp_path, owners={"anna": (), "bert": ()}, disturb=spoil)
    assert not ended and len(rounds_of(world)) == NUM_ROUNDS and "anna" in rounds_of(world)[-1]
    assert any("had become" in note and "fetch it again" in note for note in world.hosts[WorkerId("anna")].notes)


def test_a_worker_does_not_train_on_another_base_than_it_joined_with(tmp_path: Path) -> None:
    """Its coordinator comes back with the same run on another model."""
    problem = problem_of(num_rounds=200)
    other = replace(plan := problem.plan(strategy_of("fed_it")), spec=with_base(plan.spec, problem_of(seed=8)))

    async def main() -> dict[str, BaseException]:
        world = virtual_world(problem, strategy_of("fed_it"), tmp_path)
        await world.start()
        for name in ("anna", "bert"):
            world.add(name, cost_s=lambda _: 1.0)
        while not rounds_of(world):
            await world.clock.sleep(0.5)
        await world.crash_coordinator()
        world.plan = other
        await world.start()
        await world.clock.sleep(10.0)
        ended = ended_workers(world)
        await world.shut_down()
        return ended

    ended = run_virtual(main())
    assert {name: type(error) for name, error in ended.items()} == dict.fromkeys(("anna", "bert"), Refused)
    assert plan.spec.base is not None and other.spec.base is not None
    for error in ended.values():
        assert f"names the base model {other.spec.base.digest} and this worker trains" in str(error)
        assert plan.spec.base.digest in str(error)


def with_base(spec: RunSpec, of: Problem) -> RunSpec:
    return spec.model_copy(update={"base": of.plan(strategy_of("fed_it")).spec.base})


# Over the network


def test_on_real_connections_a_bad_owner_leaves_with_a_sentence(model_dir: Path, tmp_path: Path) -> None:  # noqa: F811
    """One of three machines brings nothing but empty answers."""
    write_recipe(
        tmp_path / "tiny.toml", "", fleet=FLEET, budget="rounds = 2",
        model=f'path = "{model_dir.as_posix()}"\nadapter = {{ rank = 2, target_modules = ["q_proj"] }}',
        data='private = true\nformat = "instruct"\nseq_len = 48\nvalidation = 0.2',
        strategy=STRATEGY.format(rule="fed_it", more=""),
    )  # fmt: skip
    recipe, events = load_recipe(tmp_path / "tiny.toml"), list[Event]()
    files = {name: instructions(tmp_path / f"{name}.jsonl", seed) for seed, name in enumerate(("anna", "bert"))}
    files["dora"] = records(tmp_path / "dora.jsonl", ["", ""])
    said: dict[str, list[str]] = {name: [] for name in files}

    async def main() -> tuple[RunResult, dict[str, str | BaseException]]:
        working: dict[str, asyncio.Task[str]] = {}

        def listening(run: Listening) -> None:
            for name, path in files.items():
                options = JoinOptions(
                    link=run.join_line, state_dir=tmp_path / name, name=name, num_threads=1, data=(path,)
                )  # fmt: skip
                working[name] = asyncio.create_task(work(options, told=said[name].append))

        options = HostOptions(recipe=recipe, run_dir=tmp_path / "run", cache_dir=tmp_path / "cache")
        result = await serve(options, on_event=events.append, on_listening=listening)
        ended = await asyncio.gather(*working.values(), return_exceptions=True)
        return result, dict(zip(working, ended, strict=True))

    result, ended = asyncio.run(main())
    assert result.rounds == 2
    assert [event.detail["workers"] for event in events if event.kind == "round"] == [["anna", "bert"]] * 2
    assert isinstance(ended["dora"], DataError) and "dora.jsonl:1: 'output' is empty" in str(ended["dora"])
    assert isinstance(ended["anna"], str) and isinstance(ended["bert"], str)
    assert not any("dora.jsonl" in event.text for event in events)
