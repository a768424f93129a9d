"""The kernels of benchmarks/compiled/aot_kernels.py, run by XLA.

Every code and scale is that of ``scaling.quantize`` and of the simulator.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aot_kernels
from fp8ref.formats import BFLOAT16
from fp8ref.jax.linear import linear
from fp8ref.jax.quantize import cast, scaling
from fp8ref.sim.quantize import cast as sim_cast
from fp8ref.sim.quantize import scaling as sim_scaling

HOW = {"granularity": "rowwise", "policy": aot_kernels.POLICY}


@pytest.fixture(scope="module")
def x():
    """[64, 96] in bfloat16: lines of magnitudes up to 2^40 apart; a NaN, infinities, zeros of both
    signs, a line of subnormals.
    """
    rng = np.random.default_rng(5)
    values = rng.standard_normal((64, 96)) * np.exp2(
        rng.integers(-20, 21, (64, 1)) + rng.integers(-20, 21, (1, 96))
    )
    values[3, 5], values[9, 7], values[20, 50], values[11], values[:, 13], values[40] = (
        np.nan,
        np.inf,
        -np.inf,
        0,
        -0.0,
        2.0**-130,
    )
    return sim_cast.round_to(values.astype(np.float32), BFLOAT16)


@pytest.mark.parametrize(
    "kernel", [aot_kernels.rows_and_maxima, aot_kernels.both], ids=lambda kernel: kernel.__name__
)
# S-4, S-5
def test_codes_and_scales_are_those_of_the_library_and_of_the_simulator(kernel, x, monkeypatch):
    # 4 rows at a time, so that a program of the first kernel loops
    monkeypatch.setattr(aot_kernels, "HELD", 4 * 96)
    given = jnp.asarray(x, jnp.bfloat16)
    found = jax.jit(lambda v: kernel(v, interpret=True))(given)
    for axis, q in zip((-1, 0), found, strict=True):
        library = jax.jit(
            lambda v, axis=axis: scaling.quantize(v, aot_kernels.FMT, axis=axis, **HOW)
        )(given)
        simulated = sim_scaling.quantize(x, aot_kernels.FMT, axis=axis, **HOW)
        assert q.axis in (axis, axis % 2)
        for other, codes in (
            (library, np.asarray(cast.decode(library.codes, aot_kernels.FMT))),
            (simulated, None),
        ):
            expected = (
                sim_cast.decode(np.asarray(other.codes), aot_kernels.FMT)
                if codes is None
                else codes
            )
            mine = np.asarray(cast.decode(q.codes, aot_kernels.FMT))
            np.testing.assert_array_equal(
                np.signbit(mine)[~np.isnan(mine)], np.signbit(expected)[~np.isnan(mine)]
            )
            np.testing.assert_array_equal(mine, expected)
            np.testing.assert_array_equal(np.asarray(q.scale), np.asarray(other.scale))
            np.testing.assert_array_equal(np.asarray(q.scale_inv), np.asarray(other.scale_inv))


def test_a_program_holds_a_power_of_two_of_rows_in_its_registers():
    assert [
        aot_kernels._held((4096, n), aot_kernels.ROWS) for n in (4096, 14336, 65536, 2**17)
    ] == [8, 2, 1, 1]
    assert [(chunk.start, chunk.stop) for chunk in aot_kernels._chunks(3 * 128)] == [
        (0, 128),
        (128, 256),
        (256, 384),
    ]


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize(
    "of",
    [aot_kernels.gelu, aot_kernels.gelu_gradient, aot_kernels.rounded],
    ids=lambda of: of.__name__,
)
# S-4, S-5, G-4, G-14
def test_kernels_that_hold_gelu_make_the_codes_and_scales_of_its_result(of, axis, x, monkeypatch):
    monkeypatch.setattr(aot_kernels, "HELD", 4 * 96)
    rows, columns = (
        jnp.exp2(jnp.asarray(np.random.default_rng(n).integers(-30, 10, n), jnp.float32))
        for n in x.shape
    )
    products = [
        aot_kernels.Product(jnp.asarray(v, jnp.bfloat16), rows, columns, together)
        for v, together in ((x, False), (x[::-1], True))
    ]
    given = (
        [jnp.asarray(x) * 1.1]
        if of is aot_kernels.rounded
        else products[: 2 if of is aot_kernels.gelu_gradient else 1]
    )
    q = jax.jit(lambda given: aot_kernels.lines(of, *given, axis=axis, interpret=True))(given)
    made = jax.jit(
        lambda given: of(
            *(one.value() if isinstance(one, aot_kernels.Product) else one for one in given)
        )
    )(given)
    library = jax.jit(lambda v: scaling.quantize(v, aot_kernels.FMT, axis=axis, **HOW))(made)
    simulated = sim_scaling.quantize(
        np.asarray(made, np.float32), aot_kernels.FMT, axis=axis, **HOW
    )
    mine, of_library = (
        np.asarray(cast.decode(each.codes, aot_kernels.FMT)) for each in (q, library)
    )
    assert np.unique(mine[np.isfinite(mine)]).size > 100
    assert np.isnan(mine).any()
    assert q.axis in (axis, axis % 2)
    for expected, other in (
        (of_library, library),
        (sim_cast.decode(np.asarray(simulated.codes), aot_kernels.FMT), simulated),
    ):
        np.testing.assert_array_equal(mine, expected)
        np.testing.assert_array_equal(np.asarray(q.scale), np.asarray(other.scale))
        np.testing.assert_array_equal(np.asarray(q.scale_inv), np.asarray(other.scale_inv))


@pytest.mark.slow
def test_the_mlp_of_kernels_is_two_rowwise_layers_and_a_gelu(monkeypatch):  # G-22
    call = aot_kernels.pl.pallas_call
    monkeypatch.setattr(
        aot_kernels.pl,
        "pallas_call",
        lambda *args, **how: call(*args, **{**how, "interpret": True}),
    )
    rng = np.random.default_rng(7)
    x, up, down, g = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((32, 64), (64, 96), (96, 64), (32, 64))
    )

    def layers(x, up, down):
        h, _ = linear.apply(x, aot_kernels.rounded(up).T, recipe="rowwise")
        return linear.apply(aot_kernels.gelu(h), aot_kernels.rounded(down).T, recipe="rowwise")[0]

    def step(mlp, x, up, down):
        y, vjp = jax.vjp(mlp, x.astype(jnp.bfloat16), up, down)
        return y, *vjp(g.astype(jnp.bfloat16))

    for mine, theirs in zip(
        *(jax.jit(functools.partial(step, mlp))(x, up, down) for mlp in (aot_kernels._mlp, layers)),
        strict=True,
    ):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(theirs, np.float32))
