"""Bounds of spec B on GEMM outputs, attention, logits, losses and gradients.

The bits of these values are not defined: they depend on the order of float32 sums.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.gemm import bound
from fp8ref.formats import BFLOAT16
from fp8ref.recipe import GemmSpec, Recipe
from fp8ref.sim import delayed
from fp8ref.sim import llama as model
from fp8ref.sim.gemm.tensor_core import TensorCore
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec import llama
from fp8ref.spec.hardware import Multiply

SAMPLES = 16  # runs of the simulated model under stochastic rounding
T_LOSS = 7.91  # Student's t, two-sided 1e-6, SAMPLES - 1 = 15 degrees of freedom (B-3)
SIGMAS = 8.0  # the bound on logits, as a multiple of sigma (B-2)

REPLICATES = 6
"""Training runs whose first rounding was stochastic."""

GRADIENT_FACTOR = 3.0
"""The bound on a gradient, as a multiple of the replicates' root mean square distance (B-5)."""

U = 2.0**-8
"""The largest error of a rounding to bfloat16 (8 significant bits), as a fraction of its result."""

T_CURVE = 9.1
"""Student's t, two-sided 1e-4, REPLICATES = 6 degrees of freedom (B-4).

The degrees are not one fewer, because the mean is known: it is the unperturbed run.
"""


class Part(NamedTuple):
    """The operands of a GEMM, all or those of one device, and the simulator's output of them.

    Shapes:   a [M, K]; b [N, K]; out float32 [M, N], rounded to bfloat16.
    """

    a: scaling.Quantized
    b: scaling.Quantized
    out: np.ndarray


def gemm(
    a: scaling.Quantized,
    b: scaling.Quantized,
    spec: GemmSpec,
    output: np.ndarray,
    simulated: np.ndarray,
    *,
    unit: TensorCore | None = None,
) -> np.ndarray:
    """Bound on |output - simulated| of a GEMM's bfloat16 outputs, elementwise, in float64 (B-1).

    unit      of tensor cores that multiplied, and under whose plan the output was simulated (B-16):
              each side errs by what its steps lose.
    Shapes:   a [M, K]; b [N, K]; output, simulated and the bound [M, N].
    Specials: NaN or Inf where an operand is.
    """
    rounded = bound.bound(a, b, output, simulated, out_dtype=BFLOAT16, epilogue=spec.epilogue)
    return rounded if unit is None else rounded + 2 * bound.tensor_core_bound(a, b, unit)


def summed_gemm(
    parts: Sequence[Part],
    spec: GemmSpec,
    output: np.ndarray,
    *,
    wide: bool,
    unit: TensorCore | None = None,
) -> np.ndarray:
    """Bound on |output - simulated| of a GEMM whose parts are rounded to bfloat16, summed over
    devices, and rounded again (P-8).

    wide      sums are float32, not bfloat16.
    Shapes:   output and the bound [M, N].
    """
    parts_bound = sum(gemm(a, b, spec, out, out, unit=unit) for a, b, out in parts)
    size = sum(np.abs(out).astype(np.float64) for *_, out in parts) + parts_bound
    # n parts take n - 1 additions. Each rounds a partial sum, of at most ``size``, by u of it; so
    # do the simulator's. Both results are then rounded to bfloat16, by U of about output.
    u = 2.0**-24 if wide else U
    sums = 2 * u * (len(parts) - 1) * size
    return parts_bound + sums + 2 * U * (np.abs(output) + parts_bound)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Attention of given queries, keys and values, and how far roundings can take it (B-11).

    All are float64 [B, T, H * D].

    exact          without roundings.
    before, after  with probabilities normalized before, or after, they are rounded.
    magnitude      sum of p |v|.
    spread         bound on the relative error of p's exponents.
    """

    exact: np.ndarray
    before: np.ndarray
    after: np.ndarray
    magnitude: np.ndarray
    spread: np.ndarray

    def distance(self, out: np.ndarray) -> float:
        """The largest distance of an output from the exact one, in units of the bound."""
        bound = (np.exp(2 * self.spread) * (1 + 2 * U) - 1) * self.magnitude + 2 * U * np.abs(out)
        error = np.abs(out - self.exact)
        return float(np.where(error == 0, 0, error / np.maximum(bound, 1e-300)).max())


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, config: llama.LlamaConfig) -> Attention:
    """Causal attention of three projections, taken before the rotary embedding.

    Shapes:   q, k, v [B, T, heads * head_dim]; k and v may have fewer heads (grouped queries).
    """
    dim = config.head_dim
    groups = config.num_attention_heads // config.num_key_value_heads
    cos, sin = (t.astype(np.float64) for t in llama.rotary_tables(config, q.shape[1]))
    # [B, H, T, D]
    q, k, v = (
        np.asarray(x, np.float64).reshape(*x.shape[:2], -1, dim).swapaxes(1, 2) for x in (q, k, v)
    )
    k, v = (np.repeat(x, groups, axis=1) for x in (k, v))

    def rotated(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rotary embedding of x: exact, rounded, and the sum of its terms' magnitudes."""
        first, second = np.split(x, 2, axis=-1)
        half = np.concatenate([-second, first], axis=-1)
        exact = x * cos + half * sin
        return exact, _rounded(exact), np.abs(x * cos) + np.abs(half * sin)

    (exact_q, near_q, size_q), (exact_k, near_k, size_k) = rotated(q), rotated(k)
    causal = np.tril(np.ones((q.shape[2], q.shape[2]), bool))
    exact_weights, exact_total = _exponentials(exact_q, exact_k, causal)
    p = exact_weights / exact_total
    weights, total = _exponentials(near_q, near_k, causal)
    # Each factor of a score errs by U; a third U is room for float32, U^2 and the exponential.
    sizes = np.where(causal, size_q @ size_k.swapaxes(-1, -2), 0)
    scores = sizes.max(-1, keepdims=True) / np.sqrt(dim)

    def features(x: np.ndarray) -> np.ndarray:
        """[B, H, T, D] -> [B, T, H * D]."""
        return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)

    return Attention(
        exact=features(p @ v),
        before=features(_rounded(_rounded(weights / total) @ v)),
        after=features(_rounded(_rounded(weights) @ v / total)),
        magnitude=features(p @ np.abs(v)),
        spread=features(np.broadcast_to(3 * U * scores, v.shape)),
    )


