"""Whether the simulator finds bugs: nineteen faults planted in a copy of the package, and how soon each is found."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import potluck
from potluck.types.errors import PotluckError


@dataclass(frozen=True, kw_only=True)
class Plant:
    """One bug: in `file`, `right` becomes `wrong`."""

    name: str
    file: str
    right: str
    wrong: str


plants = (
    Plant(
        name="a commit that is visible before it is written",
        file="coordinator/core.py",
        right="""\
        await self.lanes.ledger.run(self.ledger.commit, row, self.clock.time())
        self.fleet.end(committed=True)
""",
        wrong="""\
        self.fleet.end(committed=True)
        self.state = proposed
        self.tell('round', 'early', round=proposed.round, loss=0.0, workers=[], tokens=0, seconds=0.0)
        await self.lanes.ledger.run(self.ledger.commit, row, self.clock.time())
""",
    ),
    Plant(
        name="lost work whose data is not dealt again",
        file="fleet/attempt.py",
        right="parted(lease.spans, num_trained(lease, scalars) if counts else 0)",
        wrong="parted(lease.spans, num_trained(lease, scalars) if counts else lease.num_sequences)",
    ),
    Plant(
        name="data that a task that was cut short left over, counted as trained",
        file="fleet/data.py",
        right='    return min(int(scalars["num_steps"]) * lease.sequences_per_step, lease.num_sequences)\n',
        wrong="    return lease.num_sequences\n",
    ),
    Plant(
        name="an update that counts twice",
        file="fleet/live.py",
        right="""\
        rows = [o for o in outcomes if isinstance(o, ReplyRow)]
""",
        wrong="""\
        rows = [o for o in outcomes if isinstance(o, ReplyRow)]
        rows += rows[:1] if len(rows) > 2 else []
""",
    ),
    Plant(
        name="lost pure work that is not handed out again",
        file="fleet/live.py",
        right="""\
        untouched = [k for k in missing if not running.get(k)]
""",
        wrong="""\
        untouched = [k for k in missing if k not in running]
""",
    ),
    Plant(
        name="a reply that is told before it is logged",
        file="fleet/live.py",
        right="""\
        is_first = bool(inline) or await self._lanes.ledger.run(
            self.ledger.reply, message.round, lease.attempt, row, lease.issue, pace
        )
""",
        wrong="""\
        is_first = True
""",
    ),
    Plant(
        name="a deal that is not written with the leases it made",
        file="storage/ledger.py",
        right="""\
                [(round, attempt, x.key, x.issue, x.worker, x.lease, x.status, x.reason) for x in leases],
            )
            self._put_deal(deal)
""",
        wrong="""\
                [(round, attempt, x.key, x.issue, x.worker, x.lease, x.status, x.reason) for x in leases],
            )
""",
    ),
    Plant(
        name="leases of lost workers that are never given up",
        file="fleet/leases.py",
        right="""\
    if gone:
        return gone
""",
        wrong="",
    ),
    Plant(
        name="parameters that are removed while a restart may need them",
        file="coordinator/core.py",
        right="""\
        handles = {*state.handles(), self.facts.initial, self.facts.zeros}
""",
        wrong="""\
        handles = {*state.handles()[:1], self.facts.initial, self.facts.zeros}
""",
    ),
    Plant(
        name="a weight that counts speed twice",
        file="aggregation/combine.py",
        right="""\
    factors = [weight / total * (1.0 if mean else total) for weight in weights]
""",
        wrong="""\
    factors = [weight / total * weight / total * (1.0 if mean else total) for weight in weights]
""",
    ),
    Plant(
        name="an inner optimizer that a restart forgets",
        file="worker/trainer.py",
        right="            self._replica.restore_local_state(tensors, scalars)\n",
        wrong="            del tensors\n",
    ),
    Plant(
        name="a commit that does not say which states workers hold",
        file="storage/ledger.py",
        right="[(r.worker, r.version) for r in row.accepted if r.version],",
        wrong="[],",
    ),
    Plant(
        name="a discard that does not give the data back for the next process",
        file="storage/ledger.py",
        right="""\
                (reason, round, attempt),
            )
            self._put_deal(deal)
""",
        wrong="""\
                (reason, round, attempt),
            )
""",
    ),
    Plant(
        name="who takes part in a round, not written down",
        file="fleet/attempt.py",
        right="        ledger.decide_all(round, attempt, first)\n",
        wrong="",
    ),
    Plant(
        name="lost work that the next process waits for",
        file="fleet/live.py",
        right="""\
            self.ledger.settle, message.round, lease.attempt, message.key, lease.issue, "lost", reason, deal,
""",
        wrong="""\
            self.ledger.settle, message.round, lease.attempt, message.key, lease.issue, "open", reason, deal,
""",
    ),
    Plant(
        name="a snapshot of another task that is gone on from",
        file="worker/snapshots.py",
        right="        if snapshot.task != task:\n            return None\n        tensors",
        wrong="        tensors",
    ),
    Plant(
        name="an inner optimizer that keeps the steps of a task that was given up",
        file="worker/trainer.py",
        right="        self._in_memory = None  # until the task ends well, what is in memory is neither v nor v+1\n",
        wrong="",
    ),
    Plant(
        name="data that is read twice after a snapshot",
        file="worker/resumable.py",
        right="        for _ in range(snapshot.num_batches):\n            next(self._batches)\n",
        wrong="",
    ),
    Plant(
        name="error feedback that is forgotten",
        file="worker/feedback.py",
        right="total = vector if before is None else vector + beta * before",
        wrong="total = vector",
    ),
)


def bench_planted(*, seeds: int = 2000, jobs: int = 2, told: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """For each planted fault the number of seeds until the first violation, 0 if none was found."""
    figures: dict[str, Any] = {"seeds_at_most": seeds}
    for plant in plants:
        with tempfile.TemporaryDirectory(prefix="potluck-planted-") as name:
            num_seeds, violation = _search(plant, Path(name), seeds, jobs)
        key = re.sub(r"[^a-z]+", "_", plant.name.lower())
        figures[f"{key}_found_after_seeds"], figures[f"{key}_as"] = num_seeds, violation
        told(f"{plant.name}: {f'seed {num_seeds}: {violation}' if violation else 'not found'}")
    return figures


def _search(plant: Plant, folder: Path, seeds: int, jobs: int) -> tuple[int, str]:
    copy = folder / "potluck"
    shutil.copytree(Path(potluck.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    file = copy / plant.file
    source = file.read_text(encoding="utf-8")
    if source.count(plant.right) != 1:
        raise PotluckError(f"{plant.file} has changed: the place of the planted fault {plant.name!r} is not there once")
    file.write_text(source.replace(plant.right, plant.wrong), encoding="utf-8")
    command = [sys.executable, "-m", "potluck", "simulate", "--fuzz", str(seeds), "--jobs", str(jobs), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode == 0:
        json.loads(done.stdout.splitlines()[-1])
        return 0, ""
    match = re.search(r"potluck: seed (\d+) violates an invariant: (.*?); replay it", done.stderr, re.DOTALL)
    if match is None:
        raise PotluckError(f"the search for {plant.name!r} ended with: {done.stderr[-2000:]}")
    return int(match[1]) + 1, match[2][:200]
