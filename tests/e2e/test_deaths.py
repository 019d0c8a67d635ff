"""A coordinator that dies again and again, each time in the middle of something else, ends with the same model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from e2e.processes import write_corpus, write_recipe
from e2e.test_faults import strategy

from potluck.bench.rig.nursery import Nursery
from potluck.bench.rig.real_run import RealRun, real_run
from potluck.bench.rig.wire import WireLoop
from potluck.storage.digest import digest_file

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="workers dial addresses of loopback that are Linux's only"),
]

DEATHS = {
    "aggregation": """
from potluck.storage.params import ParamStore
apply = ParamStore.apply
def deadly(self, op, *handles, **how):
    def one_slice(*slices, **where):
        op(*slices, **where)
        die()
    return apply(self, one_slice, *handles, **how)
ParamStore.apply = deadly
""",
    "a transaction": """
from potluck.storage.database import Database
execute = Database.execute
def deadly(self, statement, values=()):
    changed = execute(self, statement, values)
    if statement.startswith("INSERT INTO commits"):
        die()
    return changed
Database.execute = deadly
""",
    "a commit that nobody has heard of": """
from potluck.fleet.live import LiveFleet
def deadly(self, *, committed):
    die()
LiveFleet.end = deadly
""",
    "a checkpoint": """
from potluck.storage.checkpoints import Checkpoints
def deadly(self, scratch, target):
    die()
Checkpoints._put_in_place = deadly
""",
    "validation": """
from potluck.fleet.live import LiveFleet
accept = LiveFleet.accept
async def deadly(self, lease, *rest):
    is_first = await accept(self, lease, *rest)
    if lease.message.held_out:
        die()
    return is_first
LiveFleet.accept = deadly
""",
}
BEFORE = "import os, signal\ndef die():\n    os.kill(os.getpid(), signal.SIGKILL)\n"


@contextmanager
def ready_to_start(folder: Path, processes: Nursery, wires: WireLoop) -> Iterator[RealRun]:
    folder.mkdir()
    write_corpus(folder / "texts", num_files=4)
    write_recipe(
        folder / "recipe.toml", 'shared = "texts"', budget=f"rounds = {len(DEATHS) + 1}", strategy=strategy(5),
        fleet="min_workers = 2\nheartbeat_s = 0.5\nreconnect_s = 4.0", checkpoint="every_rounds = 1",
        validation="every_rounds = 1",
    )  # fmt: skip
    with real_run(folder, wires, start=processes.start, speeds=processes.speeds) as made:
        yield made
        processes.speeds = made.speeds


def test_it_ends_with_the_model_of_the_run_that_nobody_disturbed(
    tmp_path: Path, processes: Nursery, wires: WireLoop
) -> None:
    def model(run: RealRun) -> str:
        return digest_file(run.run / "model" / "model.safetensors")

    with ready_to_start(tmp_path / "undisturbed", processes, wires) as run:
        run.start_host()
        run.join_all("anna", "bert")
        assert run.host.wait(60) == 0, run.log()[-2000:]
        expected, tokens = model(run), [e["tokens"] for e in run.rounds()]
    with ready_to_start(tmp_path / "deaths", processes, wires) as run:
        for number, death in enumerate(DEATHS.values()):
            run.start_host(BEFORE=BEFORE + death)
            if not number:
                run.join_all("anna", "bert")
            assert run.host.wait(60) == -9, f"in {list(DEATHS)[number]}: {run.log()[-2000:]}"
        run.start_host()
        assert run.host.wait(60) == 0, run.log()[-2000:]
        assert model(run) == expected
        assert [e["tokens"] for e in run.rounds()][-1] == tokens[-1]
        accepted = [(round, worker) for round, worker, _ in run.accepted()]
        assert accepted == [(round, worker) for round in range(len(DEATHS) + 1) for worker in ("anna", "bert")]
        assert all(worker.wait(20) == 0 for worker in run.workers.values())
        assert "starts afresh" not in run.log("anna") + run.log("bert")
