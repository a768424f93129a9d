"""The proof of attention's products, in either backend; a product that is missing stops the run (B-15)."""

import jax.numpy as jnp
import pytest

from fp8ref.attention_products import PRODUCTS
from fp8ref.errors import ConfigError
from fp8ref.jax import attention as attention_jax
from fp8ref.jax.attention_operands import Parts
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
        "gemms": [
            {"gemm": f"{LAYER}/{product}", "a": "f8e4m3fn", "b": "f8e4m3fn", "accumulate": "slow", "fp8": True}
            for product in ("scores", "values", "grad_probabilities", "grad_v", "grad_k", "grad_q")
        ],
        "on_dequantised_operands": [],
    }
    assert (found["missing"], len(found["gemms"])) == ([], 21)  # those of linears, as before
    assert not any("self_attn/" in gemm["gemm"] for gemm in found["gemms"])


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "through": "jit"}, {"scan": True}], ids=str)
def test_jax_runs_them_on_meshes_and_in_a_scan(parallel, config):  # B-15
    config = config.replace(model={"num_hidden_layers": 2, "intermediate_size": 64}, numerics={"recipe": "bf16"}, parallel=parallel)
    found = proven("jax", config)["attention"]["gemms"]
    assert {gemm["gemm"] for gemm in found} == {f"model.layers.{i}.self_attn/{product}" for i in range(2) for product in PRODUCTS}
    assert all(gemm["fp8"] for gemm in found)


def test_jax_names_products_of_dequantized_blocks(config):  # G-16
    found = proven("jax", config.replace(numerics={"attention": "mxfp8"}))["attention"]
    assert found["on_dequantised_operands"] == [f"{LAYER}/{product}" for product in PRODUCTS]
    assert {(gemm["a"], gemm["b"], gemm["fp8"]) for gemm in found["gemms"]} == {("bf16", "bf16", False)}


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

    def other(q, k, v, *, tap, **how):
        heads = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax.nn.dot_product_attention(*heads, is_causal=True).swapaxes(1, 2), tap

    monkeypatch.setattr(attention_jax, "apply_with_stats", other)
    with pytest.raises(ConfigError, match=rf"{LAYER}/scores: planned f8e4m3fn x f8e4m3fn, slow; found no such dot"):
        proven("jax", config)
    allowed = proven("jax", config.replace(run={"allow_fallback": True}))
    assert len([line for line in allowed["missing"] if "self_attn/" in line]) == 6
