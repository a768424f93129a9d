"""Simulated hardware for the backends to train under (spec G-19, G-20).

A ``Hardware`` names the accumulation plan of a recipe's fast GEMMs and that of its slow ones. It is
a function of arrays, as ``fp8ref.spec.hardware.Multiply`` asks: codes and scales in,
``gemm.matmul`` inside, float32 out. HARDWARE has them by name.
"""

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fp8ref.formats import Format
from fp8ref.shared import registry
from fp8ref.sim.gemm import accumulate as sums
from fp8ref.sim.gemm import block_scaled, gemm
from fp8ref.sim.gemm.accumulate import ACCUMULATIONS, Accumulation
from fp8ref.sim.gemm.tensor_core import K_STEP, MODELED, TensorCore
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import epilogue as epilogues
from fp8ref.spec.attention.variants import Variant
from fp8ref.spec.epilogue import Epilogue
from fp8ref.spec.granularity import by_name as granularity_of
from fp8ref.spec.hardware import Factor

__all__ = ["HARDWARE", "Hardware", "by_name"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A ``fp8ref.spec.hardware.Multiply``: by plan ``fast`` for fast GEMMs, ``slow`` for slow ones.

    Order:    K is padded with zeros to a multiple of 32, which changes no bit (G-12);
              ``gemm.matmul`` of the codes, under the recipe's epilogue.
    epilogue  replaces scale_then_round, the epilogue of a single library call; None: it stays. A
              unit_round_scale_round always stays: it is the framework's own multiplication after a
              GEMM under unit scales.
    unit      of a tensor core that applies the scales of blocks of 32 itself: it multiplies
              operands in such blocks (G-23), in the place of a plan. None: none does.
    Specials: no rows, columns or K: zeros; Inf and NaN as gemm.matmul.
    Raises:   ValueError: an unknown plan; an epilogue that takes a bias; a unit without block
              scales.
    """

    name: str
    fast: str | Accumulation
    slow: str | Accumulation
    epilogue: Epilogue | None = None
    unit: TensorCore | None = None

    def __post_init__(self) -> None:
        for plan in (self.fast, self.slow):
            sums.by_name(plan)
        if self.unit is not None and not self.unit.block_scales:
            raise ValueError(
                f"unit needs block scales, as MODELED['blackwell_mx']; got {self.unit.name!r}."
            )
        if self.epilogue is not None and self.epilogue.bias is not None:
            raise ValueError(
                f"linears have no bias; epilogue {self.epilogue.name!r} has. Use without_bias."
            )

    def __call__(
        self,
        a: Factor,
        b: Factor,
        *,
        accumulate: Literal["fast", "slow"],
        epilogue: str,
        out_dtype: Format,
    ) -> np.ndarray:
        if 0 in (*a.codes.shape, *b.codes.shape):
            return np.zeros((len(a.codes), len(b.codes)), np.float32)
        qa, qb = _quantized(a), _quantized(b)
        if self.unit is not None and all(
            granularity_of(q.granularity).reduced == self.unit.fused_width for q in (qa, qb)
        ):
            return block_scaled.matmul(qa, qb, unit=self.unit, out_dtype=out_dtype)
        plan = sums.by_name(self.fast if accumulate == "fast" else self.slow)
        return gemm.matmul(
            qa, qb, accumulate=plan, epilogue=self.finishing(epilogue), out_dtype=out_dtype
        )

    def finishing(self, epilogue: str) -> Epilogue:
        """The epilogue that this hardware runs where a recipe asks for ``epilogue``."""
        named = epilogues.by_name(epilogue)
        if self.epilogue is None or named.name != "scale_then_round":
            return named
        return self.epilogue

    def to_dict(self) -> dict[str, Any]:
        """Plans and epilogue as data, for a run's manifest."""
        epilogue_fields = None if self.epilogue is None else dataclasses.asdict(self.epilogue)
        unit_fields = {} if self.unit is None else {"unit": dataclasses.asdict(self.unit)}
        return {
            "name": self.name,
            "fast": _as_data(self.fast),
            "slow": _as_data(self.slow),
            "scale_then_round": epilogue_fields,
            **unit_fields,
        }


_OF_FLOAT16 = [Accumulation(name=name, unit=MODELED[name]) for name in ("hopper_f16", "ada_f16")]

HARDWARE = {
    h.name: h
    for h in (
        *(Hardware(name=name, fast=name, slow=name) for name in ("exact", "f32", *ACCUMULATIONS)),
        Hardware(name="hopper", fast="hopper_fast", slow="hopper_slow"),
        *(Hardware(name=plan.name, fast=plan, slow=plan) for plan in _OF_FLOAT16),
        Hardware(
            name="blackwell_mx", fast="blackwell", slow="blackwell", unit=MODELED["blackwell_mx"]
        ),
    )
}
"""Simulated hardware by name: each plan for all GEMMs; ``hopper`` with its fast and slow plan;
units with an accumulator of float16 (G-24); and ``blackwell_mx``, which is ``blackwell`` and
applies MX scales itself (G-23)."""


def by_name(name: "str | Hardware") -> Hardware:
    """The hardware of a name: a plan for all GEMMs, or 'hopper'; or a Hardware."""
    return registry.lookup("hardware is a Hardware or", HARDWARE, name, Hardware)


def attending(variant: Variant, hardware: Hardware | None) -> Variant:
    """A variant of attention whose products this hardware multiplies: each tile's by a GEMM of its
    own, so that ``promotion`` is 1 (G-19).

    None, or a variant above 8 bits: it stays as it is.
    Raises:   ValueError: MX blocks, which the backends multiply dequantized; an epilogue of the
              hardware's own.
    """
    if hardware is None or variant.fmt.bits != 8:
        return variant
    if variant.granularity == "mx_1x32" or hardware.epilogue is not None:
        raise ValueError(
            "attention on simulated hardware needs no MX blocks, and hardware without an epilogue; "
            f"got {variant.name!r} and {hardware.name!r}."
        )
    plan = hardware.fast if variant.plan in ("hopper_fast", "ada") else hardware.slow
    return dataclasses.replace(variant, plan=plan, promotion=1)  # type: ignore[arg-type]


def probed(accumulate: str | Accumulation, epilogue: Epilogue) -> Hardware:
    """Hardware with a probed plan and epilogue in every GEMM; its name hashes both."""
    unbiased, default = without_bias(epilogue), epilogues.EPILOGUES["scale_then_round"]
    own = None if dataclasses.replace(unbiased, name=default.name) == default else unbiased
    bare = Hardware(name="probed", fast=accumulate, slow=accumulate, epilogue=own)
    decisions = repr((bare.to_dict()["fast"], bare.to_dict()["scale_then_round"]))
    digest = hashlib.sha256(bytes(decisions, "utf-8")).hexdigest()
    return dataclasses.replace(bare, name=f"probed_{digest[:12]}")


def without_bias(epilogue: Epilogue) -> Epilogue:
    """The same scales and roundings, without the bias."""
    if epilogue.bias is None:
        return epilogue
    return dataclasses.replace(epilogue, name=f"{epilogue.name} without its bias", bias=None)


def _as_data(plan: str | Accumulation) -> Any:
    """A plan for JSON: its name if 'exact' or 'f32', else its fields."""
    accumulation = sums.by_name(plan)
    if isinstance(accumulation, str):
        return accumulation
    return dataclasses.asdict(accumulation)


def _quantized(factor: Factor) -> Quantized:
    """A factor as a Quantized, K padded to a multiple of 32 unless it has block scales (S-6)."""
    codes, scale_inv, fmt, granularity = factor
    missing = 0 if granularity_of(granularity).reduced is not None else -codes.shape[1] % K_STEP
    codes = np.pad(codes, ((0, 0), (0, missing))) if missing else np.ascontiguousarray(codes)
    scale_inv = np.asarray(scale_inv, np.float32)
    with np.errstate(divide="ignore"):
        scale = np.float32(1) / scale_inv  # which no GEMM takes
    return Quantized(codes, scale, scale_inv, fmt, granularity, 1)
