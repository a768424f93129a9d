"""What is written under the names of libraries is found again, bit for bit."""

import numpy as np
import pytest
from checkpoints import made, models

from fp8ref.checkpoints import audit, weights, write
from fp8ref.checkpoints import rule as rules
from fp8ref.checkpoints.tensors import stored
from fp8ref.sim.quantize import scaling

NAME = "model.layers.0.mlp.up_proj.weight"
TWO_LEVELS = [name for name, form in weights.FORMS.items() if form.tensor_scale]
ONE_LEVEL = ["deepseek", "compressed_tensors", "torchao"]
SHAPES = [(256, 384), (300, 200), (48, 32), (1, 160), (129, 129)]


def again(path, tensors):
    """The weight that is found in tensors."""
    (weight,) = weights.find(stored(made.write(path, tensors))).values()
    return weight


def equal(found, q) -> None:
    assert np.array_equal(found.codes, q.codes)
    assert np.array_equal(found.scale_inv.ravel(), np.ravel(q.scale_inv))
    if q.tensor_scale_inv is not None:
        assert np.array_equal(found.tensor_scale_inv, q.tensor_scale_inv)
    assert np.array_equal(scaling.dequantize(found), scaling.dequantize(q))


@pytest.mark.parametrize("form", ONE_LEVEL)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "rule",
    [
        *("torchao_tensor", "compressed_tensors_row", "vllm_group", "deepseek_v3_block"),
        *("mx_rceil_mx", "deepgemm_ue8m0_block"),
    ],
)
def test_one_level_comes_back(tmp_path, form, shape, rule):
    q = rules.by_name(rule).quantize(models.spread(shape, 1))
    weight = again(tmp_path, write.tensors_of(NAME, q, form))
    assert (weight.name, weight.form.name, weight.shape) == (NAME, form, shape)
    equal(weight.quantized(), q)


@pytest.mark.parametrize("form", ["compressed_tensors_packed", "gpt_oss"])
@pytest.mark.parametrize("shape", [(48, 96), (64, 32)])
def test_mxfp4_comes_back(tmp_path, form, shape):
    q = rules.by_name("mx_floor_mx", "e2m1fn").quantize(models.spread(shape, 2))
    parts = [q, q] if form == "gpt_oss" else q
    weight = again(tmp_path, write.tensors_of("experts.up_proj", parts, form))
    assert (weight.form.name, weight.shape[-2:]) == (form, shape)
    equal(weight.quantized((1,) if form == "gpt_oss" else ()), q)


@pytest.mark.parametrize("form", TWO_LEVELS)
@pytest.mark.parametrize("rule", ["te_nvfp4_nv", "torchao_nvfp4_one_level_nv"])
@pytest.mark.parametrize("shape", [(256, 384), (48, 32), (33, 48)])
def test_nvfp4_comes_back(tmp_path, form, rule, shape):
    for seed in range(8):  # the reciprocal of a reciprocal
        q = rules.by_name(rule).quantize(models.spread(shape, seed) * (seed + 1))
        weight = again(tmp_path, write.tensors_of(NAME, q, form))
        assert (weight.form.name, weight.scale_fmt.name) == (form, "e4m3fn")
        equal(weight.quantized(), q)


def test_a_weight_of_zeros_comes_back(tmp_path):
    for name, form in write.FORMATS.items():
        q = rules.by_name(form.rule).quantize(np.zeros((128, 128), np.float32))
        weight = again(tmp_path / name, write.tensors_of(NAME, q, form.form))
        equal(weight.quantized(), q)


def test_experts_come_back_in_one_tensor(tmp_path):
    each = [
        rules.by_name("deepseek_v3_block").quantize(models.spread((256, 384), s)) for s in (1, 2)
    ]
    module = "model.layers.0.mlp.experts.gate_up_proj"
    weight = again(tmp_path, write.tensors_of(module, each, "transformers_experts"))
    assert (weight.name, weight.shape) == (module, (2, 256, 384))
    for expert, q in enumerate(each):
        equal(weight.quantized((expert,)), q)


def test_as_many_blocks_as_rows_are_blocks(tmp_path):
    """Llama's k_proj of 405B, at an eighth of its size: the scales of blocks are as many as rows."""
    q = rules.by_name("deepseek_v3_block").quantize(models.spread((128, 128 * 128), 3))
    weight = again(tmp_path, write.tensors_of(NAME, q, "deepseek"))
    assert weight.granularity == "blockwise_128x128"
    equal(weight.quantized(), q)