def _exponentials(
    q: np.ndarray, k: np.ndarray, causal: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    # [B, H, T, T]
    scores = np.where(causal, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights, weights.sum(-1, keepdims=True)


def _rounded(x: np.ndarray) -> np.ndarray:
    return cast.round_to(x, BFLOAT16).astype(np.float64)


def forward(
    tokens: np.ndarray,
    weights: Mapping[str, np.ndarray],
    config: llama.LlamaConfig,
    recipes: Mapping[str, Recipe],
    *,
    advance=lambda: None,
    multiply: Multiply | None = None,
    attention: str | None = None,
    states: Mapping[str, delayed.DelayedState] | None = None,
) -> tuple[np.ndarray, float, np.ndarray, float]:
    """Simulated logits and loss, and bounds on two backends' differences in them (B-2, B-3).

    Shapes:   tokens [B, T + 1]; logits [B, T, V]; their bound [B, T, 1].
    multiply  the simulated hardware of the backends' FP8 GEMMs, if any.
    attention the variant of their attention, if any; states: of its delayed scales.
    """
    # A worst-case bound over ten roundings in a row would exceed the logits. Stochastic rounding
    # samples what roundings do instead: two backends, which mostly round alike, differ at most as
    # much as two independent samples do. Pairs of samples give sigma.
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    numerics = model.Numerics(
        recipes=recipes, states=states or {}, multiply=multiply, attention=attention
    )
    simulate = functools.partial(model.forward, inputs, weights, config, numerics)
    nearest = simulate()
    losses, squares, previous = [], [], nearest
    for seed in range(SAMPLES):
        sample = simulate(seed=seed)
        losses.append(model.loss(sample, targets))
        if seed % 2:
            squares.append(((sample - previous) ** 2).mean(-1, keepdims=True))
        previous = sample
        advance()
    return (
        nearest,
        model.loss(nearest, targets),
        SIGMAS * np.sqrt(np.mean(squares, axis=0)),
        T_LOSS * float(np.std(losses, ddof=1)) * np.sqrt(2),
    )


def probe_weights(weights: Mapping[str, np.ndarray], *, seed: int) -> dict[str, np.ndarray]:
    """Weights at which every operation shows in the logits (B-6).

    At the usual initial weights scores and gates are near zero: attention is then uniform, however
    it is rotated or scaled. Matrices here are N(0, 1 / K), query, key and gate N(0, 2 / K), the
    embedding N(0, 1), norms and sinks 1 + N(0, 1/16).
    """
    rng = np.random.Generator(np.random.PCG64(seed))

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        value = rng.standard_normal(shape)
        if len(shape) == 1:
            return 1 + value / 4
        if "embed_tokens" in name:
            return value
        large = any(part in name for part in ("q_proj", "k_proj", "gate_proj"))
        return value * np.sqrt(2 if large else 1) / np.sqrt(shape[-1])

    drawn = {name: draw(name, value.shape) for name, value in weights.items()}
    return {name: value.astype(np.float32) for name, value in drawn.items()}


def rerounded(weights: Mapping[str, np.ndarray], *, seed: int) -> dict[str, np.ndarray]:
    """A replicate's weights: rounded stochastically, where M-2 rounds to nearest (B-4, B-5)."""
    return {
        name: cast.round_to(value, BFLOAT16, rounding="stochastic", seed=(seed << 16) + i)
        for i, (name, value) in enumerate(weights.items())
    }


def gradient(base: np.ndarray, replicates: list[np.ndarray]) -> float:
    """Bound on the norm of two backends' difference in a parameter's gradient (B-5).

    base, replicates   one backend's gradient, and that of its replicates.
    """
    squares = [np.square(r - base).sum() for r in replicates]
    return GRADIENT_FACTOR * float(np.sqrt(np.mean(squares)))


def curve(base: np.ndarray, replicates: np.ndarray) -> np.ndarray:
    """Bound on the difference of two backends' losses at each step (B-4).

    Shapes:   base [S], one backend's losses; replicates [R, S], its replicates'; the bound [S].
    """
    departure = np.maximum.accumulate(np.abs(replicates - base), axis=1)
    return T_CURVE * np.sqrt((departure**2).mean(axis=0))
