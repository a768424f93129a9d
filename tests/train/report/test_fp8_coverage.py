import made_runs

from fp8ref.train.report import fp8_coverage

LAYER = "model.layers.0.mlp.up_proj"


def of(tmp_path, small, proof) -> dict:
    return {
        linear.path: linear
        for linear in fp8_coverage.gemms(made_runs.make(tmp_path / "run", small, [1.0], recipe="tensorwise", proof=proof))
    }


def gemm(which, a="f8e4m3fn", fp8=True) -> dict:
    return {"gemm": f"{LAYER}/{which}", "a": a, "b": "f8e4m3fn" if fp8 else "bf16", "accumulate": "slow", "fp8": fp8}


def test_a_gemm_is_what_was_seen(tmp_path, small):
    proof = {"read_from": "x", "gemms": [gemm("output"), gemm("grad_weight", "bf16", fp8=False)], "missing": []}
    assert of(tmp_path, small, proof)[LAYER].gemms == ("FP8: f8e4m3fn x f8e4m3fn, slow", "not seen", "high precision: bf16 x bf16")


def test_what_is_missing_dequantised_or_not_needed_is_called_so(tmp_path, small):
    proof = {
        "read_from": "x",
        "gemms": [gemm("output"), gemm("grad_input", "bf16", fp8=False)],
        "missing": [f"{LAYER}/output: planned f8e4m3fn x f8e4m3fn, fast; f8e4m3fn x f8e4m3fn, slow"],
        "on_dequantised_operands": [f"{LAYER}/grad_input"],
        "pruned": [f"{LAYER}/grad_weight"],
    }
    assert of(tmp_path, small, proof)[LAYER].gemms == ("MISSING", "dequantised: FP8 values, high-precision GEMM", "not needed")


def test_without_a_proof_there_is_only_the_plan(tmp_path, small):
    found = of(tmp_path, small, None)
    assert set(found[LAYER].gemms) == {"planned, no proof recorded"}
    assert (found[LAYER].plan, found[LAYER].shape) == ("tensorwise", "48 x 32")
    assert found["lm_head"].plan == "high precision: named by filter_fqns 'lm_head'"
    assert set(found["lm_head"].gemms) == {"high precision"}
