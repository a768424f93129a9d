"""Attention's operands: quantized, padded to whole steps, by heads and tiles (A-2, A-4, A-6)."""

import functools

import numpy as np

from fp8ref.formats import Format
from fp8ref.sim.attention import exponentials
from fp8ref.sim.attention.operands import hadamard
from fp8ref.sim.attention.operands import heads as head_scaling
from fp8ref.sim.attention.operands.heads import Heads
from fp8ref.sim.attention.operands.inputs import Problem
from fp8ref.sim.attention.softmax import Seen
from fp8ref.sim.gemm import accumulate as sums
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.sim.gemm.tensor_core import K_STEP, TensorCore
from fp8ref.sim.kernels.chains import chains_from
from fp8ref.sim.kernels.chains.chains import Rows
from fp8ref.sim.kernels.chains.vectors import LANES
from fp8ref.sim.quantize.scales import scale_inv_from_scale, scales_from_amax
from fp8ref.spec.attention.variant import MX
from fp8ref.spec.attention.variants import Variant


def quantize(problem: Problem, role_scales: dict) -> dict[str, Heads]:
    """q, k and v as the variant quantizes them, by role (A-2, A-13)."""
    variant, heads = problem.variant, problem.k.shape[1]
    quantized = functools.partial(
        head_scaling.quantize,
        fmt=variant.fmt,
        granularity=variant.granularity,
        policy=variant.policy,
        heads=heads,
    )
    q, k = problem.q, problem.k
    if variant.rotated:
        signs = hadamard.signs(q.shape[-1], problem.call.seed)
        q, k = hadamard.rotate(q, signs), hadamard.rotate(k, signs)
    return {
        "q": quantized(q, scale=role_scales.get("q")),
        "k": quantized(k, scale=role_scales.get("k")),
        "v": quantized(problem.v, scale=role_scales.get("v"), along_tokens=True),
    }


def probability_scale(variant: Variant, role_scales: dict) -> tuple[np.float32, np.float32]:
    """(scale, scale_inv) of the probabilities (A-8)."""
    if "s" in role_scales:
        scale = np.float32(head_scaling.given_scales(role_scales["s"], ()).scale)
    elif variant.p_scale == "state":
        scale = np.float32(scales_from_amax(np.float32(1), variant.fmt, variant.policy).scale)
    else:
        scale = np.float32(variant.p_scale)
    return scale, np.float32(scale_inv_from_scale(np.asarray(scale)))


