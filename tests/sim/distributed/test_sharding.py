import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.policy import POLICIES
from fp8ref.sim.distributed import sharding
from fp8ref.sim.distributed.mesh import Layout, Mesh, split
from fp8ref.sim.quantize import scaling

GRID = Mesh(axes={"data": 2, "tensor": 4})
MESHES = [Mesh(axes={"data": n}) for n in (1, 2, 3, 8)] + [GRID]
# whole blocks remain whole when any axis is cut into 1, 2, 4 or 8, and uneven where there are no
# blocks
SHAPES = {
    "tensorwise": (13, 37),
    "rowwise": (13, 37),
    "blockwise_1x128": (1024, 1024),
    "blockwise_128x128": (1024, 1024),
    "mx_1x32": (256, 256),
}


def wide(rng, shape):
    """Magnitudes over twelve powers of ten, so that every group has its own amax."""
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape) * 4)).astype(np.float32)


def layouts(mesh, shape):
    """No axis, each axis, both axes, and both mesh axes on one tensor axis."""
    names = mesh.names
    splits = [{}, {0: names[:1]}, {1: names[-1:]}, {0: names}, {1: names}]
    if len(names) == 2:
        splits += [{0: names[:1], 1: names[1:]}, {0: names[1:], 1: names[:1]}]
    result = [Layout(mesh=mesh, shape=shape, splits=s) for s in splits]
    # whole blocks for three devices, one of them with none
    if mesh.axes == {"data": 3} and shape == (1024, 1024):
        result += [
            Layout(mesh=mesh, shape=shape, splits={i: names}, sizes={i: (640, 0, 384)})
            for i in (0, 1)
        ]
    return result


def assert_same(actual, expected):
    np.testing.assert_array_equal(actual.codes, expected.codes)
    np.testing.assert_array_equal(actual.scale, expected.scale)
    np.testing.assert_array_equal(actual.scale_inv, expected.scale_inv)
    assert actual[3:] == expected[3:]


def fitting(layout, granularity, axis):
    """Whether the layout cuts no block: 3 devices do not divide a power of two."""
    reduced, other = {
        "blockwise_1x128": (128, 1),
        "blockwise_128x128": (128, 128),
        "mx_1x32": (32, 1),
    }.get(granularity, (1, 1))
    return all(
        n % (reduced if i == axis else other) == 0 for i in layout.splits for n in layout.pieces(i)
    )


@pytest.mark.grid(11)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m.axes.values())))
@pytest.mark.parametrize("granularity", SHAPES)
def test_global_scope_is_one_device_bit_for_bit(granularity, mesh, axis, rng):  # P-2, P-4, P-5, P-6
    x = wide(rng, SHAPES[granularity])
    one = scaling.quantize(x, E4M3FN, granularity=granularity, axis=axis)
    tried = 0
    for layout in layouts(mesh, x.shape):
        if fitting(layout, granularity, axis):
            shards = sharding.quantize(
                split(x, layout), layout, E4M3FN, granularity=granularity, axis=axis, scope="global"
            )
            assert_same(sharding.gather(shards, layout), one)
            for device, q in shards.items():
                np.testing.assert_array_equal(q.codes, one.codes[layout.index(device)])
            tried += 1
    assert tried >= 2


@pytest.mark.grid(17)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_every_policy_and_a_narrow_dtype(granularity, policy, rng):  # P-4
    x = wide(rng, (13, 37)).astype(np.float16).clip(-60000, 60000)
    one = scaling.quantize(x, E5M2, granularity=granularity, policy=policy)
    for layout in layouts(GRID, x.shape):
        shards = sharding.quantize(
            split(x, layout), layout, E5M2, granularity=granularity, policy=policy, scope="global"
        )
        assert_same(sharding.gather(shards, layout), one)


@st.composite
def partitions(draw):
    """A small tensor, specials included, on a small mesh, each axis cut anywhere or not at all:
    empty pieces are common.
    """
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    mesh = Mesh(axes={"a": draw(st.integers(1, 4)), "b": draw(st.integers(1, 3))})
    owner = {name: draw(st.sampled_from([None, 0, 1])) for name in mesh.names}
    splits = {
        i: tuple(n for n in mesh.names if owner[n] == i) for i in (0, 1) if i in owner.values()
    }
    sizes = {}
    for i, names in splits.items():
        parts = int(np.prod([mesh.axes[n] for n in names]))
        cuts = sorted(
            draw(st.lists(st.integers(0, shape[i]), min_size=parts - 1, max_size=parts - 1))
        )
        sizes[i] = tuple(b - a for a, b in itertools.pairwise([0, *cuts, shape[i]]))
    values = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, np.inf, np.nan, 1.0]))
    x = np.array(
        draw(st.lists(values, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])),
        np.float32,
    ).reshape(shape)
    return x, Layout(mesh=mesh, shape=shape, splits=splits, sizes=sizes)


