"""Private, listed and shared data, with a model that comes from a directory: its weights, family and tokenizer."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.processes import events, free_port_pair, potluck, start, wait_for, words, write_corpus, write_recipe
from safetensors import safe_open

from potluck.coordinator.prepare import prepare
from potluck.coordinator.recipe import load_recipe
from potluck.data.config import ReadOptions
from potluck.data.manifest import make_manifest
from potluck.data.tokenizer import TextTokenizer, train_bpe
from potluck.models.device import this_machine
from potluck.storage.objects import ObjectStore
from potluck.types.errors import DataError
from potluck.types.vector import Vector

pytestmark = pytest.mark.timeout(180)

FLEET = "min_workers = 2\nheartbeat_s = 0.5\nreconnect_s = 1.0"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with weights and a tokenizer that was trained on other text than any test's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_bpe(iter([" ".join(random.Random(7).choices(words, k=4000))]), 300, folder)
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=tokenizer.eos_id, eos_token_id=tokenizer.eos_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Run:
    """A host and its workers as processes in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        address = f"127.0.0.1:{free_port_pair()}"
        self.host = start("host", "tiny.toml", "--address", address, "--dir", "run", cwd=folder, log=folder / "log")
        self.line = str(wait_for(self.run, "listening")[0]["join_line"])

    def join(self, name: str, *data: Path, terms: tuple[str | Path, ...] = ()) -> None:
        given = [part for path in data for part in ("--data", path)]
        self.workers[name] = start(
            "join", self.line, "--state", self.folder / name, "--name", name, "--threads", "1", *given, *terms,
            cwd=self.folder, log=self.folder / f"{name}.log",
        )  # fmt: skip

    def rounds(self) -> list[dict[str, Any]]:
        return [e for e in events(self.run) if e["kind"] == "round"]

    def wait(self, until: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 90
        while not until():
            assert time.monotonic() < deadline, f"no {what}: {events(self.run)[-8:]}"
            time.sleep(0.1)

    def status(self) -> dict[str, Any]:
        done = potluck("status", self.run, "--json", cwd=self.folder)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def stop(self) -> None:
        """In good order: everybody ends with 0."""
        stopped = potluck("stop", self.run, cwd=self.folder)
        assert stopped.returncode == 0, stopped.stderr
        assert self.host.wait(60) == 0, (self.folder / "log").read_text()[-3000:]
        for name, worker in self.workers.items():
            assert worker.wait(30) == 0, (self.folder / f"{name}.log").read_text()[-3000:]

    def kill(self) -> None:
        for process in (self.host, *self.workers.values()):
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[[], Run]]:
    """Starts the run of `tiny.toml` in the test's folder."""
    made: list[Run] = []

    def begin() -> Run:
        made.append(Run(tmp_path))
        return made[-1]

    yield begin
    for run in made:
        run.kill()


def private_text(path: Path, secret: str, seed: int) -> Path:
    """Many documents, each with the owner's secret word in it."""
    chance = random.Random(seed)
    texts = [" ".join(chance.choices([*words, secret], k=60)) for _ in range(120)]
    path.write_text("\n".join(json.dumps({"text": f"{secret} {text}"}) for text in texts))
    return path


# Private


