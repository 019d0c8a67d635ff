"""From a recipe to a plan: data, tokenizer, model and strategy, made once and found again when the run goes on."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from potluck.coordinator.deck import Deck
from potluck.coordinator.first import bare_model, first_parameters, make_base
from potluck.coordinator.frozen import TOKENIZER, Frozen, keep_tokenizer
from potluck.coordinator.plan import Plan
from potluck.coordinator.recipe import IDENTITY, Recipe, parse_recipe
from potluck.data.manifest import Manifest, listed_data
from potluck.data.prepare import prepare_shared
from potluck.data.prepared import PreparedData
from potluck.data.records import RecordForm
from potluck.data.shards import Shard
from potluck.data.tokenizer import TextTokenizer, pack_tokenizer
from potluck.models.build import layout_of, model_config, tokenizer_folder
from potluck.models.config import BaseFiles
from potluck.models.device import require_memory
from potluck.storage.digest import digest_file
from potluck.storage.files import write_atomic
from potluck.storage.objects import ObjectStore
from potluck.strategies.registry import strategy_type
from potluck.strategies.run import RunSpec
from potluck.strategies.strategy import (
    HeadStrategy,
    Strategy,
    kept_vectors,
    merges_adapters,
    privacy,
    takes_pairs,
    takes_unequal_ranks,
    tasks_given,
)
from potluck.types.errors import CorruptError, DataError, ModelError, RecipeError
from potluck.types.ids import Digest
from potluck.types.mistakes import first_difference
from potluck.types.params import Fragment, Layout, Params

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that can start: its plan, its data and its tokenizer in Hugging Face form."""

    plan: Plan
    deck: Deck
    tokenizer_dir: Path | None
    corpus_digest: str
    facts: dict[str, Any]  # about the data, for people and the model card


def run_identity(run_dir: Path, recipe: Recipe) -> str:
    """The run's id, a new one where the folder holds none. RecipeError if it holds a run of another recipe.

    What may change between starts is how long, how often and with whom: not the model, the data or the method.
    """
    if not (run_dir / IDENTITY).exists():
        return f"{recipe.name}-{secrets.token_hex(4)}"
    stored_id, stored = _identity(run_dir)
    now = recipe.to_json()
    for strategy in (stored["strategy"], now["strategy"]):
        strategy["name"] = Path(strategy["name"]).name  # a file may lie elsewhere now
    for section in ("name", "seed", "model", "data", "strategy"):
        if stored.get(section) != now.get(section):
            key, was, given = first_difference(section, stored.get(section), now.get(section))
            raise RecipeError(
                f"{run_dir} holds a run whose {key} is {was} and here it is {given}; name that folder in place of the "
                "recipe to go on with the run's own, or give another folder with --dir"
            )
    return stored_id


def stored_recipe(run_dir: Path) -> Recipe:
    """The recipe that a run's folder was made with. CorruptError, RecipeError."""
    return parse_recipe(_identity(run_dir)[1], f"the recipe in {run_dir / IDENTITY}")


