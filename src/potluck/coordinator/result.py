"""What a run leaves in its folder, for others to open.

RUN/model/    the model; where adapters were trained, a PEFT directory
RUN/base/     the model below the adapters, where it has no other place: random weights of the run's own
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from potluck.coordinator.frozen import TOKENIZER, Frozen
from potluck.coordinator.plan import Plan
from potluck.coordinator.prepare import stored_recipe
from potluck.models.config import BaseFiles, ModelConfig
from potluck.models.export import check_targets, model_card, save_model_dir
from potluck.storage.digest import file_name
from potluck.types.errors import PotluckError
from potluck.types.ids import Digest

MODEL, BASE = "model", "base"


def leave_model(
    folder: Path, plan: Plan, model: ModelConfig, vector: Tensor, tokenizer_dir: Path | None,
    card: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write what `vector`, the run's parameters, is of. Blocks."""
    spec = plan.spec
    if spec.adapter is None or spec.base is None:
        save_model_dir(folder / MODEL, spec.model_config_json, vector, plan.layout, tokenizer_dir, card)
        return
    from potluck.models.adapter_export import save_adapter_dir, save_merged_dir

    base_name = model.source if model.from_weights else str((folder / BASE).absolute())
    if not model.from_weights and not (folder / BASE).is_dir():
        paths = _paths(spec.base, folder)
        readme = model_card({"name": f"{spec.name}, before training"})
        save_merged_dir(folder / BASE, spec.model_config_json, paths, spec.base.precision, None, tokenizer_dir, readme)
    save_adapter_dir(
        folder / MODEL, spec.model_config_json, spec.adapter, vector, plan.layout, tokenizer_dir, card,
        base_name=base_name,
    )  # fmt: skip


def merge(run_dir: Path, target: Path) -> None:
    """Write the whole model that a run's adapters and its base make. Blocks. PotluckError with what is wrong."""
    check_targets(target)
    recipe, frozen = stored_recipe(run_dir), Frozen.load(run_dir)
    if recipe.model.adapter is None or frozen is None or frozen.base is None:
        raise PotluckError(f"the run in {run_dir} trains whole weights and there is nothing to merge; copy {MODEL}")
    from potluck.models.adapter_export import WEIGHTS_FILE, Adapters, save_merged_dir

    source = run_dir / MODEL
    if not (source / WEIGHTS_FILE).is_file():
        raise PotluckError(f"{source} holds no adapters yet; finish the run or end it with `potluck stop`")
    adapters = Adapters.load(source)
    readme = model_card({"name": recipe.name, "adapters": f"rank {recipe.model.adapter.rank}, merged"})
    save_merged_dir(
        target, frozen.model_config, _paths(frozen.base, run_dir), frozen.base.precision, adapters,
        run_dir / TOKENIZER if frozen.has_tokenizer else None, readme,
    )  # fmt: skip


def _paths(base: BaseFiles, run_dir: Path) -> list[Path]:
    """Without opening the store, which a coordinator at work has to itself."""
    return [run_dir / "objects" / file_name(Digest(each.digest)) for each in base.objects]
