"""The amax of a sharded tensor, over any partition, and the reduction that loses a NaN."""

import numpy as np
import pytest
from hypothesis import strategies as st
from properties.domains import F32, any_float32, caught, for_all, spread_out

from fp8ref.formats import E4M3FN
from fp8ref.sim.distributed import sharding
from fp8ref.sim.distributed.mesh import Layout, Mesh, split
from fp8ref.sim.quantize import scaling

NAN = np.float32(np.nan)
MAXIMA = {"np.maximum": np.maximum, "np.fmax": np.fmax, "by_comparison": sharding.max_by_comparison}
each_maximum = pytest.mark.parametrize("maximum", MAXIMA)


@st.composite
def partitions(draw):
    """float32 [n], n from 1 to 12, often with infinities and NaNs, and the sizes of up to 5 shards
    of it, empty ones included.
    """
    n = draw(st.integers(1, 12))
    x = draw(any_float32(n)).copy()
    for special in (np.inf, np.nan, 0.0):
        x[draw(st.lists(st.integers(0, n - 1), max_size=2))] = special
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=4)))
    return x, tuple(int(size) for size in np.diff([0, *cuts, n]))


def sharded(x, sizes, axis=0):
    layout = Layout(
        mesh=Mesh(axes={"data": len(sizes)}),
        shape=np.shape(x),
        splits={axis: ("data",)},
        sizes={axis: sizes},
    )
    return split(x, layout), layout


@each_maximum
@pytest.mark.parametrize("flag", [True])
@for_all(150, drawn=partitions())
def test_the_amax_of_the_shards_is_that_of_the_tensor(maximum, flag, drawn):
    """Every float32, NaN and infinity included, any partition, any of three maxima: on every device
    (P-2, P-3).
    """
    x, sizes = drawn
    shards, layout = sharded(x, sizes)
    found = sharding.amax(shards, layout, scope="global", maximum=MAXIMA[maximum], flag=flag)
    for device in layout.mesh.devices:
        np.testing.assert_array_equal(found[device].amax, scaling.amax(x))


@pytest.mark.parametrize(
    "granularity", ["rowwise", "blockwise_1x128", "blockwise_128x128", "mx_1x32"]
)
@for_all(
    15,
    seed=st.integers(0, 1 << 32),
    parts=st.lists(st.integers(0, 2), min_size=1, max_size=4).filter(any),
    along=st.integers(0, 1),
)
def test_codes_and_scales_of_the_shards_are_those_of_the_tensor(granularity, seed, parts, along):
    """Cuts at multiples of 128, along either axis; empty shards included (P-4, P-5)."""
    shape = [128, 128]
    shape[along] = 128 * sum(parts)
    x = spread_out(seed, tuple(shape))
    shards, layout = sharded(x, tuple(128 * n for n in parts), along)
    gathered = sharding.gather(
        sharding.quantize(shards, layout, E4M3FN, granularity=granularity, scope="global"), layout
    )
    for found, expected in zip(
        gathered, scaling.quantize(x, E4M3FN, granularity=granularity), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@each_maximum
def test_without_its_flag_a_nan_is_dropped(maximum):
    """The least examples: two shards, or for gloo's comparison three, which loses the true maximum,
    3, too (P-3).
    """
    expected = {"np.maximum": (NAN, NAN), "np.fmax": (0, 3), "by_comparison": (0, 1)}[maximum]
    for x, amax in zip(([np.nan, 0], [3, np.nan, 1]), expected, strict=True):
        shards, layout = sharded(np.array(x, F32), (1,) * len(x))
        options = {"scope": "global", "maximum": MAXIMA[maximum]}
        np.testing.assert_array_equal(
            sharding.amax(shards, layout, flag=False, **options)[0,].amax, F32(amax)
        )
        np.testing.assert_array_equal(sharding.amax(shards, layout, **options)[0,].amax, NAN)


def test_a_maximum_that_drops_nan_is_caught():
    """The property finds what a library's maximum does without the flag (P-3); ``np.maximum`` needs
    none.
    """
    lost = {
        name: caught(test_the_amax_of_the_shards_is_that_of_the_tensor, maximum=name, flag=False)
        for name in MAXIMA
    }
    assert lost == {"np.maximum": False, "np.fmax": True, "by_comparison": True}


def test_local_amaxes_are_not_the_tensors():
    """Two elements on two devices: each maps its own to max, and 1 and 2 have one code (P-2,
    P-4).
    """
    shards, layout = sharded(np.array([1, 2], F32), (1, 1))
    codes = [
        int(q.codes[0]) for q in sharding.quantize(shards, layout, E4M3FN, scope="local").values()
    ]
    assert codes == [0x7E, 0x7E]
    assert scaling.quantize(np.array([1, 2], F32), E4M3FN).codes.tolist() == [0x76, 0x7E]
