"""What an owner reads of canaries: of a model that learned them, of each validation, and nobody else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from owners import Owned, problem_of, records
from worlds import virtual_world

from potluck.clock import run_virtual
from potluck.coordinator.plan import ValidationConfig
from potluck.data.canaries import Canaries, CanaryConfig
from potluck.data.config import ReadOptions
from potluck.data.prepare import prepare_private
from potluck.data.stream import OwnSequences
from potluck.data.tokenizer import unpack_tokenizer
from potluck.fleet.intake import Intake
from potluck.fleet.roster import Member
from potluck.optim.inner import InnerConfig
from potluck.protocol import pb
from potluck.simulator.exact.world import World
from potluck.strategies.fed_avg import FedAvg, FedAvgConfig
from potluck.strategies.fed_lora import FedLoRA, FedLoRAConfig
from potluck.types.ids import WorkerId
from potluck.worker.canaries import EXPOSURES, FOLDER, CanaryWatch
from potluck.worker.policy import Policy
from potluck.worker.replica import TorchReplica

CONFIG = CanaryConfig(count=2, repeats=4, candidates=63)


def told_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / FOLDER / EXPOSURES).read_text().splitlines()]


def test_a_model_that_learned_them_has_all_the_exposure_there_is(tmp_path: Path) -> None:
    inner = InnerConfig(lr=1e-2, batch_size=4, warmup=0.0)
    problem = problem_of(Owned, adapter=None, family="gpt2", private=True, seq_len=64, inner=inner)
    problem.begin(tmp_path / "tok")
    plan = problem.plan(FedAvg(FedAvgConfig()))
    options = ReadOptions.model_validate(plan.spec.data_options)
    unpack_tokenizer(problem.packed, tmp_path / "tokenizer")
    own = prepare_private(
        [records(tmp_path / "mine.jsonl", [f"number {i}" for i in range(20)])], options, seed=1, base=tmp_path,
        cache_dir=tmp_path / "own", tokenizer_dir=tmp_path / "tokenizer",
    )  # fmt: skip
    (tmp_path / "run" / FOLDER).mkdir(parents=True)
    (tmp_path / "run" / FOLDER / "seed.json").write_text('{"seed": "7"}')
    told: list[str] = []
    watch = CanaryWatch.open(own, CONFIG, options, tmp_path / "run", told.append)
    assert told == [
        "2 canaries, 4 times each, are among the 16 sequences trained on here; their exposure after each validation "
        f"goes to {tmp_path / 'run' / FOLDER / EXPOSURES}"
    ]
    replica = TorchReplica(plan.spec)
    replica.load(plan.initial())
    planted = OwnSequences(watch.canaries.shards, seq_len=64, rows_per_record=1)
    replica.feed([planted.take(range(8))[i : i + 4] for i in (0, 4)] * 50)  # pyright: ignore[reportArgumentType]
    watch.watching(0, replica.sequence_losses, batch_size=16)()
    for _ in range(100):
        replica.train_step(progress=0.1)
    measure = watch.watching(1, replica.sequence_losses, batch_size=16)
    measure()
    measure()
    measure()  # there is no third kind of model
    before, after, own_one = told_of(tmp_path / "run")
    assert (before["round"], before["model"], after["round"], after["model"]) == (0, "shared", 1, "shared")
    assert after["exposures"] == [6.0, 6.0] == own_one["exposures"] and own_one["model"] == "personal"
    assert sum(before["exposures"]) < 12.0 and after["most"] == 6.0 == math.log2(64)
    assert told[2:] == [
        f"canaries after round 1: {whose} has exposures of 6.0 bits on average and 6.0 at most; 1.4 is chance and 6.0 "
        "memorised" for whose in ("the run's model", "this worker's own model")
    ]  # fmt: skip


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """All that workers report."""
    found: list[bytes] = []
    plain: Callable[[Intake, Member, pb.Report], None] = Intake.report

    def report(self: Intake, member: Member, said: pb.Report) -> None:
        found.append(said.SerializeToString())
        plain(self, member, said)

    monkeypatch.setattr(Intake, "report", report)
    return found


def test_each_validation_is_told_to_the_owner_alone_also_after_a_restart(heard: list[bytes], tmp_path: Path) -> None:
    validating = ValidationConfig(every_rounds=2)
    problem = problem_of(Owned, private=True, seq_len=64, validating=validating).begin(tmp_path / "tok")
    owners = {
        name: records(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(25)]) for name in ("anna", "bert")
    }
    strategy = FedLoRA(FedLoRAConfig(rule="fed_it", num_inner_steps=2, personal=True))

    async def main() -> World:
        world = virtual_world(problem, strategy, tmp_path / "world")
        world.add("anna", data=(owners["anna"],), cost_s=lambda _: 1.0, policy=Policy(canaries=CONFIG, min_examples=1))
        world.add("bert", data=(owners["bert"],), cost_s=lambda _: 1.0)
        await world.clock.sleep(1.0)
        await world.start()
        while sum(event.kind == "round" for event in world.events) < 3:
            await world.clock.sleep(0.5)
        await world.crash("anna")
        world.switch_on(WorkerId("anna"))
        await world.finish()
        return world

    world = run_virtual(main())
    (run_dir,) = world.disk("anna").glob("runs/*")
    lines = told_of(run_dir)
    assert {(line["round"], line["model"]) for line in lines if line["round"]} == {
        (num, model) for num in (2, 4) for model in ("shared", "personal")
    }
    assert all(0.0 <= x <= 6.0 and len(line["exposures"]) == 2 for line in lines for x in line["exposures"])
    notes = world.hosts[WorkerId("anna")].notes
    assert sum(note.startswith("2 canaries, 4 times each") for note in notes) == 2
    assert any(note.startswith("canaries after round 4: the run's model has exposures of ") for note in notes)
    assert not any("canar" in note for note in world.hosts[WorkerId("bert")].notes)
    assert not list(world.disk("bert").glob(f"runs/*/{FOLDER}"))

    seed = json.loads((run_dir / FOLDER / "seed.json").read_text())["seed"]
    assert heard and not any(b"canar" in said or b"exposure" in said or seed.encode() in said for said in heard)
    assert not any("canar" in event.text or "exposure" in str(event.detail) for event in world.events)
    (own,) = [json.loads(path.read_text()) for path in run_dir.glob("data/data-*/prepared.json")]
    assert sum(shard[2] for shard in own["shards"]) == 20 and sum(shard[2] for shard in own["validation"]) == 5


def test_a_line_that_a_kill_left_torn_costs_no_other(tmp_path: Path) -> None:
    canaries = Canaries(shards=(), rows=torch.zeros(16, 3, dtype=torch.int64), count=1)
    (tmp_path / EXPOSURES).write_bytes(b'{"round": 1, "mod')
    for num_rounds in (2, 3):
        CanaryWatch(canaries, tmp_path, lambda _: None).watching(
            num_rounds, lambda rows: [0.0] * len(rows), batch_size=8
        )()
    torn, *whole = (tmp_path / EXPOSURES).read_text().splitlines()
    assert torn == '{"round": 1, "mod' and [json.loads(line)["round"] for line in whole] == [2, 3]


@pytest.mark.parametrize(
    ("validation", "access", "says"),
    [
        (0.2, "private", ""),
        (0.0, "private", "none"),
        (0.0, "shared", ""),
        ("0", "private", "none"),
        (0.2, "listed", "listed files"),
    ],
)
def test_a_run_that_never_validates_private_text_is_refused(
    validation: object, access: str, says: str, tmp_path: Path
) -> None:
    spec = problem_of(Owned, private=True, seq_len=64).begin(tmp_path).plan(FedAvg(FedAvgConfig())).spec
    options = {**spec.data_options, "validation": validation}
    given = spec.model_copy(update={"data_options": options, "data_access": access})
    found = Policy(canaries=CONFIG).objections(given, ())
    assert [says in sentence for sentence in found] == ([True] if says else [])
