"""A backend's amaxes and counts of P and dS in a pass, next to the simulator's (A-12, Q-13).

The simulator runs the backend's own q, k, v and do. Both count all elements, those that a cast
clipped, and those that it made 0. Where a sum or an exponential of the library moves an element
over the threshold of a cast, counts may differ: by no more elements than lie that near to it
(A-18). Nor is an element lost that is below 2^-126: a difference of equal numbers may be 0 in one
order and a rounding in another.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fp8ref.conformance.gemm.bound import gamma
from fp8ref.conformance.kit.compare import Report, compare_values
from fp8ref.crosscheck.attention import attention
from fp8ref.crosscheck.attention.attention import LARGEST, MASK, TANH, AttentionPass, U
from fp8ref.formats import Format
from fp8ref.sim.attention import attention as simulator
from fp8ref.sim.attention.attention import Result
from fp8ref.sim.attention.gradients import gradients as attention_gradients
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import GRADIENT_ROLES, ROLES, Variant

COUNTS = ("count", "saturated", "lost")
"""What is counted, in the order of what a pass shows as ``<what>/counts``."""

TINY = 2.0**-126  # smallest normal number: below it nothing counts as lost


class _Simulated(NamedTuple):
    """P or dS in the simulator's place.

    amax, counts   its own; counts by ``saturated`` and ``lost``.
    values, bound  magnitudes in float64, and A-18's bound on each.
    fmt, scale     of the cast.
    """

    amax: np.ndarray
    counts: Mapping[str, int]
    values: np.ndarray
    bound: np.ndarray
    fmt: Format
    scale: float


def check(
    report: Report,
    passes: Sequence[AttentionPass],
    variant: Variant | None,
    scales: Mapping[str, np.ndarray] | None = None,
) -> int:
    """Compare the amaxes and counts of P, and of dS where it is cast with one scale.

    scales    delayed ones by ``<layer>/<role>``.
    Checks:   ``<layer>/<p or ds>/<amax, count, saturated or lost>/<backend>``.
    Returns:  how many tensors were compared. Under microbatches P alone: passes are not paired.
    """
    compared = 0
    if variant is None or variant.fmt.bits != 8:
        return compared
    for layer in dict.fromkeys(one.layer for one in passes):
        forwards, backwards = (
            [one for one in passes if (one.layer, one.phase) == (layer, phase)]
            for phase in ("forward", "backward")
        )
        stored = {
            role: scales[f"{layer}/{role}"]
            for role in variant.roles
            if scales and f"{layer}/{role}" in scales
        }
        for one in forwards:
            finite = (np.isfinite(one.tensor(role)).all() for role in "qkv")
            if "p/counts" not in one.arrays or not all(finite):
                continue
            result = _forward(one, variant, stored)
            _compare(report, one, "p", _probabilities(one, variant, result))
            compared += 1
            cast_ds = variant.backward == "cast" and variant.granularity != "mx_1x32"
            if len(forwards) == len(backwards) == 1 and cast_ds:
                compared += _check_ds(report, one, backwards[0], result, variant, stored)
    return compared


def _forward(one: AttentionPass, variant: Variant, stored: Mapping[str, np.ndarray]) -> Result:
    scales = {role: x for role, x in stored.items() if role in ROLES}
    call = Call(variant=variant, mask=MASK, softcap=one.softcap, keep_s=True)
    q, k, v = map(one.tensor, "qkv")
    return simulator.forward(q, k, v, variant=call, scales=scales, sinks=one.sinks)


def _check_ds(
    report: Report,
    forward: AttentionPass,
    backward: AttentionPass,
    result: Result,
    variant: Variant,
    stored: Mapping[str, np.ndarray],
) -> int:
    do = backward.tensor("do")
    if "ds/counts" not in backward.arrays or not np.isfinite(do).all():
        return 0
    scales = {role: x for role, x in stored.items() if role in ("s", *GRADIENT_ROLES)}
    q, k, v = map(forward.tensor, "qkv")
    call = Call(variant=variant, mask=MASK, softcap=forward.softcap, keep_ds=True)
    gradients = attention_gradients.backward(do, q, k, v, result, variant=call, scales=scales)
    exact = attention.exact("ds", forward, backward, variant)
    assert exact is not None
    values, bound = np.abs(exact.value), exact.bound
    # A scale of its own amax moves by as much as the largest element may.
    largest = values.max() or 1.0
    bound = bound + values * (0 if "ds" in stored else bound.max() / largest)
    right = _Simulated(
        gradients.amaxes["ds"],
        {"saturated": gradients.saturated_ds, "lost": gradients.lost},
        values,
        bound,
        variant.format_of("ds"),
        float(gradients.scale_ds.scale),
    )
    _compare(report, backward, "ds", right)
    return 1


def _probabilities(one: AttentionPass, variant: Variant, result: Result) -> _Simulated:
    """P of each tile under its own maximum."""
    s = np.asarray(result.scores, np.float64)
    keys, features = s.shape[-1], one.arrays["q/value"].shape[-1]
    length = variant.tile(features, MASK)
    tiles = [slice(n, n + length) for n in range(0, keys, length)]
    p, maximum = np.zeros_like(s), np.full(s.shape[:-1], -np.inf)
    for tile in tiles[::-1] if variant.descending else tiles:
        new = np.maximum(maximum, s[..., tile].max(-1))
        with np.errstate(invalid="ignore"):
            maximum = np.where(new - maximum <= variant.threshold, maximum, new)
        below = np.where(maximum == -np.inf, 0, maximum)[..., None]
        x = s[..., tile] - below + variant.offset
        p[..., tile] = np.exp2(x) if variant.base == "2" else np.exp(x)
    q, k = (np.abs(attention.dequantized(role, one, variant)) for role in ("q", "k"))
    # [B, H, Tq, D] x [B, H, Tk, D] -> [B, H, Tq, Tk]
    sizes = q @ np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(-1, -2)
    row_sizes = np.max(sizes, axis=-1, keepdims=True, where=np.isfinite(s), initial=0)
    row_sizes = row_sizes / np.sqrt(features)
    # E of A-18, term by term. A is row_sizes: a score is at most A, so s - m is within 2 A, and an
    # offset or a threshold adds at most 16. A softcap only lowers scores.
    exponents = 2 * row_sizes + LARGEST
    # h, for each tile's exponentials of x and of c: the largest of A-18's is XLA's in base 2, 2^-23
    # (2 + |x| / 2). x is 1.5 times the exponent at most, as log2 e < 1.5.
    h = 2.0**-23 * (2 + 1.5 * exponents / 2)
    # Both forms round an exponent twice: 4 u, and 1.5 times that in base 2.
    tiles_error = (1 + len(tiles)) * (6 * U * exponents + h)
    # The scores of both forms: D products and at most four factors each, A-18's gamma(D + 8) A,
    # twice with the maximum's; under a softcap cap tanh, with h of a hyperbolic tangent, a rounding
    # of it and one of its product with cap, and two of room: h + 4 u in each form.
    scores_error = 2 * gamma(features + 8) * row_sizes + 2 * (one.softcap or 0) * (TANH + 4 * U)
    e = scores_error + tiles_error
    # Exponents are within E of real arithmetic, so backend and simulator are within 2 E.
    counts = {"saturated": result.saturated, "lost": result.lost}
    scale = float(one.arrays["p/scale"])
    return _Simulated(result.amaxes["s"], counts, p, np.expm1(2 * e) * p, variant.fmt, scale)


def _compare(report: Report, one: AttentionPass, what: str, right: _Simulated) -> None:
    """Compare amax and counts with the simulator's: counts, but for elements near thresholds."""
    values, bound, fmt, scale = right.values, right.bound, right.fmt, right.scale
    seen = np.broadcast_to(np.tri(*values.shape[-2:]) > 0, values.shape)  # MASK is causal
    counts = dict(zip(COUNTS, np.asarray(one.arrays[f"{what}/counts"]).tolist(), strict=True))

    def add(kind: str, value, reference, by) -> None:
        check = report.check(f"{one.layer}/{what}/{kind}/{one.backend}", bound=1.0)
        compare_values(check, value, reference, by, names=(one.backend, "sim"))

    add("amax", np.asarray(one.arrays[f"{what}/amax"]), right.amax, bound.max())
    add("count", counts["count"], int(seen.sum()), 0)
    # Zero is the code of what is at most half of the smallest number, and a cast clips what is
    # above the middle of max and the number behind it (C-4).
    smallest = 2.0 ** (fmt.emin - fmt.mantissa_bits)
    behind = float(fmt.max) - float(cast.decode(np.array([fmt.max_code - 1], np.uint8), fmt)[0])
    thresholds = (("saturated", fmt.max + behind / 2), ("lost", smallest / 2))
    for kind, threshold in thresholds:
        near = np.abs(values * scale - threshold) <= bound * scale + 2 * U * threshold
        near |= (kind == "lost") & (np.abs(values - TINY) <= bound)
        add(kind, counts[kind], right.counts[kind], int((near & seen).sum()))
