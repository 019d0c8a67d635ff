from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models.families import gpt2, llama, save_tokenizer
from transformers import AutoModelForCausalLM

from potluck.models.build import build
from potluck.models.export import save_model_dir
from potluck.models.flat import FlatModel
from potluck.models.generate import draw, generate
from potluck.types.errors import ModelError


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    config = gpt2(initializer_range=0.5) if request.param == "gpt2" else llama(initializer_range=0.5)
    flat = FlatModel(build(config, seed=3))
    save_model_dir(folder / "model", config, flat.params(), flat.layout, save_tokenizer(folder / "tok"), {})
    return folder / "model"


def test_the_likeliest_tokens_are_those_of_transformers(model_dir: Path) -> None:
    text = generate(model_dir, "ABC", max_new_tokens=12, temperature=0.0, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    ids = [33, 34, 35]  # "!" has token 1 and the other characters follow in their order
    while len(ids) < 15:
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == 0:
            ids.pop()
            break
    assert text == "".join(chr(ord("!") + i - 1) for i in ids)
    assert len(text) > 3


def wild(
    model_dir: Path, prompt: str, seed: int, num_tokens: int, on_text: Callable[[str], None] = lambda _: None
) -> str:
    return generate(
        model_dir,
        prompt,
        max_new_tokens=num_tokens,
        temperature=2.0,
        top_p=1.0,
        seed=seed,
        device="cpu",
        on_text=on_text,
    )


def test_a_seed_writes_the_same_text_and_another_another(model_dir: Path) -> None:
    pieces: list[str] = []
    one = wild(model_dir, "AB", 1, 20, pieces.append)
    assert one == wild(model_dir, "AB", 1, 20)
    assert one == "AB" + "".join(pieces)
    assert len({wild(model_dir, "AB", seed, 20) for seed in range(3)}) > 1


def test_it_writes_past_the_models_positions_and_from_nothing(model_dir: Path) -> None:
    longest = max((wild(model_dir, "", seed, 80) for seed in range(6)), key=len)
    assert len(longest) > 40  # the models have 32 positions


def test_top_p_keeps_the_smallest_set_that_holds_its_share() -> None:
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    generator = torch.Generator().manual_seed(0)
    assert {draw(logits, 1.0, 0.5, generator) for _ in range(200)} == {1}
    assert {draw(logits, 1.0, 0.51, generator) for _ in range(200)} == {1, 2}
    assert {draw(logits, 1.0, 1.0, generator) for _ in range(200)} == {0, 1, 2, 3}
    assert draw(logits, 0.0, 1.0, generator) == 1


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        generate(tmp_path, "A", device="cpu")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError, match="cannot be opened"):
        generate(tmp_path, "A", device="cpu")
