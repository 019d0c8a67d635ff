"""The policy of a worker's owner: which runs it takes part in and what may leave the machine. It wins over any recipe.

A key that is left out restricts nothing; an empty list allows nothing. What cannot be read or understood stops the
worker before it has contacted anybody.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from potluck.data.canaries import CanaryConfig
from potluck.data.config import ReadOptions
from potluck.storage.digest import check_digest
from potluck.strategies.privacy import guarantee
from potluck.strategies.registry import shipped
from potluck.strategies.run import RunSpec
from potluck.strategies.task import TaskFunction
from potluck.types.errors import OwnerRefused, PotluckError, Refused
from potluck.types.mistakes import nearest, sentence
from potluck.types.profile import DeviceProfile
from potluck.types.untrusted import printable

MAX_POLICY_BYTES = 1 << 20
_profile_fields = tuple(each.name for each in fields(DeviceProfile))


class PrivacyPolicy(BaseModel):
    """The differential privacy that a run must guarantee each record of the owner."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_epsilon: float = Field(gt=0, allow_inf_nan=False, description="epsilon of a whole run, at most")
    delta: float = Field(gt=0, lt=1, description="at this delta, or a smaller one")


class Policy(BaseModel):
    """An owner's `policy.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    strategies: tuple[str, ...] | None = Field(
        default=None,
        description="names of shipped strategies, and digests of strategy files, that may run here (`potluck digest "
        "FILE` prints one)",
    )
    base_models: tuple[str, ...] | None = Field(
        default=None,
        description="digests of frozen models below adapters that may be trained on (`potluck digest MODEL_DIR` and "
        "`potluck join --dry-run LINE` print them); a run that trains all weights has none and is refused",
    )
    fields: tuple[str, ...] | None = Field(
        default=None,
        description="numbers, texts, vectors and tensors of results that may leave: `num_tokens`, `loss_sum`, `delta`; "
        "a run that needs another one is refused",
    )
    profile: tuple[str, ...] | None = Field(
        default=None,
        description="what the coordinator may be told of this machine: `device`, `num_threads`, `free_memory_bytes` "
        "and so on; without `host_name` the worker goes by --name, or by `worker`",
    )
    notes: bool = Field(
        default=True,
        description="whether sentences may leave: how many records were skipped, and why a task failed",
    )
    min_examples: int = Field(
        default=0, ge=0,
        description="of the owner's own training sequences or records: an update that stands on fewer different ones "
        "is not sent",
    )  # fmt: skip
    max_updates: int | None = Field(
        default=None, ge=0, description="updates of one run that may leave, over all restarts; then the worker leaves"
    )
    privacy: PrivacyPolicy | None = Field(
        default=None, description="the differential privacy that a run must guarantee each record of yours"
    )
    canaries: CanaryConfig | None = Field(
        default=None, description="random secrets planted among your training data: how well models know them is told "
        "to you, and to nobody else",
    )  # fmt: skip

    @field_validator("strategies")
    @classmethod
    def _known_strategies(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in names or ():
            if ":" in name:
                _require_digest(name)
            elif name not in shipped:
                near = nearest(name, shipped)
                hint = f"did you mean {near!r}?" if near else "a file of its own is named by its digest"
                raise ValueError(f"{name!r} is not a shipped strategy; {hint}")
        return names

    @field_validator("base_models")
    @classmethod
    def _digests(cls, digests: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for digest in digests or ():
            _require_digest(digest)
        return digests

    @field_validator("profile")
    @classmethod
    def _known_fields(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in names or ():
            if name not in _profile_fields:
                hint = f"did you mean {near!r}?" if (near := nearest(name, _profile_fields)) else "see docs/profile.md"
                raise ValueError(f"{name!r} is not a field of a profile; {hint}")
        return names

    # What may run

    def objections(self, spec: RunSpec, tasks: Iterable[TaskFunction]) -> list[str]:
        """Why a run with these tasks may not begin here, a sentence for each reason."""
        found = (
            self._of_strategy(spec), self._of_base(spec), self._of_fields(tasks), self._of_privacy(spec),
            self._of_canaries(spec),
        )  # fmt: skip
        return [why for why in found if why]

    def allows_strategy(self, name_or_digest: str) -> bool:
        return self.strategies is None or name_or_digest in self.strategies

    def _of_strategy(self, spec: RunSpec) -> str:
        if self.allows_strategy(spec.strategy_digest or spec.strategy):
            return ""
        what = printable(f"{spec.strategy} {spec.strategy_digest}".strip(), 200)
        return f"the run's strategy is {what}, which is not among the policy's strategies"

    def _of_base(self, spec: RunSpec) -> str:
        if self.base_models is None:
            return ""
        if spec.adapter is None or spec.base is None or not spec.base.objects:
            return "the run trains all weights of a model, and the policy allows adapters on its base_models only"
        if spec.base.digest in self.base_models:
            return ""
        return f"the run's base model is {spec.base.digest}, which is not among the policy's base_models"

    def _of_fields(self, tasks: Iterable[TaskFunction]) -> str:
        return self._objection_to(field.name for task in tasks for field in task.fields)

    def _objection_to(self, names: Iterable[str]) -> str:
        if self.fields is None:
            return ""
        kept = [printable(name, 100) for name in dict.fromkeys(names) if name not in self.fields]
        return f"{', '.join(kept)} would leave and {'is' if len(kept) == 1 else 'are'} not among the policy's fields" \
            if kept else ""  # fmt: skip

    def _of_privacy(self, spec: RunSpec) -> str:
        if (wanted := self.privacy) is None:
            return ""
        given = guarantee(spec)
        asked = f"the policy requires differential privacy of epsilon {wanted.max_epsilon:g} at delta {wanted.delta:g}"
        if given is None:
            return f"{asked} and this run, of {printable(spec.strategy, 200)}, guarantees none"
        if given.epsilon <= wanted.max_epsilon and given.delta <= wanted.delta:
            return ""
        return f"{asked} and the run guarantees epsilon {given.epsilon:g} at delta {given.delta:g}"

    def _of_canaries(self, spec: RunSpec) -> str:
        if self.canaries is None or spec.data_access == "shared":
            return ""
        if spec.data_access == "listed":
            return "the policy's canaries are planted among private text, and this run trains on listed files"
        try:
            share = ReadOptions.model_validate(spec.data_options).validation
        except ValueError:
            share = 0.0  # such a run will not begin
        if share and spec.privacy is None:
            return ""
        return (
            "the policy's canaries are measured when a run validates, and this one holds out none of its owners' text"
        )

    # What may leave

    def tells(self, profile_field: str) -> bool:
        """Whether the coordinator may be told this of the machine."""
        return self.profile is None or profile_field in self.profile

    def check_fields(self, names: Iterable[str]) -> None:
        """OwnerRefused where a result holds what may not leave."""
        if objection := self._objection_to(names):
            raise OwnerRefused(f"{objection}; nothing was sent")

    def check_examples(self, num_examples: int) -> None:
        """OwnerRefused for an update on too few of the owner's sequences. The sentence does not tell how many."""
        if num_examples < self.min_examples:
            raise OwnerRefused(
                f"an update would stand on fewer of this worker's sequences than the {self.min_examples} of its "
                "owner's policy (min_examples); it is not sent"
            )

    def check_number(self, num_updates: int) -> None:
        """OwnerRefused once so many updates have left that no other may."""
        if self.max_updates is not None and num_updates >= self.max_updates:
            raise OwnerRefused(
                f"{num_updates} updates of this run have left, as many as the owner's policy allows (max_updates)"
            )


def load_policy(path: Path) -> Policy:
    """Read an owner's file, strictly. PotluckError where it cannot be read or says something that is not known."""
    try:
        if path.stat().st_size > MAX_POLICY_BYTES:
            raise PotluckError(f"the policy {path} is larger than {MAX_POLICY_BYTES:,} bytes; give another file")
        value = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise PotluckError(
            f"the policy {path} cannot be read ({error.strerror or error}); nothing was contacted"
        ) from error
    except (ValueError, RecursionError) as error:  # neither UTF-8 nor TOML
        raise PotluckError(f"the policy {path} is not TOML: {error}; mend it") from error
    try:
        return Policy.model_validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        known = [*Policy.model_fields, *(f"privacy.{name}" for name in PrivacyPolicy.model_fields)]
        known += [f"canaries.{name}" for name in CanaryConfig.model_fields]
        raise PotluckError(f"the policy {path}: {sentence(error, '', known, page='docs/policy.md')}") from error


def _require_digest(text: str) -> None:
    try:
        check_digest(text)
    except Refused as error:
        raise ValueError(str(error)) from error
