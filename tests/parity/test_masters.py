"""The trainers of both backends under a layout that stores masters narrower than float32 (O-14),
and weights in FP8 (O-16).
"""

import jax
import numpy as np
import pytest
from helpers.states.state_layouts import differing
from helpers.training import given_gradients
from helpers.training.given_gradients import BACKENDS, fed
from safetensors.numpy import load_file

from fp8ref.estimate import memory
from fp8ref.shared.errors import ConfigError
from fp8ref.sim.states import states as sim
from fp8ref.spec import llama
from fp8ref.spec.states import saved as layout_decisions
from fp8ref.spec.states.layouts import WITH_MASTERS
from fp8ref.train import loop
from fp8ref.train.data import loader
from fp8ref.train.models import export
from fp8ref.train.run import coverage, train_state

# what XLA compiles takes its time
COMPILED = pytest.mark.parametrize(
    "backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)]
)
EVERY = [
    pytest.param(name, marks=[] if name == "sqrt_e4m3_f16" else pytest.mark.slow)
    for name in WITH_MASTERS
]


def configured(small, layout: str, recipe: str = "tensorwise", **sections):
    return small.replace(
        numerics={"recipe": recipe},
        optimizer={"kind": "adamw_states", "layout": layout},
        **sections,
    )


def tensors(trainer) -> dict[str, np.ndarray]:
    """What a checkpoint would hold, by name."""
    found = train_state.flat(
        trainer._step.tensors(*([trainer._state] if trainer.backend == "jax" else []))
    )
    return {name: np.array(np.asarray(value)) for name, value in found.items()}


@pytest.mark.grid(1)
@BACKENDS
@pytest.mark.parametrize("layout", WITH_MASTERS)
def test_equal_gradients_give_the_simulators_masters(backend, layout, small):  # O-14, O-15
    """Of given weights in float32, which the master rounds first; so the masters of both backends
    have the same bits.
    """
    config = given_gradients.configured(small, layout)
    given = {
        name: value[...] for name, value in llama.lazy_initial_weights(config.model, seed=0).items()
    }
    trainer = loop.trainer(backend, config, given)
    tokens = loader.open_batches(config).step(0)
    masters = {name: sim.master(w, layout) for name, w in given.items()}
    stored = {name: sim.init(w.shape, layout) for name, w in given.items()}
    rng = np.random.default_rng(0)
    for step in range(3):
        gradients = {
            name: (1e-2 * rng.standard_t(3, w.shape)).astype(np.float32)
            for name, w in given.items()
        }
        fed(trainer, gradients)
        trainer.step(tokens)
        keys = config.optimizer
        rate = float(np.float32(keys.learning_rate_at(step, config.run.steps)))
        for name, g in gradients.items():
            numbers = {"learning_rate": rate, "b1": keys.beta1, "b2": keys.beta2, "eps": keys.eps}
            numbers["weight_decay"] = keys.weight_decay if g.ndim > 1 else 0.0
            masters[name], stored[name] = sim.step(
                masters[name], g, stored[name], sim.AdamW(layout=layout, **numbers)
            )
    found, weights = tensors(trainer), trainer.weights()
    for name, master in masters.items():
        assert (
            differing(
                found[f"model.{name}.codes"].astype(np.float32),
                np.asarray(master.codes, np.float32),
            )
            == 0
        ), name
        assert differing(found[f"model.{name}.scale_inv"], master.scale_inv) == 0, name
        if layout == "sqrt_e4m3_f16":
            assert differing(found[f"model.{name}.amax"], master.amax) == 0, name
        assert (
            differing(
                found[f"exp_avg_sq.{name}.codes"].astype(np.float32),
                np.asarray(stored[name].v.codes, np.float32),
            )
            == 0
        ), name
        assert differing(weights[name], sim.weight(master, layout)) == 0, name


