import dataclasses

import numpy as np
import pytest

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT16, FLOAT32
from fp8ref.recipe import OPERANDS, RECIPES, CastSpec, GemmSpec, Recipe
from fp8ref.sim import delayed, linear
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import ACCUMULATIONS, Accumulation
from fp8ref.sim.gemm.tensor_core import UNITS
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec.delayed import DELAYED

GEMMS = ("output", "grad_input", "grad_weight")
# L-2, by numpy: operands of [M, K], [N, K], [M, N] with their reduced axis last, and the Hopper
# plan of a slow or fast GEMM.
BY_HAND = {
    "output": lambda x, w, g: (x, w, "hopper_fast"),
    "grad_input": lambda x, w, g: (g, w.T, "hopper_slow"),
    "grad_weight": lambda x, w, g: (g.T, x.T, "hopper_slow"),
}
E4, E5 = E4M3FN, E5M2
TENSOR, ROW, LINE, SQUARE, MX = (
    "tensorwise",
    "rowwise",
    "blockwise_1x128",
    "blockwise_128x128",
    "mx_1x32",
)
# Formats, granularities, policies and epilogue of each GEMM, as the table of R has them; None is
# high precision.
CASTS = {
    "bf16": dict.fromkeys(GEMMS),
    "tensorwise": {
        "output": (E4, TENSOR, E4, TENSOR, "torchao", "scale_then_round"),
        "grad_input": (E5, TENSOR, E4, TENSOR, "torchao", "scale_then_round"),
        "grad_weight": (E5, TENSOR, E4, TENSOR, "torchao", "scale_then_round"),
    },
    "rowwise": {
        "output": (E4, ROW, E4, ROW, "torchao_pow2", "scale_then_round"),
        "grad_input": (E4, ROW, E4, ROW, "torchao_pow2", "unit_round_scale_round"),
        "grad_weight": (E4, ROW, E4, ROW, "torchao_pow2", "unit_round_scale_round"),
    },
    "rowwise_with_gw_hp": {
        "output": (E4, ROW, E4, ROW, "torchao_pow2", "scale_then_round"),
        "grad_input": (E4, ROW, E4, TENSOR, "torchao_pow2", "unit_round_scale_round"),
        "grad_weight": None,
    },
    "blockwise": {
        "output": (E4, LINE, E4, SQUARE, "torchao", "scale_then_round"),
        "grad_input": (E4, LINE, E4, SQUARE, "torchao", "scale_then_round"),
        "grad_weight": (E4, LINE, E4, LINE, "torchao", "scale_then_round"),
    },
    "mxfp8": dict.fromkeys(GEMMS, (E4, MX, E4, MX, "mx_rceil", "scale_then_round")),
    "mxfp8_32x32": {
        "output": (E4, MX, E4, "mx_32x32", "mx_rceil", "scale_then_round"),
        "grad_input": (E4, MX, E4, "mx_32x32", "mx_rceil", "scale_then_round"),
        "grad_weight": (E4, MX, E4, MX, "mx_rceil", "scale_then_round"),
    },
}
for name, like, policy, epilogue in (
    ("tensorwise_pow2", "tensorwise", "torchao_pow2", "scale_then_round"),
    ("rowwise_native", "rowwise", "torchao_pow2", "scale_then_round"),
):
    CASTS[name] = {which: (*casts[:4], policy, epilogue) for which, casts in CASTS[like].items()}
for name, policy in (("blockwise_deepgemm", "deepgemm"), ("blockwise_ue8m0", "deepgemm_ue8m0")):
    CASTS[name] = {
        which: (*casts[:4], policy, casts[5]) for which, casts in CASTS["blockwise"].items()
    }
DYNAMIC = [
    name for name, r in RECIPES.items() if not (r.delayed or r.emulated)
]  # test_linear_fp4.py has those in FP4


