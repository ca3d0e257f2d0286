"""bf16 products through fp32: exact products, fp32 sums, one rounding; everything else is left to SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_rl_patches.sglang import bf16_products
from megatron_rl_patches.sglang.bf16_products import is_slow, linear


def refuse(*_: Any) -> torch.Tensor:
    raise AssertionError("SGLang's own product was used")


@pytest.fixture(autouse=True)
def _without_bf16_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_products, "slow_bf16", lambda: True)


@pytest.mark.parametrize("bias", [False, True])
def test_products_are_the_exact_ones_rounded_once(bias: bool) -> None:
    g = torch.Generator().manual_seed(0)
    x, weight, b = (torch.randn(*size, generator=g).bfloat16() for size in ((7, 33), (5, 33), (5,)))
    found = linear(refuse, None, SimpleNamespace(weight=weight), x, b if bias else None)
    exact = x.double() @ weight.double().T + (b.double() if bias else 0)
    # fp64 rounded to bf16 is the correctly rounded result; fp32 sums may fall on the other side of a tie: one bf16 step, 2^-8
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.bfloat16(), rtol=2**-8, atol=0)
    assert (found == exact.bfloat16()).double().mean() > 0.9


def test_other_dtypes_are_left_alone() -> None:
    called = []
    x = torch.ones(2, 3)
    linear(lambda *a: called.append(a) or x, None, SimpleNamespace(weight=torch.ones(4, 3)), x)
    assert len(called) == 1
    assert not is_slow(x.bfloat16(), "a quantised weight")
