"""The ledger of spent privacy: it only grows, whatever happens, and is never begun anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from potluck.optim.accounting import PrivateSteps
from potluck.optim.dp_sgd import PrivacyConfig
from potluck.types.errors import CorruptError, Refused
from potluck.worker import privacy_ledger
from potluck.worker.privacy_ledger import PrivacyLedger
from potluck.worker.private_training import PrivateTraining

config = PrivacyConfig(max_epsilon=8.0, delta=1e-5, noise_multiplier=1.0, clip=1.0)


def path_in(folder: Path) -> Path:
    return PrivacyLedger.path(folder, "run-1")


def opened(folder: Path, *, has_begun: bool = False, **changes: float) -> PrivacyLedger:
    return PrivacyLedger.open(path_in(folder), config.model_copy(update=changes), has_begun=has_begun)


def grown(folder: Path, num_steps: int = 3) -> PrivacyLedger:
    ledger = opened(folder)
    for _ in range(num_steps):
        ledger.add_step(rate=0.1, noise_multiplier=1.0)
    return ledger


def test_it_grows_over_restarts_and_counts_steps_of_other_kinds_apart(tmp_path: Path) -> None:
    assert grown(tmp_path).num_steps == 3
    later = opened(tmp_path, has_begun=True)
    later.add_step(rate=0.1, noise_multiplier=1.0)
    later.add_step(rate=0.2, noise_multiplier=1.0)  # its owner brought other records
    assert opened(tmp_path).spent == (
        PrivateSteps(num_steps=4, rate=0.1, noise_multiplier=1.0),
        PrivateSteps(num_steps=1, rate=0.2, noise_multiplier=1.0),
    )


def test_one_that_is_lost_is_not_begun_anew(tmp_path: Path) -> None:
    grown(tmp_path)
    path_in(tmp_path).unlink()
    with pytest.raises(CorruptError, match=r"has trained in the run and .*run-1.json.* is missing"):
        opened(tmp_path, has_begun=True)
    assert opened(tmp_path, has_begun=False).num_steps == 0


def test_one_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    grown(tmp_path)
    whole = path_in(tmp_path).read_bytes()
    broken = [whole[:length] for length in range(len(whole))]
    for changes in ({"steps": [[0, 0.1, 1.0]]}, {"steps": [[-3, 0.1, 1.0]]}, {"steps": []}, {"steps": [[3, 0.0, 1.0]]},
                    {"steps": [[3, 0.1, float("inf")]]}, {"steps": [[3, 0.1, float("nan")]]}, {"steps": 3},
                    {"steps": [[1.5, 0.1, 1.0]]}, {"delta": 2.0}, {"max_epsilon": None}):  # fmt: skip
        broken.append(json.dumps({**json.loads(whole), **changes}).encode())
    for content in broken:
        path_in(tmp_path).write_bytes(content)
        with pytest.raises(CorruptError, match="cannot be read"):
            opened(tmp_path)


def test_one_that_does_not_know_the_state_to_go_on_from_is_an_older_copy(tmp_path: Path) -> None:
    """Also where the whole folder is one: the coordinator names what the worker has made since."""

    def goes_on(state: str, content: bytes) -> None:
        path_in(tmp_path).write_bytes(content)
        PrivateTraining(config, opened(tmp_path), num_records=40, batch_size=4).require_ledger(state)

    written: list[bytes] = []
    for after, made in (("", "1"), ("1", "2"), ("1", "2 again")):
        ledger = grown(tmp_path, num_steps=1)
        ledger.add_state(made, after=after)
        written.append(path_in(tmp_path).read_bytes())
    for state in ("", "1", "2", "2 again"):
        goes_on(state, written[-1])
    for state, content in (("2", written[0]), ("2 again", written[1])):
        with pytest.raises(
            CorruptError, match=f"its state {state}, of which its ledger .* an older copy; put the newest"
        ):
            goes_on(state, content)
    before_names_were_kept = {name: value for name, value in json.loads(written[1]).items() if name != "states"}
    goes_on("2 again", json.dumps(before_names_were_kept).encode())


def test_the_state_that_rounds_go_on_from_is_known_however_often_they_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(privacy_ledger, "num_states", 4)
    ledger = grown(tmp_path)
    for number in range(9):
        ledger.add_state(f"try {number}", after="good")
    ledger = opened(tmp_path)
    assert ledger.knows("good") and ledger.knows("try 8") and not ledger.knows("try 0")


@pytest.mark.parametrize("changes", [{"max_epsilon": 9.0}, {"delta": 2e-5}])
def test_a_run_is_not_made_less_private(changes: dict[str, float], tmp_path: Path) -> None:
    grown(tmp_path)
    with pytest.raises(Refused, match="a run is not made less private once it has begun"):
        opened(tmp_path, **changes)
    assert opened(tmp_path, max_epsilon=4.0, delta=1e-6).num_steps == 3


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_what_cannot_be_written_is_not_counted(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = grown(tmp_path)

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if where == "fsync" else (Path, "replace")), fails)
        with pytest.raises(KeyboardInterrupt):
            ledger.add_step(rate=0.1, noise_multiplier=1.0)
    assert ledger.num_steps == opened(tmp_path).num_steps == 3


COUNTING = """
import sys
from pathlib import Path
from potluck.optim.dp_sgd import PrivacyConfig
from potluck.worker.privacy_ledger import PrivacyLedger
config = PrivacyConfig(max_epsilon=8.0, delta=1e-5, noise_multiplier=1.0, clip=1.0)
ledger = PrivacyLedger.open(Path(sys.argv[1]), config, has_begun=False)
while True:
    ledger.add_step(rate=0.1, noise_multiplier=1.0)
    print(ledger.num_steps, flush=True)
"""


@pytest.mark.parametrize("num_seen", [1, 7])
def test_a_kill_at_any_moment_forgets_no_step(num_seen: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", COUNTING, str(path_in(tmp_path))], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(num_seen):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    told = [int(line) for line in process.stdout if line.endswith("\n")]
    process.wait()
    process.stdout.close()
    last = told[-1] if told else num_seen
    assert last <= opened(tmp_path, has_begun=True).num_steps <= last + 1