def tensors(rng, m, n, k):
    """x [2, m / 2, k], w [n, k], g [2, m / 2, n], values of bfloat16 whose rows and columns differ
    in size.
    """

    def like(shape, size):
        return cast.round_to(
            rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[-1])) * size, BFLOAT16
        )

    return like((2, m // 2, k), 1), like((n, k), 0.1), like((2, m // 2, n), 1e-3)


@pytest.fixture
def operands(rng):
    return tensors(rng, 256, 128, 384)


def results(x, w, g, recipe, **options):
    grad_input, grad_weight = linear.backward(g, x, w, recipe, **options)
    return {
        "output": linear.forward(x, w, recipe, **options),
        "grad_input": grad_input,
        "grad_weight": grad_weight,
    }


def by_hand(which, x, w, g, casts, accumulate, out_dtype, quantize=scaling.quantize):
    """One GEMM from the table: leading dims flattened, reduced axis last, each operand quantized
    along it (L-1, L-2, L-3).
    """
    a, b, plan = BY_HAND[which](x.reshape(-1, x.shape[-1]), w, g.reshape(-1, g.shape[-1]))
    if casts is None:
        return cast.round_to(
            (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float32), out_dtype
        )
    fmt_a, granularity_a, fmt_b, granularity_b, policy, epilogue = casts
    qa = quantize(a, fmt_a, granularity=granularity_a, policy=policy, axis=1)
    qb = quantize(b, fmt_b, granularity=granularity_b, policy=policy, axis=1)
    out_dtype = BFLOAT16 if ROW in (granularity_a, granularity_b) else out_dtype  # G-8
    return gemm.matmul(
        qa,
        qb,
        accumulate=plan if accumulate == "hopper" else accumulate,
        epilogue=epilogue,
        out_dtype=out_dtype,
    )


@pytest.mark.grid(4)
@pytest.mark.parametrize("out_dtype", [BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("accumulate", ["exact", "f32", "hopper", "ada"])
@pytest.mark.parametrize("recipe", DYNAMIC)
# L-1 to L-4, L-6, R-1
def test_every_gemm_of_every_recipe_by_hand(recipe, accumulate, out_dtype, operands):
    x, w, g = operands
    got = results(x, w, g, recipe, accumulate=accumulate, out_dtype=out_dtype)
    shapes = {"output": g.shape, "grad_input": x.shape, "grad_weight": w.shape}
    for which, casts in CASTS[recipe].items():
        expected = by_hand(which, x, w, g, casts, accumulate, out_dtype).reshape(shapes[which])
        np.testing.assert_array_equal(got[which], expected, err_msg=which)
        assert got[which].dtype == np.float32


def test_the_rules_of_accumulation_differ(operands):
    found = {
        how: results(*operands, "tensorwise", accumulate=how, out_dtype=FLOAT32)
        for how in ("exact", "f32", "hopper", "ada")
    }
    for which in GEMMS:
        assert len({found[how][which].tobytes() for how in found}) == 4


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_accumulation_is_chosen_for_each_gemm(recipe, operands):  # L-6
    x, w, g = operands
    own = Accumulation(name="own", unit=UNITS["hopper"], promotion=64)
    rules = {"output": "f32", "grad_input": own, "grad_weight": "hopper"}
    got = results(x, w, g, recipe, accumulate=rules)
    for which, rule in rules.items():
        expected = by_hand(which, x, w, g, CASTS[recipe][which], rule, BFLOAT16)
        np.testing.assert_array_equal(got[which].reshape(expected.shape), expected)
    np.testing.assert_array_equal(
        linear.forward(x, w, recipe, accumulate={"output": "f32"}), got["output"]
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "bf16"])
@pytest.mark.parametrize("accumulate", ["exact", "f32", "hopper", "blackwell"])
def test_any_number_of_rows_and_odd_multiples_of_16(recipe, accumulate, rng):  # L-5
    """M = 38, N = 48, K = 80: a tensor core's last instruction reaches beyond each; zeros there
    change no bit (G-12).
    """
    x, w, g = (v.reshape(-1, v.shape[-1]) for v in tensors(rng, 38, 48, 80))
    got = results(x, w, g, recipe, accumulate=accumulate)
    padded = [np.pad(v, [(0, -n % 32) for n in v.shape]) for v in (x, w, g)]
    for which, value in results(*padded, recipe, accumulate=accumulate).items():
        rows, columns = got[which].shape
        np.testing.assert_array_equal(got[which], value[:rows, :columns])


def test_a_block_that_does_not_divide_n_is_refused(rng):  # S-6
    x, w, g = tensors(rng, 48, 64, 128)
    assert linear.forward(x, w, "blockwise").shape == g.shape  # 64 of N are half a block
    with pytest.raises(
        ValueError,
        match=r"divisible by 128; got x.shape=\(48, 64\).*Pad it with zeros or use 'rowwise'",
    ):
        linear.backward(g, x, w, "blockwise")


@pytest.mark.parametrize("accumulate", ["exact", "f32", "hopper"])
@pytest.mark.parametrize("m", [1, 31, 96, 130])
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
# L-5, G-13; ms-swift#9723
def test_a_last_block_of_rows_may_be_shorter(recipe, m, accumulate, rng):
    """Zeros that fill it change no bit of either gradient; its scale is that of its rows."""
    x, w, g = tensors(rng, m + 2, 128, 128)
    x, g = (v.reshape(-1, 128)[:m] for v in (x, g))
    found = linear.backward(g, x, w, recipe, accumulate=accumulate)
    filled = [np.pad(v, ((0, -m % 128), (0, 0))) for v in (g, x)]
    grad_input, grad_weight = linear.backward(*filled, w, recipe, accumulate=accumulate)
    np.testing.assert_array_equal(found[0], grad_input[:m])
    np.testing.assert_array_equal(found[1], grad_weight)
    a, _ = linear.quantize_operands("grad_weight", {"grad_output": g, "input": x}, RECIPES[recipe])
    block = RECIPES[recipe].rows
    assert a.codes.shape == (128, m)
    np.testing.assert_array_equal(
        scaling.amax(g[-(m % block or block) :].T, "rowwise"),
        scaling.amax(g.T, a.granularity, ragged=True)[:, -1:],
    )


def test_delayed_scaling_by_hand(operands):  # L-6, R-1, H-1
    """Three steps: the first at scale 1, the next by the amaxes of the steps before, the same for
    both of a role's GEMMs.
    """
    x, w, g = operands
    config, formats = DELAYED["delayed"], {"input": E4, "weight": E4, "grad_output": E5}
    states = {role: delayed.init(config) for role in formats}
    sizes = {role: np.float32(1) for role in formats}
    table = {"output": (E4, E4), "grad_input": (E5, E4), "grad_weight": (E5, E4)}
    for step in range(3):
        now = {
            "input": x * np.float32(2**step),
            "weight": w,
            "grad_output": g / np.float32(2**step),
        }
        scales = {role: delayed.scales(states[role], config, fmt) for role, fmt in formats.items()}
        assert {role: float(s.scale) for role, s in scales.items()} == sizes
        tensors_ = now["input"], now["weight"], now["grad_output"]
        got = results(*tensors_, "delayed", accumulate="hopper", scales=scales)
        for which, (fmt_a, fmt_b) in table.items():
            roles = iter(OPERANDS[which])

            def quantize(v, fmt, roles=roles, scales=scales, **options):
                return scaling.quantize_with(v, scales[next(roles)], fmt, **options)

            expected = by_hand(
                which,
                *tensors_,
                (fmt_a, TENSOR, fmt_b, TENSOR, "te_delayed", "scale_then_round"),
                "hopper",
                BFLOAT16,
                quantize,
            )
            np.testing.assert_array_equal(got[which].reshape(expected.shape), expected)
        for role, fmt in formats.items():
            states[role] = delayed.update(
                states[role], delayed.observe(scaling.amax(now[role])), config=config, fmt=fmt
            )
            # of the history
            largest = max(float(np.abs(now[role]).max()), fmt.max / sizes[role] if step else 0)
            sizes[role] = float(np.float32(np.float32(fmt.max) / np.float32(largest)))


def test_delayed_scales_come_from_the_state_and_only_there(operands):
    x, w, g = operands
    scales = {
        role: delayed.scales(delayed.init(DELAYED["delayed"]), DELAYED["delayed"], E4)
        for role in ("input", "weight", "grad_output")
    }
    with pytest.raises(
        ValueError,
        match=r"scales of input from its state; got none. Pass scales=\{role: delayed.scales",
    ):
        linear.forward(x, w, "delayed")
    with pytest.raises(ValueError, match="scales of weight from its state; got input"):
        linear.forward(x, w, "delayed", scales={"input": scales["input"]})
    with pytest.raises(ValueError, match="scales of grad_output from its state; got input, weight"):
        linear.backward(g, x, w, "delayed", scales={r: scales[r] for r in ("input", "weight")})
    for recipe in ("tensorwise", "mxfp8", "bf16"):
        with pytest.raises(
            ValueError,
            match=r"takes no scales; got some for input\. Leave them out, or use recipe 'delayed'",
        ):
            linear.forward(x, w, recipe, scales={"input": scales["input"]})
    with pytest.raises(ValueError, match="got some for inptu"):
        linear.forward(x, w, "delayed", scales={**scales, "inptu": scales["input"]})


def test_delayed_and_dynamic_operands_may_meet_in_one_gemm(operands):
    """Only grad_output delayed, say: scales are for the roles that take them."""
    x, w, g = operands
    config = DELAYED["delayed"]
    late, now = CastSpec(fmt=E5, policy=config.policy, delayed=config), CastSpec(fmt=E4)
    mixed = Recipe(
        name="mixed",
        output=GemmSpec(a=now, b=now, accumulate="fast"),
        grad_input=GemmSpec(a=late, b=now, accumulate="slow"),
        grad_weight=GemmSpec(a=late, b=now, accumulate="slow"),
    )
    unit = scaling.Scales(np.float32(4096), np.float32(2.0**-12))
    grad_input, _ = linear.backward(g, x, w, mixed, scales={"grad_output": unit})
    qg = scaling.quantize_with(g.reshape(256, 128), unit, E5)
    expected = gemm.matmul(qg, scaling.quantize(w.T, E4), out_dtype=BFLOAT16)
    np.testing.assert_array_equal(grad_input.reshape(256, 384), expected)
    with pytest.raises(ValueError, match="got some for weight"):
        linear.backward(g, x, w, mixed, scales={"grad_output": unit, "weight": unit})


def test_rowwise_outputs_pass_through_bfloat16(operands):  # G-8
    x, w, _ = operands
    wide = linear.forward(x, w, "rowwise", out_dtype=FLOAT32)
    np.testing.assert_array_equal(wide, cast.round_to(wide, BFLOAT16))
    assert (
        linear.forward(x, w, "tensorwise", out_dtype=FLOAT32) != linear.forward(x, w, "tensorwise")
    ).any()


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_rowwise_outputs_in_float16_are_rounded_a_second_time(recipe, operands):  # G-8
    """By NumPy, of results small enough to be subnormal in float16, and so large that it has
    none.
    """
    x, w, g = operands
    for size in (2.0**-20, 1.0, 2.0**13):
        given = np.float32(size) * x, w, g
        first, second = (results(*given, recipe, out_dtype=fmt) for fmt in (BFLOAT16, FLOAT16))
        for which in GEMMS if recipe == "rowwise" else ("output", "grad_input"):
            with np.errstate(over="ignore"):
                expected = first[which].astype(np.float16)
            np.testing.assert_array_equal(second[which], expected)
            assert which == "grad_input" or (np.isinf(expected).any() == (size > 1))
    assert (first["output"] != second["output"]).any()


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_fp8_is_near_high_precision(recipe, operands):
    x, w, _ = operands
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    # Operands err by at most 1/16 each (S-5), or under tensorwise scales by half the smallest
    # subnormal, so their product by 2/16 + 1/256 of sum |x w| and what underflow adds; and bfloat16
    # by 2^-8.
    bound = (np.abs(x).astype(np.float64) @ np.abs(w).T) * (2 / 16 + 1 / 256) + np.abs(
        exact
    ) * 2.0**-8
    bound += (
        np.abs(x).max() / 448 * 2.0**-10 * np.abs(w).sum(axis=1) * 1.1
        + np.abs(w).max() / 448 * 2.0**-10 * np.abs(x).sum(axis=-1)[..., None] * 1.1
    )
    assert (np.abs(linear.forward(x, w, recipe) - exact) <= bound).all()


def test_any_memory_order_dtype_and_read_only_tensors(rng):  # L-1
    x, w, g = tensors(rng, 64, 32, 64)
    for v in (x, w, g):
        v.flags.writeable = False
    expected = results(x, w, g, "rowwise", accumulate="hopper")
    for change in (np.asfortranarray, lambda v: np.repeat(v, 2, -1)[..., ::2]):
        got = results(*(change(v) for v in (x, w, g)), "rowwise", accumulate="hopper")
        assert all((got[which] == expected[which]).all() for which in GEMMS)
    one = linear.forward(x[0, 0], w, "rowwise", accumulate="hopper")  # a vector: no leading dims
    assert one.shape == (32,)
    np.testing.assert_array_equal(
        linear.forward(x[0, :1], w, "rowwise", accumulate="hopper"), one[None]
    )
    # values that both dtypes hold
    half = [cast.round_to(v, E5M2).astype(np.float16) for v in (x, w)]
    np.testing.assert_array_equal(
        linear.forward(*half, "tensorwise"),
        linear.forward(*(v.astype(np.float32) for v in half), "tensorwise"),
    )
    assert linear.forward(x[:, :0], w, "bf16").shape == (2, 0, 32)


@pytest.mark.parametrize(
    ("x", "w", "options", "message"),
    [
        ((4, 64), (32, 48), {}, r"one K; got \(4, 64\) and \(32, 48\)"),
        (
            (4, 40),
            (32, 40),
            {},
            r"multiples of 16; got w.shape=\(32, 40\). Pad the layer or use recipe 'bf16'",
        ),
        ((4, 64), (24, 64), {}, "multiples of 16"),
        ((4, 64), (2, 32, 64), {}, r"w \[N, K\]"),
        ((), (32, 64), {}, r"x \[..., K\] and w \[N, K\].*got \(\)"),
        ((4, 64), (32, 64), {"recipe": "fp8"}, "tensorwise, .*got 'fp8'"),
        ((4, 64), (32, 64), {"accumulate": "fast"}, "hopper_fast.*got 'fast'"),
        (
            (4, 64),
            (32, 64),
            {"accumulate": {}},
            "one for each GEMM by name; output needs one.*got none",
        ),
        (
            (4, 64),
            (32, 64),
            {"accumulate": {"ouput": "exact"}},
            "of output, grad_input, grad_weight; got ouput",
        ),
        (
            (4, 64),
            (32, 64),
            {"accumulate": {"output": "exact", "grads": "f32"}},
            "got output, grads",
        ),
        ((4, 64), (32, 64), {"out_dtype": E4M3FN}, "out_dtype is one of"),
    ],
)
def test_errors(x, w, options, message):
    with pytest.raises(ValueError, match=message):
        linear.forward(
            np.ones(x, np.float32), np.ones(w, np.float32), **{"recipe": "tensorwise", **options}
        )


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise"])
def test_errors_of_dtypes(recipe):
    x, w = np.ones((4, 32), np.float32), np.ones((16, 32), np.float32)
    for bad in (x.astype(np.int32), x.astype(complex), x > 0):
        with pytest.raises(ValueError, match=r"got .*Use .astype first\."):
            linear.forward(bad, w, recipe)
    if recipe == "tensorwise":
        with pytest.raises(ValueError, match=r"got float64\. Use x\.astype"):
            linear.forward(x.astype(np.float64), w, recipe)


def test_errors_of_backward():
    x, w = np.ones((4, 64), np.float32), np.ones((32, 64), np.float32)
    with pytest.raises(ValueError, match=r"the output's shape \(4, 32\); got \(4, 16\)"):
        linear.backward(np.ones((4, 16), np.float32), x, w, "bf16")
    with pytest.raises(
        ValueError, match="grad_input needs one of output, grad_input, grad_weight; got output"
    ):
        linear.backward(
            np.ones((4, 32), np.float32), x, w, "tensorwise", accumulate={"output": "exact"}
        )


def test_a_recipe_of_ones_own(operands):
    x, w, _ = operands
    spec = CastSpec(fmt=E5)
    mine = Recipe(
        name="mine",
        output=GemmSpec(a=spec, b=spec, accumulate="slow", epilogue="product_then_round"),
    )
    expected = by_hand(
        "output",
        x,
        w,
        operands[2],
        (E5, TENSOR, E5, TENSOR, "torchao", "product_then_round"),
        "hopper_slow",
        BFLOAT16,
    )
    got = linear.forward(x, w, mine, accumulate="hopper")
    np.testing.assert_array_equal(got.reshape(expected.shape), expected)
    assert set(ACCUMULATIONS) >= {
        f"hopper_{spec.accumulate}"
        for r in RECIPES.values()
        for spec in r.gemms.values()
        if spec.fp8
    }
    assert dataclasses.replace(mine, output=GemmSpec()).fp8 is False


@pytest.mark.parametrize(
    "recipe",
    ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8"],
)
@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128)])
def test_no_tokens_give_no_outputs_and_zeros_as_gradients(recipe, shape):  # L-9
    x, w, g = (
        np.zeros(shape, np.float32),
        np.ones((256, 128), np.float32),
        np.zeros((*shape[:-1], 256), np.float32),
    )
    assert linear.forward(x, w, recipe).shape == g.shape
    grad_input, grad_weight = linear.backward(g, x, w, recipe)
    assert grad_input.shape == shape
    np.testing.assert_array_equal(grad_weight, np.zeros((256, 128)))