def _identity(run_dir: Path) -> tuple[str, dict[str, Any]]:
    path = run_dir / IDENTITY
    try:
        stored: dict[str, Any] = json.loads(path.read_bytes())
        return str(stored["run_id"]), dict(stored["recipe"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptError(
            f"{path} cannot be read ({error}); restore it from a copy or start in a new folder"
        ) from error


def replanned(plan: Plan, recipe: Recipe) -> Plan:
    """The plan with what may change while a run goes on. RecipeError for what the strategy refuses of it."""
    changed = replace(plan, **_changeable(recipe))
    _check_strategy(changed)
    return changed


def _changeable(recipe: Recipe) -> dict[str, Any]:
    """The parts of a plan that may change while its run goes on."""
    return {
        "budget": recipe.budget.to_budget(), "fleet": recipe.fleet, "checkpoint": recipe.checkpoint,
        "validation": recipe.validation, "transfer": recipe.transfer, "divergence": recipe.divergence,
    }  # fmt: skip


def prepare(recipe: Recipe, run_dir: Path, objects: ObjectStore, *, cache_dir: Path, tell: Tell) -> Prepared:
    """Blocks for seconds: call it in an executor. Raises what is wrong with the recipe, the data or the model."""
    run_id = run_identity(run_dir, recipe)
    frozen = Frozen.load(run_dir) if (run_dir / IDENTITY).exists() else None
    if frozen is None or not frozen.is_whole(recipe, objects):
        if frozen is None:
            sketch(recipe)  # what the strategy refuses of the recipe is told before text is read, which may take hours
        before, frozen = frozen, _made(recipe, run_dir, objects, cache_dir=cache_dir, tell=tell)
        if before is not None:
            _check_base(recipe, run_dir, before.base, frozen.base)
    tokenizer_dir = run_dir / TOKENIZER if frozen.has_tokenizer else None
    config = frozen.model_config
    tell("building the model")
    layout = layout_of(bare_model(recipe.model, config, merges=merges_adapters(_strategy(recipe))))
    require_memory(layout.numel)
    tokenizer_object = ""
    if tokenizer_dir is not None and recipe.data.access != "shared":
        tokenizer_object = objects.put(pack_tokenizer(tokenizer_dir))
    plan = _plan(recipe, run_id, config, layout, tokenizer_object, frozen.base)
    # Last: a start that failed, for a path misspelt, binds the folder to nothing.
    frozen.save(run_dir, recipe.strategy.file)
    stored = {"run_id": run_id, "recipe": recipe.to_json()}
    write_atomic(run_dir / IDENTITY, json.dumps(stored, indent=2).encode())
    return Prepared(
        plan=plan, deck=frozen.deck(recipe), tokenizer_dir=tokenizer_dir, corpus_digest=frozen.corpus_digest,
        facts=frozen.facts,
    )  # fmt: skip


def sketch(recipe: Recipe) -> Plan:
    """The plan of a run without its data: a tokenizer that data will train is taken at the recipe's word."""
    vocab_size = recipe.data.tokenizer.vocab_size if recipe.data.tokenizer.train else 0
    model = recipe.model
    if vocab_size and model.config is not None and "vocab_size" not in model.config:
        model = model.model_copy(update={"config": {**model.config, "vocab_size": vocab_size}})
    config = model_config(model, _tokenizer_source(recipe), seq_len=recipe.data.seq_len)
    base = BaseFiles(precision=model.base) if model.adapter is not None else None
    layout = layout_of(bare_model(model, config, merges=merges_adapters(_strategy(recipe))))
    return _plan(recipe, recipe.name, config, layout, "", base)


def _tokenizer_source(recipe: Recipe) -> Path | None:
    """The directory of the tokenizer that the recipe names or, where it names none, of the model's; None without."""
    named = recipe.data.tokenizer.path
    return Path(named) if named else tokenizer_folder(recipe.model)


def _strategy(recipe: Recipe) -> Strategy:
    return strategy_type(recipe.strategy.name)(recipe.strategy.settings)


def _plan(
    recipe: Recipe, run_id: str, config: dict[str, Any], layout: Layout, tokenizer_object: str, base: BaseFiles | None
) -> Plan:
    """RecipeError also for what the strategy refuses of the other sections."""
    file = recipe.strategy.file
    strategy = _strategy(recipe)
    on_head = isinstance(strategy, HeadStrategy)
    if on_head and recipe.data.access != "shared":
        raise RecipeError(
            f"strategy {recipe.strategy.name} trains on this machine, with the devices' help, and needs data.shared; "
            f"data is {recipe.data.access}"
        )
    if on_head and recipe.data.read_options().rows_per_record:
        raise RecipeError(
            f"strategy {recipe.strategy.name} predicts every token and data.format is {recipe.data.format!r}, of which "
            "only answers are; choose a strategy whose workers hold the model"
        )
    if recipe.data.format == "preference" and not takes_pairs(strategy):
        raise RecipeError(
            f'strategy {recipe.strategy.name} trains on single sequences and data.format "preference" gives pairs; '
            'use "chat" or "instruct"'
        )
    if recipe.model.adapter is not None:
        _check_adapters(recipe, strategy)
    if privacy(strategy) is not None:
        _check_privacy(recipe)
    spec = RunSpec(
        run_id=run_id,
        name=recipe.name,
        seed=recipe.seed,
        strategy=recipe.strategy.name if file is None else f"{file.name}:{recipe.strategy.name.rpartition(':')[2]}",
        strategy_digest=digest_file(file) if file is not None else "",
        tasks=tasks_given(strategy),
        model_config_json=config,
        layout=layout.to_json(),
        seq_len=recipe.data.seq_len,
        precision=recipe.model.precision,
        adapter=recipe.model.adapter,
        base=base,
        merges_adapters=merges_adapters(strategy),
        inner=recipe.strategy.inner,
        data_access=recipe.data.access,
        data_options=recipe.data.read_options().model_dump(mode="json"),
        tokenizer_object=tokenizer_object,
        heartbeat_s=recipe.fleet.heartbeat_s,
        snapshot_every_steps=recipe.fleet.snapshot_every_steps,
        kept_vectors=kept_vectors(strategy),
        up_rules=recipe.codec.up_rules,
        up_codec=recipe.codec.up,
        devices_hold_model=not on_head,
        privacy=privacy(strategy),
    )
    plan = Plan(
        spec=spec,
        strategy=strategy,
        layout=layout,
        initial=lambda: first_parameters(recipe.model, config, layout, seed=recipe.seed),
        aggregation=recipe.aggregation,
        up_codec=recipe.codec.up,
        down_codec=recipe.codec.down,
        up_rules=recipe.codec.rules("up"),
        down_rules=recipe.codec.rules("down"),
        compression=recipe.compression,
        **_changeable(recipe),
        open_objects=tuple(
            Digest(d) for d in (tokenizer_object, *(each.digest for each in (base.objects if base else ()))) if d
        ),
    )
    _check_strategy(plan)  # what it refuses is known before a folder is bound to it
    return plan


def _check_strategy(plan: Plan) -> None:
    """RecipeError for what the strategy refuses of the recipe's other sections."""
    nowhere = Params((Fragment("nowhere", plan.layout.numel),))
    plan.strategy.init(plan.facts(initial=nowhere, zeros=nowhere))


def _check_adapters(recipe: Recipe, strategy: Strategy) -> None:
    """RecipeError for what adapters do not go with."""
    assert recipe.model.adapter is not None
    if recipe.model.adapter.lower_ranks and not takes_unequal_ranks(strategy):
        raise RecipeError(
            f"strategy {recipe.strategy.name} as it is set gives all workers adapters of one rank; remove "
            "model.adapter.lower_ranks, or use fed_lora with a rule for unequal ranks: flora, flex_lora or het_lora"
        )
    if isinstance(strategy, HeadStrategy):
        raise RecipeError(
            f"strategy {recipe.strategy.name} trains all weights of a model; remove model.adapter or choose another"
        )
    if recipe.strategy.inner.weights != "fp32":
        raise RecipeError(
            f'strategy.inner.weights is "{recipe.strategy.inner.weights}" and adapters are trained in fp32; remove it, '
            'and hold the model below them in fewer bits with model.base = "bf16"'
        )


def _check_privacy(recipe: Recipe) -> None:
    """RecipeError for data that differential privacy of records does not go with."""
    data, adapter = recipe.data, recipe.model.adapter
    if not data.private or data.read_options().rows_per_record != 1 or adapter is None:
        raise RecipeError(
            "strategy.privacy is of records that stay with their owners and train adapters, and the run has "
            f"{data.access} data of format {data.format!r}{'' if adapter else ' and no model.adapter'}; set "
            'data.private = true, data.format to "instruct" or "chat", and model.adapter'
        )
    if data.validation:
        raise RecipeError(
            f"strategy.privacy lets no loss leave a worker and data.validation holds out {data.validation} of its text "
            "for losses; set data.validation = 0"
        )
    if data.max_bytes:
        raise RecipeError(
            f"strategy.privacy is of single records and data.max_bytes stops reading after {data.max_bytes:,} bytes, "
            "so that the length of each decides which others are in; set data.max_bytes = 0"
        )


def _made(recipe: Recipe, run_dir: Path, objects: ObjectStore, *, cache_dir: Path, tell: Tell) -> Frozen:
    """From the data and the model where the recipe says they are. The tokenizer goes into the run's folder."""
    model_tokenizer = tokenizer_folder(recipe.model)
    training: tuple[Shard, ...] = ()
    held_out: tuple[Shard, ...] = ()
    corpus, facts = "", dict[str, Any]()
    source = _tokenizer_source(recipe)
    if recipe.data.access == "listed":
        assert recipe.data.listed is not None
        manifest = Manifest.load(Path(recipe.data.listed))
        _check_tokenizer(manifest, recipe, source)
        listed = listed_data(manifest, recipe.data.read_options(), seed=recipe.seed)
        training, held_out, corpus = listed.shards, listed.validation, digest_file(Path(recipe.data.listed))
    elif recipe.data.access == "shared":
        data = _shared(recipe, objects, cache_dir=cache_dir, model_tokenizer=model_tokenizer, tell=tell)
        training, held_out, corpus, facts = data.catalogue(), data.held_out(), data.corpus_digest, _facts(data)
        source = data.tokenizer_dir
    tokenizer_dir = keep_tokenizer(source, run_dir)
    options = recipe.data.read_options()
    if options.rows_per_record and tokenizer_dir is not None:
        RecordForm(options, tokenizer_dir)  # a template that cannot be used is refused here, not on every worker
    config = model_config(recipe.model, tokenizer_dir, seq_len=recipe.data.seq_len)
    return Frozen(
        training=training,
        held_out=held_out,
        corpus_digest=corpus,
        facts=facts,
        model_config=config,
        has_tokenizer=tokenizer_dir is not None,
        base=make_base(recipe.model, config, objects, seed=recipe.seed, tell=tell),
    )


def _check_base(recipe: Recipe, run_dir: Path, before: BaseFiles | None, now: BaseFiles | None) -> None:
    """ModelError where a run's base had to be made again and became another: its adapters are of the one before."""
    if before is not None and (now is None or now.digest != before.digest):
        raise ModelError(
            f"the run in {run_dir} trains adapters on the base {before.digest}, of which files are missing there, and "
            f"{recipe.model.source or 'the recipe'} gives {now.digest if now else 'none'} now; restore the model's "
            "files as they were, or start in a new folder"
        )


def _shared(
    recipe: Recipe, objects: ObjectStore, *, cache_dir: Path, model_tokenizer: Path | None, tell: Tell
) -> PreparedData:
    data = prepare_shared(
        recipe.data,
        seed=recipe.seed,
        base=Path.cwd(),
        cache_dir=cache_dir,
        model_tokenizer=model_tokenizer,
        vocab_size=_own_vocabulary(recipe, model_tokenizer),
        tell=tell,
    )
    for shard in (*data.shards, *data.validation):
        if not objects.has(shard.digest):
            copy = objects.root / "shard.tmp"
            shutil.copyfile(shard.path, copy)
            objects.adopt(copy)
    for where in data.report.skipped:
        tell(f"skipped {where.file}:{where.line}: {where.reason}")
    if data.report.is_flawed:
        tell(data.report.sentence())
    part = f", the first {recipe.data.max_bytes:,} bytes of it" if recipe.data.max_bytes else ""
    tell(
        f"data {data.corpus_digest[:23]}{part}: {data.num_documents:,} documents, {data.num_tokens:,} tokens to train "
        f"on, {data.num_validation_tokens:,} held out"
    )
    return data


def _own_vocabulary(recipe: Recipe, model_tokenizer: Path | None) -> int:
    """The model's vocabulary where neither a tokenizer of its own nor one of the data's says it; else 0."""
    tokenizer = recipe.data.tokenizer
    if tokenizer.train or tokenizer.path or model_tokenizer is not None:
        return 0
    if recipe.model.config is not None and "vocab_size" not in recipe.model.config:
        return 0
    return int(model_config(recipe.model, None, seq_len=recipe.data.seq_len)["vocab_size"])


def _check_tokenizer(manifest: Manifest, recipe: Recipe, source: Path | None) -> None:
    """Text was counted with one tokenizer; DataError if the run has another."""
    if not manifest.tokenizer or source is None:
        return
    digest = str(TextTokenizer.open(source).digest())
    if digest != manifest.tokenizer:
        raise DataError(
            f"the manifest {recipe.data.listed} was made with the tokenizer {manifest.tokenizer} and the run has "
            f"{digest}; make the manifest again or give its tokenizer with `data.tokenizer.path`"
        )


def _facts(data: PreparedData) -> dict[str, Any]:
    return {
        "corpus_digest": data.corpus_digest,
        "documents": data.num_documents,
        "validation_documents": data.num_validation_documents,
        "training_tokens": data.num_tokens,
        "validation_tokens": data.num_validation_tokens,
        "skipped_records": data.report.num_skipped,
    }
