"""What strategies draw, that planted faults are found by it, and that examples shrink to what
matters.
"""

import subprocess
import sys

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from fp8ref.conformance import require, strategies
from fp8ref.formats import E4M3FN, E5M2, FP8_FORMATS
from fp8ref.policy import POLICIES
from fp8ref.sim.quantize import cast, scaling
from fp8ref.spec.granularity import GRANULARITIES, scale_shape

steady = settings(
    deadline=None, derandomize=True, max_examples=100, suppress_health_check=list(HealthCheck)
)
looking = settings(
    deadline=None,
    derandomize=True,
    max_examples=3000,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.mark.grid(9)
@pytest.mark.parametrize("dtype", strategies.DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("axis", [0, -1])
def test_tensors_have_the_dtype_and_a_shape_that_the_granularity_takes(dtype, granularity, axis):
    @settings(steady, max_examples=15)
    @given(strategies.tensors(dtype, granularity=granularity, axis=axis))
    def holds(x):
        assert x.dtype.name == dtype
        scale_shape(granularity, x.shape, axis)

    holds()


@steady
@given(
    st.sampled_from(strategies.DTYPES).flatmap(lambda dtype: strategies.tensors(dtype, finite=True))
)
def test_finite_tensors_are_finite(x):
    assert np.isfinite(x.astype(np.float64)).all()


SEEN = {
    "an infinity": lambda x: np.isinf(x).any(),
    "a NaN": lambda x: np.isnan(x).any(),
    "all zero": lambda x: (x == 0).all(),
    "a zero row next to others": lambda x: (
        (x == 0).all(axis=1).any() and np.isfinite(x).all() and (x != 0).any()
    ),
    "subnormals alone": lambda x: ((np.abs(x) < 2.0**-126) & (x != 0)).all(),
    "an outlier": lambda x: (
        x.size > 2
        and np.isfinite(x).all()
        and np.abs(x).max() > 1e6 * np.sort(np.abs(x), axis=None)[-2] > 0
    ),
    "-0": lambda x: (np.signbit(x) & (x == 0)).any(),
    "an amax that is a power of two": lambda x: (
        np.abs(x).max() > 2 and np.frexp(np.abs(x).max())[0] == 0.5
    ),
    "an amax just above a power of two": lambda x: (
        np.frexp(np.nextafter(np.abs(x).max(), np.float32(0)))[0] == 0.5
        and np.abs(x).max() > 2.0**-126
    ),
    "an amax just below one": lambda x: (
        np.frexp(np.nextafter(np.abs(x).max(), np.float32(np.inf)))[0] == 0.5
        and np.abs(x).max() > 2.0**-126
    ),
    "a scale that overflows": lambda x: 0 < np.abs(x).max() < 448 / 2.0**128,
}


@pytest.mark.grid(3)
@pytest.mark.parametrize("what", SEEN)
def test_tensors_show(what):
    with np.errstate(all="ignore"):
        find(strategies.tensors(), SEEN[what], settings=looking)


@steady
@given(strategies.shards(granularity="rowwise"))
def test_shards_are_a_tensors_rows(parts):
    whole = np.concatenate(parts)
    assert len({part.shape[1:] for part in parts}) == 1
    assert whole.size > 0


@pytest.mark.parametrize(
    "seen",
    [
        lambda parts: any(p.size == 0 for p in parts),
        lambda parts: len({len(p) for p in parts if len(p)}) > 1,
    ],
)
def test_shards_are_ragged_and_some_are_empty(seen):
    find(strategies.shards(), seen, settings=looking)


@pytest.mark.parametrize(
    ("strategy", "of"),
    [
        (strategies.formats, FP8_FORMATS),
        (strategies.policies, POLICIES),
        (strategies.granularities, GRANULARITIES),
    ],
)
def test_names_are_all_drawn(strategy, of):
    for name in of:
        assert str(find(strategy(), lambda drawn, name=name: str(drawn) == name)) == name


@pytest.mark.parametrize("policy", ["torchao", "mx_rceil"])
@pytest.mark.parametrize("dtype", strategies.DTYPES)
def test_amaxes_are_magnitudes_of_the_dtype(policy, dtype):
    @settings(steady, max_examples=50)
    @given(strategies.amaxes(E5M2, policy, dtype=dtype))
    def holds(amax):
        assert not amax < 0
        assert np.isnan(amax) or np.float64(strategies.numpy_dtype(dtype).type(amax)) == amax

    holds()


def rounds_by(x, first):
    with np.errstate(all="ignore"):
        return cast.encode(x.astype(first), E4M3FN)


def flushes(x):
    codes = cast.encode(x, E4M3FN)
    return np.where((codes & 0x7F) < 8, codes & 0x80, codes)


CASTS = {
    "ties go away from zero": lambda x: cast.encode(x, E4M3FN, rounding="nearest_away"),
    "toward zero": lambda x: cast.encode(x, E4M3FN, rounding="toward_zero"),
    "does not saturate": lambda x: cast.encode(x, E4M3FN, saturate=False),
    "rounds to float16 first": lambda x: rounds_by(x, np.float16),
    "rounds to bfloat16 first": lambda x: rounds_by(x, ml_dtypes.bfloat16),
    "flushes subnormals": flushes,
    "loses the sign of zero": lambda x: np.where(x == 0, 0, cast.encode(x, E4M3FN)).astype(
        np.uint8
    ),
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("fault", CASTS)
def test_a_wrong_cast_is_found_and_shrunk_to_a_tensor_of_one_element_or_two(fault):
    failing = []

    @settings(looking, max_examples=600, phases=[Phase.generate, Phase.shrink])
    @given(strategies.tensors())
    def agrees(x):
        try:
            require.require_cast(x, CASTS[fault](x), E4M3FN)
        except AssertionError:
            failing.append(x)
            raise

    with pytest.raises(AssertionError, match="of e4m3fn differ; the simplest:"):
        agrees()
    assert min(x.size for x in failing) <= 2


def by(x, *, codes=None, **how):
    q = scaling.quantize(x, E4M3FN, **how)
    with np.errstate(all="ignore"):
        return (q.codes if codes is None else codes(x, q)), q.scale


QUANTIZERS = {
    "another power of two": (lambda x: by(x, policy="torchao_mask"), "torchao_pow2"),
    "divides by scale_inv": (
        lambda x: by(x, codes=lambda x, q: cast.encode(x / q.scale_inv, E4M3FN)),
        "torchao",
    ),
    "no floor under amax": (lambda x: by(x, policy="te_current"), "torchao"),
    "scale of the wrong format": (lambda x: (by(x)[0], scaling.quantize(x, E5M2).scale), "torchao"),
}


@pytest.mark.parametrize("fault", QUANTIZERS)
def test_a_wrong_quantizer_is_found(fault):
    quantize, policy = QUANTIZERS[fault]

    @settings(looking, max_examples=1000, phases=[Phase.generate])
    @given(strategies.tensors(policy=policy))
    def agrees(x):
        codes, scale = quantize(x)
        require.require_quantized(x, codes, E4M3FN, scale=scale, policy=policy)

    with pytest.raises(AssertionError, match="tensorwise e4m3fn of shape"):
        agrees()


def loses_a_nan(x):
    """Its maximum keeps a NaN in the first place alone, as a loop of comparisons does."""
    amax = x.ravel()[0] if np.isnan(x.ravel()[0]) else np.fmax.reduce(np.abs(x), axis=None)
    scale = scaling.scale_from_amax(np.float32(abs(amax)), E4M3FN)
    with np.errstate(all="ignore"):
        return cast.encode(x * scale, E4M3FN), scale


@pytest.mark.parametrize("seed", range(10))
def test_a_quantizer_that_loses_a_nan_is_found_in_a_hundred_examples(seed):  # S-2
    @hypothesis.seed(seed)
    @settings(
        max_examples=100,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategies.tensors())
    def agrees(x):
        codes, scale = loses_a_nan(x)
        require.require_quantized(x, codes, E4M3FN, scale=scale)

    with pytest.raises(AssertionError, match="tensorwise e4m3fn of shape"):
        agrees()


@pytest.mark.slow
@pytest.mark.parametrize("special", [np.isnan, np.isinf], ids=["NaN", "infinity"])
def test_specials_come_in_every_place_alone(special):
    alone = np.zeros((2, 3), bool)

    @settings(steady, max_examples=2000)
    @given(strategies.tensors(shape=alone.shape))
    def drawn(x):
        if np.count_nonzero(~np.isfinite(x)) == 1:
            alone[special(x)] = True

    drawn()
    assert alone.all()


@pytest.mark.parametrize("axis", [-1, 0])
def test_a_wrong_ragged_last_block_is_noticed(axis):
    """A quantizer whose last block has the amax of the block before it, or of whole blocks
    alone.
    """

    def quantize(x, amax_of):
        lines = x.T if axis == 0 else x
        parts = [lines[:, begin : begin + 32] for begin in range(0, lines.shape[1], 32)]
        return np.concatenate(
            [
                cast.encode(part * (448 / np.maximum(amax_of(parts, i), 1e-12)), E4M3FN)
                for i, part in enumerate(parts)
            ],
            1,
        )

    def own(parts, i):
        return np.abs(parts[i]).max(1, keepdims=True)

    def of_the_block_before(parts, i):
        return own(parts, i - 1 if i and parts[i].shape[1] < 32 else i)

    def wrong(x):
        return not np.array_equal(quantize(x, own), quantize(x, of_the_block_before))

    shapes = strategies.shapes("mx_1x32", axis=axis, ragged=True)
    find(
        shapes.flatmap(
            lambda shape: strategies.tensors(
                granularity="mx_1x32", axis=axis, shape=shape, finite=True
            )
        ),
        wrong,
        settings=looking,
    )
    assert all(
        shape[axis] % 32 == 0
        for shape in strategies.examples(strategies.shapes("mx_1x32", axis=axis), 20)
    )


@pytest.mark.parametrize("shape", [None, (2, 3)])
def test_an_unknown_granularity_is_refused(shape):
    message = r"granularity is one of tensorwise, .*; got 'columnwise'"
    with pytest.raises(ValueError, match=message):
        strategies.shapes("columnwise")
    with pytest.raises(ValueError, match=message):
        find(
            strategies.tensors(granularity="columnwise", shape=shape),
            lambda x: True,
            settings=looking,
        )


@pytest.mark.parametrize("dtype", strategies.DTYPES)
def test_converted_arrays_keep_their_bits(dtype):
    x = np.array([[1.5, -0.0, np.inf, 2.0**-130]]).astype(strategies.numpy_dtype(dtype))
    torch_bits = (
        strategies.as_torch(x)
        .view(**{"dtype": getattr(__import__("torch"), f"int{8 * x.itemsize}")})
        .numpy()
    )
    np.testing.assert_array_equal(
        torch_bits.view(f"uint{8 * x.itemsize}"), x.view(f"uint{8 * x.itemsize}")
    )
    np.testing.assert_array_equal(
        np.asarray(strategies.as_jax(x)).view(f"uint{8 * x.itemsize}"),
        x.view(f"uint{8 * x.itemsize}"),
    )


@pytest.mark.parametrize(
    ("module", "missing"), [("strategies", "hypothesis"), ("parameters", "pytest")]
)
def test_without_its_library_a_module_says_what_to_install(module, missing):
    program = (
        f"import sys; sys.modules[{missing!r}] = None\ntry:\n import "
        f"fp8ref.conformance.{module}\nexcept ImportError as e: print(e)"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert missing in out
    assert "pip install 'fp8ref[conformance]'" in out


def test_comparing_needs_neither():
    program = (
        "import sys; sys.modules['hypothesis'] = sys.modules['pytest'] = "
        "sys.modules['ml_dtypes'] = None; import fp8ref.conformance.require"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("shape", [(), (0, 4), (2, 0)])
def test_shapes_without_elements_are_refused(shape):
    with pytest.raises(
        ValueError, match="a tensor has at least one axis, and each at least one element"
    ):
        strategies.examples(strategies.tensors(shape=shape), 1)


def test_no_shards_are_refused():
    with pytest.raises(ValueError, match="a tensor is cut into at least one shard; got most=0"):
        strategies.examples(strategies.shards(most=0), 1)
