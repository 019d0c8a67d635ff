"""The `[model]` section of a recipe."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PrecisionName = Literal["fp32", "bf16-mixed"]


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
        return self

    @property
    def from_weights(self) -> bool:
        """Whether the run starts from stored weights."""
        return self.config is None and self.init != "scratch"

    @property
    def source(self) -> str:
        """The directory or hub id; "" for a configuration in the recipe."""
        return self.path or self.hub or ""
