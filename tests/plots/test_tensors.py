import numpy as np
import pytest

from fp8ref import plots
from fp8ref.formats import E4M3FN, E5M2
from fp8ref.plots import tensors
from fp8ref.sim.quantize import scaling, stats
from fp8ref.sim.quantize.scales import Scales


@pytest.fixture
def ax():
    return plots.figure()[1][0]


def unscaled(x, fmt=E4M3FN):
    return scaling.quantize_with(
        np.asarray(x, np.float32), Scales(np.float32(1), np.float32(1)), fmt
    )


# one of each: normal, subnormal, became zero, clipped, was zero; 448 and 464 are at max without
# being clipped
ONE_OF_EACH = np.array(
    [[1.0, 2.0**-8, 2.0**-12, 500.0, 0.0], [448.0, 464.0, -1.0, -(2.0**-9), -0.0]], np.float32
)
THEIR_FATES = [
    ["normal", "subnormal", "became zero", "clipped", "was zero"],
    ["normal", "normal", "normal", "subnormal", "was zero"],
]


def test_a_fate_map_tells_what_became_of_each_element(ax):
    plots.fate_map(ax, ONE_OF_EACH, unscaled(ONE_OF_EACH))
    names = list(tensors.FATES)
    assert [[names[i] for i in row] for row in ax.images[0].get_array()] == THEIR_FATES
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "normal",
        "subnormal",
        "became zero",
        "clipped",
        "was zero",
    ]


def test_nan_codes_have_a_fate_of_their_own():
    x = np.array([[np.nan, 1.0]], np.float32)
    with np.errstate(invalid="ignore"):
        assert tensors.fates(x, unscaled(x)).tolist() == [
            [list(tensors.FATES).index("not finite"), 0]
        ]


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "mx_1x32"])
def test_fates_are_counted_as_statistics_count_them(rng, granularity):
    x = (rng.standard_normal((64, 64)) * np.exp2(rng.integers(-20, 0, (64, 1)))).astype(np.float32)
    q = scaling.quantize(x, E4M3FN, granularity=granularity)
    counted = np.bincount(tensors.fates(x, q).ravel(), minlength=len(tensors.FATES))
    names, found = list(tensors.FATES), stats.statistics(x, q)
    assert counted[names.index("became zero")] == found.underflows
    assert counted[names.index("subnormal")] == found.subnormals
    assert counted[names.index("clipped")] == found.overflows


def test_a_magnitude_map_shows_exponents_and_leaves_zeros_white(ax):
    plots.magnitude_map(ax, [[4.0, -3.0], [0.0, 2.0**-30]], powers=8)
    shown = ax.images[0].get_array()
    np.testing.assert_array_equal(shown[0], [2, 1])
    assert shown.mask.tolist() == [[False, False], [True, False]]
    # all below the eight powers that are told apart, -5 to 2, is shown as the lowest of them
    assert shown[1, 1] == -5


@pytest.mark.parametrize("x", [[[0.0, -0.0]], [[np.nan, 0.0]], [[np.inf, np.nan]]], ids=str)
def test_a_magnitude_map_of_nothing_that_has_an_exponent_is_white(ax, x):
    plots.magnitude_map(ax, x)
    ax.figure.draw_without_rendering()
    assert ax.images[0].get_array().mask.all()


def test_infinities_are_white_and_no_magnitude_of_a_map(ax):
    plots.magnitude_map(ax, [[np.inf, 2.0**-30], [-np.inf, 2.0**-31]])
    shown = ax.images[0].get_array()
    assert shown.mask.tolist() == [[True, False], [True, False]]
    np.testing.assert_array_equal(shown[:, 1], [-30, -31])


def test_an_error_map_has_the_relative_errors_of_cells(ax):
    x = np.array([[1.0, 17.0], [2.0**-12, 0.0]], np.float32)
    plots.error_map(ax, x, unscaled(x), cell=1)
    shown = ax.images[0].get_array()
    np.testing.assert_allclose(
        [shown[0, 0], shown[0, 1], shown[1, 0]], [0, 100 / 17, 100], rtol=1e-12
    )
    assert shown.mask.tolist() == [[False, False], [False, True]]


def test_an_error_map_takes_the_root_of_the_mean_square_of_a_cell(ax):
    # of three that are not zero one is lost
    x = np.array([[1.0, 2.0**-12], [0.0, 1.0]], np.float32)
    plots.error_map(ax, x, unscaled(x), cell=2)
    np.testing.assert_allclose(ax.images[0].get_array(), [[100 / np.sqrt(3)]], rtol=1e-12)


