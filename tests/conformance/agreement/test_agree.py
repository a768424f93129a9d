"""Public incidents in which a trainer and an engine quantized otherwise: the right cause is first."""

import json

import ml_dtypes
import numpy as np
import pytest
from checkpoints import made, models

from fp8ref.checkpoints import rule as rules
from fp8ref.checkpoints import write
from fp8ref.checkpoints.tensors import stored
from fp8ref.conformance import agree
from fp8ref.conformance.agreement import causes
from fp8ref.formats import E4M3FN
from fp8ref.sim.quantize import cast, scaling

SHAPES = {name: (n + n % 256, 512) for name, (n, _) in models.SHAPES.items()}
NOISE = np.random.default_rng(0).uniform(0.99, 1.01, (512, 512)).astype(np.float32)
MASTERS = {n: x * NOISE[: len(x)] for n, x in models.linears(SHAPES, layers=1).items()}
BLOCKS = models.fp8("vllm_block", ".weight_scale_inv")
CONFIG = models.BLOCKS
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def originals(tmp_path):
    tensors = {f"{name}.weight": x for name, x in MASTERS.items()} | models.others()
    return models.write(tmp_path / "originals", tensors, None)


def checkpoint(path, store=BLOCKS, weights=MASTERS, config=CONFIG, change=None):
    tensors = models.quantized(weights, store) | models.others()
    if change is not None:
        change(tensors)
    return models.write(path, tensors, config)


def first(result):
    assert not result.ok
    assert result.exit_code == 1
    return next(cause for cause in result.causes if cause.alarm)


def kinds(result):
    return [kind for kind in result.by_kind() if causes.CAUSES[kind].get("alarm", True)]


def scales(store_scale):
    """A change of every weight's scales."""

    def change(tensors):
        for name in [n for n in tensors if n.endswith("_scale_inv")]:
            tensors[name] = store_scale(tensors[name])

    return change


def up(scale):
    return np.exp2(np.ceil(np.log2(scale))).astype(np.float32)


def packed(scale):
    """Four e8m0 codes in 32 bits, whose bytes are read as a float32."""
    codes = scale.astype(made.E8M0).view(np.uint8)
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4)))
    return codes.view(np.float32)


def no_blocks(tensors):
    for name in [n for n in tensors if n.endswith(".mlp.gate_proj.weight")]:
        tensors[name] = MASTERS[name.removesuffix(".weight")].astype(made.BF16)
        del tensors[f"{name}_scale_inv"]


def stale(tensors):
    scale = tensors[f"{Q}.weight_scale_inv"]
    old = scale * np.linspace(0.2, 0.8, scale.size, dtype=np.float32).reshape(scale.shape)
    tensors[f"{Q}.weight_scale_inv"] = old
    inv = scaling.spread(old, MASTERS[Q].shape, (128, 128))
    codes = cast.encode(MASTERS[Q] / inv, E4M3FN)
    tensors[f"{Q}.weight"] = codes.view(made.FP8["e4m3fn"])


INCIDENTS = {
    # prime-rl#3112: UE8M0 on for Hopper
    "ue8m0": (
        "vllm_block",
        models.fp8("vllm_ue8m0_block", ".weight_scale_inv"),
        None,
        "power_of_two",
    ),
    # xtuner#2044: the trainer quantizes masters, the engine their bfloat16 copies
    "masters": (
        "vllm_block",
        models.fp8("vllm_block:bfloat16", ".weight_scale_inv"),
        None,
        "source_dtype",
    ),
    # verl#7519: a pattern for mlp.gate swallows gate_proj
    "pattern": ("vllm_block", BLOCKS, no_blocks, "left_out"),
    # transformers#46763: scales are rounded after the codes were made
    "rounded": ("vllm_block", BLOCKS, scales(up), "rounded_after"),
    # vime#133: packed scales are read as raw ones
    "packed": (
        "deepgemm_ue8m0_block",
        models.fp8("deepgemm_ue8m0_block", ".weight_scale_inv"),
        scales(packed),
        "misread",
    ),
    # slime#1618: one divides, the other multiplies
    "division": ("vllm_block", models.fp8("sglang_block", ".weight_scale_inv"), None, "division"),
    "inverse": ("vllm_block", BLOCKS, scales(lambda s: 1 / s), "scale_inverse"),
    "exponents": (
        "deepgemm_ue8m0_block",
        models.fp8("deepgemm_ue8m0_block", ".weight_scale_inv"),
        scales(lambda s: np.log2(s) + 127),
        "scale_exponents",
    ),
    "stale": ("vllm_block", BLOCKS, stale, "stale_scale"),
    "blocks": ("vllm_block", models.fp8("vllm_group", ".weight_scale_inv"), None, "blocks"),
    "transposed": (
        "vllm_block",
        BLOCKS,
        lambda t: t.update({f"{Q}.weight_scale_inv": np.roll(t[f"{Q}.weight_scale_inv"], 1, 0)}),
        "scale_order",
    ),
    "bf16 scales": ("vllm_block", BLOCKS, scales(lambda s: s.astype(made.BF16)), "scale_dtype"),
}