def test_private_text_stays_where_it_is(host: Callable[[], Run], model_dir: Path, tmp_path: Path) -> None:
    secrets = {"anna": "xylophoneczar", "bert": "quetzalmoraine"}
    write_recipe(
        tmp_path / "tiny.toml", "", model=f'path = "{model_dir.as_posix()}"', fleet=FLEET, budget="rounds = 100000",
        data='private = true\nseq_len = 32\nvalidation = 0.1', validation="every_rounds = 3",
    )  # fmt: skip
    run = host()
    files = {name: private_text(tmp_path / f"{name}.jsonl", word, len(word)) for name, word in secrets.items()}
    for name, path in files.items():
        run.join(name, path)
    run.wait(lambda: len(run.rounds()) >= 3, "third round")
    assert run.rounds()[0]["workers"] == ["anna", "bert"]
    run.workers["bert"].kill()
    run.workers["bert"].wait()
    run.join("bert", files["bert"])
    seen = len(run.rounds())
    run.wait(lambda: any(e["workers"] == ["anna", "bert"] for e in run.rounds()[seen + 1 :]), "round with bert again")
    run.wait(lambda: [e for e in events(run.run) if e["kind"] == "validation"][1:] != [], "second validation")
    run.stop()

    with sqlite3.connect(run.run / "ledger.db") as ledger:
        versions = dict(ledger.execute("SELECT worker, version FROM versions"))
        commits = [json.loads(row) for (row,) in ledger.execute("SELECT accepted FROM commits ORDER BY round")]
    ledger.close()
    scalars = [reply[4] for accepted in commits for reply in accepted]
    assert scalars and all(
        {"num_tokens", "loss_sum"} <= set(s) <= {"num_tokens", "loss_sum", "num_steps"} for s in scalars
    ), "more than counts and losses came"
    # Each worker has read on in its own text: what it committed and nothing twice, also across its death.
    for name, version in versions.items():
        num_rounds = sum(reply[1] == name for accepted in commits for reply in accepted)
        assert position(tmp_path / name, version) == num_rounds * 5 * 4
    assert "starts afresh" not in (tmp_path / "bert.log").read_text()
    for path in [p for p in run.run.rglob("*") if p.is_file()]:
        content = path.read_bytes()
        for word in secrets.values():
            assert word.encode() not in content, f"{path} holds private text"
        for name in files.values():
            assert name.name.encode() not in content, f"{path} holds the name of a private file"
    assert (run.run / "model" / "tokenizer.json").exists()


def position(state: Path, version: str) -> int:
    """Sequences read of a worker's own text, by the state of that version."""
    for path in state.glob("runs/*/local/*.safetensors"):
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        if metadata["version"] == version:
            shards = [json.loads(p.read_text()) for p in state.glob("runs/*/data/data-*/prepared.json")]
            total = sum(shard[2] for shard in shards[0]["shards"])
            cursor = json.loads(metadata["scalars"])["cursor"]
            return int(cursor["epoch"]) * total + int(cursor["position"])
    raise AssertionError(f"{state} has no state {version}")


def test_private_text_is_needed_and_must_be_there(host: Callable[[], Run], model_dir: Path, tmp_path: Path) -> None:
    write_recipe(
        tmp_path / "tiny.toml", "", model=f'path = "{model_dir.as_posix()}"', data="private = true\nseq_len = 32"
    )
    run = host()
    run.join("none")
    run.join("gone", tmp_path / "gone.txt")
    assert run.workers["none"].wait(60) == 4
    assert (tmp_path / "none.log").read_text().splitlines()[-1] == (
        "potluck: this run trains on private text and none was given; start the worker with --data"
    )
    assert run.workers["gone"].wait(60) == 4
    assert "gone.txt does not exist; check the path given with --data" in (tmp_path / "gone.log").read_text()


# Listed


