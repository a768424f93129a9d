"""Codes and scales are traced to the rule that made them of the original, or to the nearest."""

import contextlib

import ml_dtypes
import numpy as np
import pytest
from checkpoints import made, models

from fp8ref.checkpoints import audit, write
from fp8ref.checkpoints import rule as rules
from fp8ref.checkpoints.weights import FORMS
from fp8ref.formats import E2M1FN
from fp8ref.sim.quantize import cast, packing

X = {"a.up_proj": models.spread((300, 256), 1) * np.float32(1.0001)}
(NAME,) = X


def audited(tmp_path, tensors, original=X[NAME]):
    checkpoint = models.write(tmp_path / "fp8", tensors, {"quant_method": "x"})
    source = models.write(tmp_path / "high", {f"{NAME}.weight": original}, None)
    return audit.audit(checkpoint, originals=source)


@pytest.mark.parametrize(
    ("rule", "store"),
    [
        ("deepseek_v3_block", models.fp8("deepseek_v3_block", ".weight_scale_inv")),
        (
            "deepseek_v3_block:bfloat16",
            models.fp8("deepseek_v3_block:bfloat16", ".weight_scale_inv"),
        ),
        ("torchao_row", models.fp8("torchao_row")),
        ("sglang_token_tensor", models.fp8("sglang_token_tensor")),
        ("compressed_tensors_bf16_row", models.fp8("compressed_tensors_bf16_row")),
        ("te_mxfp8_mx", models.fp8("te_mxfp8_mx", shape=models.as_codes)),
        ("torchao_nvfp4_nv", models.nvfp4(".weight_scale_2", False)(X)),
    ],
)
def test_the_rule_is_found(tmp_path, rule, store, monkeypatch):
    monkeypatch.setattr("fp8ref.checkpoints.originals.PIECE", 256 * 128)
    result = audited(tmp_path, models.quantized(X, store))
    assert [f.to_dict() for f in result.findings if f.alarm] == []
    (row,) = result.rows
    wanted = rules.by_name(rule).name
    family = {row.made_by.split(", ")[0], *row.made_by.split(" and ")[0].split(", ")}
    own = rules.by_name(rule).quantize(X[NAME])
    assert wanted in family or any(
        np.array_equal(rules.by_name(name).quantize(X[NAME]).codes, own.codes) for name in family
    )
    if rule == "deepseek_v3_block:bfloat16":
        assert not any(name.endswith(":float32") for name in family), row.made_by


def test_a_narrow_original_names_what_it_is(tmp_path):
    store = models.fp8("vllm_block", ".weight_scale_inv")
    narrow = {NAME: X[NAME].astype(ml_dtypes.bfloat16).astype(np.float32)}
    result = audited(tmp_path, models.quantized(narrow, store), X[NAME].astype(made.BF16))
    assert result.ok
    assert result.rows[0].made_by


def test_the_nearest_rule_and_the_first_block_that_differs(tmp_path):
    tensors = models.quantized(X, models.fp8("deepseek_v3_block", ".weight_scale_inv"))
    codes = tensors[f"{NAME}.weight"].view(np.uint8)
    codes[200, 140] ^= 1
    result = audited(tmp_path, tensors)
    (finding,) = [f for f in result.findings if f.alarm]
    assert finding.kind == "original_differs"
    assert "1 of 76,800 codes and 0 of 6 scales, first in block (1, 1)" in finding.what
    assert "_block:float32" in finding.what
    assert result.rows[0].made_by == ""


def compressed_tensors_nvfp4(x: np.ndarray) -> models.Tensors:
    """NVFP4 of a bfloat16 weight as compressed-tensors 0.20.1 makes it, bit for bit.

    Its scales are bfloat16 until the second is multiplied, a scale of 0 becomes 1/8, and codes are
    divided by the quotient of both.
    """

    def bfloat16(value) -> np.ndarray:
        return np.asarray(value, np.float32).astype(made.BF16).astype(np.float32)

    blocks = x.reshape(len(x), -1, 16)
    factor = bfloat16(bfloat16(1 / np.abs(x).max()) * np.float32(2688))
    scale = factor * bfloat16(np.abs(blocks).max(axis=2) / np.float32(6))
    scale = np.minimum(scale, 448).astype(made.FP8["e4m3fn"])
    scale[scale == 0] = 0.125
    scaled = blocks / (scale.astype(np.float32) / factor)[..., None]
    codes = cast.encode(np.clip(scaled, -6, 6), E2M1FN).reshape(x.shape)
    return {
        f"{NAME}.weight_packed": packing.pack(codes),
        f"{NAME}.weight_scale": scale,
        f"{NAME}.weight_global_scale": factor.reshape(1),
    }


