"""Claims about casts, scales and sums, measured in the simulator (``findings``)."""

import numpy as np

from claim import Claim
from fp8ref.formats import BFLOAT16, E4M3FN
from fp8ref.policy import POLICIES
from fp8ref.sim import delayed, linear
from fp8ref.sim.distributed import gradient_reduction
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast, scaling, stats
from fp8ref.sim.states import health, states
from fp8ref.spec.delayed import DELAYED

HORIZON = 200
"""Updates of the claim about stochastic rounding."""


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _error(found: np.ndarray, exact: np.ndarray) -> float:
    """||found - exact|| / ||exact||."""
    return float(np.linalg.norm(found.astype(np.float64) - exact) / np.linalg.norm(exact))


def mx_clipping(seed: int) -> float:
    """Percent of elements beyond the range under mx_floor, minus those under mx_rceil."""
    x = _normal(seed, 256, 1024)
    clipped = []
    for policy in ("mx_floor", "mx_rceil"):
        q = scaling.quantize(x, E4M3FN, granularity="mx_1x32", policy=POLICIES[policy])
        clipped.append(float(stats.statistics(x, q).overflows) / x.size)
    return 100 * (clipped[0] - clipped[1])


def delayed_clipping(seed: int) -> float:
    """Percent of a tensor that delayed scaling clips in the step in which it becomes four times as
    large, less what a current scale clips.
    """
    config, x = DELAYED["delayed"], _normal(seed, 256, 1024)
    state = delayed.init(config)
    for step in range(4):
        amax = np.abs(_normal(100 * seed + step, 256, 1024)).max()
        state = delayed.update(state, delayed.observe(amax), config=config, fmt=E4M3FN)
    x = 4 * x
    late = float((np.abs(x) * delayed.scales(state, config, E4M3FN).scale > E4M3FN.max).mean())
    now = scaling.quantize(x, E4M3FN, granularity="tensorwise", policy=config.policy)
    return 100 * (late - float(stats.statistics(x, now).overflows) / x.size)


def rowwise_outliers(seed: int) -> float:
    """dB of SQNR, of the 255 tokens beside one that is 10,000 times as large: by scales of rows,
    minus by one scale.
    """
    x = _normal(seed, 256, 1024)
    x[17] *= 10_000
    others = np.arange(256) != 17
    found = []
    for kind in ("rowwise", "tensorwise"):
        back = scaling.dequantize(
            scaling.quantize(x, E4M3FN, granularity=kind, policy=POLICIES["torchao"])
        )
        found.append(-20 * np.log10(_error(back[others], x[others].astype(np.float64))))
    return found[0] - found[1]


def gw_hp(seed: int) -> float:
    """Percent of error of grad_weight: of rowwise, minus that of rowwise_with_gw_hp, where a tenth
    of the features are 30 times as large.
    """
    x, w, g = (
        _normal(seed, 256, 128),
        0.05 * _normal(seed + 50, 128, 128),
        1e-3 * _normal(seed + 90, 256, 128),
    )
    x[:, ::10] *= 30
    exact = g.astype(np.float64).T @ x.astype(np.float64)
    errors = [
        _error(linear.backward(g, x, w, recipe)[1], exact)
        for recipe in ("rowwise", "rowwise_with_gw_hp")
    ]
    return 100 * (errors[0] - errors[1])


def root_of_v(seed: int) -> float:
    """Percent of elements whose v becomes 0 beside an m that does not, by v in e4m3 (torchao),
    minus by its root (sqrt_e4m3).
    """
    rng = np.random.default_rng(seed)
    # gradients of elements that differ by orders of magnitude
    size = np.exp(2 * rng.standard_normal((128, 256)))
    found = []
    for layout in ("torchao", "sqrt_e4m3"):
        p, state, noise = (
            np.zeros((128, 256), np.float32),
            states.init((128, 256), layout),
            np.random.default_rng(seed + 1),
        )
        for _ in range(10):
            g = (1e-3 * size * noise.standard_normal(size.shape)).astype(np.float32)
            before = state
            p, state = states.step(p, g, state, states.AdamW(learning_rate=1e-3, layout=layout))
        one = health.measure(g, before, state, b1=0.9, b2=0.95, layout=layout)
        found.append(one.v_lost / one.count)
    return 100 * (found[0] - found[1])


def _of_accumulation(seed: int, plan: str, k: int) -> float:
    """Error of a GEMM's accumulation alone: to the exact sum of the same codes."""
    a, b = (
        scaling.quantize(_normal(seed + i, 32, k), E4M3FN, granularity="tensorwise")
        for i in (0, 1000)
    )
    exact = gemm.matmul(a, b, accumulate="exact").astype(np.float64)
    return _error(gemm.matmul(a, b, accumulate=plan), exact)


def accumulation_over_k(seed: int) -> float:
    """Error of Hopper's accumulation at K = 4096, over that at K = 512."""
    return _of_accumulation(seed, "hopper_fast", 4096) / _of_accumulation(seed, "hopper_fast", 512)


def promotion(seed: int) -> float:
    """Error of Hopper's accumulation at K = 4096, over that with sums promoted to float32 every
    128.
    """
    return _of_accumulation(seed, "hopper_fast", 4096) / _of_accumulation(seed, "hopper_slow", 4096)


