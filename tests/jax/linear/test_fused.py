"""RMSNorm and SwiGLU with the casts of linears around them, interpreted, against their plain forms:
exp and rsqrt may round a result to a neighbor, which shows as less than a unit of bfloat16 (M-11).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

pytest.importorskip("triton")

from fp8ref.jax import delayed
from fp8ref.jax.distributed.sharding import Placement
from fp8ref.jax.kernels import TritonKernels, casting, plain
from fp8ref.jax.linear import fused, linear
from fp8ref.jax.linear.carried import Observations
from fp8ref.jax.linear.observer import observing
from fp8ref.jax.quantize import stats

KERNELS = TritonKernels()
ANGLES = np.random.default_rng(3).uniform(0, 6, (40, 4)).astype(np.float32)
TABLES = [jnp.asarray(np.tile(f(ANGLES), 2)) for f in (np.cos, np.sin)]  # [T, D] of heads of 8
MLP = [(48, 32), (48, 32), (32, 48), (32, 32)]  # gate, up, down, what makes the residual
READERS = [(48, 32), (16, 32), (16, 32)]


def tensor(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 0.5, shape), jnp.bfloat16)


def readers(weights, seen, recipe):
    state = delayed.init(recipe) or None
    return [
        fused.Reader(w, recipe, f"linear{i}", state, one)
        for i, (w, one) in enumerate(zip(weights, seen, strict=True))
    ]


def _is_mlp(weights):
    return len(weights) == len(MLP)


def by_kernels(recipe, stream, weights, seen):
    norm = fused.Norm(stream["norm"], 1e-5)
    total, outputs, after = fused.apply(
        stream["h"],
        readers(weights, seen, recipe),
        norm=norm,
        residual=stream.get("residual"),
        swiglu=_is_mlp(weights),
        rotary=fused.Rotary(*TABLES) if "rotated" in stream else None,
    )
    return (total, outputs), after


def by_xla(recipe, stream, weights, seen):
    def product(x, reader):
        _, recipe, name, state, one, *_ = reader
        return linear.apply(x, reader.w, recipe=recipe, state=state, seen=one, name=name)

    total, residual, last = stream["h"], stream.get("residual"), []
    linears = readers(weights, seen, recipe)
    if _is_mlp(weights):
        residual, *last = product(residual, linears[3])
    if residual is not None:
        wide = total.astype(jnp.float32) + residual.astype(jnp.float32)
        total = plain.rounded(wide, total.dtype)
    x = plain.normed(total, stream["norm"], 1e-5)
    if not _is_mlp(weights):
        outputs, after = map(list, zip(*(product(x, each) for each in linears), strict=True))
        if "rotated" in stream:
            for i, y in enumerate(outputs[:2]):
                outputs[i] = plain.rotate(y.reshape(2, 40, -1, 8), *TABLES).reshape(y.shape)
        return (total, outputs), after
    (gate, first), (up, second) = (product(x, each) for each in linears[:2])
    y, third = product(plain.swiglu(gate, up), linears[2])
    return (total, [y]), [first, second, third, *last]


def step(function, recipe, shapes, more):
    """more: ``residual`` that is added before the norm, or ``rotated`` heads of 8."""
    stream = {"h": tensor(0, 2, 40, 32), "norm": tensor(1, 32), more: tensor(2, 2, 40, 32)}
    weights = [tensor(3 + i, *shape) for i, shape in enumerate(shapes)]
    seen = [delayed.unseen(recipe) or None for _ in weights]

    def run(stream, weights, seen):
        y, pull, after = jax.vjp(
            functools.partial(function, recipe), stream, weights, seen, has_aux=True
        )
        gradients = pull(jax.tree.map(lambda v: tensor(9, *v.shape), y))
        return y, gradients, after

    return jax.jit(run)(stream, weights, seen)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize(
    ("shapes", "more"),
    [(READERS, "residual"), (READERS, "rotated"), (MLP, "residual")],
    ids=["q k v", "rotated", "swiglu"],
)
def test_a_group_computes_what_its_plain_form_does(shapes, more, recipe):  # M-11
    expected = step(by_xla, recipe, shapes, more)
    with casting(KERNELS):
        found = step(by_kernels, recipe, shapes, more)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        mine, other = (np.asarray(v, np.float64) for v in (mine, other))
        assert np.linalg.norm(mine - other) <= 2.0**-9 * np.linalg.norm(other)


@pytest.mark.parametrize(("recipe", "launches"), [("tensorwise", 9), ("delayed", 8)])
def test_what_a_group_reads_is_cast_once(recipe, launches):
    """Statistics of the norm and its cast, which are one launch where the scale is known before;
    three weights, three gradients, the norm's gradient."""
    weights = [tensor(1, *shape) for shape in READERS]
    seen = [delayed.unseen(recipe) or None for _ in weights]

    def loss(h, weights):
        stream = {"h": h, "norm": jnp.ones(32, jnp.bfloat16)}
        (_, outputs), _ = by_kernels(recipe, stream, weights, seen)
        return sum((y.astype(jnp.float32) ** 2).sum() for y in outputs)

    with casting(KERNELS):
        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(tensor(0, 40, 32), weights).as_text()
    assert text.count("@xla_ffi_python_cpu_callback") == launches


