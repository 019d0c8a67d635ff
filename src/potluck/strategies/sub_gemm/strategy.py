"""Sub-GEMM tensor parallelism: the head trains the model, and devices compute tiles of its matrix products.

    g = d(sum of token losses) / d theta over one batch      every product of it in tiles: C = A B
    g <- g min(1, clip / |g|);  theta <- adamw(theta, g)      on the head, as `sync_sgd` takes its step

Xue et al. 2025, arXiv:2512.22142 ("Cleave"). A device holds no model, no optimizer and no activations: what it needs is
memory for a tile. A round is one optimizer step; one that is not committed is done again from its data.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from potluck.strategies.fleet import Fleet, Head
from potluck.strategies.replica import Loss
from potluck.strategies.run import RunFacts
from potluck.strategies.strategy import RoundBytes
from potluck.strategies.sub_gemm.head import HeadConfig, HeadModel
from potluck.strategies.sub_gemm.multiply import SpreadMultiplier
from potluck.strategies.sub_gemm.tile import Wire, multiply
from potluck.strategies.sync_sgd import SyncSGDState, clip_scale, step
from potluck.strategies.task import Result, task
from potluck.types.errors import RoundFailed
from potluck.types.params import Params
