"""The owner decides: a coordinator and workers as processes, and policies that it does not like."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from e2e.inside import CommandLine, Ended
from e2e.processes import events, potluck, result_of, wait_for, write_recipe
from e2e.test_data_access import Run, model_dir, private_text  # noqa: F401
from e2e.test_own_method import PAGE

from potluck.storage.digest import digest_file
from potluck.storage.objects import ObjectStore
from potluck.worker.receipts import ReceiptBook

pytestmark = pytest.mark.timeout(180)

SECRET = "xylophoneczar"
FIELDS = ["num_tokens", "loss_sum", "num_steps", "delta"]
STRATEGY = "num_inner_steps = 5\ninner = { lr = 5e-3, batch_size = 4, warmup = 0.0 }"
ADAPTER = 'base = "bf16"\nadapter = { rank = 2, target_modules = ["q_proj", "v_proj"] }'


def write_policy(path: Path, **keys: Any) -> Path:
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in keys.items()))
    return path


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Run]:  # noqa: F811
    """A run of adapters on private text that waits for its first worker. `text` is what an owner brings."""
    folder = tmp_path_factory.mktemp("owner")
    write_recipe(
        folder / "tiny.toml", "", model=f'path = "{model_dir.as_posix()}"\n{ADAPTER}', budget="rounds = 100000",
        data="private = true\nseq_len = 32\nvalidation = 0.1", strategy=f'name = "fed_avg"\n{STRATEGY}',
        validation="every_rounds = 2", fleet="min_workers = 1\nheartbeat_s = 0.5\nreconnect_s = 1.0",
    )  # fmt: skip
    private_text(folder / "text", SECRET, 3)
    run = Run(folder)
    yield run
    run.kill()


@pytest.fixture
def inside(here: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    return CommandLine(here.folder, capsys, monkeypatch)


def join(inside: CommandLine, here: Run, state: str, *arguments: str | Path) -> Ended:
    return inside("join", here.line, "--state", state, "--threads", "1", *arguments)


def base_digest(inside: CommandLine, model: Path) -> str:
    printed = inside("digest", model)
    assert printed.code == 0, printed.stderr
    digests = dict(reversed(line.split()) for line in printed.stdout.splitlines())
    assert set(digests) == {"fp32", "bf16", "int8"} and len(set(digests.values())) == 3
    return digests["bf16"]


# Before the first worker: nothing is trained


def test_a_dry_run_says_what_would_be_and_leaves_no_trace(here: Run, inside: CommandLine, model_dir: Path) -> None:  # noqa: F811
    base = base_digest(inside, model_dir)
    policy = write_policy(
        here.folder / "good.toml", strategies=["fed_avg"], fields=FIELDS, base_models=[base],
        profile=["device", "free_memory_bytes"], min_examples=20,
    )  # fmt: skip
    line = inside("invite", "anna", "--run", here.run).stdout.strip()
    looked = inside("join", line, "--state", "anna", "--policy", policy, "--data", "text", "--dry-run")
    assert looked.code == 0, looked.stderr
    for row in (
        r"^run +tiny \(tiny-\w+\)$", r"^strategy +fed_avg$",
        r"^trains +[0-9,]+ parameters of adapters of rank 2 on llama$",
        rf"^base model +{base} in bf16 \(1 objects, .* kB\)$", r"^precision +fp32$",
        r"^steps +adamw, lr 0.005, 4 sequences of 32 tokens$", r"^data +your own text, read as auto; held out: 10%$",
        r"^memory +.* MB at the peak of a round$",
        r"^ +num_steps \(number, at most 24 B\) of fed_avg.inner, fed_avg.corr",
        r"^ +delta \(vector, at most .* kB in int8, unless a round chooses another codec\) of fed_avg.inner, fed_avg",
        r"^ +of this machine: device, free_memory_bytes$", r"^ +sentences on skipped records and failed tasks: yes$",
        r"^Nothing was joined, fetched or trained. This worker would take part.$",
    ):  # fmt: skip
        assert re.search(row, looked.stdout, re.MULTILINE), f"{row} is not in\n{looked.stdout}"
    without = join(inside, here, "anna", "--policy", policy, "--dry-run")
    assert without.code == 8 and without.sentence().endswith("trains on private text and none was given; add --data")
    strict = write_policy(here.folder / "strict.toml", strategies=[])
    refused = join(inside, here, "anna", "--policy", strict, "--data", "text", "--dry-run")
    assert refused.code == 8 and "the run's strategy is fed_avg, which is not among" in refused.sentence()
    assert "would take part" not in refused.stdout

    assert here.status()["workers"] == []
    assert {e["kind"] for e in events(here.run)}.isdisjoint({"joined", "left", "round"})
    assert not (here.folder / "anna" / "runs").exists() and not (here.folder / "anna" / "speeds.json").exists()
    (left,) = ReceiptBook(here.folder / "anna" / "receipts").receipts()
    assert left.kind == "enrolment" and left.text == "worker" != socket.gethostname()


def with_speeds(state: Path) -> None:
    """A worker's folder with what another one has measured of this machine."""
    state.mkdir()
    for measured in list(state.parent.glob("*/speeds.json"))[:1]:
        shutil.copyfile(measured, state / measured.name)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"strategies": ["diloco"]}, "the run's strategy is fed_avg, which is not among the policy's strategies"),
        ({"base_models": ["blake3:" + "0" * 64]}, "the run's base model is blake3:"),
        ({"fields": FIELDS[:3]}, "delta would leave and is not among the policy's fields"),
        ({"privacy": {"max_epsilon": 8.0, "delta": 1e-5}}, "and this run, of fed_avg, guarantees none"),
        ({"min_examples": 1 << 20}, "training sequences and the policy's min_examples is 1,048,576"),
    ],
)
def test_a_run_that_a_policy_does_not_allow_is_refused_before_anything_is_trained(
    here: Run, inside: CommandLine, keys: dict[str, Any], says: str
) -> None:
    policy = here.folder / "policy.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in keys.items() if not isinstance(value, dict)]
    for name, table in keys.items():
        lines += [f"[{name}]", *(f"{k} = {v}" for k, v in table.items())] if isinstance(table, dict) else []
    policy.write_text("\n".join(lines))
    num_declined = sum(event["kind"] == "declined" for event in events(here.run))
    before, name = len(events(here.run)), f"zoe-{next(iter(keys)).replace('_', '-')}"
    with_speeds(here.folder / name)
    ended = join(inside, here, name, "--name", name, "--policy", policy, "--data", "text")
    assert ended.code == 8, ended.stderr
    assert says in ended.sentence() and SECRET not in ended.stderr
    wait_for(here.run, "declined", count=num_declined + 1)
    told = [e for e in events(here.run)[before:] if e["kind"] != "waiting"]
    assert [(e["kind"], e["worker"]) for e in told] == [("joined", name), ("declined", name)]
    assert says in told[1]["reason"]
    assert not [e for e in events(here.run) if e["kind"] == "round"]
    kinds = {receipt.kind for receipt in ReceiptBook(here.folder / name / "receipts").receipts()}
    assert kinds == {"enrolment", "profile", "note"}
    assert not list(here.folder.glob(f"{name}/runs/*/local/*"))