@COMPILED
@pytest.mark.parametrize(
    ("recipe", "tied", "microbatches"),
    [
        ("tensorwise", False, 2),
        pytest.param("tensorwise", True, 1, marks=pytest.mark.slow),
        pytest.param("rowwise", True, 2, marks=pytest.mark.slow),
    ],
)
# O-14, O-16, M-2, T-7
def test_passes_have_the_bits_of_float32_masters_of_equal_numbers(
    backend, recipe, tied, microbatches, small
):
    """Also where linears take codes that the optimizer made, and their operands are measured."""
    config = configured(
        small,
        "msamp_o2",
        recipe,
        model={"tie_word_embeddings": tied},
        data={"microbatches": microbatches},
    )
    narrow = loop.trainer(backend, config)
    wide = loop.trainer(backend, config.replace(optimizer={"layout": "msamp"}), narrow.weights())
    tokens = loader.open_batches(config).step(0)
    expected = wide.gradients(tokens)
    for name, g in narrow.gradients(tokens).items():
        assert g.dtype == np.float32
        assert differing(g, expected[name]) == 0, name
    assert narrow.evaluate(tokens) == wide.evaluate(tokens)
    assert narrow.statistics(tokens) == wide.statistics(tokens)
    inputs = tokens[:, :-1]
    np.testing.assert_array_equal(narrow.logits(inputs), wide.logits(inputs))


def held(trainer) -> list[tuple[str, int, int]]:
    """(dtype, elements, bytes) of all that a trainer holds between two steps, gradients left
    out.
    """
    if trainer.backend == "jax":
        return [(x.dtype.name, x.size, x.nbytes) for x in jax.tree.leaves(trainer._state)]
    import torch
    from torchao.float8.float8_training_tensor import Float8TrainingTensor

    found = [p.detach() for p in trainer._step.params.values()]
    found += [
        x
        for state in trainer._step.optimizer.state.values()
        for x in state.values()
        if isinstance(x, torch.Tensor)
    ]
    found = [
        part
        for x in found
        for part in ((x._data, x._scale) if isinstance(x, Float8TrainingTensor) else (x,))
    ]
    return [(str(x.dtype), x.numel(), x.nbytes) for x in found]


@BACKENDS
@pytest.mark.parametrize(("layout", "most"), [("msamp_o2", 5.0), ("sqrt_e4m3_f16", 4.0625)])
def test_no_float32_master_is_held(backend, layout, most, small):  # O-14
    """Masters and moments take the layout's bytes.

    In PyTorch weights come on top: 1 byte in FP8, else 2; in JAX nothing.
    """
    model = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = configured(small, layout, model=model)
    trainer = loop.trainer(backend, config)
    shapes = llama.parameter_shapes(config.model)
    parameters, linears = (
        sum(int(np.prod(s)) for s in of.values())
        for of in (shapes, llama.linear_shapes(config.model))
    )
    in_fp8 = linears - config.model.vocab_size * config.model.hidden_size  # all but lm_head
    weights = in_fp8 + 2 * (parameters - in_fp8) if backend == "torch" else 0
    of_each = held(trainer)
    text = layout_decisions.BYTES if backend == "jax" else 0  # O-17, once
    # Of each parameter at most three scales and amaxes, and a step, are beside what is counted.
    assert sum(size for *_, size in of_each) - weights - text == pytest.approx(
        most * parameters, abs=32 * len(shapes)
    )
    float32 = [elements for dtype, elements, _ in of_each if "float32" in dtype]
    assert max(float32) <= parameters // 128  # scales of blocks at most
    float32_states = 4 + 8  # AdamW's own masters and moments, and 4 more of the gradient: 16
    assert sum(size for *_, size in of_each) / parameters < float32_states * 0.6


