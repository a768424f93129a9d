"""The checks of one backend in a report: what it has, next to what the simulator has (spec B-1)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.kit.compare import (
    Check,
    Report,
    compare_bits,
    compare_codes,
    compare_scales,
    compare_values,
)
from fp8ref.crosscheck import device_gemm
from fp8ref.crosscheck.bounds import Part
from fp8ref.recipe import Gemm, GemmSpec
from fp8ref.sim.quantize.scaling import Quantized


@dataclass(frozen=True)
class BackendChecks:
    """The checks of one backend, named "<layer>/<role or gemm>/<codes|scale|value>/<backend>".

    backend   "jax" or "torch", where several run with their devices: "jax 2x2x2 shard_map".
    """

    report: Report
    backend: str

    def check(self, name: str, *, bound: float = 0.0) -> Check:
        """The check of that name, without the backend, created on first use."""
        return self.report.check(f"{name}/{self.backend}", bound=bound)

    def bits(self, name: str, value: np.ndarray, expected: np.ndarray, other: str = "sim") -> None:
        """Compare values with another's bit for bit."""
        compare_bits(self.check(name), value, expected, names=(self.backend, other))

    def values(self, name: str, value, expected, bound, names: tuple[str, str]) -> None:
        """Compare values of these names within a bound."""
        compare_values(self.check(name, bound=1.0), value, expected, bound, names=names)

    def operand(
        self, name: str, q: Quantized, codes: np.ndarray, scale: np.ndarray, hp: np.ndarray
    ) -> None:
        """Compare codes and scale of hp with the simulator's, bit for bit."""
        by_backend = {"sim": q.codes, self.backend: codes}
        compare_codes(self.check(f"{name}/codes"), by_backend, self.backend, q.fmt, hp)
        scales = {"sim": q.scale, self.backend: scale}
        compare_scales(self.check(f"{name}/scale"), scales, self.backend)

    def output(
        self,
        name: str,
        parts: Sequence[Part],
        spec: GemmSpec,
        out: np.ndarray,
        *,
        wide: bool = False,
    ) -> None:
        """Compare a GEMM's output with the simulator's (``device_gemm.compare``)."""
        check, names = self.check(f"{name}/value", bound=1.0), (self.backend, "sim")
        device_gemm.compare(check, self.backend, parts, spec, out, names=names, wide=wide)

    def misplanned(self, layer: str, which: Gemm, planned: bool, where: str = "") -> None:
        """Fail a GEMM that did not run as it was planned, in FP8 or not."""
        problem = "ran in FP8 and was not planned"
        if planned:
            problem = "was planned in FP8 and did not run"
        self.check(f"{layer}/{which}/value", bound=1.0).fail(f"the GEMM {problem}{where}")
