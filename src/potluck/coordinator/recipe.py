"""A run as its owner writes it: one TOML file, read strictly.

Every section is a model that lives beside its owner; this file puts them together, lets `--set key=value` override
any key, and turns what pydantic finds into one sentence. Paths in a recipe file are relative to that file; paths in
a shipped recipe or in `--set` are relative to the current directory.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from potluck.aggregation.config import AggregationConfig
from potluck.codecs.base import codec, codec_names
from potluck.codecs.policy import CodecPolicy, CodecRule
from potluck.codecs.spec import parse_spec
from potluck.coordinator.divergence import DivergenceConfig
from potluck.coordinator.plan import CheckpointConfig, ValidationConfig
from potluck.coordinator.shipped import shipped
from potluck.coordinator.transfer import TransferConfig
from potluck.data.config import DataConfig
from potluck.fleet.config import FleetConfig
from potluck.models.config import AdapterConfig, ModelConfig
from potluck.optim.inner import InnerConfig
from potluck.planner.compression import CompressionConfig
from potluck.strategies.registry import config_type
from potluck.strategies.registry import shipped as strategies
from potluck.strategies.run import Budget
from potluck.types.errors import RecipeError
from potluck.types.mistakes import nearest, sentence

M = TypeVar("M", bound=BaseModel)


class BudgetConfig(BaseModel):
    """When the run is done. Exactly one of the three is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int | None = Field(default=None, ge=1, description="tokens trained on, by all workers together")
    rounds: int | None = Field(default=None, ge=1, description="committed rounds")
    hours: float | None = Field(
        default=None, gt=0, description="hours spent in rounds, waiting for workers not counted"
    )

    @model_validator(mode="after")
    def _one(self) -> BudgetConfig:
        num_set = sum(value is not None for value in (self.tokens, self.rounds, self.hours))
        if num_set != 1:
            raise ValueError(f"give exactly one of `tokens`, `rounds` and `hours`; {num_set} are given")
        return self

    def to_budget(self) -> Budget:
        return Budget(tokens=self.tokens or 0, rounds=self.rounds or 0, hours=self.hours or 0.0)


_known_codecs = ", ".join(f"`{name}`" for name in codec_names())
_down_codecs = ", ".join(f"`{name}`" for name in codec_names() if "parameter" in codec(name).roles)


class CodecConfig(BaseModel):
    """How parameters and updates are encoded on the way."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    up: str = Field(
        default="fp32",
        description=f"updates, from a worker to the coordinator: {_known_codecs}; `+ef` after one adds error feedback",
    )
    down: str = Field(
        default="fp32",
        description=f"parameters, from the coordinator to the workers: {_down_codecs}; any codec with `-delta` after "
        "it sends differences between versions: to who is several behind as many as take less than the whole, which is "
        "fp32; `async_diloco` without a quorum has each worker as many versions behind as there are workers",
    )
    up_rules: list[dict[str, Any]] = Field(
        default=[],
        description='tensors of updates that go another way: `[{match = "*.wte.*", codec = "bf16"}, '
        '{max_numel = 4096, codec = "fp32"}]`; the first that fits',
    )
    down_rules: list[dict[str, Any]] = Field(default=[], description="the same for parameters")

    @field_validator("up", "down")
    @classmethod
    def _fit(cls, name: str, info: ValidationInfo) -> str:
        try:
            return str(parse_spec(name, "update" if info.field_name == "up" else "parameter"))
        except RecipeError as error:
            raise ValueError(str(error)) from error

    @field_validator("up_rules", "down_rules")
    @classmethod
    def _readable(cls, rules: list[dict[str, Any]], info: ValidationInfo) -> list[dict[str, Any]]:
        try:
            for rule in CodecPolicy.from_json("fp32", rules).rules:
                parse_spec(rule.codec, "update" if info.field_name == "up_rules" else "parameter")
        except RecipeError as error:
            raise ValueError(str(error)) from error
        return rules

    def rules(self, way: Literal["up", "down"]) -> tuple[CodecRule, ...]:
        return CodecPolicy.from_json("fp32", self.up_rules if way == "up" else self.down_rules).rules


class StrategyConfig(BaseModel):
    """The training method: its name, its own settings, and what every worker does at an inner step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="a shipped strategy, or `file.py:Class` for your own")
    inner: InnerConfig = Field(default=InnerConfig(), description="the inner optimizer; see `[strategy.inner]`")
    settings: SerializeAsAny[BaseModel] = Field(description="the strategy's own settings, of its own type")

    @property
    def file(self) -> Path | None:
        """The user's own file, for `file.py:Class`."""
        file, colon, _ = self.name.rpartition(":")
        return Path(file) if colon and file.endswith(".py") else None


