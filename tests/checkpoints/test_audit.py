"""Right checkpoints of every library get no alarm; a planted fault is found, in the right words."""

import json
import re
import types
from collections.abc import Callable

import numpy as np
import pytest
from checkpoints import made, models

from fp8ref.checkpoints import audit
from fp8ref.checkpoints import rule as rules
from fp8ref.sim.quantize import cast, scale_layouts

PAIRS = {"mlp.gate_proj": (300, 200), "mlp.up_proj": (300, 200), "mlp.down_proj": (200, 300)}


def column(scale_inv: np.ndarray) -> np.ndarray:
    return scale_inv.reshape(-1, 1)


def one(scale_inv: np.ndarray) -> np.ndarray:
    return np.asarray(scale_inv).reshape(1)


def torchao(name: str, x: np.ndarray) -> models.Tensors:
    q = rules.by_name("torchao_rowwise").quantize(x)
    return {f"{name}._weight_qdata": made.codes(q), f"{name}._weight_scale": column(q.scale_inv)}


def mxfp4(name: str, x: np.ndarray) -> models.Tensors:
    q = rules.by_name("mx_even_mx", "e2m1fn").quantize(x)
    codes = models.as_codes(q.scale_inv)
    return {f"{name}.weight_packed": made.codes(q), f"{name}.weight_scale": codes}


def shared(name: str, weights: models.Tensors) -> models.Tensors:
    """q, k and v, or gate and up, with one scale of their common amax."""
    q = rules.by_name("sglang_token_tensor").quantize(np.concatenate(list(weights.values())))
    ends = np.cumsum([len(x) for x in weights.values()])[:-1]
    tensors: models.Tensors = {}
    for last, codes in zip(weights, np.split(made.codes(q), ends), strict=True):
        tensors |= {f"{name}.{last}.weight": codes, f"{name}.{last}.weight_scale": one(q.scale_inv)}
    return tensors


LINEARS = models.linears()
FP32 = {name: x * np.float32(1.0001) for name, x in LINEARS.items()}
BLOCK = models.fp8("deepseek_v3_block", ".weight_scale_inv")
UE8M0 = models.BLOCKS | {"scale_fmt": "ue8m0"}
NVFP4 = models.compressed(num_bits=4, strategy="tensor_group", group_size=16)
NVFP4["config_groups"]["group_0"]["weights"]["scale_dtype"] = "torch.float8_e4m3fn"


def quantized(store: Callable, weights=LINEARS) -> models.Tensors:
    return models.quantized(weights, store)


