"""Transformers configurations as values: from the recipe or a model's files, checked, and fit to travel.

A configuration comes to a worker over the network, so it is cleaned before it is believed: keys that would choose
code, number formats or attention kernels are dropped, and no size may be absurd.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from potluck.models.config import ModelConfig
from potluck.types.errors import ModelError

TESTED_FAMILIES = ("gpt2", "llama")
"""What the test suite trains; any other causal language model of transformers is accepted too."""

MAX_LAYERS = 4096
MAX_SIZE = 1 << 31

_dropped = {
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal", "_commit_hash",
    "_experts_implementation", "_name_or_path", "architectures", "attn_implementation", "auto_map", "dtype",
    "experts_implementation", "output_attentions", "output_hidden_states", "quantization_config", "return_dict",
    "torch_dtype", "transformers_version", "use_kernels", "use_return_dict",
}  # fmt: skip
_legacy = {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
    "n_ctx",
}  # known to some versions only
_dropouts = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
_tokenizer_files = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
)  # fmt: skip


def model_config(model: ModelConfig, tokenizer_dir: Path | None, *, seq_len: int) -> dict[str, Any]:
    """The transformers configuration of a run, with vocabulary and token ids from the tokenizer. ModelError."""
    if model.config is not None:
        config = cleaned(model.config)
        config_class(config, strict=True)
        for name in _dropouts.get(config["model_type"], ()):
            config.setdefault(name, 0.0)
    else:
        config = cleaned(_stored_config(model))
    if tokenizer_dir is not None:
        _take_tokenizer(config, tokenizer_dir, explicit=model.config is not None)
    elif "vocab_size" not in config:
        raise ModelError("the model's configuration has no vocab_size and no tokenizer gives one; add vocab_size to it")
    _drop_foreign_ids(config)
    _check_positions(config, seq_len)
    return config


def cleaned(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without the keys that pick code, kernels or number formats. ModelError if it is absurd."""
    if "auto_map" in config and not _is_known(config.get("model_type")):
        raise ModelError(
            f"model_type {config.get('model_type')!r} brings code of its own and none is run; use a model that "
            "transformers itself has"
        )
    kept = {name: value for name, value in config.items() if name not in _dropped}
    _check_sizes(kept, "")
    return _with_portable_rope(kept)


def parsed_config(config: dict[str, Any]) -> Any:
    """The transformers object of a configuration. ModelError with what transformers says is wrong."""
    checked = cleaned(config)
    options = {name: value for name, value in checked.items() if name != "model_type"}
    try:
        return config_class(checked)(**options)
    except Exception as error:  # each version and family has errors of its own
        raise ModelError(
            f"the model's configuration is not valid: {first_sentence(error)}; mend model.config"
        ) from error


