"""Claims about casts and scales, measured in the simulator."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from fp8ref.findings.claim import Sample, Trial
from fp8ref.formats import BFLOAT16, E4M3FN, Format
from fp8ref.policy import FP4_POLICIES, POLICIES, ScalePolicy
from fp8ref.sim import delayed, linear
from fp8ref.sim.quantize import cast, scaling, stats
from fp8ref.sim.states import health, states
from fp8ref.spec.delayed import DELAYED

HORIZON = 200
"""Updates of the claim about stochastic rounding."""

SIZES = tuple(range(-16, 17, 2))
"""Exponents of standard deviations, of the claim about static scales."""


def error(x: np.ndarray, exact: np.ndarray) -> float:
    """||x - exact|| / ||exact||."""
    return float(np.linalg.norm(x.astype(np.float64) - exact) / np.linalg.norm(exact))


def sqnr(x: np.ndarray, exact: np.ndarray) -> float:
    """The ratio of signal to quantization noise, in dB."""
    return -20 * float(np.log10(error(x, exact.astype(np.float64))))


def through(
    x: np.ndarray,
    granularity: str = "tensorwise",
    policy: str | ScalePolicy = "torchao",
    *,
    fmt: Format | str = E4M3FN,
    axis: int = -1,
) -> np.ndarray:
    """x quantized and back."""
    q = scaling.quantize(x, fmt, granularity=granularity, policy=policy, axis=axis)
    return scaling.dequantize(q)


def _difference(lines: Mapping[str, Sequence[float]], a: str, b: str, at: int = 0) -> Sample:
    """Lines, whose figure is that of one less that of another, at a place of x."""
    return Sample(lines[a][at] - lines[b][at], lines)


def mx_clipping(trial: Trial) -> Sample:
    """Percent of elements beyond the range under mx_floor, minus those under mx_rceil."""
    x = trial.normal(256, 1024)
    clipped = {}
    for policy in ("mx_floor", "mx_rceil"):
        q = scaling.quantize(x, E4M3FN, granularity="mx_1x32", policy=POLICIES[policy])
        clipped[policy] = [100 * float(stats.statistics(x, q).overflows) / x.size]
    return _difference(clipped, "mx_floor", "mx_rceil")


def delayed_clipping(trial: Trial) -> Sample:
    """Percent of a tensor that delayed scaling clips in the step in which it becomes four times as
    large, less what a current scale clips.
    """
    config, x = DELAYED["delayed"], trial.normal(256, 1024)
    state = delayed.init(config)
    for step in range(4):
        amax = np.abs(trial.normal(256, 1024, stream=1 + step)).max()
        state = delayed.update(state, delayed.observe(amax), config=config, fmt=E4M3FN)
    clipped = []
    for factor in (1, 2, 4, 8):
        scale = delayed.scales(state, config, E4M3FN).scale
        clipped.append(100 * float(stats.overflows(factor * x * scale, E4M3FN).mean()))
    now = scaling.quantize(4 * x, E4M3FN, granularity="tensorwise", policy=config.policy)
    current = 100 * float(stats.statistics(4 * x, now).overflows) / x.size
    return Sample(clipped[2] - current, {"delayed": clipped, "current": [current] * 4})


def delayed_history(trial: Trial) -> Sample:
    """Percent of steps that clip under a history of one amax, minus under the longest, where amaxes
    wander by a tenth of their size a step.
    """
    walk = np.exp(np.cumsum(0.1 * trial.random().standard_normal(1500))).astype(np.float32)
    shares, wasted = [], []
    for length in (1, 4, 16, 64, 256, 1024):
        highest = np.array([walk[max(0, i - length) : i].max() for i in range(1, walk.size)])
        shares.append(100 * float((walk[1:] > highest).mean()))
        wasted.append(float(np.log2(highest / walk[1:]).clip(0).mean()))
    lines = {"% of steps that clip": shares, "powers of two unused, mean": wasted}
    return Sample(shares[0] - shares[-1], lines)


def delayed_margin(trial: Trial) -> Sample:
    """Percent of elements that delayed scaling clips where a tensor doubles, minus with a margin of
    one power of two.
    """
    x = trial.normal(256, 1024)
    amax = np.abs(trial.normal(256, 1024, stream=1)).max()
    clipped, noise = [], []
    for margin in (0, 1, 2, 3):
        policy = dataclasses.replace(POLICIES["te_delayed"], name="margin", margin=margin)
        config = dataclasses.replace(DELAYED["delayed"], name="margin", policy=policy)
        state = delayed.init(config)
        state = delayed.update(state, delayed.observe(amax), config=config, fmt=E4M3FN)
        scales = delayed.scales(state, config, E4M3FN)
        clipped.append(100 * float(stats.overflows(2 * x * scales.scale, E4M3FN).mean()))
        q = scaling.quantize_with(x, scales, E4M3FN, policy=policy)
        noise.append(sqnr(scaling.dequantize(q), x))
    lines = {"% clipped where it doubles": clipped, "dB of SQNR where it does not": noise}
    return Sample(clipped[0] - clipped[1], lines)


def rowwise_outliers(trial: Trial) -> Sample:
    """dB of SQNR, of the 255 tokens beside one that is 10,000 times as large: by scales of rows,
    minus by one scale.
    """
    others = np.arange(256) != 17
    lines: dict[str, list[float]] = {"rowwise": [], "tensorwise": []}
    for factor in (1, 100, 1_000, 10_000, 100_000):
        x = trial.normal(256, 1024)
        x[17] *= factor
        for kind, line in lines.items():
            line.append(sqnr(through(x, kind)[others], x[others]))
    return _difference(lines, "rowwise", "tensorwise", 3)


def gw_hp(trial: Trial) -> Sample:
    """Percent of error of grad_weight: of rowwise, minus that of rowwise_with_gw_hp, where a tenth
    of the features are 30 times as large.
    """
    x, w = trial.normal(256, 128), np.float32(0.05) * trial.normal(128, 128, stream=1)
    g = np.float32(1e-3) * trial.normal(256, 128, stream=2)
    x[:, ::10] *= 30
    exact = g.astype(np.float64).T @ x.astype(np.float64)
    errors = {
        recipe: [100 * error(linear.backward(g, x, w, recipe)[1], exact)]
        for recipe in ("rowwise", "rowwise_with_gw_hp")
    }
    return _difference(errors, "rowwise", "rowwise_with_gw_hp")


def root_of_v(trial: Trial) -> Sample:
    """Percent of elements whose v becomes 0 beside an m that does not, by v in e4m3 (torchao),
    minus by its root (sqrt_e4m3).
    """
    # gradients of elements that differ by orders of magnitude
    size, lost = np.exp(2 * trial.normal(128, 256)), {}
    for layout in ("torchao", "sqrt_e4m3"):
        p, state = np.zeros((128, 256), np.float32), states.init((128, 256), layout)
        for step in range(10):
            g = np.float32(1e-3) * size * trial.normal(*size.shape, stream=1 + step)
            before = state
            p, state = states.step(p, g, state, states.AdamW(learning_rate=1e-3, layout=layout))
        one = health.measure(g, before, state, b1=0.9, b2=0.95, layout=layout)
        lost[layout] = [100 * one.v_lost / one.count]
    return _difference(lost, "torchao", "sqrt_e4m3")


def stochastic_rounding(trial: Trial) -> Sample:
    """The share of 200 updates of 1e-5 that bfloat16 weights of about 0.02 take when they round
    stochastically, minus when to nearest.
    """
    start = cast.round_to(0.02 * (1 + np.abs(trial.normal(4096))), BFLOAT16)
    shares = {}
    for rounding in ("stochastic", "nearest_even"):
        w = start
        for step in range(HORIZON):
            seed = 10_000 * trial.seed + step if rounding == "stochastic" else None
            w = cast.round_to((w - np.float32(1e-5)), BFLOAT16, rounding=rounding, seed=seed)
        shares[rounding] = [float((start - w).mean() / (HORIZON * 1e-5))]
    return _difference(shares, "stochastic", "nearest_even")


def eight_random_bits(trial: Trial) -> Sample:
    """The bias of rounding an e2m1 number with 8 random bits, downward in percent of the spacing,
    minus that with 48 bits, 3 of 1,024 spacings above a number.
    """
    fractions = np.arange(1, 9) / 1024
    x = np.repeat((1 + 0.5 * fractions).astype(np.float32)[:, None], 1 << 17, axis=1)
    bias: dict[str, list[float]] = {}
    for rounding in ("stochastic_8", "stochastic"):
        codes = cast.encode(x, "e2m1fn", rounding=rounding, seed=trial.seed)
        back = cast.decode(codes, "e2m1fn").astype(np.float64)
        bias[rounding] = (200 * (x[:, 0] - back.mean(1))).tolist()
    return _difference(bias, "stochastic_8", "stochastic", 2)


def _four_bits(trial: Trial) -> dict[str, Sequence[float]]:
    """dB of SQNR of NVFP4's choices of a block's scale, by the tail of the numbers."""
    draws = trial.random()
    kinds = {
        "normal": draws.standard_normal((256, 1024)),
        "Laplace": draws.laplace(size=(256, 1024)),
        "Student's t, 3": draws.standard_t(3, (256, 1024)),
    }
    names = {"max to 6": "te_nvfp4", "MAE": "te_nvfp4_4over6", "MSE": "te_nvfp4_4over6_mse"}
    tensors = [x.astype(np.float32) for x in kinds.values()]
    return {
        label: [
            sqnr(through(x, "nvfp4_1x16", FP4_POLICIES[policy], fmt="e2m1fn"), x) for x in tensors
        ]
        for label, policy in names.items()
    }


def four_over_six(trial: Trial) -> Sample:
    """dB of SQNR that blocks gain whose largest element may become 4 in place of 6."""
    return _difference(_four_bits(trial), "MSE", "max to 6")


def four_over_six_by_mse(trial: Trial) -> Sample:
    """dB of SQNR, of the choice by squared error, minus that by absolute error."""
    return _difference(_four_bits(trial), "MSE", "MAE")


def static_scales(trial: Trial) -> Sample:
    """dB of SQNR, of a scale of 1 at unit variance, minus that of a current scale."""
    x = trial.normal(256, 1024)
    lines: dict[str, list[float]] = {"scale 1": [], "current": []}
    for exponent in SIZES:
        y = x * np.float32(2.0**exponent)
        saturated = cast.decode(cast.encode(y, E4M3FN, saturate=True), E4M3FN)
        lines["scale 1"].append(sqnr(saturated, y))
        lines["current"].append(sqnr(through(y), y))
    return _difference(lines, "scale 1", "current", SIZES.index(0))


def swiglu_smoothing(trial: Trial) -> Sample:
    """dB of SQNR of down_proj's output, with a scale for each channel of SwiGLU's product, minus
    with one scale, where 4 of 512 channels have gate and up rows that are alike and large.
    """
    x, w = trial.normal(256, 64), trial.normal(64, 512, stream=3) / 16
    gate, up = trial.normal(64, 512, stream=1) / 8, trial.normal(64, 512, stream=2) / 8
    lines: dict[str, list[float]] = {"one scale": [], "a scale a channel": []}
    for factor in (1, 4, 16, 64, 256):
        gate[:, :4] = up[:, :4] = factor * trial.normal(64, 4, stream=4) / 8
        with np.errstate(over="ignore"):  # e^x of a gate far below 0: its sigmoid is 0
            hidden = (x @ gate) / (1 + np.exp(-(x @ gate))) * (x @ up)
        w[:, :4] = trial.normal(64, 4, stream=5) / 16
        smooth = np.exp2(np.ceil(np.log2(np.abs(hidden).max(0))))
        rest = np.delete(hidden, range(4), 1).astype(np.float64), np.delete(w, range(4), 1).T
        for label, by in (("one scale", np.ones(512)), ("a scale a channel", smooth)):
            back = through((hidden / by).astype(np.float32)) * by
            lines[label].append(sqnr(np.delete(back, range(4), 1) @ rest[1], rest[0] @ rest[1]))
    return _difference(lines, "a scale a channel", "one scale", 3)


def double_quantization(trial: Trial) -> Sample:
    """dB of SQNR that a column loses on average if the columns' cast is of the rows' codes in place
    of the bfloat16 tensor, under float32 scales of 1 x 128.
    """
    x = cast.round_to(trial.normal(512, 1024), BFLOAT16)
    x *= np.exp2(np.round(3 * trial.normal(1, 1024, stream=1)))  # channels of many sizes
    lines: dict[str, list[float]] = {"from bfloat16": [], "from the rows' codes": [], "2-D": []}
    for summary in (np.mean, np.min):
        for policy in ("torchao", "torchao_pow2"):
            rows = through(x, "blockwise_1x128", policy)
            backs = (
                through(x, "blockwise_1x128", policy, axis=0),
                through(rows, "blockwise_1x128", policy, axis=0),
                through(x, "blockwise_128x128", policy),
            )
            for line, back in zip(lines.values(), backs, strict=True):
                line.append(float(summary(stats.sqnr_by_row(x.T, back.T))))
    return _difference(lines, "from bfloat16", "from the rows' codes")


def requantized_to_ue8m0(trial: Trial) -> Sample:
    """Percent by which the error of weights grows if codes with float32 scales of 128 x 128 are
    quantized again with scales that are powers of two.
    """
    w = cast.round_to(np.float32(0.02) * trial.normal(512, 1024), BFLOAT16)
    kept = through(w, "blockwise_128x128", "torchao")
    errors = {
        "float32 scales": [100 * error(kept, w)],
        "UE8M0, from bfloat16": [100 * error(through(w, "blockwise_128x128", "deepgemm_ue8m0"), w)],
        "UE8M0, from float32 scales": [
            100 * error(through(kept, "blockwise_128x128", "deepgemm_ue8m0"), w)
        ],
    }
    first, _, again = (line[0] for line in errors.values())
    between = through(kept, "blockwise_128x128", "deepgemm_ue8m0")
    errors["UE8M0 against float32 scales"] = [100 * error(between, kept)]
    return Sample(100 * (again / first - 1), errors)


def norm_weights_in_one_code(trial: Trial) -> Sample:
    """Percent of norm weights near 1.8 that the floor of OCP's rule clips to one code, minus with
    scales rounded up.
    """
    lines: dict[str, list[float]] = {"floor": [], "rounded up": []}
    for mean in (1.0, 1.2, 1.4, 1.6, 1.8, 1.95):
        w = (mean * np.exp(0.02 * trial.normal(4096))).astype(np.float32)
        for label, policy in (("floor", "mx_floor"), ("rounded up", "mx_rceil")):
            q = scaling.quantize(w, E4M3FN, granularity="mx_1x32", policy=policy)
            lines[label].append(100 * float(stats.statistics(w, q).overflows) / w.size)
    return _difference(lines, "floor", "rounded up", 4)