RIGHT: dict[str, tuple[Callable[[], models.Tensors], dict, dict]] = {
    "deepseek": (lambda: quantized(BLOCK) | models.others(), models.BLOCKS, {}),
    "deepseek float32": (lambda: quantized(BLOCK, FP32) | models.others(), models.BLOCKS, {}),
    "deepseek ue8m0 as float32": (
        lambda: quantized(models.fp8("deepseek_v3_ue8m0_block", ".weight_scale_inv")),
        UE8M0,
        {},
    ),
    "deepseek ue8m0 as e8m0": (
        lambda: quantized(
            models.fp8("deepgemm_ue8m0_block", ".weight_scale_inv", made.scale_codes)
        ),
        UE8M0,
        {},
    ),
    "transformers experts": (models.experts, models.BLOCKS | {"modules_to_not_convert": []}, {}),
    "compressed-tensors tensor": (
        lambda: quantized(models.fp8("compressed_tensors_tensor", shape=one)) | models.others(),
        models.compressed(strategy="tensor"),
        {},
    ),
    "compressed-tensors channel": (
        lambda: quantized(models.fp8("compressed_tensors_bf16_row", shape=column)),
        models.compressed(strategy="channel"),
        {},
    ),
    "compressed-tensors block": (
        lambda: quantized(models.fp8("compressed_tensors_block")),
        models.compressed(strategy="block", block_structure=[128, 128]),
        {},
    ),
    "compressed-tensors NVFP4": (
        lambda: quantized(models.nvfp4(".weight_global_scale", True, ".weight_packed")(LINEARS)),
        NVFP4,
        {},
    ),
    "compressed-tensors MXFP4": (
        lambda: quantized(mxfp4),
        models.compressed(num_bits=4, strategy="group", group_size=32),
        {},
    ),
    "ModelOpt FP8": (
        lambda: quantized(models.fp8("sglang_token_tensor")) | models.others(),
        models.modelopt("FP8"),
        {},
    ),
    "ModelOpt NVFP4": (
        lambda: quantized(models.nvfp4(".weight_scale_2", False)(LINEARS)),
        models.modelopt("NVFP4"),
        {},
    ),
    "ModelOpt MXFP8": (
        lambda: quantized(models.fp8("modelopt_mx_mx", shape=models.as_codes)),
        models.modelopt("MXFP8"),
        {},
    ),
    "torchao": (
        lambda: quantized(torchao) | models.others(),
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8..PerRow"}}},
        {},
    ),
    "gpt-oss": (models.gpt_oss, {"quant_method": "mxfp4"}, {}),
    "fused": (
        lambda: (
            shared(
                "model.layers.0.self_attn",
                {
                    p: models.spread((128, 256), i) * (i + 1)
                    for i, p in enumerate(("q_proj", "k_proj", "v_proj"))
                },
            )
            | shared(
                "model.layers.0.mlp",
                {
                    p: models.spread((256, 256), i) * (i + 1)
                    for i, p in enumerate(("gate_proj", "up_proj"))
                },
            )
        ),
        models.modelopt("FP8"),
        {},
    ),
    "ragged": (lambda: quantized(BLOCK, models.linears(PAIRS)), models.BLOCKS, {}),
    "tied": (
        lambda: quantized(BLOCK) | models.others(tied=True),
        models.BLOCKS,
        {"tie_word_embeddings": True},
    ),
    "sharded": (lambda: quantized(BLOCK) | models.others(), models.BLOCKS, {"shards": 3}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_checkpoint_gets_no_alarm(tmp_path, name):
    tensors, quantization, keys = RIGHT[name]
    result = audit.audit(models.write(tmp_path, tensors(), quantization, **keys))
    assert [f.to_dict() for f in result.findings if f.alarm] == []
    assert result.exit_code == 0
    assert result.rows
    assert all(row.rule and row.granularity for row in result.rows)
    json.dumps(result.to_dict(), allow_nan=False)
    assert {row.rule for row in result.rows} <= RULES.get(name, {"amax / max"})


UP = {"rounded up to a power of two"}
TWO = {"amax / max in two levels"}
RULES = {
    "deepseek ue8m0 as float32": UP,
    "deepseek ue8m0 as e8m0": UP,
    "compressed-tensors NVFP4": TWO,
    "compressed-tensors MXFP4": {*UP, "MX floor"},
    "ModelOpt NVFP4": TWO,
    "ModelOpt MXFP8": UP,
    "gpt-oss": {"MX floor"},
}
"""{right checkpoint: the rules of its weights}, where they are not amax / max."""


Q = "model.layers.1.self_attn.q_proj"
WIDE = models.linears({"mlp.up_proj": (1024, 1152)}, 1)
(NAME,) = WIDE


def changed(base: Callable, name: str, change: Callable) -> Callable[[], models.Tensors]:
    """The tensors of a right checkpoint in which one is changed."""

    def build() -> models.Tensors:
        tensors = base()
        return tensors | {name: change(np.array(tensors[name]))}

    return build


def at(*index, value) -> Callable[[np.ndarray], np.ndarray]:
    """A change of one element."""

    def change(x: np.ndarray) -> np.ndarray:
        x[index] = value(x[index]) if callable(value) else value
        return x

    return change


def deepseek() -> models.Tensors:
    return quantized(BLOCK) | models.others()


def tensorwise() -> models.Tensors:
    return quantized(models.fp8("sglang_token_tensor", shape=one)) | models.others()


def modelopt4() -> models.Tensors:
    return quantized(models.nvfp4(".weight_scale_2", False)(LINEARS))


def mxfp8() -> models.Tensors:
    return quantized(models.fp8("te_mxfp8_mx", shape=models.as_codes), WIDE)


def wide() -> models.Tensors:
    return quantized(models.fp8("deepseek_v3_block", ".weight_scale_inv"), WIDE)


def high(*names: str, base=deepseek) -> Callable[[], models.Tensors]:
    """A right checkpoint in which weights were left in bfloat16."""

    def build() -> models.Tensors:
        tensors = base()
        for name in names:
            tensors = {k: v for k, v in tensors.items() if not k.startswith(f"{name}.weight_")}
            tensors[f"{name}.weight"] = LINEARS[name].astype(made.BF16)
        return tensors

    return build


def without(name: str, base=deepseek) -> Callable[[], models.Tensors]:
    return lambda: {k: v for k, v in base().items() if k != name}


def rounded_after() -> models.Tensors:
    tensors = {}
    for name, x in WIDE.items():
        q = rules.by_name("vllm_block").quantize(x)
        up = rules.by_name("vllm_ue8m0_block").quantize(x)
        tensors |= {f"{name}.weight": made.codes(q), f"{name}.weight_scale_inv": up.scale_inv}
    return tensors


def as_norm() -> models.Tensors:
    codes = made.codes(rules.by_name("deepseek_v3_tensor").quantize(np.ones((1, 384), np.float32)))
    return deepseek() | {"model.norm.weight": codes.reshape(384)}


def as_embedding(module: str) -> Callable[[], models.Tensors]:
    return lambda: deepseek() | BLOCK(module, models.spread((512, 384), 7))


def swizzled(codes: np.ndarray) -> np.ndarray:
    return scale_layouts.store(codes, "swizzled_128x4").reshape(codes.shape)


def exponents(scale_inv: np.ndarray) -> np.ndarray:
    return np.log2(scale_inv).astype(np.float32) + 127


def packed(scale_inv: np.ndarray) -> np.ndarray:
    codes = models.as_codes(scale_inv)
    return np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4))).view(np.float32)