@pytest.mark.parametrize("name", INCIDENTS)
@pytest.mark.parametrize("with_weights", [True, False])
def test_the_first_cause_of_an_incident(tmp_path, originals, name, with_weights):
    rule, store, change, kind = INCIDENTS[name]
    weights = MASTERS
    if name == "division":  # quotients of narrow numbers are ties more often
        weights = {n: models.spread((512, 1024), i) for i, n in enumerate(MASTERS)}
        models.write(originals, {f"{n}.weight": x for n, x in weights.items()}, None)
    config = CONFIG | {"modules_to_not_convert": ["mlp.gate"]}
    a = checkpoint(tmp_path / "a", models.fp8(rule, ".weight_scale_inv"), weights, config)
    b = checkpoint(tmp_path / "b", store, weights, config, change)
    result = agree(a, b, originals if with_weights else None)
    without = {"division": "codes_alone", "masters": "unexplained", "stale": "misread"}
    assert kinds(result) == [kind if with_weights else without.get(name, kind)], result.causes
    assert first(result).kind == kinds(result)[0]
    if not with_weights:
        assert agree(a, a).ok


def test_fused_weights_with_one_scale(tmp_path):
    parts = {n: x for n, x in MASTERS.items() if n.endswith(("q_proj", "k_proj", "v_proj"))}
    fused = np.concatenate(list(parts.values()))
    (parent,) = {n.rpartition(".")[0] for n in parts}
    store = models.fp8("sglang_token_tensor")
    apart = checkpoint(tmp_path / "apart", store, parts)
    together = checkpoint(tmp_path / "fused", store, {f"{parent}.qkv_proj": fused})
    result = agree(apart, together)
    assert kinds(result) == ["one_scale"]
    assert len(result.causes) == 2  # the largest of the three has the scale of all
    single = models.quantized({"x": fused}, store)["x.weight_scale"]
    merged = {f"{n}.weight_scale": single for n in parts}
    again = {}
    for name, x in parts.items():
        codes = cast.encode(x / single, E4M3FN).view(made.FP8["e4m3fn"])
        again |= {f"{name}.weight": codes, f"{name}.weight_scale": single}
    written = models.write(tmp_path / "merged", again | models.others(), CONFIG)
    assert merged.keys() < again.keys()
    assert agree(written, together).ok
    assert kinds(agree(apart, written)) == ["one_scale"]


def test_fused_weights_of_blocks_are_compared_in_parts(tmp_path):
    parts = {n: x for n, x in MASTERS.items() if n.endswith(("gate_proj", "up_proj"))}
    fused = {"model.layers.0.mlp.gate_up_proj": np.concatenate(list(parts.values()))}
    apart = checkpoint(tmp_path / "apart", weights=parts)
    result = agree(apart, checkpoint(tmp_path / "fused", weights=fused))
    assert (result.ok, result.weights) == (True, 2)
    other = {n: -x if n.endswith("up_proj") else x for n, x in parts.items()}
    result = agree(apart, checkpoint(tmp_path / "other", weights=other))
    assert [c.weight for c in result.causes] == ["model.layers.0.mlp.up_proj.weight"]


