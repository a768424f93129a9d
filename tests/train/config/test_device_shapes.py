import jax
import pytest
from helpers.models import sizes

from fp8ref.recipe import RECIPES
from fp8ref.selection.rules import Rule
from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import config as configs
from fp8ref.train.config import device_shapes
from fp8ref.train.jax.mesh import Layout


def test_parameters_by_kind():
    assert device_shapes.kinds(sizes.CONFIG) == {
        "embedding": 16384,
        "attention": 2 * (2 * 4096 + 2 * 2048),
        "mlp": 2 * 3 * 8192,
        "norms": 320,
        "lm_head": 16384,
        "all": 106816,
    }


def test_sinks_are_parameters_of_attention():
    keys = {"numerics": {"attention": "cudnn"}, "model": {"attention_sinks": True}}
    plain, found = (
        device_shapes.kinds(sizes.CONFIG),
        device_shapes.kinds(sizes.CONFIG.replace(**keys)),
    )
    assert {
        kind: found[kind] - plain[kind] for kind in found if found[kind] != plain[kind]
    } == dict.fromkeys(("attention", "all"), 2 * 4)


def test_tokens_of_a_device_are_those_of_a_part_of_its_share():
    assert device_shapes.tokens(sizes.config()) == 256
    assert device_shapes.tokens(sizes.config(parts=2, data=2, fsdp=2, tensor=2)) == 32


@pytest.mark.parametrize(
    ("linear", "shape", "used"),
    [
        ("q_proj", (64, 64), (32, 64)),
        ("o_proj", (64, 64), (64, 32)),
        ("down_proj", (64, 128), (64, 64)),
        ("lm_head", (256, 64), (256, 64)),
    ],
)
def test_tensor_parallelism_cuts_columns_or_rows(linear, shape, used):  # P-10
    assert device_shapes.used(f"model.layers.0.{linear}", shape, sizes.config(**sizes.MESH)) == used


@pytest.mark.parametrize(
    ("name", "shape", "jax", "torch"),
    [
        ("model.layers.0.mlp.down_proj.weight", (64, 128), (32, 64), (32, 64)),
        ("model.embed_tokens.weight", (256, 64), (128, 64), (128, 64)),
        ("model.norm.weight", (64,), (64,), (32,)),
        ("lm_head.weight", (255, 64), None, (128, 64)),
    ],
)
def test_pieces_at_rest(name, shape, jax, torch):  # P-10, P-11
    config = sizes.config(**sizes.MESH)
    assert device_shapes.at_rest(name, shape, config, "torch") == torch
    if jax:
        assert device_shapes.at_rest(name, shape, config, "jax") == jax


@pytest.mark.parametrize(
    ("recipe", "jax", "torch"),
    [
        ("bf16", False, False),
        ("tensorwise", True, True),
        ("rowwise", True, False),
        ("delayed", True, True),
    ],
)
def test_which_weights_move_as_codes(recipe, jax, torch):  # P-6, P-11
    assert device_shapes.in_fp8(RECIPES[recipe], sizes.config(), "jax") == jax
    assert device_shapes.in_fp8(RECIPES[recipe], sizes.config(), "torch") == torch
    assert not device_shapes.in_fp8(RECIPES[recipe], sizes.config(gather="compute"), "torch")


def test_copies_are_sharded_parameters_of_fsdp2_alone():
    assert [
        device_shapes.sharded(sizes.config(data=2), backend) for backend in ("jax", "torch")
    ] == [False, True]
    assert [
        device_shapes.sharded(sizes.config(fsdp=2), backend) for backend in ("jax", "torch")
    ] == [True, True]


