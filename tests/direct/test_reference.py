"""The reference: equal bits at every split, and as near to the truth as 32-bit sums are."""

from __future__ import annotations

import pytest
import torch

from penstock.direct.failures import KernelInputError
from tests.direct.split_reference import split_linear_reference

SIZES = [(1, 80, 72), (17, 203, 136), (100, 300, 200)]


def operands(tokens: int, rows: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(tokens)
    x, weight, bias = torch.randn(tokens, depth), torch.randn(rows, depth) / depth**0.5, torch.randn(rows)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "rows", "depth"), SIZES)
def test_bits_do_not_depend_on_the_split(tokens: int, rows: int, depth: int, dtype: torch.dtype) -> None:
    x, weight, bias = operands(tokens, rows, depth, dtype)
    whole = split_linear_reference(x, weight, None, bias)
    for prefix_rows in (*range(0, rows, 16), rows):
        # Storage of their own: nothing can be read past the end of a side.
        prefix, rest = weight[:prefix_rows].clone(), weight[prefix_rows:].clone()
        split = split_linear_reference(x, prefix, rest, bias)
        assert torch.equal(split.view(torch.int16), whole.view(torch.int16)), prefix_rows
    exact = x.double() @ weight.double().T + bias.double()
    # Half a unit in the last place of the result, and what 32-bit sums of this length add.
    unit = torch.finfo(dtype).eps * exact.abs() / 2 + depth * torch.finfo(torch.float32).eps
    assert ((whole.double() - exact).abs() <= unit).all()


def test_bias_and_sides_may_be_missing() -> None:
    x, weight, _ = operands(5, 64, 64, torch.bfloat16)
    exact = (x.double() @ weight.double().T).to(torch.bfloat16)
    for prefix, rest in ((weight, None), (None, weight)):
        assert torch.allclose(split_linear_reference(x, prefix, rest), exact, rtol=2**-7, atol=1e-6)


def test_other_numbers_stay_where_they_are() -> None:
    """NaN and infinity in one row reach that row's results alone, although tiles are filled up with zeros."""
    x, weight, bias = operands(3, 40, 72, torch.bfloat16)
    weight[17, 5], weight[18, 70] = torch.nan, torch.inf
    y = split_linear_reference(x, weight[:16], weight[16:], bias)
    odd = ~y.isfinite()
    assert odd[:, 17].all() and odd[:, 18].all() and odd.sum() == 6


def test_refusals() -> None:
    x, weight, _ = operands(3, 40, 72, torch.bfloat16)
    with pytest.raises(KernelInputError, match="8 rows of 40"):
        split_linear_reference(x, weight[:8], weight[8:])