def test_experts_in_one_tensor_equal_those_apart(tmp_path):
    together = models.write(tmp_path / "together", models.experts(), CONFIG)
    apart = {}
    for e, x in enumerate(models.spread((4, 512, 256), 0)):
        for name, part in (("gate_proj", x[:256]), ("up_proj", x[256:])):
            apart |= made.deepseek(f"model.layers.0.mlp.experts.{e}.{name}", part)
    for e, x in enumerate(models.spread((4, 256, 256), 1)):
        apart |= made.deepseek(f"model.layers.0.mlp.experts.{e}.down_proj", x)
    written = models.write(tmp_path / "apart", apart, CONFIG)
    result = agree(together, written)
    assert (result.ok, result.weights) == (True, 12)
    scale = apart["model.layers.0.mlp.experts.2.down_proj.weight_scale_inv"]
    apart["model.layers.0.mlp.experts.2.down_proj.weight_scale_inv"] = 1 / scale
    result = agree(together, models.write(tmp_path / "wrong", apart, CONFIG))
    assert [(c.kind, c.weight) for c in result.causes] == [
        ("scale_inverse", "model.layers.0.mlp.experts.2.down_proj.weight")
    ]


def by_rows(largest=448.0, floor=1e-10):
    def quantize(x):
        inv = np.maximum(np.abs(x).max(1, keepdims=True), np.float32(floor)) / np.float32(largest)
        return (x / inv).astype(ml_dtypes.float8_e4m3fn), inv.astype(np.float32)

    return quantize


def test_a_function_is_traced_to_its_rule():
    assert agree(by_rows(), "vllm_row").ok
    assert kinds(agree(by_rows(floor=1e-4), "vllm_row")) == ["amax_floor"]
    of_no_policy = agree(by_rows(floor=1e-6), "vllm_row")
    assert kinds(of_no_policy) == ["amax_floor"]
    expected = "none of A's scales is below 2.23214e-09; B's bytes are vllm_row:float32's"
    assert first(of_no_policy).detail == expected
    assert first(agree(by_rows(440.0), "vllm_row")).kind == "scale_factor"
    assert "times 1.01818" in first(agree("vllm_row", by_rows(440.0))).detail


def test_a_scale_that_multiplies_into_fp8_is_the_reciprocal():
    def quantize(x):
        scale = np.float32(448) / np.maximum(np.abs(x).max(1, keepdims=True), np.float32(1e-12))
        return (x * scale).astype(ml_dtypes.float8_e4m3fn), scale

    assert agree(quantize, "torchao_row").ok


def test_a_format_of_another_gpu():
    def quantize(x):
        q = rules.by_name("vllm_row", "e4m3fnuz").quantize(x)
        return q.codes.view(ml_dtypes.float8_e4m3fnuz), q.scale_inv

    assert first(agree(quantize, "vllm_row")).kind == "format"


CAUSES_OF_RULES = [
    ("vllm_block", "sglang_block", ["division"]),
    ("vllm_block", "vllm_block:bfloat16", ["source_dtype"]),
    ("vllm_block", "flashinfer_block", ["amax_floor"]),
    ("vllm_block", "vllm_group", ["blocks"]),
    ("vllm_block", "deepgemm_ue8m0_block", ["amax_floor", "division", "power_of_two"]),
    ("te_nvfp4_nv", "torchao_nvfp4_nv", ["two_levels"]),
]


@pytest.mark.parametrize(("a", "b", "kinds_of_rules"), CAUSES_OF_RULES)
def test_the_smallest_tensor_shows_each_decision(a, b, kinds_of_rules):
    result = agree(a, b)
    assert kinds(result) == kinds_of_rules
    examples = [c.example for c in result.causes if c.example is not None]
    assert examples
    for example in examples:
        assert example.codes[0] != example.codes[1] or example.scales[0] != example.scales[1]
    if len(kinds_of_rules) == 1 and kinds_of_rules != ["two_levels"]:
        # the sides themselves differ there, as the example says
        example = examples[0]
        x = np.zeros(example.shape, np.float32)
        along = int(np.argmax(example.shape)) if len(example.numbers) > 1 else 1
        flat = x.T if (along == 0 or example.shape == (128, 128)) else x
        flat[0, : len(example.numbers)] = example.numbers
        q = [rules.by_name(name).quantize(x) for name in (a, b)]
        assert not np.array_equal(q[0].codes, q[1].codes) or q[0].scale_inv != q[1].scale_inv