def test_a_policy_that_cannot_be_read_stops_the_worker_before_it_contacts_anybody(
    here: Run, inside: CommandLine
) -> None:
    write_policy(here.folder / "typo.toml", feilds=FIELDS)
    before = len(events(here.run))
    for file, says in (("typo.toml", "feilds is not a key; did you mean fields?"), ("none.toml", "cannot be read")):
        ended = join(inside, here, "new", "--policy", file, "--data", "text")
        assert ended.code == 1 and says in ended.sentence()
    assert not (here.folder / "new" / "identity").exists()
    assert len(events(here.run)) == before


# With workers


def receipts(here: Run, state: str, *arguments: str) -> dict[str, Any]:
    return result_of(potluck("receipts", "--state", state, "--json", *arguments, cwd=here.folder))


def accepted(run: Path, worker: str) -> list[list[Any]]:
    """[key, object, scalars] of every result of that worker that was committed, in order."""
    with closing(sqlite3.connect(run / "ledger.db")) as ledger:
        rows = [json.loads(row) for (row,) in ledger.execute("SELECT accepted FROM commits ORDER BY round")]
    return [[key, object, scalars] for row in rows for key, of, object, _, scalars in row if of == worker]


@pytest.mark.slow
def test_receipts_are_what_the_coordinator_got(here: Run) -> None:
    """anna takes part on her terms; bert wants more examples below an update than a round asks for."""
    allowed = write_policy(
        here.folder / "anna.toml", strategies=["fed_avg"], fields=FIELDS, profile=["device", "link"], notes=False,
        min_examples=20,
    )  # fmt: skip
    greedy = write_policy(here.folder / "bert.toml", min_examples=21)
    here.join("anna", here.folder / "text", terms=("--policy", allowed))
    here.join("bert", here.folder / "text", terms=("--policy", greedy))
    here.wait(lambda: len(here.rounds()) >= 4, "fourth round")
    here.wait(lambda: [e for e in events(here.run) if e["kind"] == "lost" and e["worker"] == "bert"], "refusal")
    assert here.workers["bert"].poll() is None, "it costs a task, not the membership"
    here.stop()

    got = accepted(here.run, "anna")
    listed = receipts(here, "anna")
    results = [line for line in listed["receipts"] if line["kind"] == "result"]
    assert listed["unreadable_lines"] == 0 and len(got) >= 4
    by_object = {line["tensors"][0]["digest"]: line for line in results if "tensors" in line}
    for key, object, scalars in got:
        if object:
            line = by_object[object]
            assert line["key"] == key and line["scalars"] == scalars and set(scalars) == set(FIELDS[:3])
            assert line["task"] == "fed_avg.inner" and line["num_examples"] == 20 and line["is_update"]
            (tensor,) = line["tensors"]
            assert tensor["name"] == "delta" and tensor["codec"] == "int8" and tensor["num_bytes"] > 1000
        else:
            assert any(line["scalars"] == scalars and line["task"] == "evaluation.loss" for line in results)
    stored = ObjectStore(here.run / "objects")
    here_still = [digest for digest in by_object if stored.has(digest)]
    assert all(stored.path(d).stat().st_size == by_object[d]["tensors"][0]["num_bytes"] for d in here_still)
    (run_id,) = {line["run"] for line in results}
    assert listed["totals"][run_id]["num_updates"] == len(by_object) >= len([g for g in got if g[1]])
    told = [line for line in listed["receipts"] if line["kind"] == "profile"]
    assert all(set(line["profile"]) <= {"device", "link"} for line in told) and told
    assert not any(line["kind"] == "note" for line in listed["receipts"])
    counted = [line for line in listed["receipts"] if line["kind"] == "heartbeats"]
    assert "num_messages" not in counted[0] and counted[-1]["num_messages"] > 4
    for state in ("anna", "bert"):
        text = "".join(path.read_text() for path in (here.folder / state / "receipts").glob("*.jsonl"))
        assert SECRET not in text and "ka" + "ta" not in text

    refused = [line for line in receipts(here, "bert")["receipts"] if line["kind"] in ("result", "failure")]
    assert {line["kind"] for line in refused if "fed_avg" in line.get("task", "fed_avg")} == {"failure"}
    assert all("fewer of this worker's sequences than the 21" in line["text"] for line in refused if "text" in line)
    assert not [g for g in accepted(here.run, "bert") if g[1]]
    lost = [e["reason"] for e in events(here.run) if e["kind"] == "lost" and e["worker"] == "bert"]
    assert all("min_examples" in reason and SECRET not in reason for reason in lost)

    shown = potluck("receipts", "--state", "anna", "--run", run_id, cwd=here.folder)
    assert shown.returncode == 0 and "fed_avg.inner; num_tokens 640, " in shown.stdout and "loss_sum" in shown.stdout
    assert "from 20 own sequences" in shown.stdout and f"{run_id}: " in shown.stdout.splitlines()[-1]
    none = potluck("receipts", "--state", "nobody", cwd=here.folder)
    assert none.returncode == 1 and "no worker has joined with the state folder nobody" in none.stderr


