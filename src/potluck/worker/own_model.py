"""What a worker has for its owner alone: the adapters that it ended its last round with, as files for others to open.

The methods that keep them are those of fed_lora with `personal`, and its rule `fed_sa`, whose B never leaves a worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from potluck.models.adapter_export import Adapters, save_adapter_dir, save_merged_dir, whole_change
from potluck.models.adapters import pairs
from potluck.models.export import check_targets, model_card
from potluck.storage.digest import check_digest, file_name
from potluck.strategies.fed_lora import OWN
from potluck.strategies.run import RunSpec
from potluck.types.errors import CorruptError, PotluckError
from potluck.types.untrusted import printable
from potluck.worker.replica import KEPT, read_shape
from potluck.worker.state import DESCRIPTION

TOKENIZER = Path("data", "tokenizer")


def export_own(state_dir: Path, run: str | None, *, adapters: Path | None = None, merged: Path | None = None) -> None:
    """Write the worker's own adapters of a run, by id or name, as a PEFT directory; and the whole model with them.

    Blocks; a worker at work is not disturbed. PotluckError with what is wrong.
    """
    check_targets(adapters, merged)
    run_dir = _found(state_dir, run)
    spec, vector = _description(run_dir), _newest(run_dir)
    if spec.adapter is None or spec.base is None or vector is None:
        raise PotluckError(
            f"this worker keeps no adapters of its own of {run_dir.name}: it has ended no round yet, or the run's "
            'method keeps none (strategy.personal = true and rule "fed_sa" do)'
        )
    layout, _ = read_shape(spec)
    if (list(vector.shape), vector.dtype) != ([layout.numel], torch.float32):
        raise CorruptError(
            f"the state in {run_dir} has parameters {list(vector.shape)} in {vector.dtype} and the run has "
            f"{layout.numel} in {torch.float32}; it is of another run"
        )
    if not torch.isfinite(vector).all():
        raise CorruptError(
            f"the adapters in {run_dir} hold NaN or infinity, so that no model can be made of them; wait for a round "
            "that trains them anew"
        )
    tokenizer = run_dir / TOKENIZER if (run_dir / TOKENIZER).is_dir() else None
    card = {"name": spec.name, "run": spec.run_id, "adapters": "of one worker, which they stay with"}
    if adapters is not None:
        save_adapter_dir(
            adapters, spec.model_config_json, spec.adapter, vector, layout, tokenizer,
            {**card, "base": spec.base.digest}, base_name="",
        )  # fmt: skip
    if merged is not None:
        base = [run_dir / "objects" / file_name(check_digest(each.digest)) for each in spec.base.objects]
        whole, plain, values, _ = whole_change(spec.adapter, layout, vector)
        save_merged_dir(
            merged, spec.model_config_json, base, spec.base.precision, Adapters(pairs(plain, values), whole.scaling),
            tokenizer, model_card(card),
        )  # fmt: skip


def _found(state_dir: Path, run: str | None) -> Path:
    """The folder of that run, or of the only one that there is."""
    runs = {path.parent.name: path.parent for path in sorted(state_dir.glob(f"runs/*/{DESCRIPTION}"))}
    if not runs:
        raise PotluckError(f"no worker of a run that trains adapters has the state folder {state_dir}; give its folder")
    ids = [id for id in runs if run is None or run in (id, id.rpartition("-")[0])]
    if len(ids) != 1:
        known = ", ".join(ids or runs)
        raise PotluckError(f"{len(ids)} of the runs in {state_dir} are meant; name one of these: {known}")
    return runs[ids[0]]


def _description(run_dir: Path) -> RunSpec:
    path = run_dir / DESCRIPTION
    try:
        return RunSpec.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CorruptError(
            f"{path} cannot be read ({printable(str(error), 200)}); join the run once more, which writes it"
        ) from error


def _newest(run_dir: Path) -> Tensor | None:
    """The kept parameters of the newest state that has any: fp32 [numel]. A worker at work may replace states."""
    for path in _by_age(run_dir / "local"):
        try:
            with safe_open(path, framework="pt") as file:
                if KEPT + OWN in file.keys():  # noqa: SIM118
                    return file.get_tensor(KEPT + OWN)
        except FileNotFoundError:
            continue
        except (OSError, SafetensorError) as error:
            raise CorruptError(
                f"the worker's state {path} cannot be read ({error}); let it end another round, which writes a new one"
            ) from error
    return None


def _by_age(folder: Path) -> Iterator[Path]:
    """The newest first."""
    times: dict[Path, float] = {}
    for path in folder.glob("*.safetensors"):
        try:
            times[path] = path.stat().st_mtime
        except FileNotFoundError:
            continue
    yield from sorted(times, key=times.__getitem__, reverse=True)
