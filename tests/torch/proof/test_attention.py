"""The verdict on attention's products in PyTorch, from traces made here (spec B-15)."""

import dataclasses

import pytest
import torch

from fp8ref.sim.gemm import hardware as simulated
from fp8ref.spec.attention.products import PRODUCTS
from fp8ref.spec.attention.variants import VARIANTS, differentiated
from fp8ref.torch.gemm import hardware
from fp8ref.torch.proof.attention import (
    manifest_of_kernels,
    manifest_of_products,
    missing_kernels,
    missing_products,
    multiplies_codes,
)
from fp8ref.torch.proof.records import GemmTrace, ProductRecord

CUDNN = VARIANTS["cudnn"]


def trace(*, leave_out=(), **changed) -> GemmTrace:
    record = ProductRecord("layer", "scores", "f8e4m3fn", "f8e4m3fn", "slow")
    return GemmTrace(
        "eager",
        products=[
            dataclasses.replace(record, product=p, **changed)
            for p in PRODUCTS
            if p not in leave_out
        ],
    )


def test_a_product_that_is_missing_wider_or_faster_is_named():
    assert missing_products(trace(), ["layer"], CUDNN, codes=True) == []
    assert missing_products(trace(leave_out=("grad_q",)), ["layer"], CUDNN, codes=True) == [
        "layer/grad_q: planned f8e4m3fn x f8e4m3fn, slow; no product of it was seen"
    ]
    assert (
        "; f32 x f8e4m3fn, slow"
        in missing_products(trace(a="f32"), ["layer"], CUDNN, codes=True)[0]
    )
    assert (
        missing_products(trace(a="f32", b="f32", accumulate=None), ["layer"], CUDNN, codes=False)
        == []
    )
    assert len(missing_products(trace(accumulate="fast"), ["layer"], CUDNN, codes=True)) == len(
        PRODUCTS
    )


def test_under_simulated_hardware_each_names_its_plan():  # B-12
    assert missing_products(trace(plan="hopper"), ["layer"], CUDNN, codes=True, plan="hopper") == []
    assert (
        "slow, under hopper; f8e4m3fn x f8e4m3fn, slow"
        in missing_products(trace(), ["layer"], CUDNN, codes=True, plan="hopper")[0]
    )


def test_the_manifest_has_each_distinct_product_once():
    twice = trace()
    twice.products *= 2
    found = manifest_of_products(twice, ["layer"], CUDNN, codes=False)
    assert [gemm["gemm"] for gemm in found["gemms"]] == [f"layer/{product}" for product in PRODUCTS]
    assert found["on_dequantised_operands"] == [f"layer/{product}" for product in PRODUCTS]


@pytest.mark.parametrize(
    ("variant", "arithmetic", "codes"),
    [
        ("cudnn", "stated", True),
        ("cudnn", "fast", False),
        ("mxfp8", "stated", False),
        ("bf16", "stated", False),
    ],
)
def test_a_cpu_multiplies_codes_in_the_stated_form_alone(variant, arithmetic, codes):
    assert multiplies_codes(VARIANTS[variant], arithmetic, torch.device("cpu")) == codes
    with hardware.simulating(simulated.by_name("exact")):
        assert multiplies_codes(CUDNN, "fast", torch.device("cpu"))


def test_only_the_forward_products_are_planned_under_a_backward_pass_in_bf16():
    variant, forward = differentiated("cudnn", "bf16"), PRODUCTS[:2]
    assert missing_products(trace(leave_out=PRODUCTS[2:]), ["layer"], variant, codes=True) == []
    assert len(missing_products(trace(leave_out=PRODUCTS), ["layer"], variant, codes=True)) == len(
        forward
    )
    assert manifest_of_products(trace(), ["layer"], variant, codes=True)["backward"] == "bf16"
    # scores, in the backward pass
    again = trace(leave_out=PRODUCTS[1:], a="bf16", b="bf16", accumulate=None).products
    both = trace(leave_out=PRODUCTS[2:])
    both.products += again
    assert missing_products(both, ["layer"], variant, codes=True) == []
    both.products = [*again, both.products[1]]
    assert missing_products(both, ["layer"], variant, codes=True) == [
        "layer/scores: planned f8e4m3fn x f8e4m3fn, slow; no product of it was seen"
    ]


def test_of_attention_in_high_precision_none_is_planned():
    assert missing_products(trace(), [], VARIANTS["bf16"], codes=False) == []


def test_a_layer_without_its_kernel_is_named():
    seen = GemmTrace("eager", kernels=["a: flash_attn_3::fwd"] * 2)
    assert missing_kernels(seen, ["a"]) == []
    assert missing_kernels(seen, ["a", "b"]) == [
        "b/attention: planned the kernel flash_attn_3::fwd; no call of it was seen"
    ]
    found = manifest_of_kernels(seen, differentiated("fa3", "bf16"))
    assert found == {
        "variant": "fa3",
        "backward": "bf16",
        "gemms": [],
        "kernels": ["a: flash_attn_3::fwd"],
    }
