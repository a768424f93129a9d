"""The dtype or the quantized format of exported weights (K-7)."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from fp8ref.checkpoints import layers, patterns, write
from fp8ref.checkpoints import rule as rules
from fp8ref.checkpoints.rule import WeightRule
from fp8ref.checkpoints.write import WeightFormat
from fp8ref.shared import errors
from fp8ref.shared.errors import ConfigError, require
from fp8ref.spec import llama
from fp8ref.train.config.config import Config
from fp8ref.train.models import hugging_face

__all__ = ["FORMATS", "SOURCES", "Precision"]

FORMATS = ("float32", "bf16", *write.FORMATS)
"""What ``fp8ref export --format`` takes."""

SOURCES = {"masters": "float32", "bf16": "bfloat16"}
"""{what is quantized: its dtype}."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """In which precision weights are exported.

    format  of ``FORMATS``. A quantized one holds the linears of the layers; embedding, output
            layer, norms and routers are bfloat16.
    source  what is quantized, of ``SOURCES``; None: the masters.

    Raises: ValueError: another format or source.
    """

    format: str = "float32"
    source: str | None = None

    def __post_init__(self) -> None:
        errors.one_of("--format", self.format, FORMATS)
        errors.one_of("--from", self.source or "masters", SOURCES)

    @property
    def quantized(self) -> WeightFormat | None:
        """The format that has codes; None: a dtype."""
        return write.FORMATS.get(self.format)

    @property
    def dtype(self) -> str:
        """That of weights without codes, as config.json names it."""
        return "float32" if self.format == "float32" else "bfloat16"

    @property
    def rule(self) -> WeightRule:
        """That quantizes the linears."""
        assert self.quantized is not None
        return rules.by_name(f"{self.quantized.rule}:{SOURCES[self.source or 'masters']}")

    @property
    def description(self) -> str:
        """In which precision which weights are."""
        if self.quantized is None:
            return self.dtype
        source = "bfloat16 weights" if self.source == "bf16" else "float32 masters"
        return f"linears of {source} by {self.rule.name}, all else {self.dtype}"

    def check(self, config: Config) -> None:
        """ConfigError unless a run's model has this format, and libraries read it."""
        if self.quantized is None:
            text = f"--format {self.format} quantizes nothing: leave --from out."
            return require(self.source is None, text, ConfigError)
        own = config.architecture.kind == "llama"
        kind = hugging_face.kind(config.model) if own else config.architecture.kind
        shapes = llama.parameter_shapes(config.model).items()
        ragged = [f"{n} {[*s]}" for n, s in shapes if is_linear(n) and not self._fits(s)]
        faults = {
            f"is of fp8ref's own models; this one is of kind {kind!r}": not own,
            "has no place for GraniteMoeShared's experts": kind == hugging_face.GRANITE,
            "has no experts: transformers 5.23 reads them with a scale for each row or block of "
            "128x128 alone": config.model.num_experts > 0 and self.format in ("mxfp8", "nvfp4"),
            f"has whole blocks; {', '.join(ragged[:2])} is not divided by them": bool(ragged),
        }
        for fault, holds in faults.items():
            text = f"--format {self.format} {fault}. Use --format bf16, or another format."
            require(not holds, text, ConfigError)

    def _fits(self, shape: tuple[int, ...]) -> bool:
        assert self.quantized is not None
        return self.quantized.fits((shape[-2], shape[-1]))

    def config(self, names: Iterable[str]) -> dict[str, Any]:
        """The keys of config.json; names: of the model's parameters, which routers are among."""
        if self.quantized is None:
            return {"dtype": self.dtype}
        routers = [n.removesuffix(".weight") for n in names if n.endswith(f"{llama.ROUTER}.weight")]
        quantization = self.quantized.quantization_config(["lm_head", *routers])
        return {"dtype": self.dtype, "quantization_config": quantization}

    def metadata(self, step: int) -> dict[str, str]:
        """That of the files: the format, the rule and what it quantized."""
        if self.format == "float32":
            return {}
        about = {"format": self.format, "step": str(step)}
        if self.quantized is not None:
            about |= {"rule": self.rule.name, "from": self.source or "masters"}
        return {f"fp8ref.{key}": value for key, value in about.items()}

    def stored(
        self, weights: Callable[[], Iterable[tuple[str, np.ndarray]]]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of a file, one weight at a time.

        weights   begins them anew, by the names of files. They are read twice for NVFP4: engines
                  hold q, k and v, and gate and up, in one tensor, whose scale is of their amax.
        """
        amaxes: dict[str, float] = {}
        if self.quantized is not None and self.rule.policy.two_level is not None:
            for name, value in filter(lambda weight: is_linear(weight[0]), weights()):
                group = patterns.fused_name(name.removesuffix(".weight"))
                amaxes[group] = max(amaxes.get(group, 0.0), float(np.abs(value).max()))
        for name, value in weights():
            if self.quantized is not None and is_linear(name):
                amax = amaxes.get(patterns.fused_name(name.removesuffix(".weight")))
                q = write.quantize(value, self.rule, amax)
                yield from write.tensors_of(name, q, self.quantized.form).items()
            else:
                yield name, value if self.format == "float32" else value.astype(ml_dtypes.bfloat16)


def is_linear(name: str) -> bool:
    """Whether a weight is that of a linear of a layer, which quantized formats hold as codes."""
    return name.removesuffix(".weight").rpartition(".")[2] in layers.LINEARS
