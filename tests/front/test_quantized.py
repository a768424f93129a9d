"""The front door quantizes arrays of each framework, and says what it cost."""

import warnings

import numpy as np
import pytest

import fp8ref as f8
from fp8ref.formats import E2M1FN, E4M3FN
from fp8ref.front import quantized
from fp8ref.policy import FP4_POLICIES
from fp8ref.recipe import RECIPES, CastSpec
from fp8ref.sim.quantize import scaling


@pytest.fixture
def x(rng):
    return rng.standard_normal((8, 128), dtype=np.float32)


def in_framework(x: np.ndarray, name: str):
    if name == "torch":
        import torch

        return torch.from_numpy(x.copy())
    import jax.numpy as jnp

    return jnp.asarray(x)


def test_a_format_a_recipe_and_a_policy_by_name_are_the_simulators(x):
    q = f8.quantize(x, "e4m3fn", "rowwise", policy="torchao", axis=0)
    expected = scaling.quantize(x, E4M3FN, granularity="rowwise", policy="torchao", axis=0)
    np.testing.assert_array_equal(q.codes, expected.codes)
    np.testing.assert_array_equal(q.scale, expected.scale)
    np.testing.assert_array_equal(q.scale_inv, expected.scale_inv)
    np.testing.assert_array_equal(q.dequantize(), scaling.dequantize(expected))
    np.testing.assert_array_equal(f8.dequantize(expected), scaling.dequantize(expected))
    assert (q.fmt, q.granularity, q.policy.name, q.axis) == (E4M3FN, "rowwise", "torchao", 0)
    assert q.shape == (8, 128)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "bf16"])
def test_a_recipe_is_its_cast_of_an_input(name, x):
    q, spec = f8.quantize(x, recipe=name), RECIPES[name].output.a
    expected = scaling.quantize(x, spec.fmt, granularity=spec.granularity, policy=spec.policy)
    np.testing.assert_array_equal(q.codes, expected.codes)
    np.testing.assert_array_equal(f8.quantize(x, recipe=RECIPES[name]).codes, q.codes)


@pytest.mark.parametrize(
    ("granularity", "policy"),
    [("mx_1x32", "mx_rceil"), ("nvfp4_1x16", "te_nvfp4"), ("blockwise_128x128", "torchao")],
)
def test_a_granularity_has_the_policy_of_the_first_recipe_that_has_it(granularity, policy, x):
    q = f8.quantize(x, recipe=granularity)
    assert (q.granularity, q.policy.name) == (granularity, policy)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_number_of_a_framework_is_quantized(framework):
    q = f8.quantize(in_framework(np.array(3, np.float32), framework))
    assert (q.shape, float(q.scale), float(q.dequantize())) == ((), np.float32(448 / 3), 3.0)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize(
    "recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "mxfp4", "nvfp4"]
)
def test_an_array_stays_in_its_framework_with_the_same_bits(framework, recipe, x):
    theirs = f8.quantize(in_framework(x, framework), recipe=recipe)
    ours = f8.quantize(x, recipe=recipe)
    assert type(theirs.codes).__module__.startswith(framework)
    assert type(theirs.dequantize()) is type(theirs.codes)
    np.testing.assert_array_equal(quantized.as_numpy(theirs.codes), ours.codes)
    np.testing.assert_array_equal(np.asarray(theirs.scale), ours.scale)
    np.testing.assert_array_equal(np.asarray(theirs.dequantize()), ours.dequantize())
    assert theirs.error(x).to_dict() == ours.error(in_framework(x, framework)).to_dict()
    assert repr(theirs) == repr(ours)
    assert theirs._repr_html_() == ours._repr_html_()


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_other_formats_are_for_numpy(framework, x):
    for fmt, recipe in (("e2m3fn", "mxfp4"), ("e2m1fn", "rowwise")):
        with pytest.raises(ValueError, match=rf"simulated, in NumPy alone; got {fmt}"):
            f8.quantize(in_framework(x, framework), fmt, recipe)


def test_bfloat16_of_torch_is_quantized_and_measured_as_it_is(x):
    torch = pytest.importorskip("torch")
    narrow = torch.from_numpy(x).bfloat16().requires_grad_()
    q = f8.quantize(narrow)
    expected = f8.quantize(narrow.detach().float().numpy())
    np.testing.assert_array_equal(quantized.as_numpy(q.codes), expected.codes)
    assert q.error(narrow).sqnr > 30


def test_arrays_of_bytes_that_are_no_codes_keep_their_dtype():
    torch = pytest.importorskip("torch")
    assert quantized.as_numpy(np.int8([-1])).tolist() == [-1]
    assert quantized.as_numpy(torch.tensor([-1], dtype=torch.int8)).tolist() == [-1]
    assert quantized.as_numpy(torch.tensor([2.0**-60 + 1], dtype=torch.float64)).dtype == float


