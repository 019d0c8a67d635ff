"""The `[transfer]` section of a recipe, and what an operator makes of it while the run goes on."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from potluck.protocol import pb
from potluck.transport.pace import Limits
from potluck.types.errors import Refused

BYTES_PER_MBIT = 125_000
LEAST_MBIT, MOST_MBIT = 1e-3, 1e9
"""Below that a piece of a transfer takes hours."""


class TransferConfig(BaseModel):
    """How fast objects travel at most, in Mbit/s; 0 for no limit. `potluck limit` changes it while the run goes on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_up_mbit: float = Field(
        default=0.0,
        ge=0,
        le=MOST_MBIT,
        allow_inf_nan=False,
        description="from the workers to the coordinator, all together",
    )
    max_down_mbit: float = Field(
        default=0.0,
        ge=0,
        le=MOST_MBIT,
        allow_inf_nan=False,
        description="from the coordinator to the workers, all together",
    )
    max_up_mbit_per_worker: float = Field(
        default=0.0, ge=0, le=MOST_MBIT, allow_inf_nan=False, description="from each worker"
    )
    max_down_mbit_per_worker: float = Field(
        default=0.0, ge=0, le=MOST_MBIT, allow_inf_nan=False, description="to each worker"
    )

    @field_validator("*")
    @classmethod
    def _slowest(cls, mbit: float) -> float:
        if 0 < mbit < LEAST_MBIT:
            raise ValueError(f"{mbit:g} Mbit/s is too slow to be a limit; give 0 for none or {LEAST_MBIT:g} at least")
        return mbit

    def limits(self) -> Limits:
        return Limits(
            up=self.max_up_mbit * BYTES_PER_MBIT,
            down=self.max_down_mbit * BYTES_PER_MBIT,
            up_per_worker=self.max_up_mbit_per_worker * BYTES_PER_MBIT,
            down_per_worker=self.max_down_mbit_per_worker * BYTES_PER_MBIT,
        )


def changed(limits: Limits, request: pb.RateLimits) -> Limits:
    """`limits` with what the request gives. Refused if that is no rate."""
    rates = {
        "up": limits.up,
        "down": limits.down,
        "up_per_worker": limits.up_per_worker,
        "down_per_worker": limits.down_per_worker,
    }
    for name in rates:
        if request.HasField(name):
            mbit = float(getattr(request, name))
            if mbit and not LEAST_MBIT <= mbit <= MOST_MBIT:
                raise Refused(
                    f"a limit of {mbit:g} Mbit/s is none; give 0 for no limit or {LEAST_MBIT:g} to {MOST_MBIT:g}"
                )
            rates[name] = mbit * BYTES_PER_MBIT
    return Limits(**rates)


def sentence(limits: Limits) -> str:
    """For people."""
    rates = (
        ("up", limits.up), ("down", limits.down),
        ("up for each worker", limits.up_per_worker), ("down for each worker", limits.down_per_worker),
    )  # fmt: skip
    given = [f"{what} {rate / BYTES_PER_MBIT:g} Mbit/s" for what, rate in rates if rate]
    return "transfers are limited: " + ", ".join(given) if given else "transfers have no limit"
