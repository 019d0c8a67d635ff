import subprocess
import sys

import pytest

from potluck.codecs.base import codec
from potluck.codecs.elementwise import Role
from potluck.codecs.spec import CodecSpec, parse_spec
from potluck.types.errors import RecipeError


@pytest.mark.parametrize(
    ("text", "spec", "canonical"),
    [
        ("fp32", CodecSpec(tensors="fp32"), "fp32"),
        ("topk(1.5625%)+2bit+ef", CodecSpec(tensors="topk(1.5625%)+2bit", beta=1.0), "topk(1.5625%)+2bit+ef"),
        ("int8(stochastic)", CodecSpec(tensors="int8(stochastic)"), "int8(stochastic)"),
        ("int8(nearest)", CodecSpec(tensors="int8"), "int8"),
        ("int8+zstd", CodecSpec(tensors="int8", is_lossless=True), "int8+zstd"),
        ("powersgd(4)+ef", CodecSpec(tensors="powersgd(4)", beta=1.0), "powersgd(4)+ef"),
        ("int4+ef(0.95)", CodecSpec(tensors="int4", beta=0.95), "int4+ef(0.95)"),
        ("int8-delta", CodecSpec(tensors="int8", is_delta=True), "int8-delta"),
        ("topk(2%) + ef(0.5) + zstd", CodecSpec(tensors="topk(2.001953125%)", beta=0.5, is_lossless=True),
         "topk(2.001953125%)+ef(0.5)+zstd"),
        ("int4-delta+zstd", CodecSpec(tensors="int4", is_delta=True, is_lossless=True), "int4-delta+zstd"),
    ],
)  # fmt: skip
def test_a_spec_is_read_and_written_again(text: str, spec: CodecSpec, canonical: str) -> None:
    assert parse_spec(text) == spec
    assert str(spec) == canonical
    assert parse_spec(canonical) == spec
    assert spec.codec.name == spec.tensors + "+zstd" * spec.is_lossless


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("in8", "'in8' cannot be used: 'in8' is not a codec; did you mean 'int8'?"),
        ("topk(1.5625%)+3bit", "did you mean 'topk(1.5625%)+2bit'?"),
        ("int8+int4", "'int8+int4' quantises twice"),
        ("topk(1%)+2bit+int8", "two codecs for the values"),
        ("topk+2bit", "write it as 'topk(1.5625%)'"),
        ("topk(0.001%)", "keeps 0 of 4096 values"),
        ("topk(101%)", "keeps 4137 of 4096 values"),
        ("powersgd", "write it as 'powersgd(4)'"),
        ("powersgd(5000)", "no rank from 1 to 1024"),
        ("fp32+ef", "error feedback where nothing is lost; use 'fp32'"),
        ("int8+ef(2)", "not above 0 and at most 1"),
        ("int8+ef(0)", "not above 0 and at most 1"),
        ("int8+ef+ef", "says the same thing twice"),
        ("int8+zstd+zstd", "says the same thing twice"),
        ("fp32(stochastic)", "is not a codec"),
        ("", "is not a codec"),
        ("x" * 97, "96 letters are the most"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(text: str, reason: str) -> None:
    with pytest.raises(RecipeError) as refused:
        parse_spec(text)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("text", "role", "reason"),
    [
        ("int8+ef", "parameter", "error feedback, which parameters do not take; use 'int8'"),
        ("int8+ef", "activation", "error feedback, which activations do not take; use 'int8'"),
        ("int8-delta", "update", "differences, which updates do not take; use 'int8'"),
        ("powersgd(4)-delta", "parameter", "does not decode to the same bits everywhere"),
        ("2bit", "parameter", "loses too much for parameters; use '2bit-delta'"),
        ("1bit", "activation", "loses too much for activations; use 'int8'"),
        ("int8(stochastic)", "parameter", None),
        ("topk(1.5625%)-delta", "parameter", None),
        ("powersgd(4)+ef", "update", None),
        ("int4", "activation", None),
        ("topk(1.5625%)+2bit+ef(0.95)", "gradient", None),
    ],
)
def test_each_role_takes_what_is_fit_for_it(text: str, role: Role, reason: str | None) -> None:
    if reason is None:
        assert parse_spec(text, role) == parse_spec(text)
    else:
        with pytest.raises(RecipeError) as refused:
            parse_spec(text, role)
        assert reason in str(refused.value)


def test_a_name_from_the_network_is_short_and_cheap() -> None:
    for name in (
        "int8" + "+zstd" * 20,
        "topk(" + "9" * 5000 + "%)",
        "topk(1.5625%)" * 9,
        "(" * 60,
        "int8\u0661",
        "٣bit",
    ):
        with pytest.raises(RecipeError):
            codec(name)
    assert codec("topk(1.5%)").name == "topk(1.4892578125%)"
    assert codec("topk(1.5%)+2bit+zstd").name == codec(codec("topk(1.5%)+2bit+zstd").name).name


def test_naming_a_codec_loads_no_compiler() -> None:
    script = "import sys; from potluck.codecs.spec import parse_spec; parse_spec('topk(1.5625%)+2bit+zstd+ef');"
    script += "print({'numba', 'zstandard', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