def test_a_tensor_that_is_traced_is_shown_without_its_codes(x):
    import jax

    shown = []
    jax.jit(lambda x: shown.append(repr(f8.quantize(x))))(x)
    assert shown[0].splitlines() == [
        "Quantized (8, 128) e4m3fn",
        "  scales  tensorwise",
        "  policy  torchao",
    ]


class TestInputs:
    """What is quantized after a conversion, and what is refused with a remedy."""

    @pytest.mark.parametrize("dtype", [np.float64, np.longdouble, np.int32, np.int64, np.uint8])
    def test_wider_numbers_are_rounded_to_float32_first_with_one_warning(self, dtype, rng):
        x = (15 * rng.random((4, 8)) ** 2).astype(dtype)
        quantized._say_rounded.cache_clear()
        with pytest.warns(UserWarning, match=rf"x is {x.dtype}.*x.astype\(np.float32\)") as said:
            q = f8.quantize(x)
        assert [warning.filename for warning in said] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            f8.quantize(x)
        np.testing.assert_array_equal(q.codes, f8.quantize(x.astype(np.float32)).codes)
        quantized._say_rounded.cache_clear()

    def test_rounding_to_float32_decides_a_code(self):
        """1 + 2^-4 + 2^-30 is above the tie of 1 and 1.125, and in float32 it is the tie."""
        x = [1 + 2.0**-4 + 2.0**-30, 448.0]
        assert f8.quantize(x).dequantize()[0] == 1.0

    @pytest.mark.parametrize("x", [[1, 2], [[0.5]], 3.0, 7, range(1, 4)], ids=repr)
    def test_numbers_without_a_dtype_are_taken_silently(self, x):
        assert f8.quantize(x).shape == np.shape(x)

    def test_torch_rounds_double_precision_and_integers(self):
        torch = pytest.importorskip("torch")
        quantized._say_rounded.cache_clear()
        with pytest.warns(UserWarning, match=r"x is float64.*x\.float\(\)"):
            q = f8.quantize(torch.tensor([1.0, -448.0], dtype=torch.float64))
        assert q.dequantize().tolist() == [1.0, -448.0]
        with pytest.warns(UserWarning, match="x is int64"):
            f8.quantize(torch.arange(3))
        quantized._say_rounded.cache_clear()

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (np.array([True]), r"got bool\. Use x\.astype"),
            (np.array([1j]), r"got complex128\. Use x\.real"),
            (np.array([None]), r"got object"),
            (["a"], r"got <U1|got str"),
            (np.zeros((0, 4), np.float32), r"x\.shape=\(0, 4\)\. Drop empty tensors"),
            (np.ma.masked_less([1.0, -1.0], 0), r"1 masked"),
        ],
        ids=repr,
    )
    def test_others_are_refused(self, x, message):
        with pytest.raises(ValueError, match=message):
            f8.quantize(x)

    def test_views_and_numbers_are_quantized(self, x):
        np.testing.assert_array_equal(
            f8.quantize(x[::2, ::3]).codes, f8.quantize(x[::2, ::3].copy()).codes
        )
        q = f8.quantize(np.float32(3))
        assert (q.shape, float(q.dequantize()), q.error(np.float32(3)).worst_row) == ((), 3.0, ())
        assert f8.quantize(x[0], "e5m2", "rowwise").error(x[0]).rows.shape == ()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("e4m3",), r"fmt is a Format or one of .*Did you mean 'e4m3fn'"),
            ((["e4m3fn"],), r"fmt is a Format or one of .*got \['e4m3fn'\]"),
            (("",), r"fmt is a Format or one of .*got ''"),
            (("mxfp8",), r"got a recipe\. Use recipe='mxfp8'"),
            (("e4m3fn", "rowise"), r"recipe is .*got 'rowise'\. Did you mean 'rowwise'"),
            (("e4m3fn", "bf16"), r"recipe is .*got 'bf16'"),
            (("e4m3fn", RECIPES["bf16"]), r"recipe is .*got None"),
            (("e4m3fn", "nvfp4"), r"two-level scales need e2m1fn"),
            ((None, RECIPES["nvfp4"].grad_weight.b), r"neither rotates nor rounds stoch"),
        ],
        ids=str,
    )
    def test_an_unknown_name_is_answered_with_the_nearest(self, arguments, message, x):
        with pytest.raises(ValueError, match=message):
            f8.quantize(x, *arguments)

    def test_an_unknown_policy_or_axis_is_refused(self, x):
        with pytest.raises(ValueError, match=r"Did you mean 'torchao'"):
            f8.quantize(x, policy="torcha0")
        with pytest.raises(ValueError, match=r"policy is .*got ''"):
            f8.quantize(x, policy="")
        with pytest.raises(ValueError, match=r"axis is in \[-2, 2\)"):
            f8.quantize(x, axis=2)
        with pytest.raises(ValueError, match=r"q is the result of quantize; got ndarr"):
            f8.dequantize(x)