def test_which_weights_are_scaled_first():  # P-9
    """Those that are cast once by their own amax, unless the optimizer keeps them in FP8."""
    layer = "model.layers.0.mlp."
    config = sizes.config("tensorwise").replace(
        numerics={
            "filter_fqns": ("up_proj", "lm_head"),
            "rules": (
                Rule(layers=("gate_proj",), gemms=("output",), roles=("weight",), recipe="bf16"),
            ),
        }
    )
    first = device_shapes.scaled_first(config)
    assert f"{layer}down_proj" in first
    assert not {f"{layer}up_proj", f"{layer}gate_proj", "lm_head"} & first.keys()
    assert device_shapes.scaled_first(config.replace(parallel={"precompute_scales": False})) == {}
    masters = sizes.config("tensorwise", optimizer="adamw_states").replace(
        optimizer={"layout": "msamp_o2"}
    )
    assert device_shapes.scaled_first(masters) == {}
    assert all(
        device_shapes.scaled_first(sizes.config(recipe)) == {}
        for recipe in ("bf16", "rowwise", "rowwise_with_gw_hp", "delayed")
    )


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
            device_shapes.check(config, "jax")
    else:
        device_shapes.check(config, "jax")


@pytest.mark.parametrize(
    ("backend", "sections", "said"),
    [
        (
            "jax",
            {"parallel": {"compile": "block"}},
            "parallel.compile is not a key of --backend jax",
        ),
        (
            "jax",
            {"optimizer": {"kind": "adamw_fp8"}},
            "optimizer.kind of --backend jax is 'adamw' or 'adamw_states'; got 'adamw_fp8'. Use "
            "one of them",
        ),
        ("torch", {"parallel": {"scan": True}}, "parallel.scan is not a key of --backend torch"),
        (
            "torch",
            {"parallel": {"tensor_reduce_dtype": "float32"}},
            "parallel.tensor_reduce_dtype is not a key of --backend torch",
        ),
        (
            "jax",
            {"parallel": {"scan": True}, "numerics": {"filter_fqns": ("layers.1.mlp.up_proj",)}},
            "parallel.scan compiles one layer for all",
        ),
        (
            "torch",
            {"parallel": {"through": "jit"}},
            "parallel.through is not a key of --backend torch",
        ),
        (
            "torch",
            {"parallel": {"fsdp": 4}, "data": {"microbatches": 4}},
            "data x fsdp = 4 devices times data.microbatches = 4; got 8",
        ),
        (
            "torch",
            {
                "parallel": {"tensor": 2},
                "model": {"hidden_size": 128, "intermediate_size": 384, "num_key_value_heads": 4},
                "numerics": {"recipe": "blockwise"},
            },
            r"(?s)q_proj: no rank boundary cuts a block \(P-5\).*holds a multiple of 128 "
            r"rows.*it holds 64\..*down_proj.*128 columns.*holds 192",
        ),
        (
            "torch",
            {"parallel": {"fsdp": 2, "amax_scope": "local"}, "numerics": {"recipe": "delayed"}},
            "Set it to global",
        ),
        (
            "torch",
            {
                "parallel": {"fsdp": 2},
                "model": {"vocab_size": 257},
                "optimizer": {"kind": "adamw_fp8"},
            },
            r"equal: parallel.fsdp = 2 divides its rows; model.embed_tokens.weight has 257",
        ),
        (
            "torch",
            {
                "parallel": {"fsdp": 4, "tensor": 2},
                "model": {"intermediate_size": 36},
                "optimizer": {"kind": "adamw_fp8"},
            },
            r"equal: parallel.fsdp = 4 divides its rows; model.layers.0.mlp.gate_proj.weight "
            r"has 18",
        ),
        (
            "jax",
            {"parallel": {"tensor": 2, "amax_scope": "local"}, "numerics": {"recipe": "delayed"}},
            "Set it to global",
        ),
        (
            "torch",
            {"parallel": {"data": 4, "reduction": "ordered"}},
            "at most 2 ranks along data; got 4",
        ),
        (
            "torch",
            {"parallel": {"tensor": 2}, "model": {"intermediate_size": 48}},
            r"gate_proj is FP8, .* not a multiple of 16: 24",
        ),
        (
            "jax",
            {
                "parallel": {"fsdp": 2},
                "model": {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4},
                "numerics": {"recipe": "blockwise"},
            },
            "P-5",
        ),
        (
            "jax",
            {"parallel": {"attention": "cudnn"}, "model": {"num_attention_heads": 16}},
            "multiple of 8 up to 256; got 4",
        ),
        (
            "torch",
            {"parallel": {"attention": "cudnn"}},
            "parallel.attention is not a key of --backend torch",
        ),
        ("jax", {"numerics": {"filter_fqns": ("absent",)}}, "'absent' matches none of"),
    ],
)
def test_what_a_backend_cannot_train_is_refused_by_name(backend, sections, said):
    with pytest.raises(ValueError, match=said):
        device_shapes.check(sizes.CONFIG.replace(**sections), backend)


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
# L-5
def test_on_a_gpu_tensor_parallelism_reduces_multiples_of_16_tokens(backend, recipe, refused):
    for length, tensor in ((32, 2), (31, 1), (31, 2)):
        config = sizes.config(recipe, parts=2, tensor=tensor).replace(
            data={"sequence_length": length, "batch_size": 6}
        )
        if refused and length == 31 and tensor == 2:
            with pytest.raises(
                ConfigError,
                match=r"grad_weight of model.layers.0.self_attn.q_proj .*; got 93\. Change "
                r"data.sequence_length",
            ):
                device_shapes.check_on_gpu(config, backend)
        else:
            device_shapes.check_on_gpu(config, backend)


