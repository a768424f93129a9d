"""Grouped linears (spec X), against a loop over experts and a table of this file."""

import dataclasses

import numpy as np
import pytest

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2, FLOAT32
from fp8ref.recipe import RECIPES
from fp8ref.selection.grouped import GROUPED_RECIPES, GroupedRecipe
from fp8ref.sim import delayed, linear
from fp8ref.sim.experts import grouped
from fp8ref.sim.gemm import gemm
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec.delayed import DELAYED

GEMMS = ("output", "grad_input", "grad_weight")
E4, E5 = E4M3FN, E5M2
TENSOR, ROW, LINE, SQUARE, MX = (
    "tensorwise",
    "rowwise",
    "blockwise_1x128",
    "blockwise_128x128",
    "mx_1x32",
)
# (formats, granularities, policy of a and b; Hopper's sums; rows of a block of grad_weight) of
# output, grad_input, grad_weight
TABLE = {
    "tensorwise": (
        [(E4, E4), (E5, E4), (E5, E4)],
        [(TENSOR, TENSOR)] * 3,
        "torchao",
        ("fast", "slow", "slow"),
        1,
    ),
    "rowwise": ([(E4, E4)] * 3, [(ROW, ROW)] * 3, "torchao_pow2", ("fast", "fast", "fast"), 1),
    "blockwise": (
        [(E4, E4)] * 3,
        [(LINE, SQUARE), (LINE, SQUARE), (LINE, LINE)],
        "torchao",
        ("fast", "slow", "slow"),
        128,
    ),
    "mxfp8": ([(E4, E4)] * 3, [(MX, MX)] * 3, "mx_rceil", ("fast", "slow", "slow"), 32),
}
TABLE |= {
    name: (*TABLE["blockwise"][:2], policy, *TABLE["blockwise"][3:])
    for name, policy in (("blockwise_deepgemm", "deepgemm"), ("blockwise_ue8m0", "deepgemm_ue8m0"))
}
OFFS = (40, 40, 41, 137)  # sizes 40, 0, 1 and 96; the last rows are in no group
M, K, N, E = 150, 256, 128, 4


def tensors(rng, m=M, k=K, n=N, e=E):
    """x [m, k], w [e, n, k], g [m, n]: values of bfloat16; rows, columns and experts differ in
    size.
    """

    def like(shape, size):
        sizes = np.exp(rng.standard_normal(shape[-1])) * np.exp(
            rng.standard_normal((*shape[:-1], 1))
        )
        return cast.round_to(rng.standard_normal(shape) * sizes * size, BFLOAT16)

    return like((m, k), 1), like((e, n, k), 0.1), like((m, n), 1e-3)


def results(x, w, g, offs, recipe, **options):
    grad_input, grad_weight = grouped.backward(g, x, w, offs, recipe, **options)
    return {
        "output": grouped.forward(x, w, offs, recipe, **options),
        "grad_input": grad_input,
        "grad_weight": grad_weight,
    }


def by_loop(x, w, g, offs, name, accumulate, out_dtype):
    """A GEMM for each expert, whose operands are quantized by themselves."""
    formats, granularities, policy, sums, block = TABLE[name]
    found = {
        "output": np.zeros_like(g),
        "grad_input": np.zeros_like(x),
        "grad_weight": np.zeros_like(w),
    }
    begin = 0
    for e, end in enumerate(offs):
        rows, xe, ge = slice(begin, end), x[begin:end], g[begin:end]
        begin = end
        if not len(xe):
            continue
        fill = ((0, -len(xe) % (block if block > 1 else 32)), (0, 0))
        pairs = [(xe, w[e]), (ge, w[e].T), (np.pad(ge, fill).T, np.pad(xe, fill).T)]
        for which, (a, b), fmts, lines, speed in zip(
            GEMMS, pairs, formats, granularities, sums, strict=True
        ):
            q = [
                scaling.quantize(v, f, granularity=n, policy=policy)
                for v, f, n in zip((a, b), fmts, lines, strict=True)
            ]
            how = f"hopper_{speed}" if accumulate == "hopper" else accumulate
            out = gemm.matmul(*q, accumulate=how, out_dtype=BFLOAT16 if ROW in lines else out_dtype)
            if which == "grad_weight":
                found[which][e] = out
            else:
                found[which][rows] = out
    return found


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    ("accumulate", "out_dtype"),
    [("exact", BFLOAT16), ("f32", FLOAT32), ("hopper", BFLOAT16)],
    ids=str,
)
@pytest.mark.parametrize("recipe", TABLE)
#
def test_a_grouped_gemm_is_a_gemm_for_each_group(recipe, accumulate, out_dtype, rng):
    x, w, g = tensors(rng)
    got = results(x, w, g, OFFS, recipe, accumulate=accumulate, out_dtype=out_dtype)
    for which, expected in by_loop(x, w, g, OFFS, recipe, accumulate, out_dtype).items():
        np.testing.assert_array_equal(got[which], expected, err_msg=which)
        assert got[which].dtype == np.float32
        assert np.any(expected)