class TestError:
    def test_counts_are_shares_and_rows_have_their_own(self, x):
        x[1] *= 2.0**16
        x[2] = 0
        x[3, :64] = 0
        accuracy = f8.quantize(x).error(x)
        back = f8.quantize(x).dequantize()
        assert accuracy.zeroed == np.mean((back == 0) & (x != 0))
        assert accuracy.clipped == 0
        noise, signal = ((back - x.astype(float)) ** 2).sum(1), (x.astype(float) ** 2).sum(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            rows = 10 * np.log10(signal / noise)
        np.testing.assert_allclose(accuracy.rows, rows, rtol=1e-12)
        assert accuracy.worst == np.nanmin(accuracy.rows)
        assert accuracy.worst_row == (int(np.nanargmin(accuracy.rows)),)
        assert accuracy.median == np.sort(accuracy.rows[[0, 1, 3, 4, 5, 6, 7]])[3]
        assert accuracy.sqnr == pytest.approx(10 * np.log10(signal.sum() / noise.sum()))

    def test_rows_run_along_the_reduced_axis(self, x):
        x[:, 5] *= 2.0**-20
        accuracy = f8.quantize(x, axis=0).error(x)
        assert accuracy.rows.shape == (128,)
        assert accuracy.worst_row == (5,)

    def test_clipped_elements_are_counted(self, x):
        """mx_floor leaves numbers of a block above its range."""
        assert f8.quantize(x, recipe="mxfp8", policy="mx_floor").error(x).clipped > 0.001

    def test_zeros_lose_nothing(self):
        zeros = np.zeros((2, 4), np.float32)
        accuracy = f8.quantize(zeros).error(zeros)
        assert (accuracy.zeroed, accuracy.worst, accuracy.median) == (0, np.inf, np.inf)
        assert accuracy.to_dict()["worst"] is None

    def test_another_shape_is_refused(self, x):
        with pytest.raises(ValueError, match="x and q have one shape"):
            f8.quantize(x).error(x[:4])


@pytest.mark.parametrize(
    ("recipe", "bits"),
    [
        ("tensorwise", 8 + 32 / 1024),
        ("rowwise", 8 + 32 / 128),
        ("mxfp8", 8 + 8 / 32),
        ("mxfp4", 4 + 8 / 32),
        ("nvfp4", 4 + 8 / 16 + 32 / 1024),
        (CastSpec(fmt=E2M1FN, granularity="nvfp4_1x16"), 4 + 32 / 16),
        (
            CastSpec(fmt=E2M1FN, granularity="nvfp4_1x16", policy=FP4_POLICIES["te_nvfp4_row"]),
            4 + 8 / 16 + 32 / 128,
        ),
    ],
    ids=str,
)
def test_bits_count_scales_as_they_are_stored(recipe, bits, x):
    assert f8.quantize(x, recipe=recipe).bits == bits


def test_a_tensor_without_data_has_a_card_without_a_picture(x):
    import jax
    import torch

    def shown(x):
        cards.append(f8.quantize(x)._repr_html_())
        return x

    cards: list[str] = []
    shown(torch.ones(4, 64, device="meta"))
    jax.jit(shown)(x)
    shown(x)
    assert ["torchao" in card for card in cards] == [True] * 3
    assert ["<svg" in card for card in cards] == [False, False, True]


def test_a_tensor_is_printed_in_a_few_lines():
    x = np.float32([[0.5, -3.0, 0, 0, 1e-9, 2, 2, 1], [1.0, 7.0, 1, 1, 1, 1, 1, 1]])
    q = f8.quantize(x, "e4m3fn", "rowwise")
    assert repr(q).splitlines() == [
        "Quantized (2, 8) e4m3fn",
        "  scales  2 rowwise, 64 to 128",
        "  policy  torchao_pow2",
        "  codes   64, -384, 0, 0, 0, 256, ... (decoded); 18.75% are zero",
        "  bits    12 an element, with its scales",
    ]
    assert repr(q.error(x)).splitlines() == [
        "Accuracy",
        "  SQNR         198.7 dB",
        "  rows         median 192.6 dB, worst 192.6 dB (row 0)",
        "  became zero  6.25% of the elements",
        "  clipped      0.00%",
    ]
