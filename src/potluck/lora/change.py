"""What a round of a rule that is no mean makes of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from potluck.lora.factors import Factors, drawn
from potluck.lora.fed_ex import fed_ex
from potluck.lora.flex_lora import flex_lora
from potluck.lora.flora import flora
from potluck.lora.het_lora import het_lora
from potluck.lora.weighted import Updates


@dataclass(frozen=True)
class Change:
    """The layer's adapter, of the highest rank, and what goes into the base."""

    adapter: Factors
    merged: Factors | None = None


def change_of(rule: str, held: Factors, updates: Updates, fresh: torch.Generator) -> Change:
    """`held` is the adapter before, of the highest rank and with its scale. InvalidUpdate as the rules raise it."""
    rank, scale = held.rank, held.scale
    match rule:
        case "flora":
            a = drawn(torch.empty_like(held.a), fresh)
            return Change(Factors(a, torch.zeros_like(held.b), scale), flora(updates))
        case "fed_ex":
            got = fed_ex(updates)
            return Change(got.mean, got.residual)
        case "flex_lora":
            return Change(flex_lora(updates, max_rank=rank).resized(rank, scale=scale))
        case "het_lora":
            highest = max(adapter.rank for _, adapter in updates)
            mean = het_lora(updates).resized(highest, scale=scale)
            a = torch.cat([mean.a, held.a[highest:]])  # components that nobody has now stay as they were
            b = torch.cat([mean.b, held.b[:, highest:]], dim=1)
            is_dead = ~(a.any(dim=1) | b.any(dim=0))  # without gradient for good, unless A is again what it was
            return Change(Factors(torch.where(is_dead[:, None], held.a, a), b, scale))
        case _:
            raise AssertionError(f"{rule} is a mean of what is sent")