class Recipe(BaseModel):
    """One run, checked. Made by `load_recipe` or `parse_recipe`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="letters, digits, `.`, `_` and `-`")
    seed: int = Field(
        default=0, ge=0, lt=1 << 63, description="of the initial parameters, the order of data and all chance"
    )
    model: ModelConfig
    data: DataConfig
    budget: BudgetConfig
    strategy: StrategyConfig
    codec: CodecConfig = CodecConfig()
    compression: CompressionConfig = CompressionConfig()
    aggregation: AggregationConfig = AggregationConfig()
    fleet: FleetConfig = FleetConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    transfer: TransferConfig = TransferConfig()
    divergence: DivergenceConfig = DivergenceConfig()

    def to_json(self) -> dict[str, Any]:
        """The recipe as JSON values in the form of its file; `parse_recipe` reads it back to an equal recipe."""
        value = self.model_dump(mode="json", exclude_none=True)
        strategy = value["strategy"]
        value["strategy"] = {"name": strategy["name"], "inner": strategy["inner"], **strategy["settings"]}
        return value


SECTIONS: dict[str, type[BaseModel]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "budget": BudgetConfig,
    "codec": CodecConfig,
    "compression": CompressionConfig,
    "aggregation": AggregationConfig,
    "fleet": FleetConfig,
    "checkpoint": CheckpointConfig,
    "validation": ValidationConfig,
    "transfer": TransferConfig,
    "divergence": DivergenceConfig,
}

ALTERNATIVES = (
    ("model.config", "model.path", "model.hub"),
    ("data.shared", "data.private", "data.listed"),
    ("budget.tokens", "budget.rounds", "budget.hours"),
)
"""Of each group a recipe gives one; `--set` of one takes the place of the others."""


_library_table = "model.config"
"""What it may hold is for transformers to say."""
IDENTITY = "recipe.json"
"""In a run's folder: its id and the recipe it was started with the last time."""
STRATEGY_FOLDER = "strategy"
"""In a run's folder: a copy of the user's own method."""