def test_what_kernels_do_not_fuse_is_left_to_plain_forms():
    h, w = tensor(0, 40, 32), tensor(1, 48, 32)
    one = fused.Reader(w, "tensorwise", "q")
    observed = Observations(statistics=jnp.zeros((len(stats.ROWS), stats.LENGTH)))

    def takes(**changes):
        return fused.takes(h, [one, one._replace(name="k", **changes)])

    assert not takes()  # no kernels were chosen
    with casting(KERNELS):
        assert takes()
        assert not fused.takes(h, [one])
        assert not takes(recipe="delayed")
        assert not fused.takes(h, [one._replace(recipe="rowwise")] * 2)
        assert not takes(seen=observed)
        assert not takes(placement=Placement(m=("a",)))  # plain jit
        with observing(lambda *_: None):
            assert not takes()


@pytest.mark.parametrize("cut", ["m", "n"])
def test_inside_shard_map_tokens_may_be_cut_and_features_not(cut):
    mesh = jax.make_mesh((2,), ("a",), (AxisType.Auto,))
    placement, taken = dataclasses.replace(Placement(), **{cut: ("a",)}), []

    def body(h):
        reader = fused.Reader(tensor(1, 48, 32), "tensorwise", "q", placement=placement)
        taken.append(fused.takes(h, [reader] * 2))
        return h

    with casting(KERNELS):
        jax.eval_shape(
            jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a")), tensor(0, 40, 32)
        )
    assert taken == [cut == "m"]


def test_without_gradients_a_group_needs_no_checked_variance():
    """As ``linear.apply``: what check_vma is for is the sum of gradients."""
    mesh = jax.make_mesh((1,), ("a",), (AxisType.Auto,), devices=jax.devices()[:1])
    placement, weights = Placement(m=("a",)), [tensor(i, 16, 32) for i in (0, 1)]

    def outputs(h):
        group = [
            fused.Reader(w, "tensorwise", f"linear{i}", placement=placement)
            for i, w in enumerate(weights)
        ]
        return fused.apply(h, group, norm=fused.Norm(jnp.ones(32), 1e-5))[1]

    h = tensor(2, 1, 16, 32)
    with casting(KERNELS):
        found, unchecked = (
            jax.shard_map(outputs, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=checked)(
                h
            )
            for checked in (True, False)
        )
    for a, b in zip(found, unchecked, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_group_of_no_tokens_is_left_to_its_linears():  # L-9
    group = [fused.Reader(tensor(i, 16, 32), "tensorwise", f"linear{i}") for i in (0, 1)]
    with casting(KERNELS):
        assert [fused.takes(tensor(0, rows, 32), group) for rows in (0, 1)] == [False, True]
