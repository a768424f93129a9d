"""The trainers of both backends under ``optimizer.kind`` ``adamw_states``: moments in a layout of
O-1.
"""

import json

import numpy as np
import pytest
from helpers.states.state_layouts import differing
from helpers.training.given_gradients import BACKENDS, configured, fed

from fp8ref.estimate import memory
from fp8ref.shared.errors import ConfigError
from fp8ref.sim.states import states as sim
from fp8ref.spec import llama
from fp8ref.spec.states.layouts import LAYOUTS
from fp8ref.train import loop
from fp8ref.train.config.sections import OptimizerConfig
from fp8ref.train.data import loader
from fp8ref.train.run import coverage, train_state

QUICK = ("sqrt_e4m3",)
EVERY = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in LAYOUTS]


@pytest.mark.grid(1)
@BACKENDS
@pytest.mark.parametrize("layout", EVERY)
# O-2 to O-10, T-6
def test_equal_gradients_give_the_simulators_weights_and_moments(backend, layout, small):
    config = configured(small, layout)
    trainer = loop.trainer(backend, config)
    tokens = loader.open_batches(config).step(0)
    weights = trainer.weights()
    stored = {name: sim.init(p.shape, layout) for name, p in weights.items()}
    rng = np.random.default_rng(0)
    for step in range(3):
        gradients = {
            name: (1e-2 * rng.standard_t(3, p.shape)).astype(np.float32)
            for name, p in weights.items()
        }
        fed(trainer, gradients)
        trainer.step(tokens)
        keys = config.optimizer
        rate = float(np.float32(keys.learning_rate_at(step, config.run.steps)))
        for name, g in gradients.items():
            decay = keys.weight_decay if g.ndim > 1 else 0.0
            optimizer = sim.AdamW(
                learning_rate=rate,
                b1=keys.beta1,
                b2=keys.beta2,
                eps=keys.eps,
                weight_decay=decay,
                layout=layout,
            )
            weights[name], stored[name] = sim.step(weights[name], g, stored[name], optimizer)
        found, moments = trainer.weights(), trainer.moments()
        for name, p in weights.items():
            assert differing(found[name], p) == 0, name
            for key, value in zip(
                ("exp_avg", "exp_avg_sq"), sim.decode(stored[name], layout), strict=True
            ):
                assert differing(moments[key][name], value) == 0, (key, name)


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("layout", EVERY)
def test_a_run_resumes_bit_for_bit(backend, layout, small, tmp_path):  # K-2
    config = configured(small, layout)
    opened = loader.open_batches(config)
    whole, resumed = (
        loop.trainer(backend, config),
        loop.trainer(backend, config.replace(run={"seed": 1})),
    )
    for k in range(2):
        whole.step(opened.step(k))
    whole.save(tmp_path / "state")()
    resumed.load(tmp_path / "state", 2)
    assert [resumed.step(opened.step(k)) for k in (2, 3)] == [
        whole.step(opened.step(k)) for k in (2, 3)
    ]
    for name, value in whole.weights().items():
        np.testing.assert_array_equal(resumed.weights()[name], value, err_msg=name)


@BACKENDS
def test_states_of_another_layout_are_refused(backend, small, tmp_path):
    loop.trainer(backend, configured(small, "sqrt_e4m3")).save(tmp_path / "state")()
    for other, said in (
        ("float32", "scale_inv is in the checkpoint"),
        ("coat", "center is not in the checkpoint"),
    ):
        with pytest.raises(ConfigError, match=said):
            loop.trainer(backend, configured(small, other)).load(tmp_path / "state", 1)