@pytest.mark.slow
def test_a_result_with_a_field_that_nobody_declared_does_not_leave(tmp_path: Path, model_dir: Path) -> None:  # noqa: F811
    """A method in a file of its own, whose task sends one number more than it says."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    given = '"loss_sum": loss_sum}'
    assert given in code
    (tmp_path / "averaging.py").write_text(code.replace(given, '"loss_sum": loss_sum, "longest": 31000 + 337}'))
    private_text(tmp_path / "text", SECRET, 3)
    write_recipe(
        tmp_path / "tiny.toml", "", model=f'path = "{model_dir.as_posix()}"', budget="rounds = 100000",
        data="private = true\nseq_len = 32\nvalidation = 0.0", validation="every_rounds = 0",
        strategy='name = "averaging.py:Averaging"\ninner = { lr = 5e-3, batch_size = 4, warmup = 0.0 }',
        fleet="min_workers = 1\nheartbeat_s = 0.5\nreconnect_s = 1.0",
    )  # fmt: skip
    run = Run(tmp_path)
    try:
        digest = str(digest_file(tmp_path / "averaging.py"))
        allowed = write_policy(tmp_path / "anna.toml", strategies=[digest], fields=FIELDS)
        other = write_policy(tmp_path / "other.toml", strategies=["fed_avg"])
        mine = ("--allow-strategy", tmp_path / "averaging.py")
        run.join("anna", tmp_path / "text", terms=("--policy", allowed, *mine))
        run.join("bert", tmp_path / "text", terms=("--policy", other, *mine))
        assert run.workers["bert"].wait(60) == 8
        assert f"averaging.py is {digest}, which is not among the policy's strategies" in log(run, "bert")
        assert run.workers["anna"].wait(60) == 8
        assert "potluck: longest would leave and is not among the policy's fields; nothing was sent" in log(run, "anna")
        (lost,) = wait_for(run.run, "lost")
        assert "longest would leave" in lost["reason"] and "31337" not in lost["reason"]
        left = receipts(run, "anna")["receipts"]
        assert {line["task"] for line in left if line["kind"] == "result"} <= {"evaluation.loss"}
        assert [line["text"] for line in left if line["kind"] == "failure"] == [
            "longest would leave and is not among the policy's fields; nothing was sent"
        ]
        assert "31337" not in json.dumps(left)
        for path in run.run.rglob("*"):
            assert not path.is_file() or b"31337" not in path.read_bytes()
    finally:
        run.kill()


def log(run: Run, name: str) -> str:
    return (run.folder / f"{name}.log").read_text()
