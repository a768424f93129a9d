"""The verdict on attention's products and kernels in JAX, from programs made here (spec B-15,
A-20).
"""

import dataclasses

from fp8ref.jax.attention.kernel import CALLS
from fp8ref.jax.proof.attention import (
    kernel_calls,
    manifest_of_products,
    missing_kernels,
    missing_products,
)
from fp8ref.jax.proof.hlo import Operation
from fp8ref.jax.proof.verdict import Program
from fp8ref.spec.attention.products import PRODUCTS
from fp8ref.spec.attention.variants import VARIANTS


def program(
    *, leave_out=(), types=("f8e4m3fn", "f8e4m3fn"), precision="HIGHEST", plan=None
) -> Program:
    shape = (16, 16)
    kind, how = ("simulated", f"{plan}:slow") if plan else ("dot_general", precision)
    return Program(
        tuple(
            Operation(
                kind,
                tuple((t, shape) for t in types),
                ("f32", shape),
                f"jit(step)/layer/attention:{product}/dot",
                how,
            )
            for product in PRODUCTS
            if product not in leave_out
        ),
        "stablehlo",
    )


CUDNN = VARIANTS["cudnn"]


def test_a_product_that_is_missing_wider_or_faster_is_named():
    assert missing_products(program(), ["layer"], CUDNN) == []
    assert missing_products(program(leave_out=("grad_q",)), ["layer"], CUDNN) == [
        "layer/grad_q: planned f8e4m3fn x f8e4m3fn, slow; found no such dot"
    ]
    assert len(
        missing_products(program(types=("bf16", "bf16"), precision="DEFAULT"), ["layer"], CUDNN)
    ) == len(PRODUCTS)
    assert "found no such dot" in missing_products(program(), ["other"], CUDNN)[0]
    assert (
        "; f8e4m3fn x f8e4m3fn, fast"
        in missing_products(program(precision="DEFAULT"), ["layer"], CUDNN)[0]
    )
    assert (
        missing_products(
            program(precision="DEFAULT"), ["layer"], dataclasses.replace(CUDNN, plan="hopper_fast")
        )
        == []
    )


def test_under_simulated_hardware_each_names_its_plan():  # B-12
    assert missing_products(program(plan="hopper"), ["layer"], CUDNN, "hopper") == []
    assert (
        "under hopper; f8e4m3fn x f8e4m3fn, slow"
        in missing_products(program(), ["layer"], CUDNN, "hopper")[0]
    )
    found = manifest_of_products(program(plan="hopper"), ["layer"], CUDNN)
    assert {gemm["plan"] for gemm in found["gemms"]} == {"hopper"}


def test_products_of_dequantized_blocks_are_named():  # G-16
    found = manifest_of_products(
        program(types=("bf16", "bf16"), precision="DEFAULT"), ["layer"], VARIANTS["mxfp8"]
    )
    assert found["on_dequantised_operands"] == [f"layer/{product}" for product in PRODUCTS]
    assert [gemm["gemm"] for gemm in found["gemms"]] == found["on_dequantised_operands"]


def test_kernels_are_read_from_compiled_text():
    lines = [
        f"  %call.{i} = f8e4m3fn[1,2,128,128]{{3,2,1,0}} custom-call(%q, %k), "
        f'custom_call_target="{call}", '
        f'metadata={{op_name="jit(step)/layer/attention:kernel_{phase}/dot_product_attention_fp8"}}'
        for i, (phase, call) in enumerate(CALLS.items())
    ]
    text = "ENTRY %main (q: f8e4m3fn[1]) -> f32[] {\n" + "\n".join(lines) + "\n}\n"
    calls = kernel_calls(text)
    assert calls == [f"layer: {call}" for call in CALLS.values()]
    assert missing_kernels(calls, ["layer"]) == []
    assert missing_kernels(calls[:1], ["layer"]) == [
        f"layer/attention: planned the kernel {CALLS['backward']}; found {calls[0]}"
    ]
    assert missing_kernels([], ["layer"])[0].endswith("found no such call")
