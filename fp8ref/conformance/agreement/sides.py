"""The two sides of an agreement: each a rule, a quantizer of your own, or a checkpoint."""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fp8ref.checkpoints import declared as configs
from fp8ref.checkpoints import layers, patterns, tensors, weights, write
from fp8ref.checkpoints import rule as rules
from fp8ref.checkpoints.declared import Declared
from fp8ref.checkpoints.rule import WeightRule
from fp8ref.checkpoints.tensors import ArrayTensor, StoredTensor
from fp8ref.checkpoints.weights import StoredWeight
from fp8ref.conformance.gemm import library_gemms
from fp8ref.conformance.kit import subject as subjects
from fp8ref.conformance.kit.subject import RefusedError, Subject
from fp8ref.conformance.quantizer import outputs
from fp8ref.formats import BFLOAT16
from fp8ref.shared import package_data
from fp8ref.shared.errors import require
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized

__all__ = ["Part", "Side", "high_precision", "is_linear", "is_path", "planted", "side"]

_TABLES = package_data.tables(__file__, "sides")

DTYPES: dict[str, str] = _TABLES["dtypes"]
"""{dtype of a quantizer's codes: safetensors' name of it}; bytes are taken for e4m3fn."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of one matrix of a weight: of a fused weight, or of the experts of a layer."""

    weight: StoredWeight
    matrix: tuple[int, ...] = ()
    rows: slice

    @property
    def cuts_a_block(self) -> bool:
        """Whether the rows before it have a part of its first block."""
        return bool(self.rows.start % self.weight.height)

    def quantized(self) -> Quantized | None:
        """Its codes and scales; None: its scales do not fit, or its rows cut a block."""
        if not self.weight.granularity or self.cuts_a_block:
            return None
        return self.weight.quantized(self.matrix, self.rows)

    def whole(self) -> StoredWeight | None:
        """A weight of its own, of which parts are copies; None: as ``quantized``."""
        if self.weight.shape[:-1] == (self.rows.stop,) and not self.rows.start:
            return self.weight
        q = self.quantized()
        if q is None:
            return None
        form = "deepseek" if q.tensor_scale_inv is None else "modelopt_nvfp4"
        arrays = write.tensors_of("x.weight", q, form).items()
        dtypes = DTYPES | {"uint8": "U8", "float32": "F32"}
        held = {name: ArrayTensor.of(name, x, dtypes[x.dtype.name]) for name, x in arrays}
        weight = weights.find(held)["x.weight"]
        scale, own = weight.scale, self.weight.scale
        if scale is not None and own is not None and own.dtype in tensors.FLOATS:
            # exact: they were of this dtype
            narrow = scale[...].astype(tensors.FLOATS[own.dtype])
            scale = ArrayTensor.of(scale.name, narrow, own.dtype)
        name, granularity = self.weight.name, q.granularity
        return dataclasses.replace(weight, granularity=granularity, name=name, scale=scale)

    @property
    def single_scale(self) -> float | None:
        """The one scale of the weight, or above its blocks; None: it has several."""
        weight = self.weight
        whole = weight.scales if weight.granularity == "tensorwise" else weight.tensor_factor
        return whole.item() if whole is not None and whole.size == 1 else None


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side: a rule, a function that quantizes, or the weights of a checkpoint.

    multiplies   whether the function's scale multiplies into FP8.
    tensors      of a checkpoint, those in high precision too.
    """

    label: str
    rule: WeightRule | None = None
    function: Subject | None = None
    multiplies: bool = False
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    weights: Mapping[str, StoredWeight] = field(default_factory=dict)
    declared: Declared = field(default_factory=Declared)

    @property
    def computes(self) -> bool:
        """Whether it quantizes weights in high precision, and has none of its own."""
        return self.rule is not None or self.function is not None

    def ask(self, x: np.ndarray) -> Part | None:
        """What the function makes of a weight [N, K], as a checkpoint would hold it; None: it
        refuses it.

        Raises:   ValueError: no codes of 8 bits, not one array of scales, or scales of no blocks.
        """
        assert self.function is not None
        try:
            output = outputs.read(self.function.ask(x), x)
        except RefusedError:
            return None
        scales = [s for s in output.scales.values() if s.size]
        text = f"{self.label} gives codes {output.dtype} and {len(scales)} arrays of scales"
        fits = output.codes is not None and output.dtype in DTYPES and len(scales) == 1
        require(fits, f"{text}; return 8-bit codes of x's shape and one array of scales.")
        assert output.codes is not None
        with np.errstate(all="ignore"):
            inv = np.asarray(1 / scales[0] if self.multiplies else scales[0], np.float32)
        codes = ArrayTensor.of("x.weight", output.codes, DTYPES[output.dtype])
        scale = ArrayTensor.of("x.weight_scale_inv", inv, "F32")
        weight = weights.find({t.name: t for t in (codes, scale)})["x.weight"]
        text = f"{self.label} gives scales {list(inv.shape)} for codes {list(x.shape)}"
        require(bool(weight.granularity), f"{text}; return one for the tensor, rows or blocks.")
        return Part(weight=weight, rows=slice(0, len(x)))

    def shares(self, part: Part | None) -> bool:
        """Whether a weight has one scale with others that engines hold in the same tensor."""
        if part is None or (scale := part.single_scale) is None:
            return False
        cut = part.rows.stop - part.rows.start < part.weight.shape[-2]
        return cut or self._single_scales[_group(part.weight.name), scale] > 1

    @cached_property
    def _single_scales(self) -> Counter[tuple[str, float | None]]:
        """How many weights of a group have one scale."""
        parts = (Part(weight=w, rows=slice(0, w.shape[-2])) for w in self.weights.values())
        return Counter((_group(p.weight.name), p.single_scale) for p in parts)


def _group(name: str) -> str:
    """The tensor in which engines hold a weight: all experts of a layer, q, k and v."""
    fused = patterns.fused_name(name.removesuffix(".weight"))
    return re.sub(r"(?<=\.experts\.)\d+(?=\.)", "N", fused)


def is_path(source: Any) -> bool:
    """Whether a side is a checkpoint."""
    return isinstance(source, Path) or (
        bool(source) and isinstance(source, str) and Path(source).exists()
    )


def side(source: Any) -> Side:
    """A side of a rule or its name, a function or ``module:function``, or a checkpoint's path.

    Raises:   ValueError: none of these; a checkpoint that cannot be read; as ``Side.ask``.
    """
    if isinstance(source, WeightRule):
        return Side(label=source.name, rule=source)
    if is_path(source):
        stored = tensors.stored(Path(source), lambda line: None)
        return Side(
            label=str(source),
            tensors=stored,
            weights={
                name: weight
                for name, weight in weights.find(stored).items()
                if len(weight.shape) > 1 and not weight.is_integer
            },
            declared=configs.read(Path(source)),
        )
    head, _, attribute = source.partition(":") if isinstance(source, str) else (None, "", "")
    if head is not None and (not attribute or head.rpartition("_")[2] in rules.GRANULARITIES):
        try:
            return Side(label=source, rule=rules.by_name(source))
        except ValueError as error:
            text = f"{source!r} is no path and no module:function, and no rule: {error}"
            raise ValueError(text) from error
    function = library_gemms.load(source) if isinstance(source, str) else source
    name = source if isinstance(source, str) else subjects.name_of(function)
    own = Side(label=name, function=subjects.wrap(name, function, shape=subjects.SHAPE))
    x = np.random.default_rng(0).standard_normal(subjects.SHAPE).astype(np.float32)
    part = own.ask(x)
    q = None if part is None else part.quantized()
    if q is None:
        return own
    # the mean code times the scale is the mean weight, by hundreds, or by its reciprocal
    size = np.abs(cast.decode(q.codes, q.fmt)).mean() * np.median(q.scale_inv)
    return dataclasses.replace(own, multiplies=bool(size > 100))


def high_precision(source: Any) -> dict[str, StoredTensor]:
    """The weights [N, K] and [E, N, K] in high precision of a directory of safetensors, or of
    arrays, by name.

    Raises:   ValueError: there are none.
    """
    if isinstance(source, Mapping):
        arrays = {name: np.asarray(x, np.float32) for name, x in source.items()}
        stored: dict[str, StoredTensor] = {
            name: ArrayTensor.of(name, x, "F32") for name, x in arrays.items()
        }
    else:
        stored = tensors.stored(Path(source), lambda line: None)
    parts = {part.name for weight in weights.find(stored).values() for part in weight.parts}
    plain = {
        name: tensor
        for name, tensor in stored.items()
        if tensor.dtype in tensors.FLOATS and len(tensor.shape) in (2, 3) and name not in parts
    }
    require(bool(plain), "--weights has no weights in high precision. Name those to quantize.")
    return plain


def is_linear(name: str) -> bool:
    """Whether engines quantize a weight: no norm, embedding, router or output layer."""
    module = layers.module_of(name)
    return not any(re.search(pattern, module) for pattern in layers.NO_LINEARS.values())


def planted() -> dict[str, np.ndarray]:
    """Weights of a layer that tell rules apart: float32 that bfloat16 rounds, amaxes below and
    above the floors of libraries, blocks of zeros, and rows that blocks of 128 do not divide."""
    random = np.random.default_rng(0)
    arrays = {}
    for name, (n, size) in _TABLES["planted"].items():
        x = random.standard_normal((n, 384)) * size * np.exp(random.standard_normal((n, 1)))
        arrays[f"model.layers.0.{name}.weight"] = x.astype(np.float32)
    gate = arrays["model.layers.0.mlp.gate_proj.weight"]
    gate[:128, :128] = 0
    # quotients of narrow numbers are ties more often, which a division and a product round apart
    gate[:] = cast.round_to(gate, BFLOAT16)
    return arrays
