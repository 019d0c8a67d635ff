"""Whole runs under faults from seeds: every invariant holds, and a seed gives the same history each time.

`potluck simulate --fuzz 10000` plays many more; docs/lab.md lists what it finds when a fault is planted.
"""

import random

import pytest

from potluck.simulator.exact.faults import KINDS, WORKERS_ONLY, Fault, coordinator, draw
from potluck.simulator.exact.fuzz import case_of, fuzz, play_seed

# A killed process closes nothing.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

ever_failed = (2267, 2511, 2515, 8449)
"""Seeds that once found something: they are played for ever."""


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_no_seed_violates_an_invariant(first: int) -> None:
    found = fuzz(range(first, first + 20), until_first=False)
    assert found.num_seeds == 20
    assert [(v.seed, v.detail) for v in found.violated] == []
    assert found.outcomes.get("finished", 0) >= 18  # some end early for a good reason, such as a model of their own


@pytest.mark.parametrize("seed", ever_failed)
def test_a_seed_that_once_failed(seed: int) -> None:
    verdict = play_seed(seed)
    assert verdict.is_good, verdict.detail


def test_a_seed_gives_the_same_history_each_time() -> None:
    one, two = (play_seed(7) for _ in range(2))
    assert one == two
    assert one.history and one.num_points > 100


def test_the_same_run_without_faults_is_another_one() -> None:
    """So that faults do something: with one in the middle of each process the history differs."""
    calm = play_seed(3, faults=())
    workers = case_of(3).workers
    faults = [Fault(machine=m, kind="crash", point=90, lasts_s=1.0) for m in (coordinator, *workers)]
    wild = play_seed(3, faults=faults)
    assert calm.outcome == wild.outcome == "finished"
    assert {f.machine for f in wild.struck} == {coordinator, *workers}
    assert not calm.struck and wild.virtual_s > calm.virtual_s


def test_faults_are_drawn_for_every_machine_and_of_every_kind() -> None:
    drawn = draw(random.Random(1), ["w1", "w2"], num_faults=2000, most_points=100)
    assert {f.kind for f in drawn} == set(KINDS)
    assert {f.machine for f in drawn} == {coordinator, "w1", "w2"}
    assert not [f for f in drawn if f.machine == coordinator and f.kind in WORKERS_ONLY]
    assert all(1 <= f.point < 100 and 0.1 <= f.lasts_s <= 100 for f in drawn)


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_no_product_is_wrong_whatever_happens_to_devices(first: int) -> None:
    """Sub-GEMM: a committed step is that of a plain run with the same data, up to the order of sums."""
    verdicts = [play_seed(seed, only=("sub_gemm",)) for seed in range(first, first + 8)]
    assert [(v.seed, v.detail) for v in verdicts if not v.is_good] == []
    assert sum(v.outcome == "finished" for v in verdicts) >= 7


def test_rounds_that_overlap_are_what_their_tasks_make_of_them() -> None:
    """Streaming DiLoCo with any overlap, plain and eager: chains of tasks, through every crash."""
    verdicts = [play_seed(seed, only=("streaming_diloco",)) for seed in range(8)]
    assert [(v.seed, v.detail) for v in verdicts if not v.is_good] == []
    assert sum(v.outcome == "finished" for v in verdicts) >= 7


@pytest.mark.parametrize("name", ["fed_avg", "fed_lora", "sparse_diloco"])
def test_relatives_of_diloco_keep_what_is_theirs(name: str) -> None:
    """Moments of the outer optimizer, control variates of workers, what their codecs left over."""
    verdicts = [play_seed(seed, only=(name,)) for seed in range(2, 8)]
    assert [(v.seed, v.detail) for v in verdicts if not v.is_good] == []
    assert sum(v.outcome == "finished" for v in verdicts) >= 5


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_every_update_without_a_barrier_counts_once(first: int) -> None:
    """Asynchronous DiLoCo in all its ways: an accepted update waits for its commit through every crash."""
    verdicts = [play_seed(seed, only=("async_diloco",)) for seed in range(first, first + 8)]
    assert [(v.seed, v.detail) for v in verdicts if not v.is_good] == []
    assert sum(v.outcome == "finished" for v in verdicts) >= 7