@settings(deadline=None)
@given(
    partitions(),
    st.sampled_from(["tensorwise", "rowwise"]),
    st.sampled_from([0, 1]),
    st.sampled_from([np.fmax, sharding.max_by_comparison]),
)
def test_any_partition_and_any_maximum(partition, granularity, axis, maximum):  # P-1, P-2, P-3, P-4
    x, layout = partition
    shards = sharding.quantize(
        split(x, layout),
        layout,
        E4M3FN,
        granularity=granularity,
        axis=axis,
        scope=layout.mesh.names,
        reduce=functools.partial(sharding.amax, maximum=maximum),
    )
    assert_same(
        sharding.gather(shards, layout),
        scaling.quantize(x, E4M3FN, granularity=granularity, axis=axis),
    )


def test_amax_and_its_flag():  # P-2, P-3
    x = np.float32([[1, 2, -3, 4], [np.inf, 5, 6, 7], [np.nan, 8, np.inf, 9]])
    layout = Layout(mesh=Mesh(axes={"data": 2}), shape=x.shape, splits={1: ("data",)})
    local = sharding.amax(split(x, layout), layout, "rowwise", scope="local")
    np.testing.assert_array_equal(local[0,].amax, np.float32([[2], [np.inf], [np.nan]]))
    np.testing.assert_array_equal(local[0,].non_finite, [[0], [1], [2]])
    np.testing.assert_array_equal(local[1,].amax, np.float32([[4], [7], [np.inf]]))
    np.testing.assert_array_equal(local[1,].non_finite, [[0], [0], [1]])
    for device in layout.mesh.devices:
        whole = sharding.amax(split(x, layout), layout, "rowwise", scope="global")[device]
        np.testing.assert_array_equal(whole.amax, scaling.amax(x, "rowwise"))
        np.testing.assert_array_equal(whole.non_finite, [[0], [1], [2]])
        assert whole.amax.dtype == np.float32


@pytest.mark.parametrize(
    "granularity", ["tensorwise", "rowwise", "blockwise_1x128", "blockwise_128x128", "mx_1x32"]
)
def test_empty_shards_under_local_scope_have_scales_of_their_shape(granularity):
    """Three devices, 128 rows and two of them empty: their amax is 0, which blockwise is an amax of
    no blocks (P-2).
    """
    x = np.ones((128, 256), np.float32)
    for axis, split_axis in itertools.product((0, 1), (0, 1)):
        n = x.shape[split_axis]
        layout = Layout(
            mesh=Mesh(axes={"d": 3}),
            shape=x.shape,
            splits={split_axis: ("d",)},
            sizes={split_axis: (0, n, 0)},
        )
        q = sharding.quantize(
            split(x, layout), layout, E4M3FN, granularity=granularity, axis=axis, scope="local"
        )
        merged = granularity == "tensorwise" or (granularity == "rowwise" and axis == split_axis)
        assert (q[0,].scale == np.float32(447999985582080)).all()  # S-3, of zero
        assert q[0,].codes.shape == tuple(
            0 if i == split_axis else n for i, n in enumerate(x.shape)
        )
        assert (q[0,].scale.size > 0) == merged
        assert q[0,].scale.ndim == q[1,].scale.ndim


def test_local_scope_is_each_rank_alone_and_differs(rng):
    """With 2 ranks, one of them has the amax: the other scales higher, and most of its codes differ
    from one device's (P-4).
    """
    x = rng.standard_normal((64, 64)).astype(np.float32)
    layout = Layout(mesh=Mesh(axes={"data": 2}), shape=x.shape, splits={0: ("data",)})
    q = sharding.quantize(split(x, layout), layout, E4M3FN, scope="local")
    for device, shard in split(x, layout).items():
        assert_same(q[device], scaling.quantize(shard, E4M3FN))
    one = scaling.quantize(x, E4M3FN)
    differ = [int((q[d].codes != one.codes[layout.index(d)]).sum()) for d in layout.mesh.devices]
    assert min(differ) == 0
    # the scales' ratio is not a power of two, so their codes agree only where both round alike
    assert max(differ) > x.size // 4