def test_the_result_as_json_and_text(tmp_path, capsys):
    result = agree("vllm_block", "sglang_block")
    result.write(tmp_path / "agree.json")
    written = json.loads((tmp_path / "agree.json").read_text())
    assert written["codes"]["differ"] == result.counts[0] > 0
    (cause,) = written["causes"]
    assert cause["cause"] == "division"
    assert len(cause["example"]) == 3
    result.print()
    printed = capsys.readouterr().out
    assert "smallest tensor" in printed
    assert "the first cause is division" in printed


def test_what_cannot_be_compared_is_said(tmp_path):
    a = checkpoint(tmp_path / "a")
    with pytest.raises(ValueError, match="--weights"):
        agree(a, "vllm_block")
    with pytest.raises(ValueError, match="no path and no module:function"):
        agree("vllm_blok", "vllm_block")

    def of_one_shape(x):
        assert x.shape == (256, 384)
        return by_rows()(x)

    with pytest.raises(ValueError, match="no weight with codes"):
        agree(of_one_shape, "vllm_row", {"a.weight": MASTERS[Q]})
    empty = models.write(tmp_path / "empty", models.others(), None)
    with pytest.raises(ValueError, match="no weight with codes"):
        agree(empty, empty)


def test_a_weight_without_an_original_and_one_that_is_absent(tmp_path, originals):
    extra = MASTERS | {"model.layers.1.mlp.up_proj": MASTERS["model.layers.0.mlp.up_proj"]}
    more = checkpoint(tmp_path / "more", weights=extra)
    assert kinds(agree(more, "vllm_block", originals)) == ["original_missing"]
    assert kinds(agree(more, checkpoint(tmp_path / "less"))) == ["absent"]


def test_equal_numbers_in_another_layout_agree_with_a_note(tmp_path):
    x = {Q: MASTERS[Q]}
    transposed = models.fp8("vllm_block", ".weight_scale_inv", shape=np.transpose)
    a = checkpoint(tmp_path / "a", transposed, x)
    result = agree(a, checkpoint(tmp_path / "b", weights=x))
    assert result.ok
    assert set(result.by_kind()) == {"scale_layout"}


def test_blocks_cut_from_another_place_are_padding(tmp_path):
    x = {Q: MASTERS[Q][:200]}

    def change(tensors):
        whole = np.concatenate([x[Q], np.full((56, 512), 9, np.float32)])
        tensors |= made.deepseek(Q, whole, "vllm_block")
        tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"][:200]

    a = checkpoint(tmp_path / "a", weights=x)
    b = checkpoint(tmp_path / "b", weights=x, change=change)
    assert kinds(agree(a, b)) == ["padding"]


def test_parts_of_fused_weights_are_traced_to_rules(tmp_path, originals):
    parts = {n: x for n, x in MASTERS.items() if n.endswith(("gate_proj", "up_proj"))}
    fused = {"model.layers.0.mlp.gate_up_proj": np.concatenate(list(parts.values()))}
    together = checkpoint(tmp_path / "fused", models.fp8("vllm_ue8m0_block"), fused)
    result = agree(together, checkpoint(tmp_path / "apart", weights=parts), originals)
    assert kinds(result) == ["power_of_two"]
    assert first(result).example is not None


