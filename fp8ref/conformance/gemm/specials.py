"""NaN, infinities, signs of zero, and results at both ends of a GEMM's range.

spec G-2, G-6, G-11.
"""

import numpy as np

from fp8ref.conformance.gemm import epilogues, plans
from fp8ref.conformance.gemm.scaled_gemm import unscaled
from fp8ref.conformance.gemm.stimulus import Bench, Pairs, coded
from fp8ref.conformance.kit.finding import Finding
from fp8ref.formats import Format
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.spec.epilogue import Epilogue

NAN = 0x7FFFFFFF  # the bits of the one NaN that tensor cores give

KINDS = (
    "nan",
    "infinities",
    "zeros of sums",
    "small results",
    "large results",
    "epilogue with bias",
)
"""The findings that are compared with the simulator."""

ALIKE = (
    "as IEEE 754",
    "as the simulator has them",
    *(e.name for e in epilogues.candidates() if e.bias),
)
"""The values of those findings that agree with the simulator."""


def specials(bench: Bench) -> list[Finding]:
    """Find ``nan``, ``infinities`` and ``zeros of sums``: as G-6 states them, or other values."""
    one_a, one_b = _code(bench.fmt_a, 1.0), _code(bench.fmt_b, 1.0)
    nan_a, nan_b = bench.fmt_a.nan_code, bench.fmt_b.nan_code
    stimuli: dict[str, tuple[Pairs, str]] = {
        "NaN x 1": ({0: (nan_a, one_b)}, "nan"),
        "1 x NaN": ({0: (one_a, nan_b)}, "nan"),
        "NaN x 0": ({0: (nan_a, 0)}, "nan"),
        "1 x 1 - 1 x 1": ({0: (one_a, one_b), 1: (one_a | 0x80, one_b)}, "+0"),
    }
    if bench.fmt_a.negative_zero:  # fnuz has no -0
        stimuli["-0 x 1"] = ({0: (0x80, one_b)}, "+0")
    if bench.fmt_a.inf_code is not None:
        stimuli |= _infinities("a", bench.fmt_a.inf_code, one_b, left=True)
    if bench.fmt_b.inf_code is not None:
        stimuli |= _infinities("b", bench.fmt_b.inf_code, one_a, left=False)
    results = bench.run_codes(*coded((pairs for pairs, _ in stimuli.values()), bench.k))
    got = {name: _read(x) for name, x in zip(stimuli, results, strict=True)}
    findings = []
    groups = {
        "nan": [n for n, (_, e) in stimuli.items() if e == "nan" and "Inf" not in n],
        "infinities": [n for n in stimuli if "Inf" in n],
        "zeros of sums": [n for n, (_, e) in stimuli.items() if e == "+0"],
    }
    for what, names in groups.items():
        if not names:
            continue
        wrong = {n: got[n] for n in names if got[n] != stimuli[n][1]}
        words = "as IEEE 754"
        if wrong:
            words = ", ".join(f"{n} is {value}" for n, value in wrong.items())
        findings.append(Finding(what, words, ", ".join(f"{n} is {got[n]}" for n in names)))
    bits = {int(x.view(np.uint32)) for x in results if np.isnan(x)}
    if bits:
        listed = ", ".join(f"{b:08x}" for b in sorted(bits))
        evidence = f"bits of the NaNs above, widened to float32; tensor cores give {NAN:08x}"
        findings.append(Finding("nan_bits", listed, evidence))
    return findings


def extremes(
    bench: Bench, accumulate: str | Accumulation, epilogue: Epilogue, seed: int
) -> list[Finding]:
    """Find ``small results`` and ``large results``: at both ends of the output dtype, and beyond.

    Random operands are run under scales that move their results there.
    """
    drawn, findings = plans.draw_sample(bench, seed), []
    for what, exponent in (
        ("small results", bench.out.emin - 6),
        ("large results", int(np.frexp(bench.out.max)[1])),
    ):
        typical = int(np.frexp(np.median(np.abs(drawn.found[np.isfinite(drawn.found)])) or 1.0)[1])
        # scale multiplies into FP8: results are divided by both
        factor = 2.0 ** (-(exponent - typical) / 2)
        a, b, results = epilogues.under_scales(
            bench, [drawn.a, drawn.b], np.random.default_rng(seed), factor
        )
        sums = gemm.matmul(*unscaled(a, b), accumulate=accumulate)
        expected = gemm.finish(
            sums, a.scale_inv, b.scale_inv.T, epilogue=epilogue, out_dtype=bench.out
        )
        wrong = np.argwhere(expected.view(np.uint32) != results.view(np.uint32))
        size, words = np.abs(expected), ALIKE[1]
        evidence = f"{results.size} results, from {size.min():.3g} to {size.max():.3g} in magnitude"
        if len(wrong):
            at = tuple(wrong[0])
            words = (
                f"{len(wrong)} differ from the simulator, such as {results[at]:.9g} instead of "
                f"{expected[at]:.9g}"
            )
        findings.append(Finding(what, words, evidence))
    return findings


def _infinities(who: str, inf: int, one: int, *, left: bool) -> dict[str, tuple[Pairs, str]]:
    def pair(x: int, y: int) -> tuple[int, int]:
        return (x, y) if left else (y, x)

    return {
        f"Inf of {who} x 1": ({0: pair(inf, one)}, "inf"),
        f"Inf of {who} x -1": ({0: pair(inf, one | 0x80)}, "-inf"),
        f"Inf of {who} x 0": ({0: pair(inf, 0)}, "nan"),
        f"Inf - Inf of {who}": ({0: pair(inf, one), 1: pair(inf | 0x80, one)}, "nan"),
        f"Inf + Inf of {who}": ({0: pair(inf, one), 31: pair(inf, one)}, "inf"),
    }


def _code(fmt: Format, value: float) -> int:
    """The code of a power of two, a normal number."""
    return (int(np.log2(value)) + fmt.bias) << fmt.mantissa_bits


def _read(value: np.float32) -> str:
    if np.isnan(value):
        return "nan"
    if value == 0:
        return "-0" if np.signbit(value) else "+0"
    return f"{value:g}"
