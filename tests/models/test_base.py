"""The base as it is held, against the model it was made from."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, gpt2, llama
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from potluck.models.base import held_bytes, mapped_model, write_base
from potluck.models.build import build, skeleton
from potluck.models.config import AdapterConfig, BaseFiles, BasePrecision, ModelConfig
from potluck.models.held import HeldHead, dequantised, output_axis, product, quantised
from potluck.models.loss import TokenLoss
from potluck.storage.objects import ObjectStore
from potluck.types.errors import ModelError
from potluck.types.ids import Digest

ADAPTER = AdapterConfig(rank=2, target_modules=("c_attn",))


def source(config: dict[str, Any], base: BasePrecision = "fp32") -> ModelConfig:
    return ModelConfig(config=config, base=base, adapter=ADAPTER)


def written(config: dict[str, Any], base: BasePrecision, folder: Path, **options: Any) -> tuple[BaseFiles, list[Path]]:
    objects = ObjectStore(folder / "objects")
    files = write_base(source(config, base), config, objects, seed=3, **options)
    return files, [objects.path(Digest(each.digest)) for each in files.objects]


def rounded(config: dict[str, Any], base: BasePrecision) -> nn.Module:
    """The plain model in fp32 with the weights that the base holds, rounded here anew."""
    model: Any = build(config, seed=3)
    head = model.get_output_embeddings()
    tied = {id(p) for p in head.parameters()}
    with torch.no_grad():
        for layer in model.modules():
            weight = getattr(layer, "weight", None)
            if base == "fp32" or not isinstance(weight, Tensor) or weight.dim() != 2:
                continue
            if base == "bf16" or isinstance(layer, nn.Embedding) or id(weight) in tied:
                weight.copy_(weight.bfloat16().float())
                continue
            by_output = weight if isinstance(layer, nn.Linear) else weight.T
            for row in by_output:  # one output at a time, as the words say it
                scale = row.abs().max() / 127
                row.copy_((row / scale).round() * scale)
    return model


def tokens_of(config: dict[str, Any], rows: int = 3) -> Tensor:
    return torch.randint(0, config["vocab_size"], (rows, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("base", ["fp32", "bf16", "int8"])
def test_a_mapped_model_computes_what_its_rounded_weights_give(
    family: str, base: BasePrecision, tmp_path: Path
) -> None:
    config = FAMILIES[family]
    files, paths = written(config, base, tmp_path, object_bytes=8_000)
    assert len(paths) > 2 and files.num_bytes == sum(path.stat().st_size for path in paths)
    model = mapped_model(config, base, paths)
    assert not any(p.requires_grad for p in model.parameters())
    tokens = tokens_of(config)
    expected = rounded(config, base)(input_ids=tokens).logits
    got = model(input_ids=tokens).logits
    assert got.dtype == torch.float32
    assert torch.allclose(got, expected, atol=1e-5), (got - expected).abs().max()
    if base != "fp32":
        off = (got - build(config, seed=3)(input_ids=tokens).logits).abs().max()
        assert 1e-6 < off < 0.1
    sizes = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0}
    num_params = sum(p.numel() for p in skeleton(config).parameters())
    assert held_bytes(skeleton(config), base) < files.num_bytes
    assert sizes[base] * num_params <= held_bytes(skeleton(config), base) < (sizes[base] + 0.6) * num_params


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("base", ["bf16", "int8"])
def test_input_gradients_are_those_of_the_rounded_model(family: str, base: BasePrecision, tmp_path: Path) -> None:
    config = FAMILIES[family]
    model: Any = mapped_model(config, base, written(config, base, tmp_path)[1])
    plain: Any = rounded(config, base)
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))
    gradients = []
    for each in (model, plain):
        x = hidden.clone().requires_grad_()
        each(inputs_embeds=x).logits.square().sum().backward()
        gradients.append(x.grad)
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-5 * float(gradients[1].abs().max()))
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        up, down = (
            float(plain.double()(inputs_embeds=(hidden + sign * 5e-3 * direction).double()).logits.square().sum())
            for sign in (1, -1)
        )
    assert (up - down) / 1e-2 == pytest.approx(float((gradients[0] * direction).sum()), rel=3e-3)


@pytest.mark.parametrize("block_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("is_stored_turned", [False, True])
def test_a_product_in_blocks_is_the_product(
    block_bytes: int, is_stored_turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("potluck.models.held.BLOCK_BYTES", block_bytes)
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(12, 7, generator=generator), torch.randn(2, 3, 7, generator=generator)
    q, scale = quantised(weight, 0)
    held = q.T.contiguous().T if is_stored_turned else q
    results = []
    for multiply in (lambda x: product(x, held, scale), lambda x: x @ dequantised(q, scale, 0).T):
        given = x.clone().requires_grad_()
        y = multiply(given)
        (y * torch.arange(12)).sum().backward()
        results.append((y.detach(), given.grad))
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_int8_is_symmetric_and_a_row_of_zeros_stays_one() -> None:
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    weight[2] = 0
    q, scale = quantised(weight, 0)
    assert q.dtype == torch.int8 and int(q.min()) >= -127 and scale.tolist()[2] == 1.0
    assert (dequantised(q, scale, 0) - weight).abs().max() <= 0.5 * scale.max() + 1e-7
    turned, same = quantised(weight.T.contiguous(), 1)
    assert torch.equal(turned, q.T) and torch.equal(same, scale)
    assert output_axis(nn.Linear(2, 3)) == 0


@pytest.mark.parametrize("base", ["bf16", "int8"])
def test_the_loss_in_chunks_is_the_loss(base: BasePrecision, tmp_path: Path) -> None:
    """Its hidden states and gradients of logits are rounded to bf16, as a head in bf16 has it."""
    model: Any = mapped_model(llama(), base, written(llama(), base, tmp_path)[1])
    model.model.norm.weight.requires_grad_()
    tokens = tokens_of(llama())
    found = []
    for most in (1 << 30, 0):
        loss = TokenLoss(model, vocab_size=64, max_whole_bytes=most, chunk_bytes=64 * 4 * 5, head=HeldHead())
        value = loss(tokens, divisor=24)
        model.model.norm.weight.grad = None
        value.backward()
        found.append((value.detach(), model.model.norm.weight.grad.clone()))
    assert found[0][0].item() == pytest.approx(found[1][0].item(), rel=1e-3)
    assert torch.allclose(found[0][1], found[1][1], rtol=0.02, atol=0.02 * float(found[0][1].abs().max()))


@pytest.mark.parametrize("config", [gpt2(), llama(), llama(tie_word_embeddings=True)])
def test_stored_weights_are_read_tensor_by_tensor(config: dict[str, Any], tmp_path: Path) -> None:
    model: Any = build(config, seed=8)
    model.save_pretrained(tmp_path / "model")
    given = ModelConfig(path=str(tmp_path / "model"), adapter=ADAPTER)
    objects = ObjectStore(tmp_path / "objects")
    for prefix in (model.base_model_prefix + ".", ""):  # a bare base model's names lack it
        files = write_base(given, config, objects, seed=0)
        mapped = mapped_model(config, "fp32", [objects.path(Digest(each.digest)) for each in files.objects])
        assert all(torch.equal(p, q) for p, q in zip(mapped.parameters(), model.parameters(), strict=True))
        path = tmp_path / "model" / "model.safetensors"
        save_file({n.removeprefix(prefix): t for n, t in load_file(path).items()}, path, metadata={"format": "pt"})
    save_file({n + "x": t for n, t in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks"):
        write_base(given, config, objects, seed=0)


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    model: Any = build(gpt2(), seed=8)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    given = ModelConfig(path=str(tmp_path / "model"), adapter=ADAPTER)
    with pytest.raises(ModelError, match=r"NaN or infinity in transformer\.h\.1\.mlp\.c_fc\.weight"):
        write_base(given, gpt2(), ObjectStore(tmp_path / "objects"), seed=0)


def test_a_base_of_another_model_is_refused(tmp_path: Path) -> None:
    _, paths = written(llama(), "bf16", tmp_path)
    with pytest.raises(ModelError, match=r"holds torch.bfloat16 .* as .*\.weight .*torch\.float32"):
        mapped_model(llama(), "fp32", paths)
    with pytest.raises(ModelError, match=r"holds torch.bfloat16 \[.*48.*\] as .*_proj\.weight .*40"):
        mapped_model(llama(intermediate_size=40), "bf16", paths)
    with pytest.raises(ModelError, match=r"lacks 9 of the model's tensors, such as model\.layers\.2\."):
        mapped_model(llama(num_hidden_layers=3), "bf16", paths)
    with pytest.raises(ModelError, match="the run's model has none of that name"):
        mapped_model(gpt2(), "bf16", paths)
    with pytest.raises(ModelError, match="twice"):
        mapped_model(llama(), "bf16", [*paths, *paths])
    broken = tmp_path / "broken"
    broken.write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="cannot be read"):
        mapped_model(llama(), "bf16", [broken])


second_process = """
import json, sys
from pathlib import Path
import torch
from potluck.models.base import mapped_model
from potluck.models.build import build

