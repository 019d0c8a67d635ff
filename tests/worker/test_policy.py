"""An owner's policy: read strictly, and what it objects to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from potluck.models.config import AdapterConfig, BaseFiles, BaseObject
from potluck.optim.dp_sgd import PrivacyConfig
from potluck.simulator.exact.problem import Problem
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig
from potluck.strategies.registry import strategy_type, tasks_of
from potluck.types.errors import OwnerRefused, PotluckError
from potluck.worker import policy as module
from potluck.worker.policy import Policy, PrivacyPolicy, load_policy

DIGEST = "blake3:" + "a" * 64
ADAPTER = AdapterConfig(target_modules=("c_attn",))
BASE = BaseFiles(precision="int8", objects=(BaseObject(digest=DIGEST, num_bytes=10),))
RUN = (
    Problem()
    .plan(DiLoCo(DiLoCoConfig()))
    .spec.model_copy(update={"strategy": "fed_avg", "base": BASE, "adapter": ADAPTER})
)
TASKS = tasks_of(strategy_type("fed_avg"))
ALL = ("num_tokens", "loss_sum", "num_steps", "delta")


def objections(policy: Policy, **run: Any) -> list[str]:
    return policy.objections(RUN.model_copy(update=run), TASKS)


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "policy.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_the_shipped_example_is_a_policy_with_every_key() -> None:
    example = load_policy(Path(module.__file__).with_name("policy.toml"))
    assert example.model_fields_set == set(Policy.model_fields) - {"privacy", "base_models", "max_updates", "canaries"}
    assert example.strategies is not None and "fed_avg" in example.strategies
    assert objections(example) == []
    assert example.tells("device") and not example.tells("host_name")


def test_an_empty_policy_restricts_nothing(tmp_path: Path) -> None:
    policy = load_policy(written(tmp_path, ""))
    assert policy == Policy()
    assert objections(policy) == [] == objections(policy, base=None, strategy="x.py:X", strategy_digest=DIGEST)
    policy.check_fields(["anything"])
    policy.check_examples(0)
    policy.check_number(1 << 40)
    assert policy.tells("host_name") and policy.notes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("strategy = []", "strategy is not a key; did you mean strategies?"),
        ("frobnicate = 1", "frobnicate is not a key; see docs/policy.md"),
        ("[privacy]\nmax_epsilon = 1.0\ndelta = 1e-5\nsigma = 1", "privacy.sigma is not a key"),
        ("[privacy]\nmax_epsilon = 1.0", "privacy.delta is missing; see docs/policy.md"),
        ("[privacy]\nmax_epsilon = inf\ndelta = 1e-5", "privacy.max_epsilon is Infinity and must be"),
        ("[canaries]\ncounts = 1", "canaries.counts is not a key; did you mean canaries.count?"),
        ("[canaries]\ncandidates = 3", "canaries.candidates is 3 and must be at least 15"),
        ("strategies = 'fed_avg'", 'strategies is "fed_avg" and must be a list'),
        ('strategies = ["fed_avgg"]', "'fed_avgg' is not a shipped strategy; did you mean 'fed_avg'?"),
        ('strategies = ["blake3:12"]', "'blake3:12' is not a digest: blake3 or sha256, a colon and 64"),
        ('base_models = ["SmolLM2"]', "'SmolLM2' is not a digest"),
        ('profile = ["hostname"]', "'hostname' is not a field of a profile; did you mean 'host_name'?"),
        ("min_examples = -1", "min_examples is -1 and must be at least 0"),
        ('min_examples = "many"', 'min_examples is "many" and must be a whole number'),
        ("notes = 1", "notes is 1 and must be true or false"),
        ("notes", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        pytest.param("notes = " + "[" * 20_000, "is not TOML", id="deep"),
    ],
)
def test_what_is_not_understood_is_one_sentence(tmp_path: Path, text: str | bytes, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(PotluckError) as found:
        load_policy(path)
    assert f"the policy {path}" in str(found.value) and says in str(found.value)
    assert "\n" not in str(found.value)


def test_a_policy_that_is_not_there_stops_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(PotluckError, match=r"the policy .* cannot be read \(.*\); nothing was contacted"):
            load_policy(path)
    monkeypatch.setattr(module, "MAX_POLICY_BYTES", 3)
    with pytest.raises(PotluckError, match="is larger than 3 bytes"):
        load_policy(written(tmp_path, "notes = true"))


def test_strategies_go_by_name_or_by_the_digest_of_their_file() -> None:
    by_name, by_digest = Policy(strategies=("fed_avg",)), Policy(strategies=(DIGEST,))
    assert objections(by_name) == []
    assert objections(by_digest) == ["the run's strategy is fed_avg, which is not among the policy's strategies"]
    own = {"strategy": "fed_avg", "strategy_digest": DIGEST}  # a file of its own, whatever it is called
    assert objections(by_digest, **own) == []
    (why,) = objections(by_name, **own)
    assert DIGEST in why
    assert objections(Policy(strategies=())) != []


def test_base_models_go_by_one_digest_of_precision_and_objects() -> None:
    others = [
        BASE.model_copy(update={"precision": "bf16"}),
        BASE.model_copy(update={"objects": BASE.objects * 2}),
        BASE.model_copy(update={"objects": (BaseObject(digest="blake3:" + "b" * 64, num_bytes=10),)}),
    ]
    assert len({BASE.digest, *(other.digest for other in others)}) == 4
    policy = Policy(base_models=(str(BASE.digest),))
    assert objections(policy) == []
    for other in others:
        (why,) = objections(policy, base=other)
        assert why == f"the run's base model is {other.digest}, which is not among the policy's base_models"
    for none in ({"base": None}, {"base": BaseFiles(precision="fp32")}, {"adapter": None}):
        (why,) = objections(policy, **none)
        assert "trains all weights" in why, "the coordinator sends these"


def test_fields_that_a_task_declares_are_asked_for_before_it_begins() -> None:
    assert objections(Policy(fields=ALL)) == []
    assert objections(Policy(fields=ALL[:3])) == ["delta would leave and is not among the policy's fields"]
    assert objections(Policy(fields=("delta",))) == [
        "num_tokens, loss_sum, num_steps would leave and are not among the policy's fields"
    ]
    Policy(fields=ALL).check_fields(ALL)
    with pytest.raises(OwnerRefused, match="text  sample would leave and is not among the policy's fields;"):
        Policy(fields=ALL).check_fields(["delta", "text\n sample"])


def test_too_few_examples_and_too_many_updates() -> None:
    policy = Policy(min_examples=20, max_updates=3)
    policy.check_examples(20)
    policy.check_number(2)
    with pytest.raises(OwnerRefused, match="fewer of this worker's sequences than the 20"):
        policy.check_examples(19)
    with pytest.raises(OwnerRefused, match="3 updates of this run have left, as many as"):
        policy.check_number(3)


def test_privacy_is_what_the_run_keeps_to() -> None:
    policy = Policy(privacy=PrivacyPolicy(max_epsilon=8.0, delta=1e-5))
    assert objections(policy) == [
        "the policy requires differential privacy of epsilon 8 at delta 1e-05 and this run, of fed_avg, guarantees none"
    ]
    for epsilon, delta, is_enough in ((8.0, 1e-5, True), (8.1, 1e-5, False), (1.0, 2e-5, False), (1.0, 1e-6, True)):
        given = PrivacyConfig(max_epsilon=epsilon, delta=delta, noise_multiplier=1.0, clip=1.0)
        assert (objections(policy, privacy=given) == []) is is_enough