def test_in_high_precision(rng):  # X-2, G-9
    x, w, g = tensors(rng, k=64, n=32)
    got = results(x, w, g, np.array(OFFS, np.int32), "bf16", out_dtype=FLOAT32)
    begin = 0
    for e, end in enumerate(OFFS):
        x64, w64, g64 = (v.astype(np.float64) for v in (x[begin:end], w[e], g[begin:end]))
        np.testing.assert_array_equal(got["output"][begin:end], (x64 @ w64.T).astype(np.float32))
        np.testing.assert_array_equal(got["grad_weight"][e], (g64.T @ x64).astype(np.float32))
        begin = end


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_one_group_is_a_linear(recipe, rng):
    """Of ``rowwise`` in exact sums: its epilogue is another, which powers of two let round to the
    same.
    """
    x, w, g = tensors(rng, m=48, k=64, n=32, e=1)
    got = results(x, w, g, [48], recipe)
    np.testing.assert_array_equal(got["output"], linear.forward(x, w[0], recipe))
    for found, expected in zip(
        (got["grad_input"], got["grad_weight"][0]), linear.backward(g, x, w[0], recipe), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


ALL = GroupedRecipe(recipe=RECIPES["tensorwise"], amax="all")
ROWS_OF_ALL = dataclasses.replace(GROUPED_RECIPES["rowwise"], amax="all")
EVERY = [*TABLE, "delayed", "bf16", ALL, ROWS_OF_ALL]


def scales_of(recipe, x, w, g):
    """Scales of delayed states that have seen amaxes of another size; none for other recipes."""
    if recipe != "delayed":
        return None
    config, roles = (
        DELAYED["delayed"],
        {"input": (x, E4), "weight": (w, E4), "grad_output": (g, E5)},
    )
    return {
        role: delayed.step(
            delayed.init(config), grouped.observe(role, 2 * v, OFFS), config=config, fmt=fmt
        )[1]
        for role, (v, fmt) in roles.items()
    }


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "recipe", EVERY, ids=lambda r: r if isinstance(r, str) else f"{r.name}_of_all"
)
def test_poisoned_rows_of_no_group_reach_nothing(recipe, rng):
    x, w, g = tensors(rng)
    scales = scales_of(recipe, x, w, g)
    clean = results(x, w, g, OFFS, recipe, scales=scales)
    x[OFFS[-1] :], g[OFFS[-1] :] = np.nan, np.inf
    for which, out in results(x, w, g, OFFS, recipe, scales=scales).items():
        np.testing.assert_array_equal(out, clean[which], err_msg=which)
        assert np.isfinite(out).all()
    assert not clean["output"][OFFS[-1] :].view(np.uint32).any()  # +0


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "recipe", EVERY, ids=lambda r: r if isinstance(r, str) else f"{r.name}_of_all"
)
def test_groups_without_rows(recipe, rng):
    x, w, g = tensors(rng)
    got = results(x, w, g, OFFS, recipe, scales=scales_of(recipe, x, w, g))
    assert not got["grad_weight"][1].view(np.uint32).any()
    none = results(x, w, g, [0] * E, recipe, scales=scales_of(recipe, x, w, g))
    assert not any(v.view(np.uint32).any() for v in none.values())
    empty = results(x[:0], w, g[:0], [0] * E, recipe, scales=scales_of(recipe, x, w, g))
    assert empty["output"].shape == (0, N)
    assert not empty["grad_weight"].any()


def test_no_experts(rng):
    x, w, g = tensors(rng, m=4, k=32, n=16)
    got = results(x, w[:0], g, np.zeros(0, int), "rowwise")
    assert {which: v.shape for which, v in got.items()} == {
        "output": (4, 16),
        "grad_input": (4, 32),
        "grad_weight": (0, 16, 32),
    }
    assert not any(v.any() for v in got.values())


