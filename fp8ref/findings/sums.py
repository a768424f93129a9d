"""Claims about sums: accumulation, reduction and attention's products, in the simulator."""

import numpy as np

from fp8ref.findings.casts import error
from fp8ref.findings.claim import Sample, Trial
from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.sim.distributed import gradient_reduction
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast, scaling

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""K of the GEMMs."""

RANKS = (2, 4, 8, 16, 32, 64)
"""Of the all-reduces."""


def _accumulation(trial: Trial, k: int, plan: str) -> tuple[np.ndarray, np.ndarray]:
    """A GEMM [32, K] x [32, K] of normal numbers in e4m3 by a plan, and the exact sums."""
    a, b = (scaling.quantize(trial.normal(32, k, stream=i), E4M3FN) for i in (0, 1))
    exact = gemm.matmul(a, b, accumulate="exact").astype(np.float64)
    return gemm.matmul(a, b, accumulate=plan).astype(np.float64), exact


def _by_length(trial: Trial) -> dict[str, list[float]]:
    return {
        label: [error(*_accumulation(trial, k, plan)) for k in LENGTHS]
        for label, plan in (("14 bits", "hopper_fast"), ("promoted every 128", "hopper_slow"))
    }


def accumulation_over_k(trial: Trial) -> Sample:
    """Error of Hopper's accumulation at K = 4096, over that at K = 512."""
    lines = _by_length(trial)
    fast = dict(zip(LENGTHS, lines["14 bits"], strict=True))
    return Sample(fast[4096] / fast[512], lines)


def promotion(trial: Trial) -> Sample:
    """Error of Hopper's accumulation at K = 4096, over that with sums promoted to float32 every
    128.
    """
    lines = _by_length(trial)
    at = LENGTHS.index(4096)
    return Sample(lines["14 bits"][at] / lines["promoted every 128"][at], lines)


def largest_error_of_accumulation(trial: Trial) -> Sample:
    """The largest relative error of an output at K = 4096, in percent, of positive numbers."""
    lines: dict[str, list[float]] = {label: [] for label in _LABELS}
    for k in LENGTHS:
        a, b = (scaling.quantize(np.abs(trial.normal(32, k, stream=i)), E4M3FN) for i in (0, 1))
        exact = gemm.matmul(a, b, accumulate="exact").astype(np.float64)
        for label, plan in _LABELS.items():
            out = gemm.matmul(a, b, accumulate=plan)
            lines[label].append(100 * float(np.abs(out / exact - 1).max()))
    return Sample(lines["14 bits"][LENGTHS.index(4096)], lines)


def accumulation_beside_casts(trial: Trial) -> Sample:
    """The error of accumulating 14 bits at K = 16384, over that of casting to e4m3."""
    lines: dict[str, list[float]] = {"casts": [], **{label: [] for label in _LABELS}}
    for k in LENGTHS:
        a, b = trial.normal(32, k), trial.normal(32, k, stream=1)
        _, exact = _accumulation(trial, k, "f32")
        lines["casts"].append(error(exact, a.astype(np.float64) @ b.astype(np.float64).T))
        for label, plan in _LABELS.items():
            lines[label].append(error(*_accumulation(trial, k, plan)))
    return Sample(lines["14 bits"][-1] / lines["casts"][-1], lines)


_LABELS = {"14 bits": "hopper_fast", "promoted every 128": "hopper_slow", "25 bits": "blackwell"}


def all_reduce_over_ranks(trial: Trial) -> Sample:
    """Error of a ring that adds in e4m3 over 64 ranks, over that of 4."""
    errors = []
    for ranks in RANKS:
        grads = [trial.normal(4096, stream=rank) for rank in range(ranks)]
        exact = np.sum([g.astype(np.float64) for g in grads], axis=0)
        shared = gradient_reduction.share(grads, prescale="inverse")
        total = cast.decode(gradient_reduction.ring(shared.codes), E4M3FN).astype(np.float64)
        errors.append(error(total * float(shared.scale_inv), exact))
    return Sample(errors[-1] / errors[RANKS.index(4)], {"a ring in e4m3": errors})


def attention_rounding_bias(trial: Trial) -> Sample:
    """The mean error of rounding P V of one head to bfloat16, in units of its root mean square,
    where two scores are the maximum, and P is 1 at both, minus where the exponent is shifted so
    that P is below 1. V is negative, and all other P are small.
    """
    draw = trial.random()
    lines: dict[str, list[float]] = {"P = 1 at both": [], "shifted by the maximum": []}
    v = -cast.round_to(draw.uniform(1, 4, (65536, 8)).astype(np.float32), BFLOAT16)
    for repeated in (1, 2, 4, 8):
        for label, top in (("P = 1 at both", 1.0), ("shifted by the maximum", np.exp(-2.0))):
            p = np.full(8, np.exp(-9.0) * top)
            p[:repeated] = top
            p = cast.round_to(p.astype(np.float32), BFLOAT16).astype(np.float64)
            total = (v * p).sum(1).astype(np.float32)
            off = cast.round_to(total, BFLOAT16).astype(np.float64) - total
            lines[label].append(float(-off.mean() / np.sqrt((off**2).mean())))
    return Sample(lines["P = 1 at both"][1] - lines["shifted by the maximum"][1], lines)
