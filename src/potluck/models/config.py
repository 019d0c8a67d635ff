"""The `[model]` section of a recipe, and what of it a worker is told when the model is a base with adapters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from potluck.lora.factors import scale_for
from potluck.storage.digest import digest_bytes
from potluck.types.ids import Digest

PrecisionName = Literal["fp32", "bf16-mixed"]
BasePrecision = Literal["fp32", "bf16", "int8"]


class AdapterConfig(BaseModel):
    """LoRA adapters, in the words of PEFT's LoraConfig. They are what is trained; the model below them is frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(default=8, ge=1, le=1 << 14, description="r: rows of A, columns of B")
    alpha: float = Field(
        default=16.0, gt=0, le=1e6, allow_inf_nan=False, description="numerator of the scaling, alpha / rank"
    )
    rslora: bool = Field(default=False, description="scale by alpha / sqrt(rank)")
    lower_ranks: tuple[int, ...] = Field(
        default=(), max_length=16,
        description="rising, below `rank`: what workers with little memory train instead, with a strategy for unequal "
        "ranks",
    )  # fmt: skip
    target_modules: tuple[str, ...] = Field(
        min_length=1, max_length=256,
        description='linear layers that get an adapter, by the end of their names: `["q_proj", "v_proj"]`',
    )  # fmt: skip

    @model_validator(mode="after")
    def _rising(self) -> AdapterConfig:
        if any(low >= high for low, high in pairwise((0, *self.lower_ranks, self.rank))):
            raise ValueError(
                f"`lower_ranks` are {list(self.lower_ranks)} and must rise from at least 1 to below `rank`, {self.rank}"
            )
        return self

    @property
    def ranks(self) -> tuple[int, ...]:
        """All that a worker may train, rising."""
        return (*self.lower_ranks, self.rank)

    @property
    def scaling(self) -> float:
        """s in W0 + s B A."""
        return self.scale_of(self.rank)

    def scale_of(self, rank: int) -> float:
        """s of a worker that trains this rank."""
        return scale_for(self.alpha, rank, rank_stabilised=self.rslora)


class BaseObject(BaseModel):
    """One file of the base, an object of the run."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    digest: str
    num_bytes: int = Field(ge=1)


class BaseFiles(BaseModel):
    """The frozen base as objects of the run: safetensors files (models/base.py)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    precision: BasePrecision
    objects: tuple[BaseObject, ...] = Field(default=(), max_length=1 << 14)  # none where nobody starts the run

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.objects)

    @property
    def digest(self) -> Digest:
        """Names the whole base as it is held: of its precision and the digests of its objects, in their order."""
        return digest_bytes("\n".join((self.precision, *(each.digest for each in self.objects))).encode())


class ModelConfig(BaseModel):
    """Which model a run trains. Exactly one of `config`, `path` and `hub` is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: dict[str, Any] | None = Field(
        default=None,
        description="a transformers configuration with its `model_type`; vocabulary and token ids may be left out",
    )
    path: str | None = Field(default=None, description="a local model directory: config.json and safetensors")
    hub: str | None = Field(default=None, description="a model on the Hugging Face hub, `org/name`")
    revision: str | None = Field(
        default=None, description="branch, tag or commit of the hub model; the newest by default"
    )
    init: Literal["scratch", "weights"] | None = Field(
        default=None, description="start from random or from stored weights; weights by default where there are any"
    )
    precision: PrecisionName = Field(
        default="fp32", description="fp32 or bf16-mixed; a worker that cannot do bf16-mixed well uses fp32"
    )
    adapter: AdapterConfig | None = Field(
        default=None,
        description="train LoRA adapters on the frozen model, in the words of PEFT: `{ rank = 8, alpha = 16, "
        'rslora = false, target_modules = ["q_proj", "v_proj"] }`',
    )
    base: BasePrecision = Field(
        default="fp32",
        description="below adapters, how the frozen matrices are held: `fp32`, `bf16`, or `int8` with a scale for each "
        "row (embedding and head in bf16)",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        num_set = sum(source is not None for source in (self.config, self.path, self.hub))
        if num_set != 1:
            raise ValueError(f"give exactly one of `config`, `path` and `hub`; {num_set} are given")
        if self.config is not None and self.init == "weights":
            raise ValueError('`init = "weights"` needs stored weights; give `path` or `hub` in place of `config`')
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError('`config` has no `model_type`; add one, such as model_type = "gpt2"')
        if self.revision is not None and self.hub is None:
            raise ValueError("`revision` belongs to `hub`; remove it or give `hub`")
        if self.base != "fp32" and self.adapter is None:
            raise ValueError(f'`base = "{self.base}"` is of a frozen model; give `adapter` too, or remove it')
        return self

    @property
    def from_weights(self) -> bool:
        """Whether the run starts from stored weights."""
        return self.config is None and self.init != "scratch"

    @property
    def source(self) -> str:
        """The directory or hub id; "" for a configuration in the recipe."""
        return self.path or self.hub or ""