@pytest.mark.grid(2)
@pytest.mark.parametrize("multiple", [16, 32])
@pytest.mark.parametrize(
    "recipe", EVERY, ids=lambda r: r if isinstance(r, str) else f"{r.name}_of_all"
)
def test_padding_of_groups_changes_no_bit(recipe, multiple, rng):
    x, w, g = tensors(rng)
    sizes = np.diff([0, *OFFS])
    ends = np.cumsum(sizes + -sizes % multiple)
    rows = np.concatenate(
        [
            end - size - -size % multiple + np.arange(size)
            for end, size in zip(ends, sizes, strict=True)
        ]
    )
    padded = [np.zeros((ends[-1], v.shape[1]), np.float32) for v in (x, g)]
    for to, v in zip(padded, (x, g), strict=True):
        to[rows] = v[: OFFS[-1]]
    scales = scales_of(recipe, x, w, g)
    for accumulate in ("exact", "hopper"):
        plain = results(x, w, g, OFFS, recipe, accumulate=accumulate, scales=scales)
        got = results(padded[0], w, padded[1], ends, recipe, accumulate=accumulate, scales=scales)
        np.testing.assert_array_equal(got["output"][rows], plain["output"][: OFFS[-1]])
        np.testing.assert_array_equal(got["grad_input"][rows], plain["grad_input"][: OFFS[-1]])
        np.testing.assert_array_equal(got["grad_weight"], plain["grad_weight"])


@pytest.mark.grid(2)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_a_nan_stays_in_its_group(recipe, rng):
    x, w, g = tensors(rng)
    clean = results(x, w, g, OFFS, recipe)
    x[3, 5], w[2, 7, 9] = np.nan, np.inf
    got = results(x, w, g, OFFS, recipe)
    assert np.isnan(got["output"][3]).any()
    assert not np.array_equal(got["output"][40], clean["output"][40])
    np.testing.assert_array_equal(got["output"][41:], clean["output"][41:])
    np.testing.assert_array_equal(got["grad_weight"][3], clean["grad_weight"][3])


@pytest.mark.parametrize("recipe", [ALL, ROWS_OF_ALL], ids=["tensorwise", "rowwise"])
def test_scales_of_all_groups(recipe, rng):
    """Codes of the whole tensor, quantized once, and cut into groups."""
    x, w, g = tensors(rng)
    last, policy = OFFS[-1], "torchao" if recipe is ALL else "torchao_pow2"
    lines = TENSOR if recipe is ALL else ROW
    xs = scaling.quantize(x[:last], E4, granularity=lines, policy=policy, axis=0)
    gs = scaling.quantize(
        g[:last], E5 if recipe is ALL else E4, granularity=lines, policy=policy, axis=0
    )
    begin = 0
    for end, pair in zip(
        OFFS,
        grouped.quantize_operands("grad_weight", {"input": x, "grad_output": g}, OFFS, recipe),
        strict=True,
    ):
        if begin == end:
            assert pair is None
        else:
            for got, whole in zip(pair, (gs, xs), strict=True):
                np.testing.assert_array_equal(got.codes, whole.codes[begin:end].T)
                np.testing.assert_array_equal(got.scale_inv, whole.scale_inv.T)
        begin = end
    ws = scaling.quantize(
        w, E4, granularity=lines, policy=policy, axis=-2 if recipe is ROWS_OF_ALL else -1
    )
    for e in (0, 2, 3):
        _, b = grouped.quantize_operands(
            "grad_input", {"grad_output": g, "weight": w}, OFFS, recipe
        )[e]
        np.testing.assert_array_equal(b.codes, ws.codes[e].T)
    assert np.isfinite(results(x, w, g, OFFS, recipe)["grad_weight"]).all()


def test_the_two_choices_of_amax_differ(rng):  # else the tests above could not tell
    x, w, g = tensors(rng)
    for one, other in (("tensorwise", ALL), ("rowwise", ROWS_OF_ALL)):
        found = [results(x, w, g, OFFS, recipe, out_dtype=FLOAT32) for recipe in (one, other)]
        assert not np.array_equal(found[0]["grad_weight"], found[1]["grad_weight"])
        assert np.array_equal(found[0]["output"], found[1]["output"]) == (one == "rowwise")


