"""The bounds of SEMANTICS B, where bits are not defined: GEMM outputs, logits, the loss, loss curves."""

from collections.abc import Mapping

import numpy as np

from fp8ref.formats import BFLOAT16
from fp8ref.hardware import Multiply
from fp8ref.llama import LlamaConfig
from fp8ref.recipe import GemmSpec, Recipe
from fp8ref.sim import cast, llama, scaling

SAMPLES = 16  # runs of the simulated model under stochastic rounding
T_LOSS = 7.91  # Student's t, two-sided 1e-6, SAMPLES - 1 = 15 degrees of freedom
SIGMAS = 8.0  # B-2
REPLICATES = 6  # training runs whose first rounding was stochastic
GRADIENT_FACTOR = 3.0  # B-5
T_CURVE = 9.1  # Student's t, two-sided 1e-4, REPLICATES = 6 degrees of freedom: the mean is known, it is the unperturbed run


def gamma(n: int) -> float:
    """n u / (1 - n u), u = 2^-24: the relative error of n float32 roundings (Higham, section 3.1)."""
    return n * 2.0**-24 / (1 - n * 2.0**-24)


def gemm(a: scaling.Quantized, b: scaling.Quantized, spec: GemmSpec, found: np.ndarray, simulated: np.ndarray) -> np.ndarray:
    """B-1: elementwise bound, float64, on |found - simulated| for outputs [M, N] in bfloat16, from a [M, K] and b [N, K]; NaN or Inf where an operand is."""
    magnitudes = np.abs(scaling.dequantize(a)).astype(np.float64) @ np.abs(scaling.dequantize(b)).astype(np.float64).T
    roundings = 3 if spec.epilogue == "unit_round_scale_round" else 1
    largest = np.maximum(np.abs(found), np.abs(simulated)).astype(np.float64)
    exponent = np.maximum(np.frexp(largest)[1] - 1, BFLOAT16.emin)
    ulp = np.ldexp(1.0, exponent - BFLOAT16.mantissa_bits)
    return gamma(a.codes.shape[1] + 9) * magnitudes + roundings * ulp


def forward(
    tokens: np.ndarray,
    weights: Mapping[str, np.ndarray],
    config: LlamaConfig,
    recipes: Mapping[str, Recipe],
    *,
    advance=lambda: None,
    multiply: Multiply | None = None,
) -> tuple[np.ndarray, float, np.ndarray, float]:
    """Simulated logits and loss, and bounds on two backends' differences in them (B-2, B-3).

    Shapes:   tokens [B, T + 1]; logits [B, T, V]; their bound [B, T, 1].
    multiply  the hardware that the backends' FP8 GEMMs run under, if it is simulated.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    nearest = llama.forward(inputs, weights, config, recipes, multiply=multiply)
    losses, squares, previous = [], [], nearest
    for seed in range(SAMPLES):
        sample = llama.forward(inputs, weights, config, recipes, seed=seed, multiply=multiply)
        losses.append(llama.loss(sample, targets))
        if seed % 2:
            squares.append(((sample - previous) ** 2).mean(-1, keepdims=True))
        previous = sample
        advance()
    sigma = np.sqrt(np.mean(squares, axis=0))
    return nearest, llama.loss(nearest, targets), SIGMAS * sigma, T_LOSS * float(np.std(losses, ddof=1)) * np.sqrt(2)


def probe_weights(weights: Mapping[str, np.ndarray], *, seed: int) -> dict[str, np.ndarray]:
    """Weights at which everything in the model matters: at the usual initial ones scores and gates are near zero, so that
    attention is uniform whatever rotates or scales it. Matrices N(0, 1 / K), query, key and gate twice that; the embedding N(0, 1); norms 1 + N(0, 1/16)."""
    rng = np.random.Generator(np.random.PCG64(seed))

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        value = rng.standard_normal(shape)
        if len(shape) == 1:
            return 1 + value / 4
        if "embed_tokens" in name:
            return value
        gain = np.sqrt(2) if any(part in name for part in ("q_proj", "k_proj", "gate_proj")) else 1
        return value * gain / np.sqrt(shape[1])

    return {name: draw(name, value.shape).astype(np.float32) for name, value in weights.items()}


def rerounded(weights: Mapping[str, np.ndarray], *, seed: int) -> dict[str, np.ndarray]:
    """A replicate's weights (B-4, B-5): each rounded stochastically to the compute dtype, another choice at the first rounding of M-2."""
    return {
        name: cast.round_to(value, BFLOAT16, rounding="stochastic", seed=(seed << 16) + i)
        for i, (name, value) in enumerate(weights.items())
    }


def gradient(base: np.ndarray, replicates: list[np.ndarray]) -> float:
    """B-5: bound on the norm of two backends' difference in one parameter's gradient, from one backend's and its replicates'."""
    return GRADIENT_FACTOR * float(np.sqrt(np.mean([np.square(r - base).sum() for r in replicates])))


def curve(base: np.ndarray, replicates: np.ndarray) -> np.ndarray:
    """B-4: bound on two backends' losses at each step [S], from one backend's losses [S] and its replicates' [R, S]."""
    departure = np.maximum.accumulate(np.abs(replicates - base), axis=1)
    return T_CURVE * np.sqrt((departure**2).mean(axis=0))
