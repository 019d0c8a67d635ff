"""What faults cost: real processes that are killed or stopped, over links of the bench's own.

Coordinator and workers are the shipping commands on loopback with TLS. Inner steps take a chosen time (`rig.paced`), so
that one machine can stand for several. Every time is from the fault, or from the moment that the coordinator listens
again, to what the ledger or the run's log shows. Processes are forked from one that has imported everything: what it
takes to start Python is in no figure.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from potluck.bench.rig import paced
from potluck.bench.rig.nursery import Nursery, nursery
from potluck.bench.rig.real_run import RealRun, real_run, tiny_recipe, write_corpus
from potluck.bench.rig.wire import Way, WireLoop, wire_loop
from potluck.coordinator.core import VALIDATION_ATTEMPT
from potluck.coordinator.prepare import sketch
from potluck.coordinator.recipe import parse_recipe
from potluck.fleet.roster import missed_heartbeats
from potluck.planner.deadline import deadline_s
from potluck.planner.flops import step_work
from potluck.planner.memory import ModelDims
from potluck.simulator.fleets import Device
from potluck.simulator.large.scale import simulate_scale
from potluck.storage.digest import digest_file

heartbeat_s = 2.0
step_s = 0.1
up_bytes_per_s, down_bytes_per_s, one_way_s = 5e6 / 8, 20e6 / 8, 0.02
rounds_between_failures = 3.0
look_s = 0.01


def bench_faults(
    *, only: str = "", rounds: int = 12, round_s: float = 20.0, snapshot_steps: int = 0, repeats: int = 3, seed: int = 1
) -> dict[str, Any]:
    """All parts, or `only` one: worker, pure, coordinator, goodput or throttled.

    `rounds` of `round_s` are those of goodput, and the number of throttled; `snapshot_steps` sets the recipe's where it
    has such a key.
    """
    parts: dict[str, Callable[[_Bench], dict[str, Any]]] = {
        "worker": lambda bench: worker_killed(bench, repeats),
        "pure": lambda bench: pure_task_reissued(bench, repeats),
        "coordinator": lambda bench: coordinator_killed(bench, repeats),
        "goodput": lambda bench: goodput(bench, rounds, round_s, snapshot_steps, seed),
        "throttled": lambda bench: throttled(bench, rounds),
    }
    chosen = [only] if only else list(parts)
    figures: dict[str, Any] = {}
    with wire_loop() as loop, nursery() as processes:
        bench = _Bench(loop, processes)
        for name in chosen:
            figures |= {f"{name}_{key}": value for key, value in parts[name](bench).items()}
    return figures


class _Bench:
    def __init__(self, loop: WireLoop, processes: Nursery) -> None:
        self._loop, self._processes = loop, processes

    @contextmanager
    def running(self, *names: str, **sections: str) -> Iterator[RealRun]:
        """A run with these workers at work. `sections` are those of its recipe that differ."""
        parent = os.environ.get("POTLUCK_BENCH_DIR")
        with tempfile.TemporaryDirectory(prefix="potluck-bench-", dir=parent) as name, ExitStack() as stack:
            folder = Path(name)
            write_corpus(folder / "texts")
            (folder / "recipe.toml").write_text(_recipe(**sections))
            made = stack.enter_context(
                real_run(folder, self._loop, start=self._processes.start, speeds=self._processes.speeds)
            )
            made.start_host()
            made.join_all(*names)
            self._processes.speeds = made.speeds
            yield made


def _recipe(**sections: str) -> str:
    return tiny_recipe("faults", **{
        "model": 'config = { model_type = "gpt2", n_layer = 2, n_embd = 64, n_head = 2, n_positions = 32 }',
        "data": 'shared = "texts"\ntokenizer = { train = "bpe", vocab_size = 500 }\nseq_len = 32\nvalidation = 0.1',
        "budget": "rounds = 100000",
        "strategy": _paced(40),
        "fleet": f"min_workers = 1\nheartbeat_s = {heartbeat_s}",
        "validation": "every_rounds = 0",
        **sections,
    })  # fmt: skip


def _paced(num_steps: int, step_s: float = step_s) -> str:
    return (
        f'name = "{Path(paced.__file__).as_posix()}:Paced"\nnum_inner_steps = {num_steps}\nstep_s = {step_s}\n'
        "inner = { lr = 2e-3, batch_size = 4, warmup = 0.0 }"
    )


def worker_killed(bench: _Bench, repeats: int) -> dict[str, Any]:
    """One of three workers is killed, then one is stopped, in the middle of a round of about 4 s."""
    names = ("w1", "w2", "w3")
    found: dict[str, Any] = {}
    with bench.running(*names) as run:
        run.wait_round(*names, more=4)
        usual = [e["seconds"] for e in run.rounds() if e["workers"] == [*names]][1:]
        found["undisturbed_round_s"] = round(statistics.median(usual), 2)
        limit_s = deadline_s([s / 160 for s in usual], 160)
        found["adaptive_deadline_s"] = round(limit_s or 0.0, 2)
        for what, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            given_up: list[float] = []
            closed: list[float] = []
            lost_steps = 0
            for _ in range(repeats):
                run.wait_at_work("w2")
                time.sleep(0.4 * found["undisturbed_round_s"])
                at, seen = time.time(), len(run.rounds())
                run.workers["w2"].send_signal(number)
                run.wait(lambda seen=seen: len(run.rounds()) > seen, "end of the round")
                after = run.rounds()[seen]
                given_up.append(run.events("lost", since=at)[0]["time"] - at)
                closed.append(after["seconds"])
                lost_steps += 40 * (len({"w1", "w3"} - {*after["workers"]}))
                if number == signal.SIGSTOP:
                    run.workers["w2"].send_signal(signal.SIGCONT)
                else:
                    run.workers["w2"].wait()
                    run.join("w2")
                run.wait_round(*names)
            found |= {
                f"{what}_given_up_after_s_max": round(max(given_up), 2),
                f"{what}_round_s_max": round(max(closed), 2),
                f"{what}_steps_lost_by_others": lost_steps,
            }
    return found


def pure_task_reissued(bench: _Bench, repeats: int) -> dict[str, Any]:
    """From the death of a worker that holds a pure task to its next issue. The target is 3 heartbeats and 1 s."""
    names = ("w1", "w2", "w3")
    bag = f'name = "{Path(paced.__file__).as_posix()}:Bag"\nnum_pieces = 6\npiece_s = 3.0'
    found: dict[str, Any] = {"target_s": missed_heartbeats * heartbeat_s + 1.0}
    with bench.running(*names, strategy=bag) as run:
        run.wait(lambda: len(run.rounds()) >= 1 and len(run.events("joined")) == 3, "round")
        for what, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            taken: list[float] = []
            for _ in range(repeats):
                run.wait_at_work("w2")
                (key, *_), (round_number,) = run.leased("w2"), run.ledger("SELECT max(round) FROM attempts")[0]
                again = f"SELECT 1 FROM leases WHERE round = {round_number} AND key = '{key}' AND issue > 0"
                at = time.monotonic()
                run.workers["w2"].send_signal(number)
                run.wait(lambda sql=again: run.ledger(sql), "next issue of the task", every_s=look_s)
                taken.append(time.monotonic() - at)
                if number == signal.SIGSTOP:
                    run.workers["w2"].send_signal(signal.SIGCONT)
                else:
                    run.workers["w2"].wait()
                    run.join("w2")
                back = time.time()
                run.wait(lambda back=back: run.events("joined", since=back), "return of w2")
            found[f"{what}_reissued_after_s_max"] = round(max(taken), 2)
    return found


def coordinator_killed(bench: _Bench, repeats: int) -> dict[str, Any]:
    """It is killed in the middle of each of the first rounds; the same run undisturbed ends with the same bytes."""
    names = ("w1", "w2", "w3")
    sections = {"budget": f"rounds = {repeats + 1}", "fleet": f"min_workers = 3\nheartbeat_s = {heartbeat_s}"}
    with bench.running(*names, **sections) as run:
        run.host.wait(300)
        undisturbed = digest_file(run.run / "model" / "model.safetensors")
    first_s: list[float] = []
    back_s: list[float] = []
    num_lost = num_acknowledged = 0
    with bench.running(*names, **sections) as run:
        for number in range(repeats):
            of_round = f"WHERE round = {number} AND attempt < {VALIDATION_ATTEMPT}"
            leases = f"SELECT 1 FROM leases {of_round}"
            replies = f"SELECT worker, object FROM replies {of_round}"
            run.wait(lambda sql=leases: len(run.ledger(sql)) == 3, "round")
            time.sleep(20 * step_s)  # half of its steps: the model has long come to it
            run.wires["w3"].block()  # its update is on its way while those of the others are accepted
            run.wait(lambda sql=replies: len(run.ledger(sql)) == 2, "two of three updates")
            run.host.kill()
            run.host.wait()
            run.wires["w3"].block(False)
            acknowledged = run.ledger(replies)
            listening = run.start_host()
            run.wait(
                lambda sql=replies, n=number: len(run.ledger(sql)) != 2 or len(run.rounds()) > n,
                "third update", every_s=look_s,
            )  # fmt: skip
            first_s.append(time.time() - listening)
            back_s.append(run.events("joined", since=listening)[0]["time"] - listening)
            run.wait(lambda n=number: len(run.rounds()) > n, "end of the round")
            counted = [(worker, update) for of, worker, update in run.accepted() if of == number]
            num_acknowledged += len(acknowledged)
            num_lost += len({*acknowledged} - {*counted})
        run.host.wait(300)
        disturbed = digest_file(run.run / "model" / "model.safetensors")
    return {
        "first_accepted_after_listening_s_max": round(max(first_s), 2),
        "first_accepted_after_listening_s": [round(s, 2) for s in first_s],
        "first_back_after_listening_s": [round(s, 2) for s in back_s],
        "updates_acknowledged_before": num_acknowledged,
        "updates_lost": num_lost,
        "final_model_is_equal": disturbed == undisturbed,
    }


def goodput(bench: _Bench, num_rounds: int, round_s: float, snapshot_steps: int, seed: int) -> dict[str, Any]:
    """Four workers, each killed on average every third round and started again at once; tokens per second of life.

    A worker lives from when it has joined to when it is killed; `…_with_starts` counts the seconds of its start too.
    """
    names = ("w1", "w2", "w3", "w4")
    num_steps = 40
    snapshots = f"\nsnapshot_every_steps = {snapshot_steps}" if snapshot_steps else ""
    waits = f"heartbeat_s = {heartbeat_s}\nreconnect_s = {max(30.0, round_s)}"
    fleet = f'min_workers = 1\n{waits}\nbalance = "time"{snapshots}'
    chance = random.Random(seed)
    with bench.running(*names, strategy=_paced(num_steps, round_s / num_steps), fleet=fleet) as run:
        run.wait_round(*names, more=2, timeout_s=20 * round_s)
        usual = run.rounds()[-1]
        seen, begun = len(run.rounds()), usual["time"]
        lives = {name: _Life(begun, chance, rounds_between_failures * usual["seconds"]) for name in names}

        def is_over() -> bool:
            for name, life in lives.items():
                _live_or_die(run, name, life)
            if (num_done := len(run.rounds()) - seen) > 1:
                mean_s = rounds_between_failures * (time.time() - begun) / num_done
                for life in lives.values():
                    life.mean_s = mean_s
            return num_done >= num_rounds

        run.wait(is_over, f"{num_rounds} rounds", timeout_s=20 * num_rounds * round_s, every_s=0.1)
        rounds = run.rounds()[seen : seen + num_rounds]
    ended = rounds[-1]["time"]
    tokens = rounds[-1]["tokens"] - usual["tokens"]
    usual_tokens_per_s = num_steps * 4 * 32 / usual["seconds"]  # of one worker
    return {
        "undisturbed_round_s": round(usual["seconds"], 2),
        "round_s_mean": round((ended - begun) / num_rounds, 2),
        "rounds": num_rounds,
        "failures": sum(life.num_deaths for life in lives.values()),
        "contributions": sum(len(e["workers"]) for e in rounds),
        "contributions_possible": len(names) * num_rounds,
        "start_s_mean": round(statistics.mean(s for life in lives.values() for s in life.starts_s), 1),
        "percent": round(100 * tokens / sum(life.seconds(ended) for life in lives.values()) / usual_tokens_per_s, 1),
        "percent_with_starts": round(100 * tokens / (len(names) * (ended - begun)) / usual_tokens_per_s, 1),
    }


class _Life:
    """When a worker lives and dies: after times of chance, every third round on average. Seconds since 1970."""

    def __init__(self, now: float, chance: random.Random, mean_s: float) -> None:
        self._chance, self.mean_s = chance, mean_s
        self._lived_s = 0.0
        self.num_deaths = 0
        self.starts_s: list[float] = []
        self.died_at = 0.0
        self.joined_at = 0.0  # 0 while it starts
        self.dies_at = 0.0
        self.join(now)

    def join(self, at: float) -> None:
        if self.died_at:
            self.starts_s.append(at - self.died_at)
        self.joined_at, self.dies_at = at, at + self._chance.expovariate(1 / self.mean_s)

    def die(self, at: float) -> None:
        self._lived_s += at - self.joined_at
        self.num_deaths += 1
        self.died_at, self.joined_at = at, 0.0

    def seconds(self, now: float) -> float:
        """Lived so far."""
        return self._lived_s + (now - self.joined_at if self.joined_at else 0.0)


def _live_or_die(run: RealRun, name: str, life: _Life) -> None:
    if life.joined_at and time.time() >= life.dies_at:
        run.workers[name].kill()
        run.workers[name].wait()
        life.die(time.time())
        run.join(name)
    elif not life.joined_at:
        back = [e["time"] for e in run.events("joined", since=life.died_at) if e["worker"] == name]
        if back:
            life.join(back[0])


def throttled(bench: _Bench, num_rounds: int) -> dict[str, Any]:
    """Four workers over 5 Mbit/s up, 20 down and 40 ms there and back, in rounds of 3 s of steps; and as simulated."""
    names = ("w1", "w2", "w3", "w4")
    model = 'config = { model_type = "gpt2", n_layer = 4, n_embd = 128, n_head = 4, n_positions = 32 }'
    sections = {"model": model, "strategy": _paced(12, 0.25), "fleet": f"min_workers = 4\nheartbeat_s = {heartbeat_s}"}
    with bench.running(**sections) as run:
        run.join_all(
            *names,
            up=lambda: Way(bytes_per_s=up_bytes_per_s, delay_s=one_way_s),
            down=lambda: Way(bytes_per_s=down_bytes_per_s, delay_s=one_way_s),
        )
        run.wait_round(*names, timeout_s=300)
        moved = {way: sum(getattr(wire, way).num_bytes for wire in run.wires.values()) for way in ("up", "down")}
        run.wait_round(*names, more=num_rounds, timeout_s=60.0 * num_rounds)
        seconds = [e["seconds"] for e in run.rounds()][1 : num_rounds + 1]
        after = {way: sum(getattr(wire, way).num_bytes for wire in run.wires.values()) for way in moved}
    per_worker = len(names) * num_rounds * 1e6
    predicted_s = _predicted_round_s(model, len(names), num_rounds)
    return {
        "predicted_round_s": round(predicted_s, 3),
        "predicted_over_observed_ratio": round(predicted_s / statistics.median(seconds), 3),
        "round_s": [round(s, 3) for s in seconds],
        "round_s_median": round(statistics.median(seconds), 3),
        "steps_s": 12 * 0.25,
        "up_mb_per_worker_and_round": round((after["up"] - moved["up"]) / per_worker, 3),
        "down_mb_per_worker_and_round": round((after["down"] - moved["down"]) / per_worker, 3),
    }


def _predicted_round_s(model: str, num_workers: int, num_rounds: int) -> float:
    """What the simulator says of the same recipe, on devices with steps as long and links as the wires are."""
    num_steps, step_s = 12, 0.25
    plain = f'name = "diloco"\nnum_inner_steps = {num_steps}\ninner = {{ lr = 2e-3, batch_size = 4, warmup = 0.0 }}'
    recipe = parse_recipe(tomllib.loads(_recipe(model=model, strategy=plain, budget=f"rounds = {num_rounds + 1}")))
    plan = sketch(recipe)
    dims = ModelDims.of(plan.spec.model_config_json, plan.layout.numel)
    tokens = plan.spec.inner.sequences_per_step * plan.spec.seq_len
    flops = step_work(dims, seq_len=plan.spec.seq_len, num_tokens=tokens).flops / step_s
    device = Device(
        name="w", count=num_workers, flops=(flops, flops), up_bytes_per_s=(up_bytes_per_s, up_bytes_per_s),
        down_bytes_per_s=(down_bytes_per_s, down_bytes_per_s), rtt_s=(2 * one_way_s, 2 * one_way_s),
    )  # fmt: skip
    return statistics.median(simulate_scale(plan, [device]).round_s[1:])
