"""Real faults: processes that are killed or stopped, links that are cut, blocked or crawl."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.processes import write_corpus, write_recipe

from potluck.bench.rig import paced
from potluck.bench.rig.nursery import Nursery
from potluck.bench.rig.real_run import RealRun, real_run
from potluck.bench.rig.wire import WireLoop

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="workers dial addresses of loopback that are Linux's only"),
]

HEARTBEAT_S, RECONNECT_S = 0.5, 1.5
NAMES = ("anna", "bert", "cleo")
NUM_STEPS = 20


def strategy(num_steps: int) -> str:
    """Steps of 30 ms, whatever the machine does meanwhile."""
    return (
        f'name = "{Path(paced.__file__).as_posix()}:Paced"\nnum_inner_steps = {num_steps}\nstep_s = 0.03\n'
        "outer_momentum = 0.6\ninner = { lr = 5e-3, batch_size = 4, warmup = 0.0 }"
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, processes: Nursery, wires: WireLoop) -> Iterator[RealRun]:
    """A run without end, with three workers in rounds of a second. Each test leaves all of them at work."""
    folder = tmp_path_factory.mktemp("site")
    write_corpus(folder / "texts", num_files=4)
    write_recipe(
        folder / "recipe.toml", 'shared = "texts"', budget="rounds = 100000", strategy=strategy(NUM_STEPS),
        fleet=f"min_workers = 1\nheartbeat_s = {HEARTBEAT_S}\nreconnect_s = {RECONNECT_S}",
        checkpoint="every_rounds = 3", validation="every_rounds = 0",
    )  # fmt: skip
    with real_run(folder, wires, start=processes.start, speeds=processes.speeds) as made:
        made.start_host()
        made.join_all(*NAMES)
        processes.speeds = made.speeds
        made.wait_round(*NAMES)
        yield made


@pytest.fixture(autouse=True)
def nothing_counts_twice(running: RealRun) -> Iterator[None]:
    yield
    commits = Counter((round, worker) for round, worker, _ in running.accepted())
    assert max(commits.values()) == 1
    rounds = [e["round"] for e in running.rounds()]
    assert rounds == list(range(1, len(rounds) + 1))
    per_worker = NUM_STEPS * 4 * 32
    tokens = [e["tokens"] for e in running.rounds()]
    gained = [after - before for before, after in zip([0, *tokens], tokens, strict=False)]
    assert gained == [per_worker * len(e["workers"]) for e in running.rounds()]
    for name in NAMES:
        assert "starts afresh" not in running.log(name)
        assert running.workers[name].poll() is None


# Workers


def test_a_worker_that_is_killed_costs_the_others_no_step(running: RealRun) -> None:
    running.wait_at_work("bert")
    at, seen = time.time(), len(running.rounds())
    running.workers["bert"].kill()
    running.wait(lambda: len(running.rounds()) > seen, "end of the round")
    assert running.rounds()[seen]["workers"] == ["anna", "cleo"]
    lost = running.events("lost", since=at)
    assert [e["worker"] for e in lost] == ["bert"] and "away" in lost[0]["reason"]
    running.join("bert")
    running.wait_round(*NAMES)


def test_a_worker_that_stands_still_is_given_up_and_taken_up_again(running: RealRun) -> None:
    running.wait_at_work("bert")
    seen = len(running.rounds())
    running.workers["bert"].send_signal(signal.SIGSTOP)
    running.wait(lambda: len(running.rounds()) > seen + 1, "two rounds")
    running.workers["bert"].send_signal(signal.SIGCONT)
    assert [e["workers"] for e in running.rounds()[seen : seen + 2]] == [["anna", "cleo"]] * 2
    running.wait_round(*NAMES)


def test_thirty_percent_of_the_workers_go_in_every_round(running: RealRun) -> None:
    chance = random.Random(4)
    for _ in range(3):
        name = chance.choice(NAMES)
        running.wait_at_work(name)
        time.sleep(chance.uniform(0.0, 0.8))
        seen = len(running.rounds())
        running.workers[name].kill()
        running.join(name)
        running.wait(lambda seen=seen: len(running.rounds()) > seen, "end of the round")
    running.wait_round(*NAMES)


# Links


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_link_that_is_cut_in_the_middle_of_a_transfer_costs_nothing(running: RealRun, way: str) -> None:
    there = getattr(running.wires["cleo"], way)
    at, seen = time.time(), len(running.rounds())
    there.bytes_per_s = 100_000
    there.cuts = [there.num_bytes + 30_000]
    running.wait(lambda: not there.cuts, "cut")
    there.bytes_per_s = 0
    running.wait_round(*NAMES)
    assert not running.events("lost", since=at)
    assert all(e["workers"] == [*NAMES] for e in running.rounds()[seen:])
    assert running.events("joined", since=at)


def test_a_link_that_crawls_holds_its_round_up_and_loses_nothing(running: RealRun) -> None:
    """The transfer takes far longer than the worker may be silent: heartbeats pass beside it."""
    running.wait_at_work("cleo")
    at, seen = time.time(), len(running.rounds())
    running.wires["cleo"].up.bytes_per_s = 12_000
    running.wait(lambda: len(running.rounds()) > seen, "end of the round")
    running.wires["cleo"].up.bytes_per_s = 0
    (crawled,) = running.rounds()[seen : seen + 1]
    assert crawled["workers"] == [*NAMES] and crawled["seconds"] > 2 * 3 * HEARTBEAT_S
    assert not [*running.events("lost", since=at), *running.events("left", since=at)]


def test_a_cable_that_is_pulled_is_noticed_and_plugged_in_again(running: RealRun) -> None:
    running.wait_at_work("cleo")
    seen = len(running.rounds())
    running.wires["cleo"].block()
    running.wait(lambda: len(running.rounds()) > seen, "end of the round")
    assert running.rounds()[seen]["workers"] == ["anna", "bert"]
    running.wires["cleo"].block(False)
    running.wait_round(*NAMES)


# The coordinator


def test_a_coordinator_that_stands_still_loses_nobody(running: RealRun) -> None:
    running.wait_at_work("anna")
    at, seen = time.time(), len(running.rounds())
    running.host.send_signal(signal.SIGSTOP)
    time.sleep(8 * HEARTBEAT_S)
    running.host.send_signal(signal.SIGCONT)
    running.wait(lambda: len(running.rounds()) > seen + 1, "two rounds")
    assert [e["workers"] for e in running.rounds()[seen : seen + 2]] == [[*NAMES]] * 2
    assert not [*running.events("lost", since=at), *running.events("left", since=at)]


def test_workers_train_on_without_a_coordinator_and_what_it_had_accepted_counts(running: RealRun) -> None:
    cleo = running.wires["cleo"]
    running.wait_at_work("cleo")
    cleo.block()
    (round,) = running.ledger("SELECT max(round) FROM leases WHERE round < 1000000000000")[0]
    accepted = f"SELECT worker, object FROM replies WHERE round = {round} AND attempt = 0"
    running.wait(lambda: len(running.ledger(accepted)) == 2, "two of three updates")
    running.host.kill()
    had = running.ledger(accepted)
    cleo.block(False)
    (states,) = (running.folder / "cleo").glob("runs/*/local")
    running.wait(lambda: len(list(states.glob("*.safetensors"))) == 2, "end of the training that went on")
    running.start_host()
    running.wait(lambda: len(running.rounds()) > round, "the round")
    assert running.rounds()[round]["workers"] == [*NAMES]
    counted = [(worker, update) for of, worker, update in running.accepted() if of == round]
    assert sorted(had) == [pair for pair in sorted(counted) if pair[0] != "cleo"]
    assert running.ledger(f"SELECT max(issue) FROM leases WHERE round = {round}") == [(0,)]
    running.wait_round(*NAMES)


def test_coordinator_and_worker_are_killed_at_once(running: RealRun) -> None:
    running.wait_at_work("bert")
    running.workers["bert"].kill()
    running.host.kill()
    running.join("bert")
    running.start_host()
    running.wait_round(*NAMES)
