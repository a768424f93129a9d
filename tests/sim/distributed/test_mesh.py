import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8ref.sim.distributed.mesh import Layout, Mesh, check_shapes, split

MESH = Mesh(axes={"data": 2, "tensor": 4})


def unsplit(shards, layout):
    """The whole tensor; of replicas the first device's piece."""
    check_shapes({device: shard.shape for device, shard in shards.items()}, layout)
    whole = np.empty(layout.shape, next(iter(shards.values())).dtype)
    for device in reversed(layout.mesh.devices):
        whole[layout.index(device)] = shards[device]
    return whole


@given(st.integers(1, 40), st.integers(1, 9))
def test_ceil_is_the_rule_of_torch_chunk(n, parts):  # P-1
    layout = Layout(mesh=Mesh(axes={"data": parts}), shape=(n,), splits={0: ("data",)})
    # chunk leaves empty pieces out; a device always has one
    chunks = [len(chunk) for chunk in torch.chunk(torch.zeros(n), parts)]
    assert list(layout.pieces(0)) == chunks + [0] * (parts - len(chunks))


@given(st.integers(0, 40), st.integers(1, 9))
def test_balanced_is_the_rule_of_array_split(n, parts):  # P-1
    layout = Layout(
        mesh=Mesh(axes={"data": parts}), shape=(n,), splits={0: ("data",)}, rule="balanced"
    )
    assert list(layout.pieces(0)) == [len(piece) for piece in np.array_split(np.zeros(n), parts)]


def test_two_mesh_axes_on_one_tensor_axis():
    """The first named is the slower: eight pieces of 16 rows, data-major or tensor-major (P-1)."""
    for names, of in (
        (("data", "tensor"), lambda d, t: 4 * d + t),
        (("tensor", "data"), lambda d, t: 2 * t + d),
    ):
        layout = Layout(mesh=MESH, shape=(16,), splits={0: names})
        assert all(
            layout.index((d, t)) == (slice(2 * of(d, t), 2 * of(d, t) + 2),)
            for d, t in MESH.devices
        )


def test_nested_chunks_are_sizes():
    """torch's [Shard(0), Shard(0)] cuts 5 rows into 3 + 2, then each into 4; one cut into 8 is
    another layout. Sizes give either (P-1).
    """
    nested = [
        len(c)
        for half in torch.chunk(torch.zeros(5), 2)
        for c in [*torch.chunk(half, 4), *[torch.zeros(0)] * 3][:4]
    ]
    layout = Layout(mesh=MESH, shape=(5,), splits={0: ("data", "tensor")}, sizes={0: tuple(nested)})
    assert layout.pieces(0) == (1, 1, 1, 0, 1, 1, 0, 0)
    assert layout.pieces(0) != Layout(mesh=MESH, shape=(5,), splits={0: ("data", "tensor")}).pieces(
        0
    )


@pytest.mark.parametrize(
    "splits", [{}, {0: ("data",)}, {1: ("tensor", "data")}, {0: ("tensor",), 1: ("data",)}]
)
@pytest.mark.parametrize("rule", ["ceil", "balanced"])
def test_unsplit_undoes_split(splits, rule, rng):
    x = rng.standard_normal((5, 7))
    layout = Layout(mesh=MESH, shape=x.shape, splits=splits, rule=rule)
    shards = split(x, layout)
    np.testing.assert_array_equal(unsplit(shards, layout), x)
    replicas = 8 // int(
        np.prod([MESH.axes[name] for names in splits.values() for name in names], initial=1)
    )
    assert sum(shard.size for shard in shards.values()) == replicas * x.size


def test_a_mesh_without_axes_is_one_device():
    layout = Layout(mesh=Mesh(axes={}), shape=())
    np.testing.assert_array_equal(unsplit(split(np.float32(3), layout), layout), np.float32(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Mesh(axes={"data": 0}), "at least one device"),
        (lambda: Layout(mesh=MESH, shape=(4,), splits={1: ("data",)}), "axis 1"),
        (lambda: Layout(mesh=MESH, shape=(4,), splits={-1: ("data",)}), "from 0; got axis"),
        (lambda: Layout(mesh=MESH, shape=(4,), splits={0: "data"}), r"Use \('data',\)"),
        (
            lambda: Layout(mesh=MESH, shape=(4,), splits={0: ("model",)}),
            "data, tensor; got 'model'",
        ),
        (
            lambda: Layout(mesh=MESH, shape=(4, 4), splits={0: ("data",), 1: ("data",)}),
            "more than once",
        ),
        (lambda: Layout(mesh=MESH, shape=(4,), splits={0: ("data",)}, rule="even"), "balanced"),
        (
            lambda: Layout(mesh=MESH, shape=(4,), splits={0: ("data",)}, sizes={0: (3, 2)}),
            "of sum 4",
        ),
        (lambda: Layout(mesh=MESH, shape=(4,), splits={0: ("data",)}, sizes={0: (4,)}), "2 sizes"),
        (
            lambda: Layout(mesh=MESH, shape=(4,), splits={0: ("data",)}, sizes={0: (5, -1)}),
            "of sum 4",
        ),
        (lambda: Layout(mesh=MESH, shape=(4,), sizes={0: (4,)}), "split"),
        (lambda: split(np.zeros((4, 4)), Layout(mesh=MESH, shape=(4,))), r"got \(4, 4\)"),
        (lambda: check_shapes({(0, 0): (4,)}, Layout(mesh=MESH, shape=(4,))), "each device"),
        (
            lambda: check_shapes(dict.fromkeys(MESH.devices, (3,)), Layout(mesh=MESH, shape=(4,))),
            r"shape \(4,\); got \(3,\)",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
