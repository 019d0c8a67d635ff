"""Let a trained model write: tokens drawn one after another, with the keys and values of earlier ones kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from potluck.models.device import choose_device
from potluck.models.family import first_sentence
from potluck.types.errors import ModelError


def generate(
    model_dir: Path,
    prompt: str,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    device: str = "auto",
    on_text: Callable[[str], None] = lambda _: None,
) -> str:
    """The prompt and what the model writes after it; `on_text` gets the new text piece by piece. ModelError."""
    written = prompt
    for piece in stream(
        model_dir, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, device=device
    ):
        written += piece
        on_text(piece)
    return written


def stream(
    model_dir: Path, prompt: str, *, max_new_tokens: int, temperature: float, top_p: float, seed: int, device: str
) -> Iterator[str]:
    """New text, piece by piece. Equal seeds write equal text; temperature 0 takes the likeliest token each time."""
    place = choose_device(device)
    model, tokenizer = _open(Path(model_dir))
    model = model.to(place).eval()
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
    first = next((i for i in (tokenizer.bos_token_id, tokenizer.eos_token_id) if i is not None), 0)
    context = ids or [first]
    generator = torch.Generator().manual_seed(seed)
    new: list[int] = []
    told = ""
    for token in _tokens(model, context, max_new_tokens, lambda logits: draw(logits, temperature, top_p, generator)):
        if token == tokenizer.eos_token_id:
            break
        new.append(token)
        text = tokenizer.decode(ids + new, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = text[len(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) :]
        if not text.endswith("\ufffd"):  # a character that is not complete yet
            yield text[len(told) :]
            told = text
    if new:
        whole = tokenizer.decode(ids + new, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        rest = whole[len(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) :]
        if rest != told:
            yield rest[len(told) :]


def draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token from logits [vocab] on the CPU: the smallest set of likeliest tokens that holds `top_p` of the mass."""
    if temperature <= 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits.float() / temperature, dim=-1).sort(descending=True)
    before = probabilities.cumsum(-1) - probabilities
    probabilities[before >= top_p] = 0.0  # the first one always stays
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


@torch.no_grad()
def _tokens(model: Any, context: list[int], count: int, pick: Callable[[Tensor], int]) -> Iterator[int]:
    """`count` tokens after `context`. Where the model's positions end, it goes on from the later half of the text."""
    limit = getattr(model.config, "max_position_embeddings", None) or 1 << 30
    given, kept = _cache_names(model)
    context = list(context)
    pending, cache = context[-limit:], None
    held = 0
    for _ in range(count):
        if held + len(pending) > limit:
            pending, cache, held = context[-max(1, limit // 2) :], None, 0
        tokens = torch.tensor([pending], device=model.device)
        earlier = {} if cache is None else {given: cache}
        output = model(input_ids=tokens, use_cache=True, return_dict=True, **earlier)
        held, cache = held + len(pending), output[kept]
        token = pick(output.logits[0, -1].float().cpu())
        context.append(token)
        pending = [token]
        yield token


def _cache_names(model: Any) -> tuple[str, str]:
    """What the kept keys and values are called as an argument and in the output: renamed during transformers 5."""
    given = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    probe = model(
        input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), use_cache=True, return_dict=True
    )
    return given, next(name for name in ("cache", "past_key_values") if name in probe)


def _open(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    has_adapters = (folder / "adapter_config.json").is_file()
    if not (folder / "config.json").is_file() and not has_adapters:
        raise ModelError(f"{folder} holds no config.json and a model directory does; give the path that a run printed")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        if has_adapters:
            from potluck.models.adapter_export import open_adapter_dir

            return open_adapter_dir(folder), tokenizer
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except ModelError:
        raise
    except Exception as error:  # each kind of damage fails in its own way
        raise ModelError(f"{folder} cannot be opened: {first_sentence(error)}; give a whole model directory") from error
    return model, tokenizer
