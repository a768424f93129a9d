"""The two sides of an agreement: each a rule, a quantizer of your own, or a checkpoint."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fp8ref.checkpoints import declared as configs
from fp8ref.checkpoints import layers, tensors, weights, write
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
from fp8ref.shared.errors import require
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scaling import Quantized

__all__ = ["Part", "Side", "high_precision", "places", "planted", "side"]

DTYPES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "uint8": "F8_E4M3",
}
"""{dtype of a quantizer's codes: safetensors' name of it}; bytes are taken for e4m3fn."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of one matrix of a weight: of a fused weight, or of the experts of a layer."""

    weight: StoredWeight
    matrix: tuple[int, ...] = ()
    rows: slice

    def quantized(self) -> Quantized | None:
        """Its codes and scales; None: its scales do not fit, or its rows cut a block."""
        if not self.weight.granularity or (self.rows.start or 0) % self.weight.height:
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
        return dataclasses.replace(weight, granularity=q.granularity, name=self.weight.name)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side: a rule, a function that quantizes, or the weights of a checkpoint.

    tensors   of a checkpoint, those in high precision too.
    """

    label: str
    rule: WeightRule | None = None
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    weights: Mapping[str, StoredWeight] = field(default_factory=dict)
    declared: Declared = field(default_factory=Declared)

    def locate(
        self, name: str, shape: tuple[int, ...], matrix: tuple[int, ...] = ()
    ) -> Part | None:
        """Where a weight [N, K] is stored, alone, in a fused weight, or among the experts of a
        layer in one tensor; None: it is not quantized.

        matrix   the index of an expert, where ``name`` has all of them.
        """
        for stored, index, behind in places(name):
            weight, matrix = self.weights.get(stored), matrix or index
            if weight is None or len(weight.shape) != len(matrix) + 2:
                continue
            first = 0 if behind is None else weight.shape[-2] - (behind + 1) * shape[-2]
            fits = behind is not None or weight.shape[-2] == shape[-2]
            if weight.shape[-1] == shape[-1] and fits and first >= 0:
                return Part(weight=weight, matrix=matrix, rows=slice(first, first + shape[-2]))
        return None


def places(name: str) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    """(weight, matrix, parts behind it) where a weight may be stored; None: it is the whole, or
    the first part of several."""
    yield name, (), None
    places: list[tuple[str, str, tuple[int, ...]]] = [(name, ".weight", ())]
    if expert := re.fullmatch(r"(.*\.experts)\.(\d+)(\.\w+)\.weight", name):
        yield expert[1] + expert[3], (int(expert[2]),), None
        places.append((expert[1] + expert[3], "", (int(expert[2]),)))
    for stored, ending, matrix in places:
        parent, _, last = stored.removesuffix(ending).rpartition(".")
        for fused, parts in layers.GROUPS.items():
            if last in parts:
                behind = len(parts) - 1 - parts.index(last)
                yield f"{parent}.{fused}{ending}", matrix, behind


def side(source: Any, originals: Mapping[str, StoredTensor]) -> Side:
    """A side of a rule or its name, a function or ``module:function``, or a checkpoint's path.

    originals   what a function is asked with.
    Raises:     ValueError: none of these; a checkpoint that cannot be read; a function that
                refuses every weight.
    """
    if isinstance(source, WeightRule):
        return Side(label=source.name, rule=source)
    if isinstance(source, Path) or (isinstance(source, str) and Path(source).exists()):
        stored = tensors.stored(Path(source), lambda line: None)
        return Side(
            label=str(source),
            tensors=stored,
            weights={k: w for k, w in weights.find(stored).items() if len(w.shape) > 1},
            declared=configs.read(Path(source)),
        )
    if isinstance(source, str) and source.partition(":")[2] in ("", *rules.SOURCES):
        try:
            return Side(label=source, rule=rules.by_name(source))
        except ValueError as error:
            text = f"{source!r} is no path and no module:function, and no rule: {error}"
            raise ValueError(text) from error
    function: Callable = library_gemms.load(source) if isinstance(source, str) else source
    name = source if isinstance(source, str) else subjects.name_of(function)
    subject = subjects.wrap(name, function, shape=subjects.SHAPE)
    answers = {k: _answer(subject, k, whole[...]) for k, whole in originals.items()}
    held = {k: weight for k, weight in answers.items() if weight is not None}
    require(bool(held), f"{name} quantizes none of the weights. Call it on one to find the cause.")
    return Side(label=name, weights=held)


def _answer(subject: Subject, name: str, x: np.ndarray) -> StoredWeight | None:
    """What a function makes of a weight, as a checkpoint would hold it; None: it refuses it.

    A scale that multiplies into FP8 is stored as its reciprocal.
    """
    x = x.astype(np.float32)
    try:
        output = outputs.read(subject.ask(x), x)
    except RefusedError:
        return None
    codes, scales = output.codes, [s for s in output.scales.values() if s.size]
    text = f"{subject.name} gives codes {output.dtype} and {len(output.scales)} scales; a side has"
    fits = output.dtype in DTYPES and len(scales) == 1
    require(fits, f"{text} 8-bit codes of x's shape and one array of scales.")
    assert codes is not None
    codes_of_x = ArrayTensor.of(f"{name}.weight", codes, DTYPES[output.dtype])
    assert codes_of_x.fmt is not None
    size = np.abs(x).mean() / max(np.abs(cast.decode(codes, codes_of_x.fmt)).mean(), 1e-30)
    with np.errstate(all="ignore"):
        out = min(scales[0], 1 / scales[0], key=lambda s: abs(np.log(np.median(s) / size)))
    scale = ArrayTensor.of(f"{name}.weight_scale_inv", np.asarray(out, np.float32), "F32")
    return weights.find({t.name: t for t in (codes_of_x, scale)}).get(f"{name}.weight")


def high_precision(source: Any) -> dict[str, StoredTensor]:
    """The weights to quantize, by name: of a directory of safetensors, or arrays by name.

    Norms, embeddings, routers and the output layer stay in high precision and are left out.
    """
    if isinstance(source, Mapping):
        arrays = {name: np.asarray(x, np.float32) for name, x in source.items()}
        source = {name: ArrayTensor.of(name, x, "F32") for name, x in arrays.items()}
    else:
        source = tensors.stored(Path(source), lambda line: None)
    modules = {name: layers.module_of(name) for name in source}
    return {
        name: tensor
        for name, tensor in source.items()
        if tensor.dtype in tensors.FLOATS
        and len(tensor.shape) in (2, 3)
        and not any(re.search(p, modules[name]) for p in layers.NO_LINEARS.values())
    }


def planted() -> dict[str, np.ndarray]:
    """Weights of a layer that tell rules apart: float32 that bfloat16 rounds, amaxes below and
    above the floors of libraries, blocks of zeros, and rows that blocks of 128 do not divide."""
    random = np.random.default_rng(0)
    shapes = {
        "self_attn.q_proj": (256, 384),
        "self_attn.k_proj": (128, 384),
        "self_attn.v_proj": (128, 384),
        "mlp.gate_proj": (1024, 384),
        "mlp.up_proj": (256, 384),
        "mlp.down_proj": (200, 384),
    }
    sizes = dict(zip(shapes, (0.02, 1e-6, 1e-11, 0.02, 0.5, 0.02), strict=True))
    arrays = {}
    for name, shape in shapes.items():
        x = (
            random.standard_normal(shape)
            * sizes[name]
            * np.exp(random.standard_normal((shape[0], 1)))
        )
        arrays[f"model.layers.0.{name}.weight"] = x.astype(np.float32)
    gate = arrays["model.layers.0.mlp.gate_proj.weight"]
    gate[:128, :128] = 0
    # quotients of narrow numbers are ties more often, which a division and a product round apart
    gate[:] = cast.round_to(gate, BFLOAT16)
    return arrays