def test_scales_that_their_format_lacks_stay_numbers(tmp_path):
    """Such as a quantizer's that rounds no scale."""
    q = rules.by_name("mx_rceil_mx").quantize(models.spread((64, 64), 4))
    q = q._replace(scale_inv=q.scale_inv * np.float32(1.5))
    tensors = write.tensors_of(NAME, q, "compressed_tensors")
    assert tensors[NAME.replace("weight", "weight_scale")].dtype == np.float32
    equal(again(tmp_path, tensors).quantized(), q)


def test_a_shared_amax_gives_one_tensor_scale():
    rule = rules.by_name("te_nvfp4_nv")
    x = models.spread((48, 64), 5)
    own, shared = rule.quantize(x), write.quantize(x, rule, 8 * float(np.abs(x).max()))
    assert shared.tensor_scale_inv == 8 * own.tensor_scale_inv
    assert shared.codes.shape == x.shape
    assert shared.scale_inv.shape == own.scale_inv.shape
    whole = rule.quantize(np.concatenate([x, 8 * x]))
    assert np.array_equal(shared.codes, whole.codes[:48])
    assert np.array_equal(shared.scale_inv, whole.scale_inv[:48])


@pytest.mark.parametrize("name", write.FORMATS)
def test_the_audit_finds_nothing_wrong(tmp_path, name):
    """Codes, blocks and scales are what the config says, by the rule that made them."""
    form = write.FORMATS[name]
    shapes = {"mlp.down_proj": (384, 512), "self_attn.o_proj": (384, 256)}
    linears = models.linears(shapes)
    tensors = {}
    for module, x in linears.items():
        q = rules.by_name(form.rule).quantize(x)
        tensors |= write.tensors_of(f"{module}.weight", q, form.form)
    path = models.write(
        tmp_path / "fp8", tensors | models.others(), form.quantization_config(["lm_head"])
    )
    high = models.write(tmp_path / "high", {f"{m}.weight": x for m, x in linears.items()}, None)
    result = audit.audit(path, originals=high)
    assert [f.to_dict() for f in result.findings] == []
    assert len(result.rows) == len(linears)
    rule = rules.by_name(form.rule)
    for row in result.rows:
        assert row.granularity == rule.granularity
        assert row.made_by


@pytest.mark.parametrize(
    ("name", "shape", "fits"),
    [
        ("deepseek", (256, 384), True),
        ("deepseek", (48, 32), True),
        ("deepseek", (192, 128), False),
        ("deepseek", (128, 200), False),
        ("compressed-tensors", (129, 7), True),
        ("mxfp8", (7, 64), True),
        ("mxfp8", (7, 48), False),
        ("nvfp4", (7, 48), True),
        ("nvfp4", (7, 40), False),
    ],
)
def test_which_shapes_fit(name, shape, fits):
    assert write.FORMATS[name].fits(shape) == fits


@pytest.mark.parametrize("name", write.FORMATS)
def test_dequantized_numbers_are_quantized_to_themselves(name):
    """Who trains on an import by the rule of the export trains on the exported numbers."""
    rule = rules.by_name(write.FORMATS[name].rule)
    for seed in range(4):
        q = rule.quantize(models.spread((256, 384), seed))
        again = rule.quantize(scaling.dequantize(q))
        if name == "mxfp8":
            # a block whose largest number was rounded down to half the range: half the scale
            assert np.array_equal(scaling.dequantize(again), scaling.dequantize(q))
        else:
            assert np.array_equal(again.codes, q.codes)
            # amax / max of max * scale: two roundings
            assert np.allclose(again.scale_inv, q.scale_inv, rtol=2 * 2.0**-24, atol=0)


@pytest.mark.parametrize("rule", ["vllm_tensor", "vllm_block", "vllm_row", "te_nvfp4_nv"])
def test_a_common_amax_leaves_the_shapes_of_codes_and_scales(rule):
    x = np.random.default_rng(0).standard_normal((200, 128)).astype(np.float32)
    rule = rules.by_name(rule)
    own, common = rule.quantize(x), write.quantize(x, rule, 2 * float(np.abs(x).max()))
    assert common.codes.shape == own.codes.shape
    assert np.shape(common.scale_inv) == np.shape(own.scale_inv)
    if rule.granularity == "tensorwise":
        assert common.scale_inv == 2 * own.scale_inv
    elif rule.policy.two_level is None:
        np.testing.assert_array_equal(common.scale_inv, own.scale_inv)
