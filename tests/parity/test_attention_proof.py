"""The proof of attention's products, in either backend; a product that is missing stops the run
(B-15).
"""

import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional

from fp8ref.jax.attention import attention as attention_jax
from fp8ref.jax.attention.operands.operands import Parts
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.attention.products import PRODUCTS
from fp8ref.torch.attention import attention as attention_torch
from fp8ref.torch.attention import observer as attention_observer
from fp8ref.torch.attention import products
from fp8ref.torch.attention.fast import operands as attention_fast_operands
from fp8ref.torch.gemm import batched as batched_gemm
from fp8ref.train import loop
from fp8ref.train.data import loader

WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads of 32 features, of which mxfp8 takes multiples."""

LAYER = "model.layers.0.self_attn"


@pytest.fixture
def config(small):
    return small.replace(model=WIDE, numerics={"recipe": "tensorwise", "attention": "cudnn"})


def proven(backend, config) -> dict:
    return loop.trainer(backend, config).prove(loader.open_batches(config).step(0))


def test_jax_runs_dots_of_codes(config):  # B-15
    found = proven("jax", config)
    assert found["attention"] == {
        "variant": "cudnn",
        "backward": "cast",
        "gemms": [
            {
                "gemm": f"{LAYER}/{product}",
                "a": "f8e4m3fn",
                "b": "f8e4m3fn",
                "accumulate": "slow",
                "fp8": True,
            }
            for product in ("scores", "values", "grad_probabilities", "grad_v", "grad_k", "grad_q")
        ],
        "on_dequantised_operands": [],
    }
    assert (found["missing"], len(found["gemms"])) == ([], 21)  # those of linears, as before
    assert not any("self_attn/" in gemm["gemm"] for gemm in found["gemms"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "through": "jit"}, {"scan": True}],
    ids=str,
)
def test_jax_runs_them_on_meshes_and_in_a_scan(parallel, config):  # B-15
    config = config.replace(
        model={"num_hidden_layers": 2, "intermediate_size": 64},
        numerics={"recipe": "bf16"},
        parallel=parallel,
    )
    found = proven("jax", config)["attention"]["gemms"]
    assert {gemm["gemm"] for gemm in found} == {
        f"model.layers.{i}.self_attn/{product}" for i in range(2) for product in PRODUCTS
    }
    assert all(gemm["fp8"] for gemm in found)


def test_jax_names_products_of_dequantized_blocks(config):  # G-16
    found = proven("jax", config.replace(numerics={"attention": "mxfp8"}))["attention"]
    assert found["on_dequantised_operands"] == [f"{LAYER}/{product}" for product in PRODUCTS]
    assert {(gemm["a"], gemm["b"], gemm["fp8"]) for gemm in found["gemms"]} == {
        ("bf16", "bf16", False)
    }


def test_a_wider_product_stops_a_jax_run(config, monkeypatch, tmp_path):  # B-15
    dot = Parts.dot

    def widened(self, a, b, axes, batch=2):
        wide = axes == ((4,), (2,)) and a.dtype.itemsize == 1  # P v and dS k
        return dot(self, *(x.astype(jnp.bfloat16) if wide else x for x in (a, b)), axes, batch)

    monkeypatch.setattr(Parts, "dot", widened)
    said = rf"{LAYER}/values: planned f8e4m3fn x f8e4m3fn, slow; bf16 x bf16, fast\n.*{LAYER}/grad_q: planned"
    with pytest.raises(ConfigError, match=said):
        loop.train(config, "jax", tmp_path / "run")


def test_attention_by_another_function_stops_a_jax_run(config, monkeypatch):  # B-15
    import jax

    def other(q, k, v, *, carried, **how):
        heads = (x.swapaxes(1, 2) for x in (q, k, v))
        o = jax.nn.dot_product_attention(*heads, is_causal=True).swapaxes(1, 2)
        return o, carried._replace(seen=None)

    monkeypatch.setattr(attention_jax, "apply_with_stats", other)
    with pytest.raises(
        ConfigError, match=rf"{LAYER}/scores: planned f8e4m3fn x f8e4m3fn, slow; found no such dot"
    ):
        proven("jax", config)
    allowed = proven("jax", config.replace(run={"allow_fallback": True}))
    assert len([line for line in allowed["missing"] if "self_attn/" in line]) == 6


def of_torch(fmt: str, accumulate: str | None, layers: int = 1) -> set[tuple]:
    return {
        (f"model.layers.{i}.self_attn/{product}", fmt, fmt, accumulate)
        for i in range(layers)
        for product in PRODUCTS
    }


def seen(found: dict) -> set[tuple]:
    return {
        (gemm["gemm"], gemm["a"], gemm["b"], gemm["accumulate"])
        for gemm in found["attention"]["gemms"]
    }


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_torch_runs_products_of_codes_in_the_stated_form(checkpointing, config):  # B-15
    config = config.replace(
        model={"num_hidden_layers": 2},
        numerics={"attention_arithmetic": "stated"},
        parallel={"checkpointing": checkpointing},
    )
    found = proven("torch", config)
    assert seen(found) == of_torch("f8e4m3fn", "slow", 2)
    assert all(gemm["fp8"] for gemm in found["attention"]["gemms"])
    assert (found["missing"], found["attention"]["on_dequantised_operands"]) == ([], [])
    assert not any("self_attn/" in gemm["gemm"] for gemm in found["gemms"])


@pytest.mark.parametrize("variant", ["cudnn", "mxfp8"])
def test_torch_names_products_of_dequantized_operands(variant, config):  # A-18, G-16
    found = proven("torch", config.replace(numerics={"attention": variant}))
    assert seen(found) == of_torch("f32", None)
    assert found["attention"]["on_dequantised_operands"] == [
        f"{LAYER}/{product}" for product in PRODUCTS
    ]
    assert found["missing"] == []


@pytest.mark.parametrize("arithmetic", ["fast", "stated"])
def test_the_proof_holds_products_to_the_hardware(arithmetic, config, monkeypatch):  # B-12, B-15
    config = config.replace(
        numerics={
            "attention": "fa3",
            "attention_backward": "bf16",
            "attention_arithmetic": arithmetic,
            "accumulate": "hopper",
        }
    )
    found = proven("torch", config)
    for product in ("scores", "values"):
        expected = {
            "gemm": f"{LAYER}/{product}",
            "a": "f8e4m3fn",
            "b": "f8e4m3fn",
            "accumulate": "fast",
            "fp8": True,
            "plan": "hopper",
        }
        assert expected in found["attention"]["gemms"]
    assert (found["missing"], found["attention"]["on_dequantised_operands"]) == ([], [])
    if arithmetic == "fast":  # dequantized, as no hardware multiplies them
        products = batched_gemm.products
        monkeypatch.setattr(
            batched_gemm, "products", lambda a, b, **how: products(a.float(), b.float(), **how)
        )
        with pytest.raises(
            ConfigError, match=rf"{LAYER}/values: planned f8e4m3fn x f8e4m3fn, fast, under hopper; "
        ):
            proven("torch", config)


def test_codes_that_a_device_takes_are_asked_for(config, monkeypatch):
    monkeypatch.setattr(
        attention_fast_operands, "takes_codes", lambda codes, variant: variant.fmt.bits == 8
    )
    assert seen(proven("torch", config)) == of_torch("f8e4m3fn", "slow")
    products = batched_gemm.products
    monkeypatch.setattr(
        batched_gemm, "products", lambda a, b, **how: products(a.float(), b.float(), **how)
    )
    with pytest.raises(
        ConfigError, match=rf"{LAYER}/scores: planned f8e4m3fn x f8e4m3fn, slow; f32 x f32"
    ):
        proven("torch", config)


@pytest.mark.parametrize("arithmetic", ["fast", "stated"])
# B-15
def test_attention_by_another_function_stops_a_torch_run(arithmetic, config, monkeypatch, tmp_path):
    monkeypatch.setattr(
        attention_torch,
        "apply",
        lambda q, k, v, **how: functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        ),
    )
    with pytest.raises(
        ConfigError, match=rf"{LAYER}/scores: planned .*; no product of it was seen"
    ):
        loop.train(
            config.replace(numerics={"attention_arithmetic": arithmetic}), "torch", tmp_path / "run"
        )


def test_one_wider_product_stops_a_torch_run(config, monkeypatch):  # B-15
    matmul = products.matmul

    def widened(a, b, variant):
        wide = attention_observer.product() == "grad_q"
        return matmul(*(x.float() if wide else x for x in (a, b)), variant)

    monkeypatch.setattr(products, "matmul", widened)
    config = config.replace(numerics={"attention_arithmetic": "stated"})
    with pytest.raises(
        ConfigError, match=rf"\n  {LAYER}/grad_q: planned f8e4m3fn x f8e4m3fn, slow; f32 x f32\n"
    ):
        proven("torch", config)


@pytest.mark.slow
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"
)  # inductor and dynamo
def test_a_compiled_block_is_read_off_its_graphs(codes, config, monkeypatch):  # B-15
    torch.compiler.reset()  # a graph that is known is not made again, and has nothing to read
    if codes:  # what a GPU's graphs have
        monkeypatch.setattr(
            attention_fast_operands, "takes_codes", lambda codes, variant: variant.fmt.bits == 8
        )
    found = proven(
        "torch", config.replace(model={"num_hidden_layers": 2}, parallel={"compile": "block"})
    )
    assert found["read_from"] == "inductor post-grad graphs"
    assert seen(found) == (of_torch("f8e4m3fn", "slow", 2) if codes else of_torch("f32", None, 2))