def anonymous():
    with open("/proc/self/status") as file:
        return {line.split(":")[0]: int(line.split()[1]) << 10 for line in file if line.startswith("Rss")}["RssAnon"]

config, bases = json.loads(sys.argv[1])
torch.set_num_threads(1)
tokens = torch.zeros((1, 4), dtype=torch.int64)
build({**config, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}, seed=1)(input_ids=tokens)
found = []
for base, paths in bases.items():
    before = anonymous()
    model = mapped_model(config, base, [Path(path) for path in paths])
    for parameter in model.parameters():
        parameter.view(-1).view(torch.uint8)[::4096].sum()  # every page of it
    mapped = anonymous() - before
    model(input_ids=tokens)
    found.append([mapped, anonymous() - before])
print(json.dumps(found))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux what memory is whose")
def test_a_worker_has_no_copy_of_its_own(tmp_path: Path) -> None:
    config = llama(hidden_size=512, intermediate_size=2048, num_hidden_layers=4, vocab_size=8192)
    bases = {base: written(config, base, tmp_path) for base in ("bf16", "int8")}
    asked = json.dumps([config, {base: [str(path) for path in paths] for base, (_, paths) in bases.items()}])
    done = subprocess.run(
        [sys.executable, "-c", second_process, asked], capture_output=True, text=True, check=True, timeout=50
    )
    for (files, _), (mapped, used) in zip(bases.values(), json.loads(done.stdout), strict=True):
        assert files.num_bytes > 24 << 20
        assert mapped < 0.1 * files.num_bytes
        assert used < 24 << 20  # a product holds a matrix in fp32 for a moment