def test_what_a_state_observes(rng):
    x, w, _ = tensors(rng)
    x[OFFS[-1] :] = np.nan
    of_x, of_w = grouped.observe("input", x, OFFS), grouped.observe("weight", w, OFFS)
    assert (of_x.amax, of_x.non_finite, of_x.seen) == (np.abs(x[: OFFS[-1]]).max(), False, True)
    assert of_w.amax == np.abs(w).max()
    assert not any(
        grouped.observe(role, v, [0] * E).seen
        for role, v in (("input", x), ("weight", w), ("grad_output", x[:0]))
    )


def test_delayed_scales_are_those_of_the_states(rng):
    x, w, g = tensors(rng)
    scales = scales_of("delayed", x, w, g)
    got = grouped.quantize_operands("output", {"input": x, "weight": w}, OFFS, "delayed", scales)
    for e, begin, end in ((0, 0, 40), (2, 40, 41), (3, 41, 137)):
        a, b = got[e]
        np.testing.assert_array_equal(
            a.codes, scaling.quantize_with(x[begin:end], scales["input"], E4).codes
        )
        np.testing.assert_array_equal(
            b.codes, scaling.quantize_with(w[e], scales["weight"], E4).codes
        )


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8", "tensorwise"])
def test_codes_of_rows_move_as_the_rows_do(recipe, rng):
    """Tokens are cast in their own order, then sorted by expert, two of each, one dropped; and cast
    after that.
    """
    x, w, _ = tensors(rng)
    tokens = x[:70]
    order = np.delete(rng.permutation(np.repeat(np.arange(70), 2)), 5)[: OFFS[-1]]
    moved = np.concatenate([tokens[order], np.zeros((M - len(order), K), np.float32)])
    own = linear.quantize_operands(
        "output", {"input": tokens, "weight": w[0]}, GROUPED_RECIPES[recipe].recipe
    )[0]
    pairs = grouped.quantize_operands("output", {"input": moved, "weight": w}, OFFS, recipe)
    codes = np.concatenate([pair[0].codes for pair in pairs if pair is not None])
    assert np.array_equal(codes, own.codes[order]) == (recipe != "tensorwise")
    if recipe != "tensorwise":
        scales = np.concatenate([pair[0].scale_inv for pair in pairs if pair is not None])
        np.testing.assert_array_equal(scales, own.scale_inv[order])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offs": [3, 2, 4, 5]}, "offs ascend from 0 to at most M=150; got \\[3, 2, 4, 5\\]"),
        ({"offs": [3, 4, 5, 151]}, "offs ascend from 0 to at most M=150"),
        ({"offs": [3.0, 4, 5, 6]}, "offs are integers"),
        ({"offs": [3, 4, 5]}, "offs have one end for each of E groups; got 3"),
        ({"x": np.zeros((2, 75, K), np.float32)}, "x \\[M, K\\], w \\[E, N, K\\]"),
        ({"w": np.zeros((E, 24, K), np.float32)}, "multiples of 16"),
        ({"recipe": "delayed"}, "takes the scales of input"),
        ({"recipe": "nothing"}, "a grouped recipe is a GroupedRecipe, a Recipe or"),
        ({"recipe": "nvfp4"}, "experts neither rotate.*got recipe 'nvfp4'. Use 'mxfp4'"),
    ],
)
def test_what_is_refused(change, message, rng):
    x, w, _ = tensors(rng)
    with pytest.raises(ValueError, match=message):
        grouped.forward(**({"x": x, "w": w, "offs": OFFS, "recipe": "tensorwise"} | change))


def test_recipes_that_contradict_themselves():
    with pytest.raises(ValueError, match="blocks begin with their group"):
        GroupedRecipe(recipe=RECIPES["mxfp8"], amax="all")
    with pytest.raises(ValueError, match="one state of each role for all groups"):
        GroupedRecipe(recipe=RECIPES["delayed"])
    with pytest.raises(ValueError, match="amax is one of group, all"):
        GroupedRecipe(recipe=RECIPES["bf16"], amax="none")


def test_grad_output_of_another_shape(rng):
    x, w, g = tensors(rng)
    with pytest.raises(ValueError, match="grad_output has the output's shape"):
        grouped.backward(g[:-1], x, w, OFFS, "tensorwise")
