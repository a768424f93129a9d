"""Reference quantizers of Transformer Engine and torchao 0.19, as their checkouts have them, give the
bytes of the policies. A checkout's folder is named by FP8REF_TRANSFORMER_ENGINE or FP8REF_TORCHAO;
without it the tests are skipped.
"""

import importlib.util
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8ref.conformance.inputs import fp4_inputs
from fp8ref.formats import BFLOAT16, E2M1FN, E4M3FN, E8M0FNU
from fp8ref.policy import ScalePolicy, TwoLevel
from fp8ref.sim.quantize import cast, packing, scaling

TE = "transformer_engine/pytorch/custom_recipes/"
NVFP4 = "test/prototype/moe_training/nvfp4_training/nvfp4_reference.py"
TRAINING = "torchao.prototype.moe_training.nvfp4_training"


def checkout(name: str) -> Path:
    folder = os.environ.get(name)
    if not folder:
        pytest.skip(f"{name} names no checkout")
    return Path(folder)


def load(path: Path, name: str, monkeypatch) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def transformer_engine(monkeypatch):
    """The modules of reference quantizers, whose parents, which need a GPU, are empty."""
    folder = checkout("FP8REF_TRANSFORMER_ENGINE") / TE

    class Quantizer:
        def __init__(self, *, rowwise, columnwise):
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    parents = ("", ".custom_recipes", ".quantized_tensor", ".tensor", ".tensor.utils")
    for name in ("transformer_engine", *(f"transformer_engine.pytorch{part}" for part in parents)):
        module = types.ModuleType(name)
        module.Quantizer, module.QuantizedTensorStorage = Quantizer, type("Storage", (), {})
        module.is_custom, module.__path__ = None, []
        monkeypatch.setitem(sys.modules, name, module)
    recipes = sys.modules["transformer_engine.pytorch.custom_recipes"]
    for name in ("reference_utils", "gemm"):
        module = load(folder / f"{name}.py", f"{recipes.__name__}.{name}", monkeypatch)
        setattr(recipes, name, module)
    return load(folder / "reference_nvfp4.py", f"{recipes.__name__}.reference_nvfp4", monkeypatch)