def clipped(name: str, x: np.ndarray) -> models.Tensors:
    return BLOCK(name, np.clip(x, -0.02, 0.02)) if name == Q else BLOCK(name, x)


def stale(times: float, row: int, rule: str = "deepseek_v3_block") -> Callable:
    """A store whose codes of one row of blocks of a weight are made by larger scales."""

    def store(name: str, x: np.ndarray) -> models.Tensors:
        q = rules.by_name(rule).quantize(x)
        if name == Q:
            rows = slice(128 * row, 128 * row + 128)
            q.codes[rows] = cast.encode(cast.decode(q.codes[rows], q.fmt) / times, q.fmt)
        ending = ".weight_scale_inv" if rule.endswith("block") else ".weight_scale"
        return {f"{name}.weight": made.codes(q), name + ending: q.scale_inv}

    return store


def fnuz() -> models.Tensors:
    tensors = {}
    for name, x in LINEARS.items():
        q = rules.by_name("vllm_block", "e4m3fnuz").quantize(x)
        tensors[f"{name}.weight"] = q.codes.view(made.FP8["e4m3fn"])
        tensors[f"{name}.weight_scale_inv"] = q.scale_inv
    return tensors


SCALE = f"{Q}.weight_scale_inv"
MX = models.modelopt("MXFP8")
PATTERNS = models.BLOCKS | {"modules_to_not_convert": ["lm_head", "mlp.gate"]}
GATE = "model.layers.1.mlp.gate_proj"
UP_PROJ = "model.layers.1.mlp.up_proj"
DEEPSEEK, TENSOR, NV = models.BLOCKS, models.modelopt("FP8"), models.modelopt("NVFP4")
NAN8, FN = np.uint8(0x7F).view(made.FP8["e4m3fn"]), made.FP8["e4m3fn"]

