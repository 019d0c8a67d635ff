"""Two owners bring conversations of their own: real processes, and what leaves them is searched."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from data.chat_templates import CHATML, save_chat_tokenizer
from e2e.processes import events, words, write_recipe
from e2e.test_data_access import FLEET, Run, host  # noqa: F401

from potluck.coordinator.prepare import prepare
from potluck.coordinator.recipe import load_recipe
from potluck.data.tokenizer import TextTokenizer
from potluck.storage.objects import ObjectStore
from potluck.types.errors import DataError

pytestmark = pytest.mark.timeout(180)

SECRET = "the xylophone czar of quetzal moraine"
TAP = """
import os
from potluck.transport.grpc import client

def kept(send):
    def tapped(self, *parts, **options):
        with open(os.environ["SENT_TO"], "ab") as file:
            for part in parts:
                file.write(part if isinstance(part, bytes) else part.encode())
        return send(self, *parts, **options)
    return tapped

client._WorkerEnd.send = kept(client._WorkerEnd.send)
client.GrpcConnection.call = kept(client.GrpcConnection.call)
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = save_chat_tokenizer(folder, CHATML)
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128, bos_token_id=tokenizer.eos_id,
        eos_token_id=tokenizer.eos_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def conversations(path: Path, seed: int) -> Path:
    """Twenty with the owner's secret on either side, and two lines that are none."""
    chance = random.Random(seed)
    lines = ["{", json.dumps({"messages": [{"role": "user", "content": SECRET}]})]
    for number in range(20):
        said = [SECRET if number % 2 else f"what of {number}", f"{SECRET}, {chance.choice(words)} {number}"]
        turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines))
    return path


def test_conversations_stay_where_they_are(
    host: Callable[[], Run],  # noqa: F811
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_recipe(
        tmp_path / "tiny.toml", "", model=f'path = "{model_dir.as_posix()}"', fleet=FLEET, budget="rounds = 100000",
        data='private = true\nformat = "chat"\nseq_len = 96\nvalidation = 0.2', validation="every_rounds = 2",
    )  # fmt: skip
    run = host()
    (tmp_path / "tap").mkdir()
    (tmp_path / "tap" / "sitecustomize.py").write_text(TAP)
    for seed, name in enumerate(("anna", "bert")):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path / "tap"), os.environ.get("PYTHONPATH", ""))))
        monkeypatch.setenv("SENT_TO", str(tmp_path / f"{name}.sent"))
        run.join(name, conversations(tmp_path / f"{name}.jsonl", seed))
    run.wait(lambda: len(run.rounds()) >= 4, "fourth round")
    run.wait(lambda: [e for e in events(run.run) if e["kind"] == "validation"][1:] != [], "second validation")
    rounds, told = run.rounds(), events(run.run)
    run.stop()

    assert rounds[0]["workers"] == ["anna", "bert"]
    answer = len(TextTokenizer.open(model_dir).encode([SECRET])[0])
    for before, after in pairwise(rounds):
        # Two workers, five steps, four conversations each, of which only the answers count.
        assert 40 * answer < after["tokens"] - before["tokens"] < 40 * (answer + 20) < 40 * 96
    losses = [e["loss"] for e in told if e["kind"] == "validation"]
    assert losses[-1] < losses[0]
    skipped = [e for e in told if "2 records or files skipped" in str(e.get("text"))]
    assert {e["worker"] for e in skipped} == {"anna", "bert"} and "20 documents" in skipped[0]["text"]
    for name in ("anna", "bert"):
        log = (tmp_path / f"{name}.log").read_text()
        assert (
            f"skipped {name}.jsonl:1: not JSON" in log and f"skipped {name}.jsonl:2: 'messages' holds no answer" in log
        )

    ids = TextTokenizer.open(model_dir).encode([SECRET])[0][1:-1]
    secrets = [SECRET.encode(), SECRET[:14].encode(), ids.tobytes(), (~ids).tobytes(), ids.astype(np.uint16).tobytes()]
    sent = [tmp_path / f"{name}.sent" for name in ("anna", "bert")]
    assert all(path.stat().st_size > 10_000 for path in sent), "nothing was kept of what they sent"
    for path in [*(p for p in run.run.rglob("*") if p.is_file()), *sent]:
        content = path.read_bytes()
        assert not any(secret in content for secret in (*secrets, b"anna.jsonl", b"bert.jsonl")), f"it is in {path}"
    own = [p.read_bytes() for p in (tmp_path / "anna").rglob("*.bundle")]
    assert any((~ids).tobytes() in shard for shard in own), "the search finds what is there"
    assert (run.run / "model" / "chat_template.jinja").read_text() == CHATML


def test_a_run_that_needs_a_chat_template_says_so_at_its_start(tmp_path: Path, model_dir: Path) -> None:
    save_chat_tokenizer(tmp_path / "bare", None)
    write_recipe(
        tmp_path / "tiny.toml", "", model=f'path = "{model_dir.as_posix()}"',
        data='private = true\nformat = "chat"\nseq_len = 64\ntokenizer = { path = "bare" }',
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    recipe = load_recipe(tmp_path / "tiny.toml")
    with pytest.raises(DataError, match="has no chat template and format 'chat' needs one; give another tokenizer"):
        prepare(recipe, tmp_path / "run", ObjectStore(tmp_path / "o"), cache_dir=tmp_path / "c", tell=lambda _: None)