class Parts:
    """Operands of single heads, padded, with a tile's scales, in tile order."""

    def __init__(self, problem: Problem, tensors: dict[str, Heads]) -> None:
        self.problem, self.tensors, self.variant = problem, tensors, problem.variant
        keys, features = problem.k.shape[2:]
        self.length = self.variant.tile(features, problem.call.mask)
        tiles = range(0, keys, self.length)
        self.tiles = [
            (n, min(n + self.length, keys))
            for n in (reversed(tiles) if self.variant.descending else tiles)
        ]
        self.plan = sums.by_name(self.variant.plan)
        # Zeros behind features and tokens change no bit (G-12), and make steps whole.
        features, tokens = (0, -features % K_STEP), (0, self.length + K_STEP)
        self.q = np.pad(tensors["q"].values, ((0, 0), (0, 0), (0, 0), features))
        self.k = np.pad(tensors["k"].values, ((0, 0), (0, 0), tokens, features))
        self.v = np.pad(tensors["v"].values, ((0, 0), (0, 0), tokens, (0, 0)))
        self.codes: dict[str, np.ndarray] = {}
        # whose chains take codes: of k, and of v with the keys last
        if isinstance(self.plan, Accumulation):
            k, v = (np.asarray(tensors[role].codes) for role in ("k", "v"))
            self.codes["k"] = np.pad(k, ((0, 0), (0, 0), (0, tokens[1] + LANES), features))
            v = np.pad(v, ((0, 0), (0, 0), tokens, (0, 0)))
            self.codes["v"] = v.swapaxes(2, 3).copy()
        self.rows: dict[tuple[int, int, int, int], Rows] = {}  # of q, as chains take them
        self.k_documents = np.pad(problem.k_documents, ((0, 0), tokens), constant_values=-1)
        # scale_inv of q and k, spread over heads; of v too, but for MX: tiles have their own
        shape_q, shape_k = problem.q.shape, problem.k.shape
        granularity = self.variant.granularity
        if granularity != "mx_1x32":
            self.inverse_q, self.inverse_k, self.inverse_v = (
                np.broadcast_to(
                    head_scaling.spread(tensors[role].scale_inv, shape, granularity),
                    (*shape[:3], 1),
                )
                for role, shape in (("q", shape_q), ("k", shape_k), ("v", shape_k))
            )
        self.cap = None if problem.call.softcap is None else problem.call.cap
        self.score_scale = problem.call.score_factor(shape_q[3])

    def scores(self, i: int, j: int, rows: slice, begin: int, end: int) -> np.ndarray:
        """Scores before the factors of ``factors``, [rows, keys padded to a multiple of 32]: sums
        of products of q and k (A-4); under a softcap hyperbolic tangents (A-22)."""
        s = self._sums(i, j, rows, begin, end)
        if self.cap is None:
            return s
        factors, factor = self._factors(i, j, rows.start, begin)
        for multiplier in (factor,) if self.variant.scores == "raw" else factors:
            s = s * multiplier
        return exponentials.tanh(s)

    def _sums(self, i: int, j: int, rows: slice, begin: int, end: int) -> np.ndarray:
        g = j // self.problem.group
        a = self.q[i, j, rows]
        b = self.k[i, g, begin : begin + width(begin, end)]
        formats = self.variant.fmt, self.variant.fmt
        if self.variant.granularity == "mx_1x32":
            q_scales, k_scales = (self.tensors[role].scale_inv for role in ("q", "k"))
            padded = np.zeros((len(b), b.shape[1] // MX), np.float32)
            padded[: end - begin] = k_scales[i, g, begin:end]
            return scaled_product(a, q_scales[i, j, rows], b, padded, formats, self.plan)
        if (
            isinstance(self.plan, Accumulation)
            and self.plan.unit.compiled
            and _is_one_chain(self.plan, a.shape[1])
        ):
            s = np.zeros((len(a), len(b)), np.float32)
            # those after the tile's are left out
            codes = self.codes["k"][i, g, begin : begin + -(-len(b) // LANES) * LANES]
            chains_from.go_on(s, self._packed(i, j, rows, self.plan.unit), codes, self.variant.fmt)
            return s
        return product(a, b, formats, self.plan)

    def _packed(self, i: int, j: int, rows: slice, unit: TensorCore) -> Rows:
        key = i, j, rows.start, rows.stop
        if key not in self.rows:
            self.rows[key] = chains_from.pack(
                self.q[i, j, rows],
                self.variant.fmt,
                unit.fused_width,
                unit.fraction_bits,
                unit.output_bits,
            )
        return self.rows[key]

    def factors(self, i: int, j: int, row: int, key: int) -> tuple[np.ndarray, np.float32]:
        """(factors of scaled scores, factor of raw ones) for rows and a tile (A-4, A-22)."""
        if self.cap is None:
            return self._factors(i, j, row, key)
        if self.variant.scores == "raw":
            return np.empty(0, np.float32), self.cap
        return np.array([self.cap], np.float32), np.float32(1)

    def _factors(self, i: int, j: int, row: int, key: int) -> tuple[np.ndarray, np.float32]:
        if self.variant.granularity == "mx_1x32":
            return np.array([self.score_scale], np.float32), np.float32(1)
        inverse_q = self.inverse_q[i, j, row, 0]
        inverse_k = self.inverse_k[i, j // self.problem.group, key, 0]
        if self.variant.scores == "raw":
            return np.empty(0, np.float32), np.float32(self.score_scale * (inverse_q * inverse_k))
        values = {"scale": self.score_scale, "q": inverse_q, "k": inverse_k}
        values["qk"] = inverse_q * inverse_k
        return np.array([values[name] for name in self.variant.factors], np.float32), np.float32(1)

    def values(self, i: int, j: int, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """(v [keys padded, D], its scale_inv inside the tile)."""
        g = j // self.problem.group
        v = self.v[i, g, begin : begin + width(begin, end)]
        if self.variant.granularity == "mx_1x32":
            return v, self.tensors["v"].scale_inv[i, g, begin // MX : -(-end // MX)]
        return v, self.inverse_v[i, g, begin, 0]

    def codes_of_values(self, i: int, j: int, begin: int, end: int) -> np.ndarray | None:
        """Codes of v of a tile, [D, keys padded]; None of a plan that takes none."""
        if not self.codes:
            return None
        return self.codes["v"][i, j // self.problem.group, :, begin : begin + width(begin, end)]

    def seen(self, i: int, rows: slice, begin: int, end: int) -> Seen:
        """Which keys of a tile the rows see."""
        p = self.problem
        low, high = p.low[rows] - begin, np.minimum(p.high[rows], end) - begin
        documents = self.k_documents[i, begin : begin + width(begin, end)]
        return Seen(low, high, p.q_documents[i, rows], documents)


def _is_one_chain(plan: Accumulation, k: int) -> bool:
    """Whether the plan sums all of k in one chain."""
    return plan.split_k == 1 and (plan.promotion is None or plan.promotion >= k)


def width(begin: int, end: int) -> int:
    """The keys of a tile, padded to whole steps."""
    return -(-(end - begin) // K_STEP) * K_STEP


def product(
    a: np.ndarray, b: np.ndarray, formats: tuple[Format, Format], plan: str | Accumulation
) -> np.ndarray:
    """a [M, K] times b [N, K] of these formats, by a plan of section G: float32 [M, N]."""
    if not isinstance(plan, Accumulation):
        return sums.exact_sum(a, b) if plan == "exact" else sums.f32(a, b)
    if behind := -a.shape[1] % K_STEP:
        a, b = (np.pad(x, ((0, 0), (0, behind))) for x in (a, b))
    return np.ascontiguousarray(sums.chains(a, b, *formats, plan))


def scaled_product(
    a: np.ndarray,
    a_scales: np.ndarray,
    b: np.ndarray,
    b_scales: np.ndarray,
    formats: tuple[Format, Format],
    plan: str | Accumulation = "exact",
) -> np.ndarray:
    """``product`` of blocks of 32 along K, each times both scales, added ascending from +0 (G-13):
    a_scales [M, ceil(K / 32)] and b_scales [N, ceil(K / 32)]."""
    totals = np.zeros((len(a), len(b)), np.float32)
    for n in range(a_scales.shape[1]):
        part = slice(n * MX, (n + 1) * MX)
        block = product(a[:, part], b[:, part], formats, plan)
        totals = totals + (block * a_scales[:, n, None]) * b_scales[:, n]
    return totals
