"""What is fixed for a whole run: `RunSpec` (every worker gets it) and `RunFacts` (a strategy is built with it)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from potluck.aggregation.config import AggregationConfig
from potluck.codecs.base import codec
from potluck.codecs.bundle import flat_size
from potluck.codecs.delta import CHANGE, WHOLE, longest_way
from potluck.codecs.policy import CodecPolicy, CodecRule
from potluck.codecs.spec import CodecSpec, parse_spec
from potluck.data.config import rows_per_record
from potluck.models.config import AdapterConfig, BaseFiles
from potluck.optim.dp_sgd import PrivacyConfig
from potluck.optim.inner import InnerConfig
from potluck.planner.compression import CompressionConfig
from potluck.strategies.state import State
from potluck.types.errors import RecipeError
from potluck.types.params import Layout, Params

first_round_s = 60.0
"""How long a first round is taken to last where the budget is hours: later ones go by those before."""


class RunSpec(BaseModel):
    """What a worker needs to know of a run; sent as JSON in Welcome and believed only after it has been checked."""

    model_config = ConfigDict(extra="ignore", frozen=True)  # a later minor version may add fields

    run_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")  # a worker names a folder by it
    name: str = Field(max_length=200)
    seed: int
    strategy: str
    strategy_digest: str = ""  # of the user's own file, "" for a shipped strategy
    tasks: tuple[str, ...] | None = Field(default=None, max_length=256)  # that it gives; None for all it has
    model_config_json: dict[str, Any]  # a transformers configuration
    layout: list[Any]
    seq_len: int = Field(ge=1, le=1 << 24)
    precision: Literal["fp32", "bf16-mixed"] = "fp32"
    adapter: AdapterConfig | None = None  # then `layout` is of adapters alone, and
    base: BaseFiles | None = None  # what they sit on
    merges_adapters: bool = False  # `layout` is also of what was merged into the base
    inner: InnerConfig
    data_access: Literal["shared", "private", "listed"]
    data_options: dict[str, Any] = {}  # how private and listed files are read: data/config.py
    tokenizer_object: str = ""  # digest; private and listed text needs it
    heartbeat_s: float = Field(default=2.0, gt=0, le=3600)  # a worker reports at least this often
    snapshot_every_steps: int = Field(default=0, ge=0)  # of a task under way, at least; 0 for as it costs little
    devices_hold_model: bool = True  # False: they do pieces of products, and the model is nowhere but on the head
    kept_vectors: float = Field(default=0.0, ge=0, le=1000)  # strategies/strategy.py
    up_rules: list[dict[str, Any]] = []  # which tensors of a result go in which codec: codecs/policy.py
    up_codec: str = Field(default="fp32", max_length=200)  # of all others, unless a lease names another one
    privacy: PrivacyConfig | None = None
    """What the run guarantees each record of an owner. It is the worker's own code that keeps it, whatever tasks it is
    given: with this it takes no other steps than private ones, and tells no loss (worker/private_training.py)."""

    @property
    def rows_per_record(self) -> int:
        """Of the run's data: data/config.py."""
        return rows_per_record(self.data_options.get("format"))

    @model_validator(mode="after")
    def _can_be_private(self) -> RunSpec:
        if self.privacy is not None and (
            self.data_access != "private" or self.rows_per_record != 1 or self.adapter is None
        ):
            raise ValueError(
                "`privacy` is of private records that adapters are trained on, each one row; this run has "
                f"{self.data_access} data of {self.rows_per_record} rows a record"
                f"{'' if self.adapter else ' and trains all weights'}"
            )
        if self.privacy is not None and self.data_options.get("max_bytes", 0) != 0:
            raise ValueError(
                "`privacy` is of single records and this run stops reading after so many bytes of them, so that each "
                "decides which others are in"
            )
        return self


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When a run is done: exactly one of the three is set."""

    tokens: int = 0
    rounds: int = 0
    hours: float = 0.0

    def progress(self, *, tokens: int, rounds: int, seconds: float) -> float:
        """How far the run is, in [0, 1]."""
        if self.tokens:
            return min(tokens / self.tokens, 1.0)
        if self.rounds:
            return min(rounds / self.rounds, 1.0)
        return min(seconds / (self.hours * 3600.0), 1.0)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a strategy may know of its run. Everything here is the same on every replay."""

    seed: int
    layout: Layout
    initial: Params
    zeros: Params  # a vector of zeros of the model's size
    seq_len: int
    inner: InnerConfig
    budget: Budget
    up_codec: str  # a spec (codecs/spec.py); a fleet may choose another one for a worker and a round
    down_codec: str
    up_rules: tuple[CodecRule, ...] = ()
    down_rules: tuple[CodecRule, ...] = ()
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    min_workers: int = 1  # that the recipe has a round wait for
    balances: bool = False  # whether slower workers may be given less to do
    adapter: AdapterConfig | None = None  # where the layout is of adapters on a frozen base
    model_config: Mapping[str, Any] = field(default_factory=dict[str, Any])  # a transformers configuration
    precision: str = "fp32"
    rows_per_record: int = 0  # 0: data is running text, of which every token is predicted

    @property
    def first_is_known(self) -> bool:
        """Whether a worker makes the run's first parameters itself (`Replica.first`)."""
        return self.adapter is not None

    def predicted_tokens(self, num_sequences: int) -> tuple[int, int]:
        """The least and the most that so many sequences have. Of a record it is for its owner to say how many."""
        most = num_sequences * self.seq_len
        rows = num_sequences * self.rows_per_record
        return (rows, rows * self.seq_len) if rows else (most, most)

    def refuse_balance(self, what: str) -> None:
        """RecipeError where the recipe asks for work by speed and `what`, a setting, gives every worker as much."""
        if self.balances:
            raise RecipeError(f'{what} gives every worker as many steps: set fleet.balance to "none"')

    def check_rule(self, num_updates: int | None = None, *, settings: str = "fleet.min_workers") -> None:
        """RecipeError where the rule of aggregation takes more updates than may come, as `settings` have it.

        With `num_updates`, which is all that ever come together, also where it would never do anything.
        """
        num_coming = self.min_workers if num_updates is None else num_updates
        num_needed = self.aggregation.num_needed(num_coming)
        if num_coming < num_needed and (self.aggregation.refuses_fewer or num_updates is not None):
            raise RecipeError(
                f"aggregation.rule = {self.aggregation.rule!r} needs {num_needed} updates and may be given "
                f"{num_coming}: raise {settings}, or choose another rule"
            )

    @property
    def down(self) -> CodecSpec:
        return parse_spec(self.down_codec)

    @property
    def up_policy(self) -> CodecPolicy:
        """Where a fleet chooses no other."""
        return CodecPolicy(default=parse_spec(self.up_codec).codec.name, rules=self.up_rules)

    @property
    def down_policy(self) -> CodecPolicy:
        return CodecPolicy(default=self.down.codec.name, rules=self.down_rules)

    def up_bytes(self, name: str, part: Sequence[int] = ()) -> int:
        """What a result's vector of this name takes on the way up; of some tensors of the layout, if they are named."""
        return flat_size(name, self.layout.part(part), self.up_policy)

    def down_bytes(self, part: Sequence[int] = (), *, num_behind: int = 1) -> int:
        """What a version of the parameters takes on the way down, to those who hold the one so many before."""
        layout, policy = self.layout.part(part), self.down_policy
        if not self.down.is_delta:
            return flat_size(WHOLE, layout, policy)
        if num_behind > longest_way(layout, policy):
            return flat_size(WHOLE, layout, codec("fp32"))
        return num_behind * flat_size(CHANGE, layout, policy)

    def tensors_bytes(self, layout: Layout) -> int:
        """What tensors that are none of the model's take on the way down (`types.params.Tensors`)."""
        return flat_size(WHOLE, layout, codec("fp32") if self.down.is_delta else self.down_policy)

    def tokens_per_step(self, num_steps: int = 1) -> int:
        """Tokens in that many inner steps of one worker."""
        return num_steps * self.inner.sequences_per_step * self.seq_len

    def progress(self, state: State) -> float:
        return self.budget.progress(tokens=state.tokens, rounds=state.round, seconds=state.seconds)

    def progress_span(self, state: State, num_steps: int) -> tuple[float, float]:
        """The run's progress before and (expected) after a round with `num_steps` worker steps in all."""
        budget = self.budget
        after = budget.progress(
            tokens=state.tokens + self.tokens_per_step(num_steps),
            rounds=state.round + 1,
            seconds=state.seconds * (1 + 1 / state.round) if state.round else first_round_s,
        )
        return self.progress(state), after

    def steps_left(self, state: State, num_workers: int) -> int:
        """Inner steps each of the workers may still take within a token budget; without one, as many as it likes."""
        if not self.budget.tokens:
            return 1 << 30
        left = self.budget.tokens - state.tokens
        return max(1, math.ceil(left / (self.tokens_per_step() * max(num_workers, 1))))
