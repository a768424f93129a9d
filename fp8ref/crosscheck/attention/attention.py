"""Passes of attention by a variant in a backend, and what the simulator has instead (A, B-10).

``watch`` records them; ``check_codes`` compares codes and scales of q, k, v and do, bit for bit.
``distances`` is how far all else is from the exact result, in units of A-18's bounds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fp8ref.conformance.gemm.bound import gamma
from fp8ref.conformance.kit.compare import Report, compare_codes, compare_scales
from fp8ref.sim import delayed
from fp8ref.sim.attention.operands import heads as head_scaling
from fp8ref.sim.attention.operands.heads import Heads
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec.attention.products import PARTS, SHOWN, Phase
from fp8ref.spec.attention.variants import Mask, Variant
from fp8ref.train.config.config import Config

QUANTIZED = ("q", "k", "v", "do")
"""Whole tensors that are quantized: scales and codes are defined bit for bit (A-2, A-15)."""

_NAMES = ("s", "p", "o", "do", "dv", "ds", "dk", "dq")
SYMBOLS = {name: name[:-1] + name[-1].upper() for name in _NAMES}
"""What attention makes, as its papers write it: scores S, probabilities P, output O, and gradients.
"""

MASK = Mask(causal=True)  # the mask of the trainer's model (M-1)
U = 2.0**-24  # the largest error of a rounding to float32, as a fraction of its result

TANH = 2.0**-20
"""The largest error of a hyperbolic tangent, as a fraction of it: XLA's 8 units of 2^-23 (A-18)."""

LARGEST = 16
"""The largest offset and threshold of a variant (A-1): row exponents are below 2 A + 16 (A-18)."""

FAR = 64.0  # of a sink above a maximum whose keys leave nothing


@dataclass(frozen=True)
class AttentionPass:
    """One pass of one layer's attention.

    arrays    by ``<what>/<part>`` of ``attention.products.SHOWN`` and ``PARTS``.
    """

    backend: str
    layer: str
    phase: Phase
    arrays: Mapping[str, np.ndarray]

    @property
    def softcap(self) -> float | None:
        """The softcap of this forward pass, if it had one (A-28)."""
        cap = self.arrays.get("softcap/value")
        return None if cap is None else float(cap)

    @property
    def sinks(self) -> np.ndarray | None:
        """The sinks of this forward pass, float32 [H], if it had any (A-28)."""
        sinks = self.arrays.get("sinks/value")
        return None if sinks is None else np.asarray(sinks, np.float32)

    def tensor(self, role: str) -> np.ndarray:
        """q, k, v, do or a gradient before it is quantized, float32."""
        return np.asarray(self.arrays[f"{role}/value"], np.float32)

    def parts(self) -> Iterator[tuple[str, str, np.ndarray]]:
        """(what, part, array) in the order in which they are made."""
        for what in SHOWN[self.phase]:
            for part in PARTS:
                if f"{what}/{part}" in self.arrays:
                    yield what, part, np.asarray(self.arrays[f"{what}/{part}"])


def recorder(
    backend: str, passes: list[AttentionPass]
) -> Callable[[str, Phase, Mapping[str, np.ndarray]], None]:
    """An observer of a trainer that appends to passes."""

    def record(layer: str, phase: Phase, arrays: Mapping[str, np.ndarray]) -> None:
        arrays = {key: np.asarray(x) for key, x in arrays.items()}
        passes.append(AttentionPass(backend, layer, phase, arrays))

    return record


def simulated(
    what: str, one: AttentionPass, variant: Variant, scale: np.ndarray | None = None
) -> Heads:
    """q, k, v or do as the simulator quantizes it.

    scale   a delayed one (A-12); None: of the tensor itself.
    Shapes:   codes uint8.
    """
    return head_scaling.quantize(
        one.tensor(what),
        variant.format_of(what),
        variant.granularity,
        variant.policy,
        heads=one.arrays["k/value" if one.phase == "forward" else "dk/value"].shape[1],
        along_tokens=what == "v",
        scale=scale,
    )