def all_reduce_over_ranks(seed: int) -> float:
    """Error of a ring that adds in e4m3 over 64 ranks, over that of 4."""
    errors = []
    for ranks in (4, 64):
        grads = [_normal(1000 * seed + rank, 4096) for rank in range(ranks)]
        exact = np.sum([g.astype(np.float64) for g in grads], axis=0)
        shared = gradient_reduction.share(grads, prescale="inverse")
        total = cast.decode(gradient_reduction.ring(shared.codes), E4M3FN).astype(
            np.float64
        ) * float(shared.scale_inv)
        errors.append(_error(total, exact))
    return errors[1] / errors[0]


def stochastic_rounding(seed: int) -> float:
    """The share of 200 updates of 1e-5 that bfloat16 weights of about 0.02 take when they round
    stochastically, minus when to nearest.
    """
    start = cast.round_to(0.02 * (1 + np.abs(_normal(seed, 4096))), BFLOAT16)
    taken = []
    for rounding in ("stochastic", "nearest_even"):
        w = start
        for step in range(HORIZON):
            keyed = {"seed": 10_000 * seed + step} if rounding == "stochastic" else {}
            w = cast.round_to(
                (w - np.float32(1e-5)).astype(np.float32), BFLOAT16, rounding=rounding, **keyed
            )
        taken.append(float((start - w).mean() / (HORIZON * 1e-5)))
    return taken[0] - taken[1]


CLAIMS = [
    Claim(
        name="mx_clipping",
        claim="The scale of OCP's MX rule, rounded down, clips the largest elements of blocks; "
        "rounded up it clips none.",
        source="Mishra et al., Recipes for Pre-training LLMs with MXFP8, arXiv:2506.08027",
        figure="% of elements clipped, floor minus round-up",
        how="Normal numbers [256, 1024] to e4m3 in blocks of 32.",
        measure=mx_clipping,
    ),
    Claim(
        name="delayed_clipping",
        claim="Delayed scaling clips where amaxes jump, until its history has seen the jump; a "
        "current scale does not.",
        source="Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433; Transformer "
        "Engine's user guide, delayed scaling",
        figure="% of elements clipped, delayed minus current",
        how="Normal numbers, four steps alike and then four times as large.",
        measure=delayed_clipping,
    ),
    Claim(
        name="rowwise_outliers",
        claim="Scales of rows keep the precision of all other tokens when one is an outlier; one "
        "scale of the tensor does not.",
        source="torchao, float8/README.md, rowwise scaling; PyTorch's blog on float8 rowwise "
        "scaling (2024)",
        figure="dB of SQNR, rowwise minus tensorwise",
        how="Normal tokens, one of 256 multiplied by 10,000; SQNR of the others. With 1,000 "
        "the figure is small: e4m3 still holds the others.",
        measure=rowwise_outliers,
    ),
    Claim(
        name="gw_hp",
        claim="grad_weight is more accurate in high precision: rowwise_with_gw_hp against rowwise.",
        source="torchao 0.18, float8/config.py, Float8LinearRecipeName.ROWWISE_WITH_GW_HP",
        figure="% of error of grad_weight, rowwise minus gw_hp",
        how="A linear of 128 x 128 with 256 tokens, of which a tenth of the features are 30 "
        "times as large.",
        measure=gw_hp,
    ),
    Claim(
        name="root_of_v",
        claim="AdamW's second moment loses fewer elements in FP8 if its root is stored in place "
        "of itself.",
        source="spec O-1, root of a layout; Xi et al., COAT, arXiv:2410.19313, expand the range "
        "to the same end",
        figure="% of v lost, v minus sqrt(v)",
        how="Ten steps on gradients whose sizes are log-normal, of sigma 2.",
        measure=root_of_v,
    ),
    Claim(
        name="accumulation_over_k",
        claim="The error of Hopper's accumulation in about 14 bits grows with K.",
        source="DeepSeek-V3, arXiv:2412.19437, section 3.3",
        figure="error at K = 4096 over that at K = 512",
        how="Normal numbers in e4m3, [32, K] x [32, K], against the exact sum of the same codes.",
        measure=accumulation_over_k,
        above=1.0,
    ),
    Claim(
        name="promotion",
        claim="Promotion of partial sums to float32 every 128 elements removes most of that error.",
        source="DeepSeek-V3, arXiv:2412.19437, section 3.3",
        figure="error without promotion over that with it",
        how="As above, at K = 4096.",
        measure=promotion,
        above=1.0,
    ),
    Claim(
        name="all_reduce_over_ranks",
        claim="An all-reduce that adds in FP8 loses precision with the number of ranks.",
        source="Peng et al., FP8-LM, arXiv:2310.18313, section 2.1",
        figure="error at 64 ranks over that at 4",
        how="Normal gradients of 4,096 elements, scaled by the number of ranks, and a ring "
        "that rounds to e4m3 at each hop.",
        measure=all_reduce_over_ranks,
        above=1.0,
    ),
    Claim(
        name="stochastic_rounding",
        claim="Weights in bfloat16 do not take small updates when they round to nearest, and "
        "take them on average when they round stochastically.",
        source="Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192",
        figure="share of updates taken, stochastic minus nearest",
        how="Weights from 0.02 on, 200 updates of 1e-5.",
        measure=stochastic_rounding,
        above=0.5,
    ),
]