def load_recipe(source: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe from a file, by a shipped name, or from a run's folder, and apply `key=value` overrides.

    Raises RecipeError.
    """
    if (folder := run_folder(source)) is not None:
        table = _stored_table(folder)
        for override in overrides:
            apply_override(table, override)
        return parse_recipe(table, f"the recipe of {source}")
    path = find_recipe(str(source))
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {path} is not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"recipe {path} is not text: byte {error.start} is not UTF-8") from error
    if path not in shipped().values():
        _anchor(table, path.resolve().parent)
    for override in overrides:
        apply_override(table, override)
    return parse_recipe(table, f"recipe {source}")


def run_folder(source: str | Path) -> Path | None:
    """The folder, if `source` is that of a run."""
    return Path(source) if (Path(source) / IDENTITY).is_file() else None


def _stored_table(folder: Path) -> dict[str, Any]:
    """What the run was started with; its method's own file is the folder's copy where the file is not there."""
    try:
        table: dict[str, Any] = json.loads((folder / IDENTITY).read_bytes())["recipe"]
        name = str(table["strategy"]["name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{folder / IDENTITY} cannot be read ({error}); give the recipe itself") from error
    file, _, kind = name.rpartition(":")
    copy = folder.resolve() / STRATEGY_FOLDER / Path(file).name
    if file.endswith(".py") and not Path(file).is_file() and copy.is_file():
        table["strategy"]["name"] = f"{copy}:{kind}"
    return table


def find_recipe(source: str) -> Path:
    """The file of a recipe given by path or by shipped name. Raises RecipeError."""
    path, known = Path(source), shipped()
    if path.is_file():
        return path
    if source in known:
        return known[source]
    if path.is_dir():
        raise RecipeError(f"{source} is a folder, not a recipe; give a .toml file or a name from `potluck recipes`")
    near = nearest(path.stem, known)
    hint = f"did you mean {near}?" if near else "see `potluck recipes`"
    raise RecipeError(f"there is no recipe file {source} and no shipped recipe of that name; {hint}")


def apply_override(table: dict[str, Any], override: str) -> None:
    """Set one key of a recipe's table: `strategy.inner.lr=1e-3`. The value is TOML; a bare word is text."""
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise RecipeError(f"--set {override} is not of the form key=value, such as strategy.inner.lr=1e-3")
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError:
        value = text.strip()
    full = ".".join(parts)
    for group in ALTERNATIVES:
        if chosen := next((name for name in group if full == name or full.startswith(name + ".")), None):
            for other in group:
                section, _, name = other.partition(".")
                if other != chosen and isinstance(table.get(section), dict):
                    table[section].pop(name, None)
    here = table
    for depth, part in enumerate(parts[:-1]):
        inside = here.setdefault(part, {})
        if not isinstance(inside, dict):
            at = ".".join(parts[: depth + 1])
            raise RecipeError(f"--set {key}: {at} is {inside!r} in the recipe, not a table; set {at} as a whole")
        here = inside
    here[parts[-1]] = value


def parse_recipe(table: Mapping[str, Any], where: str = "the recipe") -> Recipe:
    """Check a recipe's table, section by section. `where` begins the sentence of an error. Raises RecipeError."""
    given = dict(table)
    sections: dict[str, Any] = {}
    for name, model in SECTIONS.items():
        if name in given:
            sections[name] = _check(model, given.pop(name), name, where)
    if "strategy" in given:
        sections["strategy"] = _strategy(given.pop("strategy"), where)
    head = {name: given.pop(name) for name in ("name", "seed") if name in given}
    for name in given:
        near = nearest(name, known_keys())
        hint = f"did you mean {near}?" if near else "see docs/recipes.md"
        raise RecipeError(f"{where}: {name} is not a key; {hint}")
    for name, field in Recipe.model_fields.items():
        if field.is_required() and name not in sections and name not in head:
            raise RecipeError(f"{where}: {name} is missing; see docs/recipes.md and `potluck recipes` for examples")
    checked = _check(_Head, head, "", where)
    return Recipe(name=checked.name, seed=checked.seed, **sections)


def known_keys() -> list[str]:
    """Every key a recipe may have, in full."""
    keys = ["name", "seed", "strategy", *SECTIONS, "strategy.name", "strategy.inner"]
    for section, model in (*SECTIONS.items(), ("strategy.inner", InnerConfig), ("model.adapter", AdapterConfig)):
        keys += [f"{section}.{name}" for name in model.model_fields]
    return keys


class _Head(BaseModel):
    """The keys outside any section."""

    model_config = ConfigDict(extra="forbid")

    name: str = Recipe.model_fields["name"]  # pyright: ignore[reportAssignmentType]
    seed: int = Recipe.model_fields["seed"]  # pyright: ignore[reportAssignmentType]


def _strategy(value: Any, where: str) -> StrategyConfig:
    if not isinstance(value, dict):
        raise RecipeError(f"{where}: strategy is {value!r} and must be a table with a `name`")
    settings: dict[str, Any] = dict(value)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise RecipeError(f"{where}: strategy.name is missing; it is a shipped strategy or your own file.py:Class")
    inner = _check(InnerConfig, settings.pop("inner", {}), "strategy.inner", where)
    extra = ["strategy.name", "strategy.inner", *known_keys()]
    is_own = ".py:" in name  # and so is what its numbers mean
    if not is_own and (foreign := _setting_of_another(name, settings)):
        own = ", ".join([*config_type(name).model_fields, "inner"])
        raise RecipeError(f"{where}: strategy.{foreign} is not a key of {name}, which has {own}; remove it")
    checked = _check(config_type(name), settings, "strategy", where, also=extra, may_be_infinite=is_own)
    return StrategyConfig(name=name, inner=inner, settings=checked)


def _setting_of_another(name: str, settings: Mapping[str, Any]) -> str:
    """The first setting that the shipped strategy `name` and its inner optimizer lack and another one has; else ""."""
    own = {*config_type(name).model_fields, *InnerConfig.model_fields}
    others = {key for other in strategies for key in config_type(other).model_fields} if settings.keys() - own else ()
    return next((key for key in settings if key not in own and key in others), "")


def _check(
    model: type[M], value: Any, section: str, where: str, also: Iterable[str] = (), *, may_be_infinite: bool = False
) -> M:
    """`value` as `model`, strictly: no text for numbers, no infinite ones, no unknown key. Raises RecipeError."""
    if not may_be_infinite and (odd := _not_finite(value, section)):
        raise RecipeError(f"{where}: {odd} and must be a finite number")
    try:
        # Through JSON, where strict still lets a list be a tuple.
        return model.model_validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        keys = [f"{section}.{name}" if section else name for name in model.model_fields]
        raise RecipeError(f"{where}: {sentence(error, section, [*keys, *(also or known_keys())])}") from error


def _not_finite(value: Any, key: str) -> str:
    """The first number that is infinite or NaN, by its full key: "budget.hours is inf"; "" where there is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{key} is {value}"
    if isinstance(value, dict):
        inside = [(f"{key}.{name}" if key else str(name), item) for name, item in value.items()]
    elif isinstance(value, list):
        inside = [(f"{key}[{number}]", item) for number, item in enumerate(value)]
    else:
        return ""
    return next(filter(None, (_not_finite(item, name) for name, item in inside if name != _library_table)), "")


def _anchor(table: dict[str, Any], folder: Path) -> None:
    """Make the paths of a recipe file absolute."""

    def at(value: Any) -> Any:
        if isinstance(value, list):
            return [at(one) for one in value]
        if not isinstance(value, str) or value == "python-stdlib":
            return value
        return str(folder / Path(value).expanduser())

    for section, name in (("model", "path"), ("data", "shared"), ("data", "listed"), ("data", "validation")):
        if isinstance(inside := table.get(section), dict) and name in inside:
            inside[name] = at(inside[name])
    data, strategy = table.get("data"), table.get("strategy")
    if isinstance(data, dict) and isinstance(tokenizer := data.get("tokenizer"), dict) and "path" in tokenizer:
        tokenizer["path"] = at(tokenizer["path"])
    if isinstance(strategy, dict) and ".py:" in str(strategy.get("name", "")):
        strategy["name"] = at(strategy["name"])