FAULTS: dict[str, tuple[Callable[[], models.Tensors], dict | None, str, str, str]] = {
    # name: (tensors, config, kind, tensor, words)
    "a block's codes by a stale scale": (
        lambda: quantized(stale(4, 1)),
        DEEPSEEK,
        "code_below",
        Q,
        r"block \(1, 0\) has 112: .* 4 t",
    ),
    "a tensor's codes by a stale scale": (
        lambda: quantized(stale(4, 0, "sglang_token_tensor"), {Q: LINEARS[Q][:128]}),
        TENSOR,
        "code_below",
        Q,
        "largest of its codes is 112",
    ),
    "transformers#46763: scales rounded after the codes": (
        rounded_after,
        UE8M0,
        "rounded_after",
        NAME,
        "powers of two",
    ),
    "scales that are not powers of two, as the config says": (
        deepseek,
        UE8M0,
        "config_scale",
        "model.layers.0.self_attn.q_proj",
        "config says ue8m0",
    ),
    "one scale merged among powers of two": (
        changed(
            lambda: quantized(models.fp8("vllm_ue8m0_block", ".weight_scale_inv"), WIDE),
            f"{NAME}.weight_scale_inv",
            at(1, 2, value=lambda s: s * 0.7),
        ),
        DEEPSEEK,
        "not_power_of_two",
        NAME,
        "1 of 72 scales",
    ),
    "inverse of the scale": (
        changed(deepseek, SCALE, lambda s: 1 / s),
        DEEPSEEK,
        "scale_inverse",
        Q,
        "reciprocal",
    ),
    "inverse of NVFP4's tensor scale": (
        changed(modelopt4, f"{Q}.weight_scale_2", lambda s: 1 / s),
        NV,
        "scale_inverse",
        Q,
        "reciprocal of the tensor's",
    ),
    "e8m0 codes stored as numbers": (
        changed(RIGHT["deepseek ue8m0 as float32"][0], SCALE, exponents),
        UE8M0,
        "scale_exponents",
        Q,
        "whole numbers from 1",
    ),
    "vime#133: packed scales stored as raw ones": (
        changed(RIGHT["deepseek ue8m0 as float32"][0], SCALE, packed),
        UE8M0,
        "scale_packed",
        Q,
        "their bytes are e8m0",
    ),
    "scales transposed": (
        changed(mxfp8, f"{NAME}.weight_scale", lambda s: s.T.reshape(s.shape)),
        MX,
        "arrangement",
        NAME,
        "only if they are transposed",
    ),
    "scales of 128x128 blocks transposed": (
        changed(wide, f"{NAME}.weight_scale_inv", lambda s: s.T.reshape(s.shape)),
        DEEPSEEK,
        "arrangement",
        NAME,
        "only if they are transposed",
    ),
    "scales swizzled for cuBLAS": (
        changed(mxfp8, f"{NAME}.weight_scale", swizzled),
        MX,
        "arrangement",
        NAME,
        "swizzled",
    ),
    "scales of the row before": (
        changed(mxfp8, f"{NAME}.weight_scale", lambda s: np.roll(s, 1, axis=0)),
        MX,
        "arrangement",
        NAME,
        "shifted by a row",
    ),
    "scales of another weight": (
        changed(
            mxfp8, f"{NAME}.weight_scale", lambda s: np.random.default_rng(0).permuted(s, axis=1)
        ),
        MX,
        "unrelated",
        NAME,
        "do not depend on the codes",
    ),
    "blocks of another size than the config says": (
        lambda: quantized(models.fp8("vllm_group", ".weight_scale_inv")),
        DEEPSEEK,
        "config_blocks",
        "model.layers.0.self_attn.q_proj",
        "blockwise_1x128",
    ),
    "scales cut to whole blocks": (
        lambda: quantized(
            models.fp8("vllm_block", ".weight_scale_inv", lambda s: s[:-1]),
            {Q: models.spread((300, 384), 0)},
        ),
        DEEPSEEK,
        "scale_shape",
        Q,
        "do not fit",
    ),
    "e5m2 codes under a config of e4m3": (
        lambda: {
            f"{Q}.weight": np.zeros((128, 128), made.FP8["e5m2"]),
            SCALE: np.ones((1, 1), np.float32),
        },
        DEEPSEEK,
        "config_format",
        Q,
        "codes are e5m2",
    ),
    "bytes of e4m3fnuz labelled e4m3fn": (
        fnuz,
        DEEPSEEK,
        "nan_codes",
        "model.layers.0.self_attn.q_proj",
        "e4m3fnuz are labelled e4m3fn",
    ),
    "a NaN code": (
        changed(deepseek, f"{Q}.weight", at(130, 7, value=NAN8)),
        DEEPSEEK,
        "nan_codes",
        Q,
        r"element \(130, 7\)",
    ),
    "a scale of zero": (
        changed(deepseek, SCALE, at(1, 2, value=0)),
        DEEPSEEK,
        "zero_scale",
        Q,
        r"\(1, 2\) is 0",
    ),
    "a negative scale": (
        changed(deepseek, SCALE, at(1, 2, value=-1)),
        DEEPSEEK,
        "negative_scale",
        Q,
        "is negative",
    ),
    "a NaN scale": (
        changed(deepseek, SCALE, at(1, 2, value=np.nan)),
        DEEPSEEK,
        "nan_scale",
        Q,
        "is NaN",
    ),
    "an infinite scale": (
        changed(deepseek, SCALE, at(1, 2, value=np.inf)),
        DEEPSEEK,
        "infinite_scale",
        Q,
        "infinite",
    ),
    "clipped weights": (lambda: quantized(clipped), DEEPSEEK, "clipped", Q, "the tail was cut"),
    "verl#7519: a pattern that swallows gate_proj": (
        high(GATE, UP_PROJ),
        PATTERNS,
        "left_out",
        GATE,
        "'mlp.gate' was matched with any part",
    ),
    "a layer left out": (
        high(Q.replace("q_proj", "o_proj")),
        DEEPSEEK,
        "left_out",
        Q.replace("q_proj", "o_proj"),
        "no pattern of config.json excludes it",
    ),
    "a layer quantized that a pattern excludes": (
        deepseek,
        DEEPSEEK | {"modules_to_not_convert": ["model.layers.1"]},
        "excluded",
        Q,
        "'model.layers.1' of config.json",
    ),
    "a layer quantized that compressed-tensors ignores": (
        RIGHT["compressed-tensors block"][0],
        models.compressed(["re:.*self_attn.*"], strategy="block", block_structure=[128, 128]),
        "excluded",
        Q,
        "self_attn",
    ),
    "a norm quantized": (as_norm, DEEPSEEK, "not_a_linear", "model.norm.weight", "a vector"),
    "the embedding quantized": (
        as_embedding("model.embed_tokens"),
        DEEPSEEK,
        "not_a_linear",
        "model.embed_tokens.weight",
        "an embedding is quantized",
    ),
    "a router quantized": (
        as_embedding("model.layers.1.mlp.gate"),
        DEEPSEEK,
        "not_a_linear",
        "model.layers.1.mlp.gate.weight",
        "a router is quantized",
    ),
    "the output layer quantized": (
        as_embedding("lm_head"),
        DEEPSEEK,
        "not_a_linear",
        "lm_head.weight",
        "output layer",
    ),
    "q in FP8 beside k and v in bfloat16": (
        high(Q),
        DEEPSEEK,
        "fused_mixed",
        Q.replace("q_proj", "k_proj"),
        "in .*qkv_proj",
    ),
    "NVFP4 of gate and up by two tensor scales": (
        changed(modelopt4, f"{GATE}.weight_scale_2", lambda s: s * 2),
        NV,
        "fused_scales",
        GATE,
        "the scale of the tensor is",
    ),
    "NVFP4's tensor scale by a stale amax": (
        lambda: quantized(
            models.nvfp4(".weight_scale_2", False)({n: x * 4 for n, x in LINEARS.items()})
        ),
        NV,
        "tensor_scale",
        "model.layers.0.self_attn.k_proj",
        "largest of its blocks' scales",
    ),
    "codes without a scale": (without(SCALE), DEEPSEEK, "codes_alone", Q, "have no scale"),
    "a scale without codes": (
        lambda: deepseek() | {f"{Q}.weight": LINEARS[Q].astype(made.BF16)},
        DEEPSEEK,
        "scale_alone",
        SCALE,
        "no codes beside it",
    ),
    "no quantization_config": (deepseek, None, "config_missing", "", "no quantization_config"),
    "a quantization_config of weights in bfloat16": (
        models.others,
        DEEPSEEK,
        "config_alone",
        "",
        "no weight is quantized",
    ),
}
"""{fault: (its tensors, the config, and the kind, tensor and words of a finding that names it)}."""


