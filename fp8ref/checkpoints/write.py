"""Quantized weights as libraries store them: the inverse of ``weights.find``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from fp8ref.checkpoints import rule as rules
from fp8ref.checkpoints.rule import WeightRule
from fp8ref.checkpoints.weights import FORMS, WeightForm
from fp8ref.formats import E4M3FN, E8M0FNU
from fp8ref.shared import package_data
from fp8ref.sim.quantize import cast, packing
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import granularity as granularities

__all__ = ["FORMATS", "WeightFormat", "quantize", "tensors_of"]


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How a checkpoint stores its weights.

    rule      that quantizes them, as ``rule.by_name`` takes it.
    form      the names of their tensors, of ``weights.FORMS``.
    config    ``quantization_config``, without the modules left in high precision.
    ignored   its key that lists those.
    """

    rule: str
    form: str
    config: Mapping[str, Any]
    ignored: str = "ignore"

    def quantization_config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """That of config.json, with the modules left in high precision."""
        return {**self.config, self.ignored: list(ignored)}

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether blocks divide a weight [N, K], or one block holds an axis: transformers takes
        the length of an axis over its number of scales for a block's."""
        blocks = granularities.lengths(rules.by_name(self.rule).granularity, 2, -1)
        sizes = granularities.block_sizes(shape, blocks)
        return not any(n % min(size, n) for n, size in zip(shape, sizes, strict=True))


def _compressed(
    rule: str, form: str, layout: str, weights: dict, inputs: dict | None = None
) -> WeightFormat:
    """As compressed-tensors stores it; without ``inputs`` activations stay in high precision."""
    dynamic = {**inputs, "dynamic": True} if inputs else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": dynamic}
    config = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "config_groups": {"group_0": group},
    }
    return WeightFormat(rule=rule, form=form, config=config)


FORMATS = {
    name: WeightFormat(**table) if "config" in table else _compressed(**table)
    for name, table in package_data.tables(__file__, "formats").items()
}
"""Formats of a checkpoint by name.

deepseek            DeepSeek-V3's blocks of 128x128, as transformers' fine-grained FP8 reads them.
compressed-tensors  a scale for each output feature; activations one for each token.
mxfp8, nvfp4        as compressed-tensors stores them; with NVFP4 activations stay as they are.
"""


def quantize(weight: np.ndarray, rule: WeightRule, amax: float | None = None) -> Quantized:
    """``rule.quantize`` of a weight [N, K] that shares the scale of a tensor with others.

    amax      the largest magnitude of all of them; None: the weight's own.
    """
    if amax is None:
        return rule.quantize(weight)
    height = granularities.lengths(rule.granularity, 2, -1)[0] or 1
    count = -(-len(weight) // height)
    # below the weight, blocks that have the amax
    last = np.zeros((count * height + height - len(weight), weight.shape[1]), np.float32)
    last[-1, 0] = amax
    q = rule.quantize(np.concatenate([weight, last]))
    scale, scale_inv = (s[:count] if np.ndim(s) else s for s in (q.scale, q.scale_inv))
    return q._replace(codes=q.codes[: len(weight)], scale=scale, scale_inv=scale_inv)


def tensors_of(
    name: str, quantized: Quantized | Sequence[Quantized], form: WeightForm | str
) -> dict[str, np.ndarray]:
    """The tensors of a weight, of which ``weights.find`` makes the same codes and scales.

    name       that it has in high precision, such as ``model.layers.0.mlp.up_proj.weight``.
    quantized  a weight [N, K], or its experts', which become [E, N, K].
    form       or its name in ``weights.FORMS``.

    Shapes:    codes in the dtype of their format, of 4 bits two in a byte [N, K / 2]; scales
               ``granularity.scale_shape``, of a tensor [1]; the tensor's scale [1].
    Specials:  scales of MX blocks are e8m0 codes, as bytes, and of NVFP4's e4m3, if these formats
               have them all; else float32.
    Raises:    ValueError: an odd number of codes of 4 bits; as ``np.stack`` for experts.
    """
    form = FORMS[form] if isinstance(form, str) else form
    if not isinstance(quantized, Quantized):
        parts = [tensors_of(name, q, form) for q in quantized]
        return {key: np.stack([part[key] for part in parts]) for key in parts[0]}
    module, q = name.removesuffix(form.weight), quantized
    if q.fmt.bits == 8:
        codes = q.codes.view(np.dtype(getattr(ml_dtypes, f"float8_{q.fmt.name}")))
    else:
        codes = packing.pack(q.codes)
    if form.name == "gpt_oss":
        codes = codes.reshape(len(codes), -1, 16)
    tensors = {module + form.codes: codes, module + form.scale: _scales(q)}
    if form.tensor_scale:
        factor = np.float32(1 if q.tensor_scale_inv is None else q.tensor_scale_inv).reshape(1)
        with np.errstate(divide="ignore"):
            tensors[module + form.tensor_scale] = 1 / factor if form.divides else factor
    return tensors


def _scales(q: Quantized) -> np.ndarray:
    """The factors of blocks as stored."""
    numbers = np.asarray(q.scale_inv, np.float32)
    numbers = numbers.reshape(1) if numbers.ndim == 0 else numbers
    fmt = {"mx": E8M0FNU, "nvfp4": E4M3FN}.get(q.granularity.partition("_")[0])
    if fmt is None:
        return numbers
    codes = cast.encode(numbers, fmt)
    if not np.array_equal(cast.decode(codes, fmt), numbers, equal_nan=True):
        return numbers
    return codes if fmt == E8M0FNU else codes.view(ml_dtypes.float8_e4m3fn)