def test_listed_files_are_read_where_they_are(host: Callable[[], Run], model_dir: Path, tmp_path: Path) -> None:
    """Weights of a hub model, bf16, accumulation; and a worker whose copy is another file gets no say."""
    tokenizer = TextTokenizer.open(model_dir)
    copies = {name: tmp_path / f"copies-{name}" for name in ("good", "wrong")}
    write_corpus(copies["good"], num_files=4)
    tokens = np.concatenate(tokenizer.encode([" ".join(random.Random(3).choices(words, k=6000))]))
    np.save(copies["good"] / "array.npy", tokens.astype(np.uint16), allow_pickle=False)
    files = sorted(copies["good"].iterdir())
    options = ReadOptions(seq_len=32, validation=0.2)
    manifest = make_manifest(copies["good"], files, options=options, tokenizer=tokenizer)
    manifest.save(tmp_path / "manifest.jsonl")
    copies["wrong"].mkdir()
    for path in files:
        content = path.read_bytes()
        (copies["wrong"] / path.name).write_bytes(content[:-8] + content[-16:-8])
    write_recipe(
        tmp_path / "tiny.toml", "", budget="rounds = 100000", fleet=FLEET.replace("2", "1", 1),
        model=f'hub = "{model_dir.as_posix()}"\nprecision = "bf16-mixed"',
        data='listed = "manifest.jsonl"\nseq_len = 32\nvalidation = 0.2',
        strategy='name = "diloco"\nnum_inner_steps = 3\ninner = { lr = 5e-3, batch_size = 4, accumulation = 2 }',
    )  # fmt: skip
    run = host()
    run.join("wrong", copies["wrong"])
    run.wait(lambda: any(e["kind"] == "joined" for e in events(run.run)), "worker")
    run.join("good", copies["good"])
    run.wait(lambda: len(run.rounds()) >= 3, "three rounds")
    status = {w["id"]: w for w in run.status()["workers"]}
    run.stop()
    lost = [e["text"] for e in events(run.run) if e["kind"] == "lost" and e["worker"] == "wrong"]
    assert lost and all("is listed; copy the file again" in text for text in lost), lost
    assert all(e["workers"] == ["good"] for e in run.rounds())
    assert all(e["tokens"] == e["round"] * 3 * 4 * 2 * 32 for e in run.rounds())
    assert status["good"]["precision"] == ("bf16-mixed" if this_machine.cpu_has_bf16() else "fp32")
    assert status["wrong"]["tokens"] == 0
    stored = stored_weights(model_dir)
    began = np.concatenate([np.fromfile(p, dtype="<f4") for p in sorted((run.run / "params").glob("initial*.f32"))])
    assert np.array_equal(began, stored)
    ended = stored_weights(run.run / "model")
    assert not np.array_equal(ended, stored) and np.isfinite(ended).all()
    coordinator_holds = {p.name for p in run.run.rglob("*") if p.suffix in (".npy", ".txt")}
    assert coordinator_holds == set()


def stored_weights(folder: Path) -> np.ndarray[Any, Any]:
    """A model directory's parameters as one vector, tied ones once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder))
    return np.concatenate([p.detach().float().numpy().ravel() for p in model.parameters()])


# Shared


def test_parquet_and_saved_datasets(tmp_path: Path, model_dir: Path) -> None:
    from datasets import Dataset

    texts = [" ".join(random.Random(i).choices(words, k=80)) for i in range(30)]
    Dataset.from_dict({"body": texts[:20]}).to_parquet(str(tmp_path / "some.parquet"))
    Dataset.from_dict({"body": texts[20:]}).save_to_disk(str(tmp_path / "saved"))
    write_recipe(
        tmp_path / "tiny.toml", "", model=f'path = "{model_dir.as_posix()}"\ninit = "scratch"',
        data='shared = ["some.parquet", "saved"]\ntext_field = "body"\nseq_len = 32\nvalidation = 0.1',
    )  # fmt: skip
    recipe = load_recipe(tmp_path / "tiny.toml")
    said: list[str] = []
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    objects = ObjectStore(run_dir / "objects")
    prepared = prepare(recipe, run_dir, objects, cache_dir=tmp_path / "cache", tell=said.append)
    assert prepared.facts["documents"] + prepared.facts["validation_documents"] == 30
    tokenizer = TextTokenizer.open(model_dir)
    expected = sum(len(ids) + 1 for ids in tokenizer.encode(texts))  # each ends with the end-of-text token
    assert prepared.facts["training_tokens"] + prepared.facts["validation_tokens"] == expected
    assert set(prepared.deck.digests()) <= objects.digests()
    assert prepared.plan.layout.numel == stored_weights(model_dir).size
    assert not np.array_equal(Vector.of(prepared.plan.initial()).tensor().numpy(), stored_weights(model_dir)), (
        "scratch means from scratch"
    )
    again = prepare(recipe, run_dir, objects, cache_dir=tmp_path / "cache", tell=said.append)
    assert again.corpus_digest == prepared.corpus_digest and again.plan.spec == prepared.plan.spec
    other = load_recipe(tmp_path / "tiny.toml", ['data.text_field="nothing"'])
    with pytest.raises(DataError, match="nothing"):
        prepare(other, tmp_path / "other", ObjectStore(tmp_path / "o"), cache_dir=tmp_path / "cache", tell=said.append)