def test_every_fault_is_told_at_once():
    config = sizes.config(fsdp=3, tensor=3, compile="block")
    with pytest.raises(ConfigError) as error:
        device_shapes.check(config, "jax")
    assert all(
        word in str(error.value)
        for word in (
            "parallel.compile",
            "batch_size",
            "num_attention_heads",
            "vocab_size",
            "q_proj",
        )
    )


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize(
    "recipe", ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"]
)
@pytest.mark.parametrize("scope", ["global", "local"])
def test_what_fits_is_let_through(backend, recipe, scope):
    if (recipe, scope) != ("delayed", "local"):
        device_shapes.check(
            sizes.config(recipe, parts=2, **sizes.MESH | {"amax_scope": scope}), backend
        )


@pytest.mark.parametrize(
    ("backend", "numerics", "parallel", "message"),
    [
        (
            "jax",
            {"recipe": "mxfp8", "products": "scaled_mm"},
            {},
            "one of auto, emulated, scaled_m",
        ),
        ("torch", {"recipe": "rowwise", "products": "scaled_mm"}, {}, "no linear has any"),
        ("jax", {"recipe": "mxfp4", "products": "scaled_matmul"}, {}, "got e2m1fn x e2m1fn"),
        ("torch", {"recipe": "nvfp4"}, {"data": 2, "amax_scope": "local"}, "places of tokens"),
    ],
)
def test_what_training_refuses_is_refused_before(backend, numerics, parallel, message):  # G-26
    config = sizes.CONFIG.replace(numerics=numerics, parallel=parallel)
    with pytest.raises(ConfigError, match=message):
        device_shapes.check(config, backend)


def test_rotations_take_whole_blocks_of_a_devices_tokens():  # S-23
    config = sizes.CONFIG.replace(
        numerics={"recipe": "nvfp4"}, data={"sequence_length": 24, "batch_size": 1}
    )
    with pytest.raises(ConfigError, match="rotates 16 tokens at a time in grad_weight"):
        device_shapes.check(config, "torch")


def test_experts_are_refused_what_they_do_not_take():  # S-24
    config = configs.load("tiny-moe").replace(numerics={"recipe": "nvfp4"})
    with pytest.raises(ConfigError, match="experts neither rotate"):
        device_shapes.check(config, "torch")
