"""Tiny models of the tested families, and a tokenizer to go with them."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 64


def gpt2(**changes: Any) -> dict[str, Any]:
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": VOCAB_SIZE}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return {"model_type": "gpt2", **shape, **ids, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **changes}


def llama(**changes: Any) -> dict[str, Any]:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCAB_SIZE}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return {"model_type": "llama", **shape, **heads, "bos_token_id": 0, "eos_token_id": 0, **changes}


FAMILIES = {"gpt2": gpt2(), "llama": llama(), "llama-tied": llama(tie_word_embeddings=True)}


def save_tokenizer(folder: Path, num_tokens: int = VOCAB_SIZE) -> Path:
    """A byte-pair tokenizer without merges: the end token, and letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<end>": 0} | {letter: i + 1 for i, letter in enumerate(letters[: num_tokens - 1])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "bos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
