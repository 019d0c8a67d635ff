"""What a device multiplies and how factors travel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from potluck.codecs.factors import decode, encode, sent_as
from potluck.strategies.sub_gemm.tile import REPLY_TYPES, multiply
from potluck.types.errors import InvalidUpdate, NotFinite


def some(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_int8_has_a_scale_for_each_row_and_is_off_by_half_of_it() -> None:
    values = some(5, 300) * torch.tensor([1.0, 1e-3, 1e20, 0.0, 1e-44])[:, None]
    sent = encode(values, "int8")
    assert {name: (x.dtype, list(x.shape)) for name, x in sent.items()} == {
        "values": (torch.int8, [5, 300]), "scales": (torch.float32, [5]),
    }  # fmt: skip
    decoded = decode(sent, "int8")
    assert torch.allclose(sent["scales"][:3], values[:3].abs().amax(1) / 127, rtol=1e-6)
    assert ((decoded - values).abs() <= 0.5001 * sent["scales"][:, None] + 1e-43).all()
    assert int(sent["values"][:3].abs().amax(1).min()) == 127
    assert (decoded[3:] == 0).all()  # nothing, and what is too small to have a scale


@pytest.mark.parametrize("wire", list(REPLY_TYPES))
def test_a_view_is_sent_as_its_values_and_decodes_to_what_the_head_checks_with(wire: str) -> None:
    stored = some(40, 30)
    view = stored.T[3:20, 5:9]
    sent = encode(view, wire)
    assert all(x.is_contiguous() for x in sent.values())
    decoded = decode(sent, wire)
    assert torch.equal(decoded, sent_as(view, wire))
    error = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.5 / 127}[wire]
    assert float((decoded.float() - view).abs().max()) <= error * float(view.abs().max())


@pytest.mark.parametrize("wire", list(REPLY_TYPES))
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_a_product_is_exact_to_its_type_and_the_same_each_time(wire: str, transposed: tuple[bool, bool]) -> None:
    a, b = sent_as(some(70, 500), wire), sent_as(some(500, 90, 2), wire)
    stored = [x.T.contiguous() if flag else x for x, flag in zip((a, b), transposed, strict=True)]
    flags = {"is_a_transposed": transposed[0], "is_b_transposed": transposed[1]}
    c = multiply(*stored, wire=wire, **flags)
    exact = a.double() @ b.double()
    assert c.dtype == (torch.float32 if wire == "fp32" else torch.bfloat16)
    limit = torch.as_tensor(1e-4) if wire == "fp32" else 2**-8 * exact.abs() + 1e-4
    assert ((c.double() - exact).abs() <= limit).all()
    assert torch.equal(multiply(*stored, wire=wire, **flags), c)


def test_bf16_sums_are_in_fp32() -> None:
    ones = torch.ones(1, 4097, dtype=torch.bfloat16)
    assert float(multiply(ones, ones.T, wire="bf16")) == 4096  # 4097 rounded once; sums in bf16 end at 256


def test_what_cannot_be_multiplied_or_decoded_is_refused() -> None:
    a = some(3, 4)
    for factors, wire in (((a, a), "fp32"), ((a, a.T.double()), "fp32"), ((a, a.T), "fp8"), ((a, a[0]), "fp32")):
        with pytest.raises(InvalidUpdate, match="which cannot be; check the coordinator's version"):
            multiply(*factors, wire=wire)
    codes = encode(a, "int8")
    for sent, wire in (
        ({}, "fp32"), ({"values": a}, "bf16"), ({"values": a[0]}, "fp32"), ({"values": codes["values"]}, "int8"),
        (codes, "fp32"), ({**codes, "scales": codes["scales"][:2]}, "int8"), (codes, "fp4"),
    ):  # fmt: skip
        with pytest.raises(InvalidUpdate, match="a factor came as"):
            decode(sent, wire)
    with pytest.raises(NotFinite, match="NaN or infinity"):
        encode(a.index_fill(0, torch.tensor([1]), torch.inf), "int8")
