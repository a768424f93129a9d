"""What a dry run refuses is what the trainers refuse."""

import jax
import pytest
import sizes

from fp8ref.errors import ConfigError
from fp8ref.train import feasibility
from fp8ref.train.jax.mesh import Layout

CASES = [
    ({}, {}),
    ({}, sizes.MESH),
    ({}, {"data": 2, "fsdp": 2, "tensor": 2}),
    ({"data": {"microbatches": 2}}, {"fsdp": 4}),
    ({"data": {"microbatches": 4}}, {"fsdp": 4}),
    ({"data": {"batch_size": 6}}, {"fsdp": 4}),
    ({"data": {"sequence_length": 33}}, sizes.MESH),
    ({}, {"tensor": 4}),
    ({"model": {"num_key_value_heads": 4}}, {"tensor": 4}),
    ({"model": {"intermediate_size": 130}}, {"fsdp": 4}),
    ({"model": {"intermediate_size": 129}}, {"tensor": 2}),
    ({"model": {"vocab_size": 257}}, {"fsdp": 2}),
    ({"model": {"vocab_size": 257}}, {"tensor": 2}),
]


@pytest.mark.parametrize(("sections", "parallel"), CASES, ids=str)
def test_jax_is_refused_what_its_layout_refuses(sections, parallel):  # P-1
    config = sizes.config("bf16", **parallel).replace(**sections)
    try:
        Layout(config, jax.devices() * (config.parallel.devices // jax.device_count() + 1))
        refused = False
    except ConfigError:
        refused = True
    except ValueError as error:  # a device twice in a mesh, after everything else was looked at
        refused = "unique" not in str(error)
    if refused:
        with pytest.raises(ConfigError, match="divisible"):
            feasibility.check(config, "jax")
    else:
        feasibility.check(config, "jax")


@pytest.mark.parametrize(
    ("backend", "sections", "said"),
    [
        ("jax", {"parallel": {"compile": "block"}}, "parallel.compile is not a key of --backend jax"),
        ("jax", {"optimizer": {"kind": "adamw_fp8"}}, "optimizer.kind is not a key of --backend jax"),
        ("torch", {"parallel": {"through": "jit"}}, "parallel.through is not a key of --backend torch"),
        ("torch", {"parallel": {"fsdp": 4}, "data": {"microbatches": 4}}, "data x fsdp = 4 devices times data.microbatches = 4; got 8"),
        ("torch", {"parallel": sizes.MESH | {"amax_scope": "global"}}, "Set parallel.amax_scope to local"),
        (
            "torch",
            {"parallel": {"tensor": 2}, "numerics": {"recipe": "delayed"}},
            "parallel.tensor takes recipes tensorwise.*got 'delayed'",
        ),
        ("torch", {"parallel": {"fsdp": 2, "amax_scope": "local"}, "numerics": {"recipe": "delayed"}}, "Set it to global"),
        ("torch", {"parallel": {"data": 4, "reduction": "ordered"}}, "at most 2 along data; got 4"),
        ("torch", {"parallel": {"tensor": 2}, "model": {"intermediate_size": 48}}, r"gate_proj is FP8, .* no multiple of 16: 24"),
        (
            "jax",
            {
                "parallel": {"fsdp": 2},
                "model": {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4},
                "numerics": {"recipe": "blockwise"},
            },
            "P-5",
        ),
        ("jax", {"parallel": {"attention": "cudnn"}, "model": {"num_attention_heads": 16}}, "multiple of 8 up to 256; got 4"),
        ("torch", {"parallel": {"attention": "cudnn"}}, "parallel.attention is not a key of --backend torch"),
        ("jax", {"numerics": {"filter_fqns": ("absent",)}}, "'absent' names none of"),
    ],
)
def test_what_a_backend_cannot_train_is_refused_by_name(backend, sections, said):
    with pytest.raises(ValueError, match=said):
        feasibility.check(sizes.CONFIG.replace(**sections), backend)


@pytest.mark.parametrize(
    ("backend", "recipe", "refused"),
    [
        ("torch", "tensorwise", True),
        ("torch", "rowwise", True),
        ("torch", "rowwise_with_gw_hp", False),
        ("torch", "delayed", False),
        ("torch", "bf16", False),
        ("jax", "tensorwise", False),
    ],
)
def test_on_a_gpu_torchao_reduces_multiples_of_16_tokens(backend, recipe, refused):  # L-5
    for length in (32, 31):
        config = sizes.config(recipe, parts=2).replace(data={"sequence_length": length, "batch_size": 6})
        if refused and length == 31:
            with pytest.raises(
                ConfigError, match=r"grad_weight of model.layers.0.self_attn.q_proj .*; got 93\. Change data.sequence_length"
            ):
                feasibility.check_on_gpu(config, backend)
        else:
            feasibility.check_on_gpu(config, backend)


def test_every_fault_is_told_at_once():
    config = sizes.config(fsdp=3, tensor=3, compile="block")
    with pytest.raises(ConfigError) as error:
        feasibility.check(config, "jax")
    assert all(word in str(error.value) for word in ("parallel.compile", "batch_size", "num_attention_heads", "vocab_size", "q_proj"))


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_what_fits_is_let_through(backend, recipe):
    feasibility.check(sizes.config(recipe, parts=2, **sizes.MESH), backend)