def check_codes(
    report: Report,
    passes: Sequence[AttentionPass],
    variant: Variant | None,
    scales: Mapping[str, np.ndarray] | None = None,
) -> int:
    """Compare codes and scales of q, k, v and do with the simulator's, bit for bit.

    scales    delayed ones by ``<layer>/<role>``.
    Returns:  how many operands were compared.
    """
    count = 0
    for one in passes:
        for what in QUANTIZED:
            if variant is None or f"{what}/codes" not in one.arrays:
                continue
            value = one.tensor(what)
            if not np.isfinite(value).all():
                continue
            name, backend = f"{one.layer}/{what}", one.backend
            right = simulated(what, one, variant, (scales or {}).get(name))
            assert right.codes is not None
            own = np.asarray(one.arrays[f"{what}/codes"])
            codes = {"sim": right.codes, backend: own}
            check = report.check(f"{name}/codes/{backend}")
            compare_codes(check, codes, backend, variant.format_of(what), value)
            scale = np.asarray(one.arrays[f"{what}/scale"], np.float32)
            check = report.check(f"{name}/scale/{backend}")
            compare_scales(check, {"sim": right.scale, backend: scale}, backend)
            count += 1
    return count


def first_states(config: Config) -> dict[str, delayed.DelayedState]:
    """Attention's delayed states before the first step, by ``<layer>/<role>``; {} without any."""
    return {
        f"{layer}/{role}": delayed.init(delayed_config)
        for layer, casts in config.attention_casts.items()
        for role, (_, delayed_config) in casts.items()
    }


def states_after(
    states: Mapping[str, delayed.DelayedState],
    config: Config,
    passes: Sequence[AttentionPass],
    trained: Mapping[str, Any] | None = None,
) -> dict[str, delayed.DelayedState]:
    """The states after a step with these passes (A-19), by ``<layer>/<role>``.

    trained   a trainer's ``fp8_states`` after the step: the amaxes of all roles but q, k, v and do
              are sums, and are taken from it. Without, the states of q, k, v and do alone.
    """
    new_states = {}
    for layer, casts in config.attention_casts.items():
        for role, (fmt, delayed_config) in casts.items():
            name = f"{layer}/{role}"
            if role in QUANTIZED:
                seen = [
                    delayed.observe(scaling.amax(one.tensor(role)))
                    for one in passes
                    if one.layer == layer and f"{role}/value" in one.arrays
                ]
            elif trained is None:
                continue
            else:
                seen = [delayed.observe(np.asarray(trained[name][1], np.float32)[0])]
            new_states[name] = delayed.update(states[name], *seen, config=delayed_config, fmt=fmt)
    return new_states