MIXED = {"left_out", "fused_mixed"}
"""Findings that a layer in another precision has besides its own."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(tmp_path, name):
    tensors, quantization, kind, tensor, words = FAULTS[name]
    result = audit.audit(models.write(tmp_path, tensors(), quantization))
    hits = [
        f for f in result.findings if f.kind == kind and f.tensor in (tensor, f"{tensor}.weight")
    ]
    assert hits, [f.to_dict() for f in result.findings]
    said = hits[0].to_dict()
    assert re.search(words, f"{said['what']}; {said['cause']}"), said
    assert said["remedy"]
    assert result.exit_code == 1
    kinds = {f.kind for f in result.findings if f.alarm}
    assert kinds <= {kind} | (MIXED if kind in (*MIXED, "scale_alone") else set()), kinds


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        (np.zeros((0, 128), FN), {".weight_scale": np.ones((0, 1), np.float32)}),
        (np.zeros((16, 16), made.E8M0), {".weight_scale": np.ones((1, 1), np.float32)}),
        (
            np.zeros((16, 16), np.uint8),
            {".weight_scale": np.zeros((16, 2), FN), ".weight_scale_2": np.zeros(7, np.float32)},
        ),
        (np.zeros((16, 16), FN), {".weight_scale": np.zeros((16, 1), FN)}),
        (np.zeros((2, 16, 16), FN), {".weight_scale": np.full((2, 1, 1), np.inf, np.float32)}),
    ],
)
def test_odd_tensors_are_no_errors(tmp_path, codes, scales):
    tensors = {"m.weight": codes} | {f"m{ending}": value for ending, value in scales.items()}
    path = models.write(tmp_path, tensors, models.BLOCKS)
    json.dumps(audit.audit(path, originals=path).to_dict(), allow_nan=False)


def by_torch(path, tensors: dict, config: dict | None, metadata: dict | None = None) -> audit.Audit:
    """The audit of tensors of PyTorch beside their bfloat16 originals in ``path/high``."""
    save = pytest.importorskip("safetensors.torch").save_file
    path.mkdir(exist_ok=True)
    save(tensors, path / "model.safetensors", metadata=metadata)
    (path / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    return audit.audit(path, originals=path.parent / "high" if config else None)


@pytest.fixture
def original(tmp_path):
    """A weight of PyTorch's in bfloat16, kept under high/."""
    torch = pytest.importorskip("torch")
    weight = torch.from_numpy(models.spread((256, 384), 0)).to(torch.bfloat16)
    by_torch(tmp_path / "high", {"up_proj.weight": weight}, None)
    return weight