@pytest.mark.parametrize(
    "granularity", ["rowwise", "blockwise_1x128", "blockwise_128x128", "mx_1x32"]
)
def test_groups_that_lie_on_one_device_know_no_scope(granularity, rng):
    """Rows cut along the other axis, and blocks whichever way they are cut: local is global
    (P-5).
    """
    x = wide(rng, (256, 512))
    layout = Layout(
        mesh=GRID,
        shape=x.shape,
        splits={0: ("data",)} if granularity == "rowwise" else {0: ("data",), 1: ("tensor",)},
    )
    results = [
        sharding.quantize(
            split(x, layout), layout, E4M3FN, granularity=granularity, axis=1, scope=s
        )
        for s in ("local", "global", ("data",))
    ]
    assert_same(
        sharding.gather(results[0], layout),
        scaling.quantize(x, E4M3FN, granularity=granularity, axis=1),
    )
    for other in results[1:]:
        for device in GRID.devices:
            assert_same(other[device], results[0][device])


@pytest.mark.parametrize(
    ("scope", "missing"), [(("data",), "tensor"), (("tensor",), "data"), ("local", "data")]
)
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_a_wrong_scope_is_named(granularity, scope, missing, rng):
    """Both mesh axes cut the reduced axis.

    A scope without one leaves scales that differ along it, and gathering is refused (P-6).
    """
    x = wide(rng, (8, 64))
    layout = Layout(mesh=GRID, shape=x.shape, splits={1: ("data", "tensor")})
    q = sharding.quantize(split(x, layout), layout, E4M3FN, granularity=granularity, scope=scope)
    for check in (sharding.check_replicas, sharding.gather):
        with pytest.raises(
            ValueError, match=rf"differ along mesh axis '{missing}'.*includes '{missing}'"
        ):
            check(q, layout)
    sharding.check_replicas(
        sharding.quantize(
            split(x, layout), layout, E4M3FN, granularity=granularity, scope=("tensor", "data")
        ),
        layout,
    )


def test_what_a_wrong_scope_does(rng):
    """Codes of a local scope under the first device's scale: values off by the ratio of the scales,
    where one device errs by a sixteenth (P-6).
    """
    x = wide(rng, (64, 64))
    layout = Layout(mesh=GRID, shape=x.shape, splits={0: ("data",), 1: ("tensor",)})
    q = sharding.quantize(split(x, layout), layout, E4M3FN, scope=("tensor",))
    scales = {device: float(q[device].scale) for device in GRID.devices}
    assert len(set(scales.values())) == 2  # one a data rank: the tensor ranks of each agree
    unchecked = {
        d: scaling.dequantize(v._replace(scale=q[0, 0].scale, scale_inv=q[0, 0].scale_inv))
        for d, v in q.items()
    }
    for device, shard in split(x, layout).items():
        normal = np.abs(shard * q[device].scale) >= 2.0**-6
        gain = unchecked[device][normal] / shard[normal]
        # half a step of e4m3 is at most 1/16 of a value; scales and products round once each, far
        # below the 0.1 % allowed for them
        assert (np.abs(gain / (scales[device] / scales[0, 0]) - 1) <= 1 / 16 * 1.001).all()
    worst = (
        max(scales[d] / scales[0, 0] for d in GRID.devices),
        min(scales[d] / scales[0, 0] for d in GRID.devices),
    )
    assert worst[0] > 1.2 or worst[1] < 0.8


def test_replicas_that_drift_are_named(rng):  # P-6
    x = rng.standard_normal((8, 8)).astype(np.float32)
    layout = Layout(mesh=GRID, shape=x.shape, splits={0: ("tensor",)})
    shards = {device: shard.copy() for device, shard in split(x, layout).items()}
    shards[1, 2][0, 0] *= 1.5
    q = sharding.quantize(shards, layout, E4M3FN, scope="global")
    with pytest.raises(
        ValueError, match=r"replicated along mesh axis 'data'.*\(0, 2\) and \(1, 2\)"
    ):
        sharding.gather(q, layout)