@pytest.mark.parametrize(("seed", "kind"), [(1, "original_near"), (2, "original_differs")])
def test_a_library_without_a_policy_is_a_note_unless_most_codes_differ(tmp_path, seed, kind):
    x = models.spread((300, 256), 1)
    x[0, :16] = 0
    tensors = compressed_tensors_nvfp4(x)
    result = audited(tmp_path, tensors, x if seed == 1 else models.spread((300, 256), seed))
    assert [f.kind for f in result.findings] == [kind]
    assert result.ok == (kind == "original_near")
    assert result.rows[0].made_by == ""


def test_codes_by_the_unrounded_scale_are_named(tmp_path):
    q = rules.by_name("vllm_block").quantize(X[NAME])
    up = rules.by_name("vllm_ue8m0_block").quantize(X[NAME])
    tensors = {f"{NAME}.weight": made.codes(q), f"{NAME}.weight_scale_inv": up.scale_inv}
    assert "codes by the unrounded scale" in audited(tmp_path, tensors).rows[0].made_by


@pytest.mark.parametrize(
    "original", [np.zeros((256, 300), np.float32), np.zeros((300, 256), np.int8)]
)
def test_a_weight_without_its_original(tmp_path, original):
    tensors = models.quantized(X, models.fp8("deepseek_v3_block", ".weight_scale_inv"))
    (finding,) = [f for f in audited(tmp_path, tensors, original).findings if f.alarm]
    assert finding.kind == "original_missing"


@pytest.mark.parametrize("compares", [False, True])
def test_the_bar_counts_codes_once_read_and_once_compared(tmp_path, monkeypatch, compares):
    weights = {f"{i}.up_proj": models.spread((1024, 1200), i) for i in range(2)}
    tensors = models.quantized(weights, models.fp8("vllm_block", ".weight_scale_inv"))
    checkpoint = models.write(tmp_path / "fp8", tensors, models.BLOCKS)
    high = {f"{name}.weight": x for name, x in weights.items()}
    source = models.write(tmp_path / "high", high, None)
    bars = []

    @contextlib.contextmanager
    def bar(title, total, *, shown):
        counts = []
        yield lambda by: counts.append(by)
        bars.append((title, total, shown, counts))

    monkeypatch.setattr("fp8ref.shared.console.bar", bar)
    audit.audit(checkpoint, originals=source if compares else None, progress=True)
    ((title, total, shown, counts),) = bars
    assert (title, total, shown) == ("audit, bytes", sum(counts), True)
    assert counts == [1024 * 1200] * (4 if compares else 2)


def together(tmp_path, rule: str, form: str, factor: float = 1.0):
    """The audit of q, k and v with one scale of a tensor, of their common amax times a factor."""
    high = {
        f"attn.{p}_proj.weight": models.spread((96, 128), i) * (i + 1) for i, p in enumerate("qkv")
    }
    high["attn.o_proj.weight"] = models.spread((96, 128), 9)
    amax = max(float(np.abs(x).max()) for x in high.values()) * factor
    tensors = {}
    for name, x in high.items():
        q = write.quantize(x, rules.by_name(rule), None if "o_proj" in name else amax)
        tensors |= write.tensors_of(name, q, form)
    checkpoint = models.write(tmp_path / "fp8", tensors, {"quant_method": "x"})
    return audit.audit(checkpoint, originals=models.write(tmp_path / "high", high, None))