def test_what_torchao_saves(tmp_path, original):
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(384, 256, bias=False)})
    model["up_proj"].weight = torch.nn.Parameter(original)
    quantization.quantize_(model, quantization.Float8WeightOnlyConfig())
    tensors, metadata = support.flatten_tensor_state_dict(model.state_dict())
    config = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnly"}}}
    result = by_torch(tmp_path / "fp8", tensors, config, metadata)
    assert [f.to_dict() for f in result.findings] == []
    assert result.rows[0].granularity == "rowwise"
    assert result.rows[0].made_by


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_what_transformers_saves(tmp_path, original, scale_fmt):
    library = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from transformers import FineGrainedFP8Config

    config = FineGrainedFP8Config(scale_fmt=scale_fmt)
    quantizer = types.SimpleNamespace(quantization_config=config)
    tensors = library.Fp8Quantize(quantizer).convert({"up_proj.weight": original})
    result = by_torch(tmp_path / "fp8", tensors, json.loads(json.dumps(config.to_dict())))
    assert [f.to_dict() for f in result.findings] == []
    (row,) = result.rows
    assert row.made_by.startswith("transformers_block" if scale_fmt == "float" else "")
    assert row.rule.startswith("amax / max" if scale_fmt == "float" else "rounded up")


@pytest.mark.parametrize(
    ("strategy", "keys", "granularity"),
    [
        ("tensor", {}, "tensorwise"),
        ("channel", {}, "rowwise"),
        ("block", {"block_structure": [128, 128]}, "blockwise_128x128"),
        (
            "tensor_group",
            {"num_bits": 4, "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
            "nvfp4_1x16",
        ),
    ],
)
def test_what_compressed_tensors_saves(tmp_path, original, strategy, keys, granularity):
    library = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    nvfp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4")
    torch = pytest.importorskip("torch")
    arguments = library.QuantizationArgs(
        type="float", strategy=strategy, symmetric=True, **({"num_bits": 8} | keys)
    )
    n, k = original.shape
    sizes = {"tensor": (n, k), "channel": (1, k), "block": (128, 128), "tensor_group": (1, 16)}
    height, width = sizes[strategy]
    split = original.reshape(n // height, height, k // width, width)
    ends = split.amin(dim=(1, 3)), split.amax(dim=(1, 3))
    factor = helpers.generate_gparam(*original.aminmax()) if strategy == "tensor_group" else None
    scale, zero = helpers.calculate_qparams(*ends, arguments, global_scale=factor)
    scale = scale.reshape(1) if strategy == "tensor" else scale
    state = {"weight": original, "weight_scale": scale}
    if factor is None:
        codes = forward.quantize(original, scale, zero, arguments, dtype=torch.float8_e4m3fn)
        state |= {"weight": codes}
    else:
        scheme = library.QuantizationScheme(targets=["Linear"], weights=arguments)
        state |= {"weight_global_scale": factor}
        state = nvfp4.NVFP4PackedCompressor.compress(state, scheme)
    config = models.compressed((), strategy=strategy, **keys)
    tensors = {f"up_proj.{key}": value.contiguous() for key, value in state.items()}
    result = by_torch(tmp_path / "fp8", tensors, config)
    # no policy is that of its two levels
    kinds = {"original_near"} if strategy == "tensor_group" else set()
    assert {f.kind for f in result.findings} == kinds, [f.to_dict() for f in result.findings]
    assert (result.rows[0].granularity, bool(result.rows[0].rule)) == (granularity, True)