def test_both_scales_are_compared(rng):  # P-6
    x = rng.standard_normal((8, 8)).astype(np.float32)
    layout = Layout(mesh=GRID, shape=x.shape, splits={0: ("tensor",)})
    for field in ("scale", "scale_inv"):
        q = sharding.quantize(split(x, layout), layout, E4M3FN, scope="global")
        q[0, 3] = q[0, 3]._replace(**{field: np.float32(1)})
        with pytest.raises(ValueError, match=r"between devices \(0, 3\) and \(1, 3\)"):
            sharding.check_replicas(q, layout)


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("sizes", [(0, 8), (8, 0)])
def test_a_device_without_elements_has_no_scale_to_agree_with(granularity, sizes, rng):  # P-6
    """Under local scope its scale is that of amax 0.

    Wherever it is, the gather has one device's codes and scales.
    """
    x = wide(rng, (4, 8))
    layout = Layout(
        mesh=Mesh(axes={"data": 2}), shape=x.shape, splits={1: ("data",)}, sizes={1: sizes}
    )
    q = sharding.quantize(split(x, layout), layout, E4M3FN, granularity=granularity, scope="local")
    assert not np.array_equal(q[0,].scale, q[1,].scale)
    assert_same(sharding.gather(q, layout), scaling.quantize(x, E4M3FN, granularity=granularity))


def test_scales_are_compared_past_devices_without_elements(rng):  # P-6
    """Of four devices, those that hold parts share no line of the mesh."""
    x = wide(rng, (4, 8))
    layout = Layout(
        mesh=Mesh(axes={"a": 2, "b": 2}),
        shape=x.shape,
        splits={1: ("a", "b")},
        sizes={1: (4, 0, 0, 4)},
    )
    q = sharding.quantize(split(x, layout), layout, E4M3FN, scope="local")
    with pytest.raises(
        ValueError,
        match=r"scales differ along mesh axis 'a', 'b', between devices \(0, 0\) and \(1, 1\)",
    ):
        sharding.gather(q, layout)


def test_shards_are_left_alone(rng):
    x = wide(rng, (8, 8))
    x.flags.writeable = False
    layout = Layout(mesh=GRID, shape=x.shape, splits={0: ("data",)})
    sharding.gather(sharding.quantize(split(x, layout), layout, E4M3FN, scope="global"), layout)


ROWS = Layout(mesh=GRID, shape=(256, 256), splits={0: ("tensor",)})


def quantized(layout, **options):
    return sharding.quantize(
        split(np.ones(layout.shape, np.float32), layout), layout, E4M3FN, **options
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantized(ROWS, scope="data"), r"Use \('data',\)"),
        (lambda: quantized(ROWS, scope=("model",)), "data, tensor; got model"),
        (
            lambda: quantized(ROWS, scope="global", granularity="blockwise_128x128"),
            "whole blocks of 128.*rowwise.*P-5",
        ),
        (  # a last block may be short, but not one before it
            lambda: quantized(
                Layout(mesh=GRID, shape=(300, 256), splits={0: ("data",)}),
                scope="global",
                granularity="blockwise_128x128",
            ),
            r"sizes \(150, 150\)",
        ),
        (lambda: quantized(ROWS, scope="global", granularity="row"), "tensorwise"),
        # S-7
        (
            lambda: quantized(Layout(mesh=GRID, shape=(0, 4)), scope="global"),
            "at least one element",
        ),
        (
            lambda: sharding.amax(
                {(0, 0): np.ones(4, np.float32)}, Layout(mesh=GRID, shape=(4,)), scope="local"
            ),
            "each device",
        ),
        (
            lambda: sharding.amax(
                dict.fromkeys(GRID.devices, np.ones(4)),
                Layout(mesh=GRID, shape=(4,)),
                scope="local",
            ),
            "float64",
        ),
        (
            lambda: sharding.gather(
                {
                    **quantized(ROWS, scope="global"),
                    (0, 0): quantized(ROWS, scope="global", axis=0)[0, 0],
                },
                ROWS,
            ),
            "one format, granularity and axis",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_ragged_last_block_lies_whole_on_one_shard():  # S-6, P-5
    x = np.random.default_rng(5).standard_normal((300, 256)).astype(np.float32)
    layout = Layout(
        mesh=Mesh(axes={"data": 3}), shape=x.shape, splits={0: ("data",)}, sizes={0: (128, 128, 44)}
    )
    whole = scaling.quantize(x, E4M3FN, granularity="blockwise_128x128")
    shards = sharding.quantize(
        split(x, layout), layout, E4M3FN, granularity="blockwise_128x128", scope="global"
    )
    gathered = sharding.gather(shards, layout)
    np.testing.assert_array_equal(gathered.codes, whole.codes)
    np.testing.assert_array_equal(gathered.scale, whole.scale)
