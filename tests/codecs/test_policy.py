from pathlib import Path

import pytest
import torch

from potluck.codecs.base import codec, codec_names
from potluck.codecs.bundle import Bundle, flat_size, write_flat
from potluck.codecs.policy import CodecPolicy, CodecRule
from potluck.types.errors import RecipeError
from potluck.types.params import Layout

layout = Layout.of([("h.wte.weight", (128, 64)), ("h.ln.bias", (1023,)), ("h.proj", (64, 64)), ("none", (0, 3))])


def test_the_first_rule_that_fits_counts_then_the_default() -> None:
    rules = (CodecRule(match="*.wte.*", codec="bf16"), CodecRule(max_numel=2000, codec="fp16"))
    policy = CodecPolicy(default="2bit", rules=rules)
    assert [policy.choose(t.name, t.shape).name for t in layout] == ["bf16", "fp16", "2bit", "fp16"]
    rows = [{"match": "*.wte.*", "codec": "bf16"}, {"max_numel": 2000, "codec": "fp16"}]
    assert CodecPolicy.from_json("2bit", rows) == policy
    assert policy.choose("wte.weight", (128, 64)).name == "2bit"


def test_small_tensors_are_not_cut_below_eight_bits() -> None:
    for name in codec_names():
        few_bits = name in ("int4", "2bit", "1bit", "topk(1.5625%)", "topk(1.5625%)+2bit")
        policy = CodecPolicy(default=name)
        assert policy.choose("b", (1023,)).name == ("int8" if few_bits else name)
        assert policy.choose("b", (1024,)).name == name


def test_what_is_no_rule_is_a_sentence() -> None:
    with pytest.raises(RecipeError, match="did you mean 'int8'"):
        CodecPolicy(default="fp32", rules=(CodecRule(codec="in8"),))
    for row in ({"match": "*"}, {"codec": "int8", "name": "x"}, {"codec": "int8", "max_numel": -1}, {"codec": 8}):
        with pytest.raises(RecipeError, match="is not one of `codec`, and `match` or `max_numel`"):
            CodecPolicy.from_json("fp32", [row])


@pytest.mark.parametrize("default", ["topk(1.5625%)+2bit", "int8+zstd", "powersgd(2)"])
def test_a_bundle_with_a_policy_comes_back(default: str, tmp_path: Path) -> None:
    policy = CodecPolicy(default=default, rules=(CodecRule(match="*.proj", codec="fp32"),))
    vector = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    size = write_flat(tmp_path / "b", "delta", vector, layout, policy)
    assert (tmp_path / "b").stat().st_size == size <= flat_size("delta", layout, policy)
    with Bundle.open(tmp_path / "b") as bundle:
        used = [entry.codec for entry in bundle.entries.values()]
        assert used == [policy.choose(t.name, t.shape).name for t in layout]
        found = bundle.decode_flat("delta", layout)
        proj = layout.tensors[2]
        assert torch.equal(found[proj.offset : proj.stop], vector[proj.offset : proj.stop])
        assert bundle.check_flat("delta", layout) == pytest.approx(float(found.double().norm()), rel=1e-12)
        into = torch.zeros(5000)
        bundle.accumulate("delta", layout, into, 6000, 2.0)
        assert torch.equal(into, 2 * found[6000:11_000])
        assert torch.equal(bundle.read_all()["delta/h.wte.weight"].reshape(-1), found[: 128 * 64])


@pytest.mark.parametrize("name", codec_names())
def test_the_residual_is_what_the_reader_lacks(name: str, tmp_path: Path) -> None:
    vector = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    residual, itself = torch.empty(layout.numel), vector.clone()
    write_flat(tmp_path / "plain", "delta", vector, layout, codec(name), seed=9)
    write_flat(tmp_path / "beside", "delta", vector, layout, codec(name), seed=9, residual=residual)
    write_flat(tmp_path / "itself", "delta", itself, layout, codec(name), seed=9, residual=itself)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "beside").read_bytes() == (tmp_path / "itself").read_bytes()
    with Bundle.open(tmp_path / "plain") as bundle:
        assert torch.equal(residual, vector - bundle.decode_flat("delta", layout))
    assert torch.equal(itself, residual)
    with pytest.raises(ValueError, match=r"the residual of delta is not fp32 \[13311\]"):
        write_flat(tmp_path / "plain", "delta", vector, layout, codec(name), residual=torch.empty(3))


def test_a_lossless_bundle_that_claims_too_much_is_not_unpacked(tmp_path: Path) -> None:
    from potluck.codecs.bundle import unpack_tensors
    from potluck.types.errors import CorruptError, InvalidUpdate

    large = Layout.of([("w", (3000, 1000))])
    write_flat(tmp_path / "zeros", "delta", torch.zeros(large.numel), large, codec("int8+zstd"))
    data = bytearray((tmp_path / "zeros").read_bytes())
    with pytest.raises(CorruptError, match="claims 3000000 elements, which is not believed"):
        unpack_tensors(data)
    with Bundle.open(tmp_path / "zeros") as bundle:  # where the layout says so it is
        assert bundle.check_flat("delta", large) == 0
        assert not bundle.decode_flat("delta", large).any()
    data[-1] ^= 0xFF
    (tmp_path / "zeros").write_bytes(data)
    with (
        Bundle.open(tmp_path / "zeros") as bundle,
        pytest.raises(InvalidUpdate, match=r"delta/w: a tensor in int8\+zstd"),
    ):
        bundle.check_flat("delta", large)