def config_class(config: dict[str, Any], *, strict: bool = False) -> Any:
    """The configuration's type. With `strict`, ModelError for a key that the type does not have."""
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not _is_known(model_type):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known_types

        near = difflib.get_close_matches(str(model_type), list(known_types), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use {' or '.join(TESTED_FAMILIES)}, for instance"
        raise ModelError(f"model_type {str(model_type)[:100]!r} is no causal language model of transformers; {hint}")
    found = CONFIG_MAPPING[model_type]
    if strict:
        known = set(found().to_dict()) | set(found.attribute_map) | _legacy
        for name in config:
            if name not in known:
                near = difflib.get_close_matches(name, sorted(known), n=1)
                hint = f"did you mean {near[0]}?" if near else f"see {found.__name__} in the transformers documentation"
                raise ModelError(f"model.config.{name} is not a key of a {model_type} configuration; {hint}")
        _check_types(config, found())
    return found


def _check_types(config: dict[str, Any], defaults: Any) -> None:
    """Numbers where the family has numbers; not every version of transformers looks."""
    for name, value in config.items():
        default = getattr(defaults, name, None)
        if isinstance(default, bool) or not isinstance(default, int | float):
            continue
        wanted = int if isinstance(default, int) and default > 1 else (int, float)
        if value is not None and (isinstance(value, bool) or not isinstance(value, wanted)) and "token_id" not in name:
            what = "a whole number" if wanted is int else "a number"
            raise ModelError(f"model.config.{name} is {value!r} and must be {what}; mend it")


def tokenizer_folder(model: ModelConfig) -> Path | None:
    """The directory of the tokenizer that comes with the model; None if none does. A hub model's is downloaded."""
    if model.path is not None:
        folder = Path(model.path)
        return folder if any((folder / name).is_file() for name in _tokenizer_files) else None
    if model.hub is None:
        return None
    found = [path for name in _tokenizer_files if (path := hub_file(model, name)) is not None]
    return found[0].parent if found else None


def hub_file(model: ModelConfig, name: str) -> Path | None:
    """A file of a hub model, downloaded by transformers or found in its cache; None if the model has no such file."""
    from transformers.utils import cached_file

    assert model.hub is not None
    try:
        found = cached_file(model.hub, name, revision=model.revision, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"hub model {model.hub!r} cannot be had: {first_sentence(error)}; check the name and the connection, or "
            "give model.path"
        ) from error
    return Path(found) if found else None


def first_sentence(error: BaseException) -> str:
    """What an error of another library says, on one line and not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200].rstrip(". ")


def _is_known(model_type: object) -> bool:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return (
        isinstance(model_type, str) and model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type in CONFIG_MAPPING
    )


def _stored_config(model: ModelConfig) -> dict[str, Any]:
    """config.json of a model directory or hub model."""
    if model.path is not None:
        path = Path(model.path) / "config.json"
        if not path.is_file():
            raise ModelError(f"{model.path} holds no config.json and a model directory does; give another model.path")
    else:
        found = hub_file(model, "config.json")
        if found is None:
            raise ModelError(f"hub model {model.hub!r} cannot be found or has no config.json; check the name")
        path = found
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not JSON: {error}; give another model") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__} and not a configuration; give another model")
    return config


def _check_sizes(value: Any, name: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_sizes(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            _check_sizes(inner, name)
    elif isinstance(value, int) and not isinstance(value, bool):
        limit = MAX_LAYERS if "layer" in name and "idx" not in name else MAX_SIZE
        if abs(value) > limit:
            raise ModelError(f"the model's configuration says {name[:100]} = {value} and {limit} is the most; lower it")


def _with_portable_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings under their new name (`rope_parameters`, transformers 5) and their old ones, so that workers
    of either version build the same model."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return config  # absent, or one for each kind of layer, which only version 5 has
    result = dict(config)
    if "rope_theta" in rope:
        result.setdefault("rope_theta", rope["rope_theta"])
    if rope.get("rope_type", "default") != "default":
        result.setdefault("rope_scaling", dict(rope))
    return result


def _take_tokenizer(config: dict[str, Any], folder: Path, *, explicit: bool) -> None:
    """Fill in vocab_size and token ids, or check those given."""
    vocab_size, ids = _read_tokenizer(folder)
    given = config.get("vocab_size")
    if given is None and not explicit:
        given = config["vocab_size"] = getattr(parsed_config(config), "vocab_size", None)
    if given is None:
        config["vocab_size"] = vocab_size
    elif given < vocab_size:
        raise ModelError(
            f"the model has a vocabulary of {given:,} and the tokenizer has {vocab_size:,} tokens; raise "
            "model.config.vocab_size or use the model's own tokenizer"
        )
    for name, id in ids.items():
        if config.get(name) is None:
            config[name] = id
    pad = config.get("pad_token_id")
    if explicit and isinstance(pad, int) and not pad < config["vocab_size"]:
        raise ModelError(
            f"model.config.pad_token_id is {pad} and the vocabulary has {config['vocab_size']:,} entries; remove it"
        )


def _drop_foreign_ids(config: dict[str, Any]) -> None:
    """A family's default token ids belong to its first vocabulary: no id where they do not exist in this one."""
    defaults = config_class(config)()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        default = getattr(defaults, name, None)
        if name not in config and isinstance(default, int) and default >= config["vocab_size"]:
            config[name] = None


def _read_tokenizer(folder: Path) -> tuple[int, dict[str, int]]:
    """Size of the vocabulary (largest id + 1), and the ids of the begin and end tokens that the tokenizer names."""
    from tokenizers import Tokenizer

    try:
        if (folder / "tokenizer.json").is_file():
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        else:
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            tokenizer = loaded.backend_tokenizer
    except Exception as error:  # `tokenizers` raises bare Exception for every fault of a file
        raise ModelError(
            f"{folder} holds no tokenizer that can be used: {first_sentence(error)}; give another"
        ) from error
    ids: dict[str, int] = {}
    for token_name, id_name in (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id")):
        token = _named_token(folder, token_name)
        id = tokenizer.token_to_id(token) if token else None
        if id is not None:
            ids[id_name] = id
    ids.setdefault("bos_token_id", ids.get("eos_token_id", 0))
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1, ids


def _named_token(folder: Path, name: str) -> str | None:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            settings = json.loads((folder / file).read_bytes())
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise ModelError(f"{folder / file} is not JSON: {error}; give another tokenizer") from error
        token = settings.get(name) if isinstance(settings, dict) else None
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None


def _check_positions(config: dict[str, Any], seq_len: int) -> None:
    parsed = parsed_config(config)
    positions = getattr(parsed, "max_position_embeddings", None)
    if isinstance(positions, int) and positions < seq_len:
        name = parsed.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        raise ModelError(
            f"the model has {positions:,} positions and data.seq_len is {seq_len:,}; lower data.seq_len or raise {name}"
        )


def has_dropout(config: dict[str, Any]) -> bool:
    """Whether the model drops anything at random while it trains."""
    values = parsed_config(config).to_dict()
    return any(
        isinstance(value, int | float) and value > 0
        for name, value in values.items()
        if ("drop" in name) and not name.startswith(("summary", "classifier"))
    )
