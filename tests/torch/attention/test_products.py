"""Products of attention in the stated form (spec A-4, A-9)."""

import dataclasses

import pytest
import torch

from fp8ref.spec.attention.variants import VARIANTS
from fp8ref.torch.attention import products


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_products(dtype):
    made = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 8, (2, 3, n, 32), generator=made).double().to(dtype) for n in (5, 16))
    found = products.matmul(a, b, VARIANTS["cudnn"])
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(found.double(), a.double() @ b.double().transpose(2, 3))  # integers


@pytest.mark.parametrize(("plan", "fast"), [("hopper_fast", True), ("blackwell", False)])
def test_the_plan_chooses_the_accumulation(plan, fast, monkeypatch):  # G-7
    asked, original = [], torch._scaled_mm
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda *a, **k: asked.append(k["use_fast_accum"]) or original(*a, **k)
    )
    x = torch.ones(1, 1, 16, 16).to(torch.float8_e4m3fn)
    products.matmul(x, x, dataclasses.replace(VARIANTS["fa3"], plan=plan))
    assert asked == [fast]