@BACKENDS
@pytest.mark.parametrize("layout", WITH_MASTERS)
def test_what_is_estimated_is_what_is_kept(backend, layout, small):  # O-14, K-2
    config = configured(small, layout)
    schema = train_state.schema(config, backend)
    lines = memory.lines(config, backend)
    for label, prefix in (("weights, float16 masters", "model."), ("AdamW's moments", "exp_avg")):
        assert lines[label][0] == sum(
            tensor.nbytes for name, tensor in schema.items() if name.startswith(prefix)
        )
    assert "weights, float32 masters" not in lines
    parameters = sum(int(np.prod(s)) for s in llama.parameter_shapes(config.model).values())
    over_linears = sum(int(np.prod(d.shape)) for d in config.decisions() if d.fp8)
    assert lines["weights in use"][0] == over_linears + 2 * (parameters - over_linears)
    told = coverage.of(config, config.decisions())
    assert told["states"]["master"] == "float16"
    assert told["states"]["bytes_per_master"] == pytest.approx(2, rel=0.01)
    assert "and masters in float16: 2.0" in told["summary"]


@COMPILED
@pytest.mark.parametrize("layout", EVERY)
def test_a_run_is_resumed_and_exported(backend, layout, small, tmp_path, capsys):  # K-2, K-7, O-12
    config = configured(
        small, layout, run={"steps": 4}, checkpoint={"every": 2}, statistics={"every": 2}
    )
    whole = loop.train(config, backend, tmp_path / "whole")
    assert whole[-1]["loss"] < whole[0]["loss"]
    opened = loader.open_batches(config)
    resumed = loop.trainer(backend, config.replace(run={"seed": 1}))
    resumed.load(tmp_path / "whole" / "checkpoints" / "step-00000002" / "state", 2)
    for line in whole[2:]:
        metrics = resumed.step(opened.step(line["step"]))
        assert metrics == {key: line[key] for key in metrics}
    export.export(tmp_path / "whole", tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for name, w in resumed.weights().items():
        assert exported[name].dtype == np.float32
        assert differing(exported[name], w) == 0, name
    saved = resumed.save(tmp_path / "state")
    saved()
    for other, said in (
        ("msamp", "is not in the checkpoint"),
        ({"msamp_o2": "sqrt_e4m3_f16"}.get(layout, "msamp_o2"), "amax is"),
    ):
        with pytest.raises(ConfigError, match=said):
            loop.trainer(backend, configured(small, other)).load(tmp_path / "state", 4)
    with pytest.raises(ConfigError, match=r"optimizer\.layout"):
        loop.train(
            configured(small, "msamp", run={"steps": 4}), backend, tmp_path / "whole", resume=True
        )


@COMPILED
def test_a_step_that_is_not_finite_changes_no_master(backend, small):  # T-4
    config = configured(small, "sqrt_e4m3_f16", "bf16")
    trainer = loop.trainer(backend, config)
    tokens, before = loader.open_batches(config).step(0), tensors(trainer)
    fed(
        trainer,
        {name: np.full(w.shape, np.nan, np.float32) for name, w in trainer.weights().items()},
    )
    assert np.isnan(trainer.step(tokens)["grad_norm"])
    for name, value in tensors(trainer).items():
        assert value.tobytes() == before[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("through", ["shard_map", "jit"])
@pytest.mark.parametrize("layout", WITH_MASTERS)
def test_a_mesh_in_jax(layout, through, small, tmp_path):  # O-16, K-2
    """Two devices read the bits that one saved, and go on as between meshes: 2^-9 of a loss; back
    on one, the bits are read.
    """
    config = configured(small, layout)
    tokens = loader.open_batches(config).step(0)
    one, two = (
        loop.trainer("jax", config),
        loop.trainer("jax", config.replace(parallel={"fsdp": 2, "through": through})),
    )
    two.prove(tokens)
    one.step(tokens)
    one.save(tmp_path / "state")()
    two.load(tmp_path / "state", 1)
    assert all(
        value.tobytes() == tensors(one)[name].tobytes() for name, value in tensors(two).items()
    )
    assert [two.step(tokens)["loss"] for _ in range(3)] == pytest.approx(
        [one.step(tokens)["loss"] for _ in range(3)], rel=2.0**-9
    )
    two.save(tmp_path / "again")()
    back = loop.trainer("jax", config)
    back.load(tmp_path / "again", 4)
    assert all(
        value.tobytes() == tensors(two)[name].tobytes() for name, value in tensors(back).items()
    )