@pytest.mark.parametrize("rule", ["vllm_row", "vllm_block", "te_nvfp4_nv"])
@pytest.mark.parametrize("sizes", [(512, 128, 128), (256, 256, 256), (128, 256, 128)])
def test_q_k_and_v_of_unlike_sizes_are_parts_of_a_fused_weight(tmp_path, rule, sizes):
    parent = "model.layers.0.self_attn"
    x = [models.spread((n, 256), i) for i, n in enumerate(sizes)]
    parts = {f"{parent}.{who}_proj.weight": part for who, part in zip("qkv", x, strict=True)}
    masters = models.write(tmp_path / "masters", parts, None)
    fused = {f"{parent}.qkv_proj.weight": np.concatenate(x)}
    form = "modelopt_nvfp4" if "nv" in rule else "compressed_tensors"
    amax = float(np.abs(fused[f"{parent}.qkv_proj.weight"]).max())

    def written(folder, weights, name=rule):
        tensors = {}
        for weight, value in weights.items():
            q = write.quantize(value, rules.by_name(name), amax if "nv" in rule else None)
            tensors |= write.tensors_of(weight, q, form)
        return models.write(tmp_path / folder, tensors, None)

    together, apart = written("together", fused), written("apart", parts)
    result = agree(together, apart)
    assert (result.ok, result.weights) == (True, 3), result.causes
    assert agree(together, apart, masters).ok
    narrow = agree(written("narrow", fused, f"{rule}:bfloat16"), apart, masters)
    assert narrow.ok == all(np.array_equal(p, p.astype(made.BF16)) for p in x)
    tensors = safe_numpy(apart)
    del tensors[f"{parent}.v_proj.weight"]
    lacking = models.write(tmp_path / "lacking", tensors, None)
    assert [c.weight for c in agree(together, lacking).causes] == [f"{parent}.v_proj.weight"]


def safe_numpy(folder):
    """The tensors of a checkpoint in memory, codes as their dtypes."""
    return {
        name: tensor[...].view(np.dtype(getattr(ml_dtypes, NUMPY[tensor.dtype])))
        if tensor.dtype in NUMPY
        else tensor[...]
        for name, tensor in stored(folder).items()
    }


NUMPY = {"F8_E4M3": "float8_e4m3fn", "BF16": "bfloat16"}


def test_a_rule_is_compared_with_what_a_checkpoint_left_out(tmp_path, originals):
    config = CONFIG | {"modules_to_not_convert": ["mlp.gate"]}
    b = checkpoint(tmp_path / "b", config=config, change=no_blocks)
    result = agree(b, "vllm_block", originals)
    assert kinds(result) == ["left_out"]
    assert "'mlp.gate', matched as substring does" in first(result).detail
    named = CONFIG | {"modules_to_not_convert": ["model.layers.0.mlp.gate_proj"]}
    right = checkpoint(tmp_path / "named", config=named, change=no_blocks)
    assert agree(right, "vllm_block", originals).ok


def test_masters_in_one_tensor_are_those_of_its_parts(tmp_path):
    gate, up = models.spread((256, 256), 0), models.spread((128, 256), 1)
    fused = {"mlp.gate_up_proj.weight": np.concatenate([gate, up])}
    masters = models.write(tmp_path / "masters", fused, None)
    apart = models.quantized({"mlp.gate_proj": gate, "mlp.up_proj": up}, BLOCKS)
    checkpoint = models.write(tmp_path / "apart", apart, CONFIG)
    assert agree(checkpoint, "vllm_block", masters).ok
    experts = np.stack([gate, gate * 2])
    every = models.write(tmp_path / "experts", {"mlp.experts.up_proj": experts}, None)
    each = {f"mlp.experts.{e}.up_proj": x for e, x in enumerate(experts)}
    written = models.write(tmp_path / "each", models.quantized(each, BLOCKS), CONFIG)
    result = agree(written, "vllm_block", every)
    assert (result.ok, result.weights) == (True, 2)
    assert agree(by_rows(), "vllm_row", {"mlp.experts.up_proj": experts}).weights == 2


def test_one_scale_of_all_experts(tmp_path):
    x = {f"mlp.experts.{e}.up_proj": models.spread((128, 128), e) for e in range(3)}
    own = models.write(tmp_path / "own", models.quantized(x, models.fp8("vllm_tensor")), None)
    amax = max(float(np.abs(each).max()) for each in x.values())
    tensors = {}
    for name, each in x.items():
        inv = np.float32(amax) / np.float32(448)
        codes = cast.encode(each / inv, E4M3FN).view(made.FP8["e4m3fn"])
        tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": inv.reshape(1)}
    shared = models.write(tmp_path / "shared", tensors, None)
    assert kinds(agree(own, shared)) == ["one_scale"]


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        ("te_nvfp4_nv", "te_nvfp4_4over6_nv", "two_levels"),
        ("te_nvfp4_nv", "vllm_block", "format"),
        ("mx_floor_mx", "mx_rceil_mx", "power_of_two"),
    ],
)
def test_rules_of_other_kinds(a, b, kind):
    for result in (agree(a, b), agree(b, a)):
        assert first(result).kind == kind