@pytest.mark.parametrize(
    ("rule", "form"),
    [("te_nvfp4_nv", "compressed_tensors_nvfp4"), ("torchao_nvfp4_nv", "modelopt_nvfp4")],
)
def test_weights_that_share_a_tensors_scale(tmp_path, rule, form, monkeypatch):
    monkeypatch.setattr("fp8ref.checkpoints.originals.PIECE", 128 * 32)
    result = together(tmp_path / "right", rule, form)
    assert [f.to_dict() for f in result.findings if "original" in f.kind] == []
    assert all(row.made_by for row in result.rows)
    wrong = together(tmp_path / "wrong", rule, form, 1.5)
    assert {f.tensor for f in wrong.findings if f.kind.startswith("original_")} == {
        f"attn.{p}_proj.weight" for p in "qkv"
    }


def test_fp8_weights_that_share_a_tensors_scale(tmp_path):
    high = {
        f"attn.{p}_proj.weight": models.spread((96, 128), i) * (i + 1) for i, p in enumerate("qkv")
    }
    q = rules.by_name("sglang_token_tensor").quantize(np.concatenate([*high.values()]))
    tensors = {}
    for i, name in enumerate(high):
        part = q._replace(codes=q.codes[96 * i : 96 * (i + 1)])
        tensors |= write.tensors_of(name, part, "compressed_tensors")
    checkpoint = models.write(tmp_path / "fp8", tensors, {"quant_method": "x"})
    result = audit.audit(checkpoint, originals=models.write(tmp_path / "high", high, None))
    assert [f.to_dict() for f in result.findings if "original" in f.kind] == []
    assert all(row.made_by for row in result.rows)


@pytest.mark.parametrize("form", ["modelopt_nvfp4", "compressed_tensors_nvfp4"])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_the_scale_of_a_tensor_is_compared_too(tmp_path, form, factor):
    q = rules.by_name("te_nvfp4_nv").quantize(X[NAME])
    tensors = write.tensors_of(f"{NAME}.weight", q, form)
    (name,) = [n for n in tensors if n.endswith(FORMS[form].tensor_scale)]
    tensors[name] = tensors[name] * np.float32(factor)
    assert audited(tmp_path, tensors).ok == (factor == 1)


def test_a_wrong_weight_beside_right_ones_of_its_form_is_no_note(tmp_path):
    x = {f"{NAME}.weight": X[NAME], "b.down_proj.weight": X[NAME] * np.float32(0.5)}
    tensors = {}
    for name, weight in x.items():
        q = rules.by_name("te_nvfp4_nv").quantize(weight)
        tensors |= write.tensors_of(name, q, "compressed_tensors_nvfp4")
    (codes,) = [t for n, t in tensors.items() if n == f"{NAME}.weight_packed"]
    codes[:75] ^= 0x88  # signs
    checkpoint = models.write(tmp_path / "fp4", tensors, {"quant_method": "x"})
    source = models.write(tmp_path / "high", x, None)
    found = audit.audit(checkpoint, originals=source).findings
    assert [f.kind for f in found if f.alarm] == ["original_differs"]


def test_a_rule_of_an_earlier_weight_does_not_end_the_search(tmp_path, monkeypatch):
    monkeypatch.setattr("fp8ref.checkpoints.originals.PIECE", 2**14)
    small = X[NAME].copy()
    small[:128, :128] = 1e-12
    tail = X[NAME].copy()
    tail[128:] *= np.float32(1e-11)
    x = {"a.up_proj.weight": small, "b.up_proj.weight": tail}
    tensors = {}
    for (name, weight), rule in zip(x.items(), ("vllm_block", "flashinfer_block"), strict=True):
        tensors |= write.tensors_of(name, rules.by_name(rule).quantize(weight), "deepseek")
    checkpoint = models.write(tmp_path / "fp8", tensors, models.BLOCKS)
    result = audit.audit(checkpoint, originals=models.write(tmp_path / "high", x, None))
    assert result.ok
    assert "flashinfer_block" in result.rows[1].made_by


def test_four_bits_stored_as_signed_bytes(tmp_path):
    q = rules.by_name("mx_floor_mx", "e2m1fn").quantize(X[NAME])
    tensors = write.tensors_of(f"{NAME}.weight", q, "compressed_tensors")
    tensors[f"{NAME}.weight"] = tensors[f"{NAME}.weight"].view(np.int8)
    result = audited(tmp_path, tensors)
    assert "mx_floor_mx" in result.rows[0].made_by
