"""Weights are found under the names of libraries, and are the numbers that were quantized."""

import ml_dtypes
import numpy as np
import pytest
from checkpoints import made

from fp8ref.checkpoints import rule as rules
from fp8ref.checkpoints import weights
from fp8ref.checkpoints.tensors import stored
from fp8ref.sim.quantize import scale_layouts, scaling

X = made.weight((300, 384))


def found(tmp_path, tensors):
    return weights.find(stored(made.write(tmp_path, tensors)))


def pieces_of(weight, most=1 << 26) -> list:
    return [(*span, weight.quantized(*span)) for span in weight.spans(most)]


def check(weight, q, most=1 << 26) -> None:
    """The pieces of a weight are a Quantized, bit for bit."""
    pieces = pieces_of(weight, most)
    assert np.array_equal(np.concatenate([p.codes for *_, p in pieces]), q.codes)
    back = np.concatenate([scaling.dequantize(p) for *_, p in pieces])
    assert np.array_equal(back, scaling.dequantize(q))


@pytest.mark.parametrize(
    "rule",
    ["vllm_block", "vllm_group", "torchao_rowwise", "torchao_tensor", "deepgemm_ue8m0_block"],
)
@pytest.mark.parametrize("most", [1, 1 << 26])
def test_deepseek_and_transformers(tmp_path, rule, most):
    weight = found(tmp_path, made.deepseek("m", X, rule))["m.weight"]
    assert (weight.form.name, weight.fmt.name) == ("deepseek", "e4m3fn")
    assert weight.granularity == rules.by_name(rule).granularity
    assert (weight.scale_layout, weight.transposed) == ("row_major", False)
    check(weight, rules.by_name(rule).quantize(X), most)


def test_e8m0_scales_and_their_layouts(tmp_path):
    q = rules.by_name("mx_rceil_mx").quantize(X)
    codes = made.scale_codes(q.scale_inv).view(np.uint8)
    tensors = {"plain.weight": made.codes(q), "plain.weight_scale": codes}
    for layout in ("swizzled_128x4", "packed_ue8m0"):
        tensors[f"{layout}.weight"] = made.codes(q)
        tensors[f"{layout}.weight_scale"] = scale_layouts.store(codes, layout)
    tensors |= {"t.weight": made.codes(q), "t.weight_scale": np.ascontiguousarray(codes.T)}
    all_found = found(tmp_path, tensors)
    assert {name: w.scale_layout for name, w in all_found.items()} == {
        "plain.weight": "row_major",
        "swizzled_128x4.weight": "swizzled_128x4",
        "packed_ue8m0.weight": "packed_ue8m0",
        "t.weight": "row_major",
    }
    assert all_found["t.weight"].transposed
    for weight in all_found.values():
        assert weight.granularity == "mx_1x32"
        check(weight, q)


@pytest.mark.parametrize("form", ["modelopt_nvfp4", "compressed_tensors_nvfp4", "torchao_nvfp4"])
def test_nvfp4(tmp_path, form):
    form = weights.FORMS[form]
    q = rules.by_name("te_nvfp4_nv").quantize(X)
    factor = np.float32(1) / q.tensor_scale_inv if form.divides else q.tensor_scale_inv
    tensors = {
        f"m{form.codes}": made.codes(q),
        f"m{form.scale}": q.scale_inv.astype(ml_dtypes.float8_e4m3fn),
        f"m{form.tensor_scale}": np.float32([factor]),
    }
    weight = found(tmp_path, tensors)["m.weight"]
    assert (weight.form, weight.fmt.name, weight.shape) == (form, "e2m1fn", X.shape)
    piece = weight.quantized()
    assert np.array_equal(piece.codes, q.codes)
    assert np.array_equal(piece.scale_inv, q.scale_inv)
    back, again = float(piece.tensor_scale_inv), np.float32(1) / np.float32([factor])[0]
    assert back == (float(again) if form.divides else float(q.tensor_scale_inv))


def test_experts_in_one_tensor(tmp_path):
    experts = [made.weight((256, 128), seed) for seed in range(3)]
    q = [rules.by_name("deepseek_v3_block").quantize(x) for x in experts]
    tensors = {
        "experts.gate_up_proj": np.stack([made.codes(e) for e in q]),
        "experts.gate_up_proj_scale_inv": np.stack([e.scale_inv for e in q]),
    }
    weight = found(tmp_path, tensors)["experts.gate_up_proj"]
    assert weight.shape == (3, 256, 128)
    pieces = pieces_of(weight, 128 * 128)
    assert [(m, r.start) for m, r, _ in pieces] == [((e,), n) for e in range(3) for n in (0, 128)]
    for matrix, rows, piece in pieces:
        assert np.array_equal(piece.codes, q[matrix[0]].codes[rows])
        assert np.array_equal(scaling.dequantize(piece), scaling.dequantize(q[matrix[0]])[rows])


def test_gpt_oss(tmp_path):
    q = [rules.by_name("mx_floor_mx", "e2m1fn").quantize(made.weight((64, 96), s)) for s in (0, 1)]
    blocks = np.stack([made.codes(e).reshape(64, 3, 16) for e in q])
    scales = np.stack([made.scale_codes(e.scale_inv).view(np.uint8) for e in q])
    tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    weight = found(tmp_path, tensors)["experts.down_proj"]
    assert (weight.shape, weight.granularity) == ((2, 64, 96), "mx_1x32")
    for (expert,), _, piece in pieces_of(weight):
        assert np.array_equal(scaling.dequantize(piece), scaling.dequantize(q[expert]))


def test_codes_without_a_scale_and_scales_that_do_not_fit(tmp_path):
    q = rules.by_name("vllm_block").quantize(X)
    tensors = {"a.weight": made.codes(q), "b.weight": made.codes(q)}
    tensors |= {"b.weight_scale_inv": np.ones((5, 7), np.float32), "norm.weight": X[0]}
    all_found = found(tmp_path, tensors)
    assert all_found.keys() == {"a.weight", "b.weight"}
    assert all_found["a.weight"].scale is None
    for weight in all_found.values():
        with pytest.raises(ValueError, match="do not fit"):
            pieces_of(weight)


@pytest.mark.parametrize("rule", ["vllm_block", "vllm_group", "torchao_rowwise", "torchao_tensor"])
def test_numbers_at_an_index(tmp_path, rule):
    weight = found(tmp_path, made.deepseek("m", X, rule))["m.weight"]
    whole = scaling.dequantize(rules.by_name(rule).quantize(X))
    rows = (slice(3, 140), slice(128, 256), slice(299, None), slice(5, 5), slice(300, 300))
    for index in (..., *rows, *((r, slice(7, 130)) for r in rows), (slice(None), slice(0, 0))):
        assert np.array_equal(weight[index], whole[index])
    assert np.array_equal(weight[::7, 3], whole[::7, 3])
    assert np.array_equal(weight[4], whole[4])


def test_only_the_rows_of_an_index_are_read(tmp_path, monkeypatch):
    weight = found(tmp_path, made.deepseek("m", X, "vllm_block"))["m.weight"]
    pieces = []
    plain = weights.StoredWeight.quantized

    def quantized(self, matrix=(), rows=slice(None)):
        pieces.append(rows)
        return plain(self, matrix, rows)

    monkeypatch.setattr(weights.StoredWeight, "quantized", quantized)
    weight[slice(130, 200)]
    weight[slice(100, 129), slice(2)]
    assert pieces == [slice(128, 256), slice(0, 256)]
    assert "scales" not in vars(weight)