@pytest.mark.slow
def test_losses_agree(small):  # T-6
    """Of both backends as under other kinds, and of layouts that lose little with those of float32
    states.
    """
    losses = {}
    for backend in loop.BACKENDS:
        for layout in ("float32", "sqrt_e4m3"):
            config = configured(small, layout)
            trainer, tokens = loop.trainer(backend, config), loader.open_batches(config).step(0)
            losses[backend, layout] = [trainer.step(tokens)["loss"] for _ in range(6)]
            assert losses[backend, layout][-1] < losses[backend, layout][0] - 0.05
    for layout in ("float32", "sqrt_e4m3"):
        # two bf16 forward passes differ by a few roundings of logits, 2^-9 of a loss
        # (test_processes)
        np.testing.assert_allclose(losses["jax", layout], losses["torch", layout], rtol=2.0**-8)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["sqrt_e4m3", "sqrt_e5m2", "coat"])
def test_a_mesh_in_jax(layout, small, tmp_path):  # O-11, K-2
    """A state that one device saved is continued by two, as between meshes: 2^-9 of a loss; back on
    one, the bits are read.
    """
    config = configured(small, layout)
    tokens = loader.open_batches(config).step(0)
    one, two = (
        loop.trainer("jax", config),
        loop.trainer("jax", configured(small, layout, parallel={"fsdp": 2})),
    )
    one.step(tokens)
    one.save(tmp_path / "state")()
    two.load(tmp_path / "state", 1)
    for key, of_one in one.moments().items():
        for name, value in of_one.items():
            assert differing(two.moments()[key][name], value) == 0
    assert [two.step(tokens)["loss"] for _ in range(3)] == pytest.approx(
        [one.step(tokens)["loss"] for _ in range(3)], rel=2.0**-9
    )
    two.save(tmp_path / "again")()
    back = loop.trainer("jax", config)
    back.load(tmp_path / "again", 4)
    assert all(differing(value, two.weights()[name]) == 0 for name, value in back.weights().items())


@BACKENDS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_estimated_is_what_is_kept(backend, layout, small):  # O-1
    config = configured(small, layout)
    schema = train_state.schema(config, backend)
    kept = sum(tensor.nbytes for name, tensor in schema.items() if name.startswith("exp_avg"))
    assert memory.lines(config, backend)["AdamW's moments"][0] == kept
    found = coverage.of(config, config.decisions())
    assert found["states"]["layout"] == layout
    assert found["states"]["bytes_per_parameter"] * sum(
        int(np.prod(s)) for s in llama.parameter_shapes(config.model).values()
    ) == (pytest.approx(kept))
    assert f"AdamW's moments in layout {layout}: " in found["summary"]
    json.dumps(found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"layout": "sqrt_e4m3"},
            "optimizer.layout is of optimizer.kind 'adamw_states'; got layout 'sqrt_e4m3' with "
            "kind 'adamw'",
        ),
        (
            {"kind": "adamw_states", "layout": "adam8bit"},
            "optimizer.layout is one of float32, .*; got 'adam8bit'",
        ),
        ({"kind": "adamw_states", "beta2": 0.4}, r"takes the numbers of O-2: b2 is in \[0.5"),
        ({"kind": "adamw_states", "beta1": 0.99}, "layout 'sqrt_e4m3' is bounded"),
        ({"kind": "adamw_states", "learning_rate": 2000.0}, "at most 1024"),
    ],
)
def test_layouts_and_numbers_are_checked(changes, said):  # O-2, O-14
    with pytest.raises(ValueError, match=said):
        OptimizerConfig(**changes)


def test_cuts_that_a_layout_forbids_are_refused(small):  # O-11
    columns = configured(small, "sqrt_e4m3", parallel={"tensor": 2, "amax_scope": "local"})
    with pytest.raises(
        ConfigError,
        match=r"blocks of consecutive elements, which parallel.tensor = 2 cuts by columns",
    ):
        loop.trainer("torch", columns)
    with pytest.raises(
        ConfigError,
        match=r"'sqrt_e4m3_f16' has blocks of consecutive elements, which parallel.tensor = 2 cuts",
    ):
        loop.trainer(
            "torch",
            configured(small, "sqrt_e4m3_f16", parallel={"tensor": 2, "amax_scope": "local"}),
        )
