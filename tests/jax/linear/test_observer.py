import jax
import jax.numpy as jnp
import numpy as np

from fp8ref.jax.linear import linear
from fp8ref.jax.linear import observer as gemm_observer


def run(x, w, g):
    def f(x, w):
        return linear.apply(x, w, recipe="rowwise_with_gw_hp")[0]

    _, vjp = jax.vjp(jax.jit(f), *(jnp.asarray(v, jnp.bfloat16) for v in (x, w)))
    vjp(jnp.asarray(g, jnp.bfloat16))
    jax.effects_barrier()


def test_observing_reports_every_fp8_gemm_of_the_compiled_program(rng):
    x, w, g = (
        rng.integers(-7, 8, shape).astype(np.float32)
        for shape in ((2, 24, 64), (32, 64), (2, 24, 32))
    )
    seen = {}
    with gemm_observer.observing(
        lambda name, gemm, a, b, out: seen.__setitem__((name, gemm), (a, b, out))
    ):
        run(x, w, g)
    assert set(seen) == {("linear", "output"), ("linear", "grad_input")}
    (hp, codes, scale), _, out = seen["linear", "output"]
    np.testing.assert_array_equal(hp.astype(np.float32), x.reshape(48, 64))
    assert (codes.dtype, codes.shape, scale.shape, out.shape) == (
        np.uint8,
        (48, 64),
        (48, 1),
        (48, 32),
    )
    seen.clear()
    run(x, w, g)  # the program compiled afterwards reports nothing
    assert not seen


def test_an_observer_is_that_of_its_context_alone():
    outer, inner = (lambda *gemm: None), (lambda *gemm: None)
    assert gemm_observer.current() is None
    with gemm_observer.observing(outer):
        with gemm_observer.observing(inner):
            assert gemm_observer.current() is inner
        assert gemm_observer.current() is outer
    assert gemm_observer.current() is None
