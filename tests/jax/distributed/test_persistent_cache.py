"""Which programs JAX may read back from its persistent cache."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.training import persistent_caches
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fp8ref.jax.distributed import persistent_cache

X = np.arange(8, dtype=np.float32)


def total(x):
    return lax.psum(x, "data")


def add_totals(x):
    """A loop of collectives, beside one that does not wait for it."""
    return lax.scan(lambda h, _: (h + total(x), None), x, None, length=3)[0], total(2 * x)


def add_own(x):
    """A loop without collectives, beside one."""
    return lax.scan(lambda h, _: (h + x, None), x, None, length=3)[0], total(2 * x)


def repeated(x):
    return lax.fori_loop(0, x.astype(jnp.int32).max(), lambda _, h: h + total(h), x), x


def sometimes(x):
    return lax.cond(total(x.sum()) > 1, total, lambda x: x, x), x


def by_platform(x):
    return lax.platform_dependent(x, cpu=total, default=lambda x: 2 * total(x)), x


def nested(x):
    return jax.checkpoint(jax.jit(lambda x: add_totals(x)[0]))(x), x


def mapped(function):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": False}
    return jax.jit(jax.shard_map(function, mesh=mesh, **specs))


@pytest.mark.parametrize(
    ("function", "communicates"),
    [
        (add_totals, True),
        (repeated, True),
        (sometimes, True),
        (nested, True),
        (add_own, False),
        (by_platform, False),
    ],
)
def test_loops_and_branches_with_collectives(function, communicates):
    program = mapped(function).trace(X).jaxpr.jaxpr
    assert persistent_cache.loop_communicates(program) == communicates


def test_any_loop_may_get_collectives_where_xla_inserts_them():
    looping = jax.jit(lambda x: lax.map(jnp.sin, x)).trace(X).jaxpr.jaxpr
    plain = jax.jit(jnp.sin).trace(X).jaxpr.jaxpr
    assert persistent_cache.loop_communicates(looping)
    assert not persistent_cache.loop_communicates(plain)


def test_only_a_program_whose_loops_communicate_is_kept_from_the_cache(tmp_path):
    looping, other = (
        persistent_cache.MeshProgram(mapped(function)) for function in (add_totals, add_own)
    )
    with persistent_caches.in_directory(tmp_path):
        looped, plain = looping(X), other(X)
        assert persistent_caches.functions(tmp_path) == {"add_own"}
        assert jax.config.jax_enable_compilation_cache
    both = X.reshape(2, 4).sum(0)
    np.testing.assert_array_equal(
        np.asarray(looped), [X + 3 * np.tile(both, 2), 2 * np.tile(both, 2)]
    )
    np.testing.assert_array_equal(np.asarray(plain), [4 * X, 2 * np.tile(both, 2)])
    assert looping._cache_size() == other._cache_size() == 1


def test_a_program_in_the_cache_is_not_read_either(tmp_path):
    """As one that an earlier version kept; JAX warns of one that it cannot read."""
    with persistent_caches.in_directory(tmp_path):
        mapped(add_totals)(X)
        (kept,) = tmp_path.glob("*-cache")
        kept.write_bytes(b"no program")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            persistent_cache.MeshProgram(mapped(add_totals))(X)
        assert list(tmp_path.glob("*-cache")) == [kept]
        with pytest.warns(UserWarning, match="persistent compilation cache"):
            mapped(add_totals)(X)