def test_an_error_map_has_at_most_64_cells_each_way(ax):
    x = np.ones((130, 70), np.float32)
    plots.error_map(ax, x, unscaled(x))
    assert ax.images[0].get_array().shape == (44, 24)  # of 3 x 3, the last ones shorter


def test_an_exponent_histogram_has_a_share_for_each_exponent(ax):
    x = np.array([1.0, 1.5, 2.0, 0.0], np.float32)
    plots.exponent_histogram(ax, x, unscaled(x), lowest=-1, highest=2)
    bars = {bar.get_x() + bar.get_width() / 2 - 0.5: bar.get_height() for bar in ax.containers[0]}
    assert bars == {-2.0: 0, -1.0: 0, 0.0: 50, 1.0: 25, 2.0: 0, 3.0: 0}


def test_an_exponent_histogram_shows_the_codes_and_counts_what_is_lost(ax):
    x = np.array([1.97, 2.0**-12, 500.0, 0.0, 1.0], np.float32)  # 1.97 rounds up to 2
    plots.exponent_histogram(ax, x, unscaled(x), lowest=-13, highest=9)
    (after,) = (line for line in ax.lines if line.get_label() == "after")
    shares = dict(zip(after.get_xdata(), after.get_ydata(), strict=True))
    assert {place: share for place, share in shares.items() if share} == {0: 20, 1: 20, 8: 20}
    assert ax.get_title() == "20 % become zero, 20 % are clipped"


@pytest.mark.parametrize(
    ("fmt", "zero", "normal", "largest"),
    [(E4M3FN, -10, -6, np.log2(448)), (E5M2, -17, -14, np.log2(57344))],
)
def test_an_exponent_histogram_shades_where_a_format_has_no_normal_numbers(
    ax, fmt, zero, normal, largest
):
    x = np.ones(4, np.float32)
    plots.exponent_histogram(ax, x, unscaled(x, fmt))
    shaded = {
        bar.get_label(): (bar.get_x(), bar.get_x() + bar.get_width())
        for bar in ax.patches
        if not bar.get_label().startswith("_")
    }
    assert shaded["subnormal"] == (zero, normal)
    assert shaded["becomes zero"][1] == zero
    assert shaded["beyond max"][0] == pytest.approx(largest, rel=1e-14)


def test_a_code_difference_is_positive_away_from_zero_whatever_the_sign(ax):
    x = np.array([[1.0, -1.0, 1.0]], np.float32)
    a, b = unscaled(x), unscaled(x * np.array([[1.125, 1.125, 0.9375]], np.float32))
    plots.code_difference(ax, a, b)
    np.testing.assert_array_equal(ax.images[0].get_array(), [[1, 1, -1]])
    assert ax.get_title() == "0 of 3 codes equal"
    other = unscaled(x)
    other.codes[0, 1] += 1
    plots.code_difference(ax, a, other)
    assert ax.get_title() == "all but 1 of 3 codes equal"
    x[0, 1] = np.nan
    other = unscaled(x)
    other.codes[0, 1] ^= 0x80
    plots.code_difference(ax, unscaled(x), other)
    assert ax.get_title() == "all 3 codes equal"  # two NaNs of another sign


@pytest.mark.parametrize("shape", [(), (8,), (2, 4, 3)])
def test_a_map_is_of_a_matrix(ax, shape):
    """matplotlib would draw [2, 4, 3] as a picture in red, green and blue."""
    x = np.ones(shape, np.float32)
    q = unscaled(x)
    for draw in (
        lambda: plots.magnitude_map(ax, x),
        *(lambda f=f: f(ax, x, q) for f in (plots.error_map, plots.fate_map)),
    ):
        with pytest.raises(
            ValueError, match=r"a map is of a matrix \[M, K\] with elements; got shape"
        ):
            draw()
    with pytest.raises(ValueError, match="a map is of a matrix"):
        plots.code_difference(ax, q, q)


def test_codes_of_two_formats_have_no_difference(ax):
    x = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match=r"in one format and shape; got e4m3fn .* and e5m2"):
        plots.code_difference(ax, unscaled(x), unscaled(x, E5M2))


def test_a_map_of_what_numpy_cannot_read_says_what_to_do(ax):
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"use x\.detach\(\)\.float\(\)\.numpy\(\)"):
        plots.magnitude_map(ax, torch.ones(2, 2, dtype=torch.bfloat16))