def delayed_scales(states: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The scales of a trainer's ``fp8_states``, by ``<layer>/<role>``."""
    return {name: np.asarray(state[0], np.float32) for name, state in states.items()}


class Exact(NamedTuple):
    """The exact result of a pass's own operands, and A-18's bound on a backend's elements."""

    value: np.ndarray
    bound: np.ndarray


def exact(
    what: str, forward: AttentionPass, backward: AttentionPass | None, variant: Variant
) -> Exact | None:
    """S, O, dS, dV, dK or dQ in float64, from the codes that are multiplied, softcap and sinks.

    None:    where codes of MX blocks along another axis were multiplied, which are not shown; of a
             backward pass in bfloat16, which shows none; of variants whose scores are not those of
             ``scaled`` in base e, taken in ascending order without a threshold: what stands here is
             theirs alone. So it is of FlashAttention's variants.
    Order:   each from what comes before it, as the backend has it: dQ of its own codes of dS.
    """
    ordered = (
        variant.scores == "scaled"
        and variant.base == "e"
        and not variant.descending
        and not variant.threshold
    )
    if variant.fmt.bits != 8 or variant.granularity is None or not ordered:
        return None
    operands = _operands(forward, variant)
    if what == "s":
        products = operands.scale * (operands.q @ operands.wide_k.swapaxes(-1, -2))
        cap = forward.softcap
        value = products if cap is None else cap * np.tanh(products / cap)
        return Exact(value, operands.scores_error)
    rows = _rows(forward, variant, operands)
    if what == "o":
        return _exact_output(forward, variant, operands, rows)
    if backward is None or variant.granularity == "mx_1x32" or variant.backward == "bf16":
        return None
    if what == "ds":
        return _exact_ds(forward, backward, variant, operands, rows)
    p = _decoded("p", backward.arrays["p/codes"], variant) * _scale_inv_p(backward)
    ds_scale = np.asarray(backward.arrays["ds/scale"], np.float64)
    ds = _decoded("ds", backward.arrays["ds/codes"], variant) / ds_scale
    a, b = {
        "dv": (p.swapaxes(-1, -2), dequantized("do", backward, variant)),
        "dk": (ds.swapaxes(-1, -2), operands.q),
        "dq": (ds, operands.wide_k),
    }[what]
    values, size = a @ b, np.abs(a) @ np.abs(b)
    if what != "dq":
        values, size = (_over_heads(x, operands.group) for x in (values, size))
    unit = _unit(backward, what, variant)
    return Exact(values, gamma(a.shape[-1] * operands.group + 8) * size + unit)


class _Operands(NamedTuple):
    """Dequantized q, and k and v repeated for each query head, float64 [B, H, T, D]; the softmax
    scale; the query heads of a head of keys; and of each score the magnitude of its products and
    A-18's bound on its error, [B, H, Tq, Tk].
    """

    q: np.ndarray
    wide_k: np.ndarray
    wide_v: np.ndarray
    scale: float
    group: int
    sizes: np.ndarray
    scores_error: np.ndarray


def _operands(forward: AttentionPass, variant: Variant) -> _Operands:
    q, k, v = (dequantized(role, forward, variant) for role in ("q", "k", "v"))
    group, features, cap = q.shape[1] // k.shape[1], q.shape[-1], forward.softcap
    scale = float(np.float32(1 / np.sqrt(features)))
    wide_k, wide_v = (np.repeat(x, group, axis=1) for x in (k, v))
    # [B, H, Tq, D] x [B, H, Tk, D] -> [B, H, Tq, Tk]
    sizes = scale * np.abs(q) @ np.abs(wide_k).swapaxes(-1, -2)
    # A capped score differs by no more than its argument times the cap does, by the error of tanh,
    # and by the roundings of t and of t cap.
    scores_error = gamma(features + 8) * sizes + (0 if cap is None else cap * (TANH + 4 * U))
    return _Operands(q, wide_k, wide_v, scale, group, sizes, scores_error)


class _Rows(NamedTuple):
    """The softmax of each row of a backend's own scores s, float64 [B, H, Tq, 1]: the maximum, with
    a sink, and the sum of exponentials; A-18's bound on an exponential; what a sink may leave out;
    and the maxima after each tile, without sinks, [tiles, B, H, Tq].
    """

    s: np.ndarray
    top: np.ndarray
    sums: np.ndarray
    error: np.ndarray
    left: np.ndarray | float
    maxima: np.ndarray
    length: int


def _rows(forward: AttentionPass, variant: Variant, operands: _Operands) -> _Rows:
    s = np.asarray(forward.arrays["s/value"], np.float64)
    keys, length = s.shape[-1], variant.tile(operands.q.shape[-1], MASK)
    # of each tile, and those before
    maxima = np.maximum.accumulate([s[..., n : n + length].max(-1) for n in range(0, keys, length)])
    top = maxima[-1][..., None]
    # E of A-18 without the distance of scores, which are equal here: a tile rounds its exponents
    # and c. h is 2 units in the last place, 2 x 2^-23.
    sizes = np.max(operands.sizes, axis=-1, keepdims=True, where=np.isfinite(s), initial=0)
    e = (1 + len(maxima)) * (6 * U * (2 * sizes + LARGEST) + 2.0**-22)
    sums = np.exp(s - top).sum(-1, keepdims=True)
    if forward.sinks is None:
        return _Rows(s, top, sums, e, 0.0, maxima, length)
    # u of A-23 is an exponential of d, which is rounded: from 0 to 64, since one below the
    # maximum adds an error of at most u / e to l >= 1. gamma(3 Tk + 8) has room for its
    # addition: l and O are Tk additions each, and a product a tile.
    d = forward.sinks[:, None, None] - top  # [B, H, Tq, 1]
    e = e + 6 * U * (np.clip(d, 0, FAR) + LARGEST) + 2.0**-22
    # where a form may leave nothing of the keys: all of what they have is in the bound then
    left = d > FAR - 1
    shifted = np.maximum(d, 0)
    sums = sums * np.exp(-shifted) + np.exp(d - shifted)
    return _Rows(s, top + shifted, sums, e, left, maxima, length)


def _exact_output(
    forward: AttentionPass, variant: Variant, operands: _Operands, rows: _Rows
) -> Exact:
    keys, length = rows.s.shape[-1], rows.length
    behind = [
        np.repeat(m[..., None] - rows.top, min(length, keys - n * length), -1)
        for n, m in enumerate(rows.maxima)
    ]
    p = _decoded("p", forward.arrays["p/codes"], variant) * _scale_inv_p(forward)
    p = p * np.exp(np.concatenate(behind, -1)) / rows.sums
    error = np.exp(2 * rows.error) - 1 + gamma(3 * keys + 8) + rows.left
    near = error * (p @ np.abs(operands.wide_v))
    return Exact(p @ operands.wide_v, near + _unit(forward, "o", variant))


def _exact_ds(
    forward: AttentionPass,
    backward: AttentionPass,
    variant: Variant,
    operands: _Operands,
    rows: _Rows,
) -> Exact:
    do, o = dequantized("do", backward, variant), dequantized("o", forward, variant)
    s, scale, cap, features = rows.s, operands.scale, forward.softcap, do.shape[-1]
    weights = np.exp(s - rows.top) / rows.sums
    dp = do @ operands.wide_v.swapaxes(-1, -2)
    dp_sizes = np.abs(do) @ np.abs(operands.wide_v).swapaxes(-1, -2)
    d, d_sizes = (do * o).sum(-1, keepdims=True), np.abs(do * o).sum(-1, keepdims=True)
    log_sums = np.abs(rows.top + np.log(rows.sums))
    p_error = 2 * rows.error + gamma(3 * s.shape[-1] + 8) + 4 * U * log_sums
    values, slope_error = weights * (dp - d) * scale, 0.0
    if cap is not None:
        # The backward pass takes t again: it and the forward pass's differ by twice the error
        # of t, as P by that of scores. What is shown is t cap, rounded. So t t differs by 2 (2
        # scores_error / cap + u), and two roundings follow, of numbers of at most 1.
        p_error = p_error + 2 * operands.scores_error
        slope_error = (4 * operands.scores_error / cap + 4 * U) * np.abs(values)
        values = values * (1 - np.square(np.where(np.isfinite(s), s, 0) / cap))
    sizes = scale * (dp_sizes + d_sizes)
    products = 2 * gamma(features + 8) * weights * sizes
    # A probability below float32's normal numbers, and products with it, may become zero.
    flushed = 2.0**-125 * (sizes + 1)
    return Exact(values, p_error * np.abs(values) + slope_error + products + flushed)


def distance(array: np.ndarray, right: Exact) -> float:
    """The largest distance of an array from the exact result, in units of the bound; scores of keys
    that are not seen, -infinity, are left out."""
    array = np.asarray(array, np.float64)
    apart = np.abs(np.where(array == -np.inf, right.value, array) - right.value)
    return float(np.max(apart / np.maximum(right.bound, 1e-300)))


def neighbors(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether codes of probabilities, which are not negative, are equal or next to each other."""
    return bool((np.abs(a.astype(np.int16) - b.astype(np.int16)) <= 1).all())


def dequantized(what: str, one: AttentionPass, variant: Variant) -> np.ndarray:
    """A tensor of its codes and scales, float64 [B, H, T, D]."""
    codes = one.arrays[f"{what}/codes"]
    scale = np.asarray(one.arrays[f"{what}/scale"], np.float64)
    tokens, shape = what == "v", codes.shape
    spread = head_scaling.spread(1 / scale, shape, variant.granularity, along_tokens=tokens)
    return _decoded(what, codes, variant) * spread


def _decoded(what: str, codes: np.ndarray, variant: Variant) -> np.ndarray:
    return cast.decode(np.asarray(codes), variant.format_of(what)).astype(np.float64)


def _scale_inv_p(one: AttentionPass) -> float:
    return float(np.float32(1) / np.float32(one.arrays["p/scale"]))


def _over_heads(x: np.ndarray, group: int) -> np.ndarray:
    """The sum over query heads of a head of keys: [B, H, Tk, D] -> [B, Hkv, Tk, D]."""
    return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)


def _unit(one: AttentionPass, what: str, variant: Variant) -> np.ndarray:
    """One unit of the output's format at each number: 2^-mantissa of it, and the smallest number.
    An FP8 output's scale moves by the sums' own bound, with its amax: 1 % is added."""
    x, out = np.abs(np.asarray(one.arrays[f"{what}/value"], np.float64)), variant.out
    smallest = 2.0 ** (out.emin - out.mantissa_bits)
    scale = np.asarray(one.arrays.get(f"{what}/scale", 1.0), np.float64)
    return 1.01 * (2.0**-out.mantissa_bits * x + smallest / scale)
