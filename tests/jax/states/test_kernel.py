"""The kernel of a step of AdamW, interpreted on a CPU, against the simulator: 0 bits differ (spec
O).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from helpers.states.state_layouts import ALL, MASTERED, differing
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref.jax.kernels import TritonKernels, casting
from fp8ref.jax.states import kernel as adamw_kernel
from fp8ref.jax.states import moments, states
from fp8ref.sim.states import states as sim
from fp8ref.spec.states import layouts as shared
from fp8ref.spec.states.layouts import LAYOUTS, Layout

TAKEN = ("sqrt_e4m3", "torchao", "coat")
SHAPE = (16, 512)
HYPER = {"learning_rate": 1e-3, "weight_decay": 0.1}


def gradients(steps: int):
    """Of many magnitudes; a block of zeros, and numbers that are out of range (O-2)."""
    rng = np.random.default_rng(0)
    for t in range(steps):
        g = (rng.standard_normal(SHAPE) * 10.0 ** rng.integers(-6, 3, SHAPE)).astype(np.float32)
        g[3, :256] = 0
        if t == steps - 1:
            g[5, 7], g[6, 200] = np.nan, 1e30
        yield g


def count(p, both, wanted, state) -> int:
    """How many elements of the weight, codes and scales differ."""
    pairs = [
        (p, wanted),
        *(
            (x, y)
            for one, other in zip(both, (state.m, state.v), strict=True)
            for x, y in zip(one, other, strict=True)
        ),
    ]
    return sum(differing(x, y) for x, y in pairs if y is not None)


def kernel(layout: Layout):
    return jax.jit(functools.partial(adamw_kernel.step, layout=layout, kernels=TritonKernels()))


CASES = [
    *(
        pytest.param(name, None, id=name, marks=[] if name == "torchao" else [pytest.mark.slow])
        for name in TAKEN
    ),
    *(
        pytest.param("sqrt_e4m3", cut, id=str(cut), marks=pytest.mark.slow)
        for cut in (P("a"), P("a", "b"), P(None, ("a", "b")))
    ),
    *(
        pytest.param(name, P("a", "b"), id=f"{name} on a mesh", marks=pytest.mark.slow)
        for name in ("torchao", "coat")
    ),
]


def by_xla(numbers, g, weight, *stored, layout, kernels):
    """What the kernel computes of a device's piece: a program of several devices calls no host
    from what is partitioned by hand."""
    at, half = moments.Scalars(*numbers[:10]), len(stored) // 2
    both = stored[:half], stored[half:]
    old = [moments.MomentState(*x[:2], None, *x[2:]) for x in both]
    leads = [x.shape for x in stored]
    old = [jax.tree.map(lambda x: x if x.shape == g.shape else x.reshape(-1), x) for x in old]
    if layout.keeps_master:
        old.append(moments.MomentState(weight, numbers[12], jnp.float32(1)))
    (_, *new), change = moments.new(weight, g * numbers[10], old, at, layout)
    after = []
    for i, (x, state) in enumerate(zip(new[:2], old, strict=False)):
        maxima = moments.extremes(x, None, layout.kept[i], i)
        after += jax.tree.leaves(moments.store(x, maxima, state, i, at, layout, None))
    after = [x.reshape(lead) for x, lead in zip(after, leads, strict=True)]
    codes, amaxes = weight - change, ()
    if layout.keeps_master:
        codes = jnp.clip(new[2] * numbers[13], -65504, 65504).astype(jnp.float16)
        wide = jnp.abs(codes.astype(jnp.float32)).reshape(*leads[1], -1)
        amaxes = (jnp.max(jax.lax.bitcast_convert_type(wide, jnp.int32), -1),)
    pairs = zip((codes, *after), (weight, *stored), strict=True)
    return (*(jnp.where(numbers[11] != 0, x, y) for x, y in pairs), *amaxes)


@pytest.mark.parametrize(("name", "cut"), CASES)
def test_its_bits_are_the_simulators(name, cut, monkeypatch):  # O-2 to O-11
    layout = LAYOUTS[name]
    if cut is not None:
        monkeypatch.setattr(adamw_kernel, "_call", by_xla)
    adamw_kernel._partitioned.cache_clear()
    jax.clear_caches()
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def put(x):
        return (
            jnp.asarray(x)
            if cut is None
            else jax.device_put(x, NamedSharding(mesh, cut if x.shape == SHAPE else P()))
        )

    wanted = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    state, p, step = sim.init(SHAPE, layout), put(wanted), kernel(layout)
    both = [jax.tree.map(put, moments.zeros(jnp.asarray(wanted), layout, i)) for i in (0, 1)]
    for t, g in enumerate(gradients(3)):
        scalars = shared.scalars(t + 1, b1=0.9, b2=0.95, eps=1e-8, **HYPER)
        at = moments.Scalars(*map(jnp.float32, scalars))
        p, *both = step(p, put(g / np.float32(2)), both, at, jnp.float32(2), jnp.bool_(True))
        wanted, state = sim.step(wanted, g, state, sim.AdamW(layout=layout, **HYPER))
        assert count(p, both, wanted, state) == 0
    if cut is not None:
        text = step.lower(p, put(g), both, at, jnp.float32(1), jnp.bool_(True)).compile().as_text()
        # each device has its own piece alone
        assert "f32[16,512]" not in text.partition("ENTRY")[2]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [None, P("a", "b")], ids=str)
def test_masters_have_the_simulators_bits(cut, monkeypatch):  # O-14, O-15
    if cut is not None:
        monkeypatch.setattr(adamw_kernel, "_call", by_xla)
    adamw_kernel._partitioned.cache_clear()
    jax.clear_caches()
    layout, mesh = (
        MASTERED["sqrt_e4m3_f16"],
        jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2),
    )

    def put(x):
        return (
            jnp.asarray(x)
            if cut is None
            else jax.device_put(x, NamedSharding(mesh, cut if x.shape == SHAPE else P()))
        )

    w = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    wanted, state, step = sim.master(w, layout), sim.init(SHAPE, layout), kernel(layout)
    stored = [
        jax.tree.map(put, x)
        for x in (
            *(moments.zeros(jnp.asarray(w), layout, i) for i in (0, 1)),
            moments.master(jnp.asarray(w), layout),
        )
    ]
    for t, g in enumerate(gradients(3)):
        at = moments.Scalars(
            *map(jnp.float32, shared.scalars(t + 1, b1=0.9, b2=0.95, eps=1e-8, **HYPER))
        )
        p, *stored = step(put(w), put(g), stored, at, jnp.float32(1), jnp.bool_(True))
        wanted, state = sim.step(wanted, g, state, sim.AdamW(layout=layout, **HYPER))
        # NaN of either sign
        assert differing(p, np.asarray(sim.weight(wanted, layout), np.float32)) == 0 or t == 2
        for one, other in zip(stored, (state.m, state.v, wanted), strict=True):
            assert (
                sum(differing(x, y) for x, y in zip(one, other, strict=True) if y is not None) == 0
            )
    *_, kept = step(put(w), put(g), stored, at, jnp.float32(1), jnp.bool_(False))
    assert all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(kept[:3], stored[2][:3], strict=True)
    )


def test_a_step_that_is_not_finite_changes_nothing():  # T-4
    layout = LAYOUTS["sqrt_e4m3"]
    p, g = (np.random.default_rng(i).standard_normal(SHAPE).astype(np.float32) for i in (0, 1))
    at = moments.Scalars(*map(jnp.float32, shared.scalars(1, b1=0.9, b2=0.95, eps=1e-8, **HYPER)))
    both = [moments.zeros(jnp.asarray(p), layout, i) for i in (0, 1)]
    taken = kernel(layout)(p, g, both, at, jnp.float32(1), jnp.bool_(True))
    kept = kernel(layout)(*taken[:1], g, taken[1:], at, jnp.float32(1), jnp.bool_(False))
    assert all(
        differing(x, y) == 0
        for x, y in zip(jax.tree.leaves(kept), jax.tree.leaves(taken), strict=True)
    )


def test_what_it_takes():
    assert {
        name for name, layout in (ALL | MASTERED).items() if adamw_kernel.takes((3, 512), layout)
    } == {*TAKEN, "sqrt_e4m3_f16"}
    layout = LAYOUTS["sqrt_e4m3"]
    assert [
        adamw_kernel.takes(shape, layout) for shape in ((), (128,), (100,), (128, 100), (2, 3, 256))
    ] == [False, True, False, False, True]
    assert not adamw_kernel.takes(
        (512,), dataclasses.replace(layout, v=dataclasses.replace(layout.v, block=256))
    )


def test_on_an_nvidia_gpu_alone():
    """states.step has it for a GPU, if kernels are chosen; programs of a CPU call no host."""
    p = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    state = jax.eval_shape(states.adamw(1e-3).init, p)
    step = functools.partial(states.step, optimizer=states.AdamW(**HYPER))
    for kernels in (TritonKernels(capability=90), None):
        with casting(kernels):
            traced = jax.jit(step).trace(p, p, state)
        assert str(traced.jaxpr).count("fp8ref_kernel") == (kernels is not None)
        assert "callback" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    plain = functools.partial(states.step, optimizer=states.AdamW(**HYPER, kernels="plain"))
    with casting(TritonKernels(capability=90)):
        assert "fp8ref_kernel" not in str(jax.jit(plain).trace(p, p, state).jaxpr)


def test_a_process_asks_for_its_own_device(monkeypatch):
    asked = []
    monkeypatch.setattr(jax, "local_devices", lambda: ["own"])
    monkeypatch.setattr(adamw_kernel.choice, "explain", lambda *each: asked.append(each))
    monkeypatch.setattr(adamw_kernel.choice, "kernels", lambda ran, device: None)
    assert adamw_kernel.chosen("plain") is adamw_kernel.chosen("auto") is None
    assert asked == [("auto", "own")]


def test_a_process_without_a_gpu_chooses_none():
    assert adamw_kernel.chosen("auto") is None