def tensors(rng, narrow=False):
    """Tensors of several sizes with ranges by row and block, blocks of zeros, and ties."""
    for exponent in (-40, -3, 0, 60):
        x = rng.standard_normal((64, 128)) * np.exp2(rng.uniform(-8, 6, (64, 1)))
        x *= np.exp2(rng.uniform(-8, 2, (1, 128 // 16))).repeat(16, 1)
        x[:16, 16:32] = 0
        x = np.ldexp(x, exponent).astype(np.float32)
        yield cast.round_to(x, BFLOAT16) if narrow else x
    ties = rng.choice(
        np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -5, -0.0]), (64, 128)
    )
    ties[:, ::16] = 6
    yield ties


def levels(mode: str) -> ScalePolicy:
    """The policy of a mode's words: an error and its largest scale, fast mathematics, rows."""
    words = mode.lower().split()
    decisions = {"tensor_granularity": "rowwise"} if "rows" in words else {}
    if words[:1] in (["mae"], ["mse"]):
        unit = "block" if "fast" in words else "input"
        decisions |= {"error": words[0], "largest": int(words[1]), "error_unit": unit}
    return ScalePolicy(name="mine", two_level=TwoLevel(tensor="encode", **decisions))


POLICIES = {
    "": {},
    "rows": {"row_scaled_nvfp4": True},
    "MAE 256 rows": {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "row_scaled_nvfp4": True},
    "MAE 256 fast": {
        "nvfp4_use_4over6": True,
        "nvfp4_e4m3_max": 256,
        "nvfp4_4over6_err_use_fast_math": True,
    },
    "MSE 448 fast rows": {
        "nvfp4_use_4over6": True,
        "nvfp4_4over6_err_mode": "MSE",
        "nvfp4_4over6_err_use_fast_math": True,
        "row_scaled_nvfp4": True,
    },
    "MAE 256": {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256},
    "MSE 256": {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "MSE"},
    "MAE 448": {"nvfp4_use_4over6": True},
    "MSE 448": {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": "MSE"},
}


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("mode", POLICIES)
def test_transformer_engines_nvfp4_is_the_simulators(transformer_engine, mode, rows, rng):  # S-22
    if "rows" in mode and rows == 16:
        pytest.skip("a square has no scale of a row")
    policy = levels(mode) if mode else "te_nvfp4"
    quantizer = transformer_engine.NVFP4QuantizerRef(
        transformer_engine.reference_utils.Fp4Formats.E2M1,
        quant_tile_shape=(rows, 16),
        **POLICIES[mode],
    )
    fours = fp4_inputs.tensors("float32")["fours"]
    for x in (*tensors(rng), *tensors(rng, narrow=True), fours):
        x = np.where(x == 0, np.float32(0), x)  # its comparisons drop the sign of -0
        theirs = quantizer.quantize(torch.from_numpy(x))
        for axis, codes, scale in (
            (-1, theirs.data, theirs.scale),
            (0, theirs.data_t, theirs.scale_t),
        ):
            q = scaling.quantize(
                x, E2M1FN, granularity=f"nvfp4_{rows}x16", policy=policy, axis=axis
            )
            ours = (q.codes, q.scale_inv) if axis else (q.codes.T, q.scale_inv.T)
            np.testing.assert_array_equal(ours[1].repeat(rows, 0), scale.float().numpy())
            np.testing.assert_array_equal(
                packing.pack(np.ascontiguousarray(ours[0])), codes.numpy()
            )


@pytest.fixture
def torchao(monkeypatch):
    folder = checkout("FP8REF_TORCHAO")
    for name in (TRAINING.rpartition(".")[0], TRAINING):
        module = types.ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    utils = f"{TRAINING}.hadamard_utils"
    load(folder / f"{utils.replace('.', '/')}.py", utils, monkeypatch)
    return folder


@pytest.mark.parametrize("rows", [1, 16])
def test_torchaos_nvfp4_reference_is_the_simulators(torchao, rows, rng, monkeypatch):  # S-22
    reference = load(torchao / NVFP4, "nvfp4_reference", monkeypatch)
    for x in (*tensors(rng), *tensors(rng, narrow=True)):
        for axis in (-1, 0):
            lines = torch.from_numpy(np.ascontiguousarray(x if axis else x.T))
            theirs = reference.nvfp4_reference_quantize(
                lines, lines.abs().max(), block=f"{rows}x16"
            )
            q = scaling.quantize(
                x, E2M1FN, granularity=f"nvfp4_{rows}x16", policy="te_nvfp4", axis=axis
            )
            ours = (q.codes, q.scale_inv) if axis else (q.codes.T, q.scale_inv.T)
            np.testing.assert_array_equal(ours[1], theirs.block_scale.float().numpy())
            np.testing.assert_array_equal(
                packing.pack(np.ascontiguousarray(ours[0])), theirs.codes.numpy()
            )


@pytest.mark.parametrize("mode", ["floor", "ceil", "even", "rceil"])
def test_torchaos_mx_of_0_19_is_the_simulators(torchao, mode, rng, monkeypatch):  # S-14, S-20
    mx = load(torchao / "torchao/prototype/mx_formats/mx_tensor.py", "mx_tensor_0_19", monkeypatch)
    with np.errstate(over="ignore"):
        x = (rng.standard_normal((256, 128)) * np.exp2(rng.uniform(-150, 126, (256, 1)))).astype(
            np.float32
        )
    x[0, 3], x[1, 4], x[2, :32], x[3, 5] = np.inf, np.nan, 0, np.finfo(np.float32).max
    for values in (x, cast.round_to(x, BFLOAT16)):
        scale, codes = mx.to_mx(
            torch.from_numpy(values), torch.float8_e4m3fn, 32, mx.ScaleCalculationMode(mode)
        )
        q = scaling.quantize(values, E4M3FN, granularity="mx_1x32", policy=f"mx_{mode}_0.19")
        np.testing.assert_array_equal(
            cast.encode(q.scale_inv, E8M0FNU), scale.view(torch.uint8).numpy()
        )
        np.testing.assert_array_equal(
            q.codes, cast.canonical_nans(codes.view(torch.uint8).numpy(), E4M3FN)
        )