def test_nan_is_itself_and_one_scale_has_a_factor(tmp_path):
    x = MASTERS[Q].copy()
    x[3, 3] = np.nan
    assert agree("vllm_block", "vllm_block", {"a.up_proj.weight": x}).ok
    a = checkpoint(tmp_path / "a", models.fp8("vllm_tensor"), {Q: MASTERS[Q]})
    double = {f"{Q}.weight_scale": np.float32(2)}
    tensors = safe_numpy(a)
    tensors |= {name: tensors[name] * factor for name, factor in double.items()}
    b = models.write(tmp_path / "b", tensors, CONFIG)
    assert kinds(agree(a, b)) == ["scale_factor"]


def test_ue8m0_of_equal_exponents_is_no_floor(tmp_path):
    x = {Q: (np.random.default_rng(0).standard_normal((512, 512)) * 0.02).astype(np.float32)}
    a = checkpoint(tmp_path / "a", weights=x)
    b = checkpoint(tmp_path / "b", models.fp8("vllm_ue8m0_block", ".weight_scale_inv"), x)
    assert kinds(agree(a, b)) == ["power_of_two"]


def test_quantized_weights_are_no_originals(tmp_path):
    a = checkpoint(tmp_path / "a", weights={Q: MASTERS[Q]})
    only = models.write(tmp_path / "only", {k: v for k, v in safe_numpy(a).items() if Q in k}, None)
    with pytest.raises(ValueError, match="no weights in high precision"):
        agree("vllm_block", "sglang_block", only)


def test_patterns_of_another_engine_are_no_error(tmp_path):
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*lm_head"]}
    a = checkpoint(tmp_path / "a", models.fp8("vllm_tensor"), config=config)

    def change(tensors):
        del tensors[f"{Q}.weight_scale"]
        tensors[f"{Q}.weight"] = MASTERS[Q].astype(made.BF16)

    b = checkpoint(tmp_path / "b", models.fp8("vllm_tensor"), config=config, change=change)
    assert kinds(agree(a, b)) == ["left_out"]


def test_experts_and_rows_that_one_side_lacks(tmp_path):
    x = models.spread((3, 128, 128), 0)
    each = {f"mlp.experts.{e}.down_proj": part for e, part in enumerate(x)}
    apart = models.write(tmp_path / "apart", models.quantized(each, BLOCKS), CONFIG)
    q = [rules.by_name("vllm_block").quantize(part) for part in x[:2]]
    two = write.tensors_of("mlp.experts.down_proj", q, "transformers_experts")
    result = agree(apart, models.write(tmp_path / "two", two, CONFIG))
    assert [(c.kind, c.weight) for c in result.causes] == [
        ("absent", "mlp.experts.2.down_proj.weight")
    ]
    rows = models.spread((640, 128), 1)
    parts = {"q_proj": rows[:256], "k_proj": rows[256:384], "v_proj": rows[384:512]}
    parts = {f"attn.{name}": part for name, part in parts.items()}
    separate = models.write(tmp_path / "parts", models.quantized(parts, BLOCKS), CONFIG)
    fused = models.quantized({"attn.qkv_proj": rows}, BLOCKS)
    assert not agree(models.write(tmp_path / "all", fused, CONFIG), separate).ok


def test_a_fault_of_one_expert_is_not_that_of_all(tmp_path):
    x = models.spread((3, 128, 256), 0)
    rule = rules.by_name("vllm_block")
    sides = {
        "a": [rule.quantize(part) for part in x],
        "b": [rule.quantize(part + np.float32(1e-3)) for part in x],
    }
    wrong = sides["b"][0]
    sides["b"][0] = wrong._replace(scale_inv=np.full_like(wrong.scale_inv, np.nan))
    folders = []
    for name, q in sides.items():
        tensors = write.tensors_of("mlp.experts.w", q, "transformers_experts")
        folders.append(models.write(tmp_path / name, tensors, CONFIG))
    causes_of = {c.weight: c.kind for c in agree(*folders).causes}
    assert causes_of["mlp.experts.w[0]"] == "misread"
    assert causes_of["mlp.experts.w[1]"] == "unexplained"
