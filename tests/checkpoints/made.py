"""Checkpoints that tests write: tensors by name, and config.json."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from fp8ref.checkpoints import rule as rules
from fp8ref.sim.quantize import packing

FP8 = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
}
E8M0, BF16 = ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16


def weight(shape=(256, 384), seed=0) -> np.ndarray:
    """Normal numbers of a weight, float32 that bfloat16 holds."""
    x = np.random.default_rng(seed).standard_normal(shape) * 0.02
    return x.astype(BF16).astype(np.float32)


def write(path: Path, tensors: dict[str, np.ndarray], config: dict | None = None) -> Path:
    """A directory with model.safetensors and config.json."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({k: np.array(v, order="C") for k, v in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config or {}))
    return path


def deepseek(name: str, x: np.ndarray, rule="deepseek_v3_block") -> dict[str, np.ndarray]:
    """A weight as DeepSeek-V3 stores it."""
    q = rules.by_name(rule).quantize(x)
    return {f"{name}.weight": codes(q), f"{name}.weight_scale_inv": q.scale_inv}


def codes(q) -> np.ndarray:
    """Codes in the dtype of their format; of 4 bits two in a byte."""
    return packing.pack(q.codes) if q.fmt.bits == 4 else q.codes.view(FP8[q.fmt.name])


def scale_codes(scale_inv: np.ndarray) -> np.ndarray:
    """Powers of two as e8m0."""
    return scale_inv.astype(E8M0)
