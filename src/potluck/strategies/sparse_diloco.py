"""Sparse DiLoCo: the few largest values of each update, in two bits each, with error feedback on the worker.

    a_i   = beta e_i + (theta - theta_i)      e_i = a_i - C(a_i)       C: top-k of each chunk, then 2-bit (codecs/)
    theta <- theta - eta 1/R sum_i p_i R C(a_i) min(1, M / |C(a_i)|)   M: the median of the norms, eta = 1

`diloco` without outer momentum (what was left out comes later, which is momentum enough) and with the norms of updates
held to their median; SparseLoCo, Sarfi et al. 2025, arXiv:2508.15706. An average is over all R who replied, not over
those who sent a coordinate. The settings of a run that belong to it are in other sections of the recipe, and are
checked here:

    codec.up = "topk(1.5625%)+2bit+ef(0.95)"     aggregation.rule = "norm_clipping"     compression.mode = "fixed"

`codec.up_rules` may send vectors and small matrices another way.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from potluck.codecs.policy import small_numel
from potluck.codecs.spec import parse_spec
from potluck.strategies.diloco import DiLoCo, DiLoCoConfig, DiLoCoState
from potluck.strategies.local_steps import most_steps
from potluck.strategies.run import RunFacts
from potluck.types.errors import RecipeError

_sparse = "topk"


class SparseDiLoCoConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    num_inner_steps: int = Field(
        default=100,
        ge=1,
        le=most_steps,
        description="H: inner steps of each worker in a round; on average where work is balanced",
    )
    outer_lr: float = Field(default=1.0, gt=0, description="eta: size of the outer step")
    min_reply_fraction: float = Field(
        default=0.5, gt=0, le=1, description="a round with fewer replies than this share of its workers is discarded"
    )


class SparseDiLoCo(DiLoCo):
    Config: ClassVar[type[BaseModel]] = SparseDiLoCoConfig

    def __init__(self, config: SparseDiLoCoConfig) -> None:
        super().__init__(DiLoCoConfig(outer_momentum=0.0, **config.model_dump()))

    def init(self, run: RunFacts) -> DiLoCoState:
        spec = parse_spec(run.up_codec)
        if run.compression.mode != "fixed":
            raise RecipeError(
                f"strategy sparse_diloco needs codec.up for every update and compression.mode is "
                f"{run.compression.mode!r}: set it to 'fixed'"
            )
        if not spec.tensors.startswith(_sparse) or not spec.beta:
            raise RecipeError(
                f"strategy sparse_diloco sends the largest values only and needs error feedback; codec.up is "
                f"{run.up_codec!r}: set it to 'topk(1.5625%)+2bit+ef(0.95)'"
            )
        policy = run.up_policy
        for tensor in run.layout:
            chosen = policy.choose(tensor.name, tensor.shape).name
            if len(tensor.shape) > 1 and tensor.numel >= small_numel and not chosen.startswith(_sparse):
                raise RecipeError(
                    f"strategy sparse_diloco sends the largest values of matrices only and codec.up_rules sends "
                    f"{tensor.name} as {chosen}: leave that rule out, or give it a codec that begins with '{_sparse}'"
                )
        if run.aggregation.rule != "norm_clipping":
            raise RecipeError(
                f"strategy sparse_diloco holds the norms of updates to their median and aggregation.rule is "
                f"{run.aggregation.rule!r}: set it to 'norm_clipping'"
            )
        return super().init(run)
