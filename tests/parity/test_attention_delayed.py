"""Delayed scales of attention in both trainers (spec A-19, H): histories, scales, checkpoints,
meshes.
"""

import numpy as np
import pytest
from helpers.processes import rank_jobs, ranks

from fp8ref.crosscheck import one_device
from fp8ref.crosscheck.attention import attention
from fp8ref.crosscheck.operands import observe
from fp8ref.sim import delayed
from fp8ref.sim.quantize import scaling
from fp8ref.spec import llama
from fp8ref.spec.attention import delayed as attention_delayed
from fp8ref.spec.attention.variants import GRADIENT_ROLES, ROLES, VARIANTS
from fp8ref.train import loop
from fp8ref.train.data import loader
from fp8ref.train.run import train_state

LAYER = "model.layers.0.self_attn"
ALL = (*ROLES, *GRADIENT_ROLES)
BACKENDS = pytest.mark.parametrize(
    "backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)]
)


@pytest.fixture
def config(small):
    return small.replace(
        numerics={"recipe": "bf16", "attention": "cudnn", "attention_scaling": "delayed"}
    )


def states_of(trainer) -> dict[str, tuple]:
    return {name: tuple(map(np.asarray, state)) for name, state in trainer.fp8_states().items()}


@BACKENDS
def test_states_follow_the_simulators_from_step_to_step(backend, config):  # A-19, H-3
    """Amaxes of q, k, v and do are those of the tensors, bit for bit; all states are the
    simulator's, given the amaxes. Under the scale 1 of the first steps dO and then dS are cast to
    0: dQ is seen in the third step."""
    trainer, batches = loop.trainer(backend, config), loader.open_batches(config)
    casts, simulated = attention_delayed.casts(VARIANTS["cudnn"]), attention.first_states(config)
    assert list(simulated) == [f"{LAYER}/{role}" for role in ALL]
    for step in range(3):
        before, passes = states_of(trainer), []
        observe(trainer, batches.step(step), passes)
        forward, backward = sorted(passes, key=lambda one: one.phase == "backward")
        trainer.step(batches.step(step))
        after = states_of(trainer)
        for role in ALL:
            name = f"{LAYER}/{role}"
            one = backward if role in GRADIENT_ROLES else forward
            if role in attention.QUANTIZED:
                amax = scaling.amax(np.asarray(one.arrays[f"{role}/value"], np.float32))
                assert after[name][1][0] == amax, role
            else:
                amax = after[name][1][0]
                assert amax > 0 or (step < 2 and role in ("ds", "dq", "dk", "dv")), role
            fmt, how = casts[role]
            simulated[name] = delayed.update(
                simulated[name], delayed.observe(amax), config=how, fmt=fmt
            )
            for mine, right in zip(after[name], simulated[name], strict=True):
                np.testing.assert_array_equal(mine, right, err_msg=role)
            scale = one.arrays["p/scale" if role == "s" else f"{role}/scale"]
            assert scale == before[name][0], role
        value = np.abs(backward.arrays["ds/value"]).max()
        # sums of another program of XLA's
        assert after[f"{LAYER}/ds"][1][0] == pytest.approx(value, rel=2**-18)


@BACKENDS
def test_a_checkpoint_resumes_bit_for_bit(backend, config, tmp_path):  # K-2
    batches = loader.open_batches(config)
    whole = loop.trainer(backend, config)
    for step in range(2):
        whole.step(batches.step(step))
    whole.save(tmp_path / "state")()
    resumed = loop.trainer(backend, config)
    resumed.load(tmp_path / "state", 2)
    for name, state in states_of(whole).items():
        for mine, other in zip(state, states_of(resumed)[name], strict=True):
            np.testing.assert_array_equal(mine, other, err_msg=name)
    for trainer in (whole, resumed):
        trainer.last = trainer.step(batches.step(2))
    assert whole.last == resumed.last
    for name, weight in whole.weights().items():
        np.testing.assert_array_equal(weight, resumed.weights()[name], err_msg=name)
    names = [
        name
        for name in train_state.schema(config, backend)
        if ".self_attn." in name and name.startswith("fp8.")
    ]
    assert len(names) == 3 * len(ALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "through": "jit"}, {"scan": True}],
    ids=str,
)
def test_devices_of_a_mesh_share_states_in_jax(parallel, config):  # H-4, P-2
    config = config.replace(
        model={"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    )
    one, mesh = (loop.trainer("jax", config.replace(parallel=keys)) for keys in ({}, parallel))
    batches = loader.open_batches(config)
    for step in range(2):
        losses = [trainer.step(batches.step(step))["loss"] for trainer in (one, mesh)]
        # Linears in bfloat16 sum partial products; a relative error of 2^-8 a rounding, averaged
        # over 64 tokens.
        assert losses[0] == pytest.approx(losses[1], rel=2**-10)
    mine, other = states_of(one), states_of(mesh)
    assert (
        mine.keys()
        == other.keys()
        == {f"model.layers.{i}.self_attn/{role}" for i in range(2) for role in ALL}
    )
    for name, (scale, history, count) in mine.items():
        # an amax after roundings to 8 bits
        np.testing.assert_allclose(other[name][1][:2], history[:2], rtol=2**-3, err_msg=name)
        assert (other[name][2] == count).all()
        assert np.asarray(other[name][0]).shape == np.asarray(scale).shape


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"fsdp": 2}, {"tensor": 2}], ids=str)
def test_ranks_share_states_in_pytorch(keys, config):  # H-4, P-2
    config = config.replace(
        model={"num_attention_heads": 4, "num_key_value_heads": 2}, parallel=keys
    )
    batches = [loader.open_batches(config).step(step) for step in range(3)]
    (losses, mine), (others, theirs) = ranks.run(2, rank_jobs.attention_states, config, batches)
    assert losses == others
    assert mine.keys() == theirs.keys() == {f"{LAYER}/{role}" for role in ALL}
    for name, state in mine.items():
        for x, y in zip(state, theirs[name], strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)
    one = loop.trainer("torch", config.replace(parallel=dict.fromkeys(keys, 1)))
    # Linears in bfloat16 sum partial products and gradients; a relative error of 2^-8 a rounding,
    # averaged over 64 tokens.
    assert [one.step(tokens)["loss"] for tokens in batches] == pytest.approx(losses, rel=2**-9)
    # A rank's loss is the mean of its own sequences, so that dO is twice as large under fsdp; what
    # is made of it under scale 1 is not.
    twice = 2 if "fsdp" in keys else 1
    for role in (*ROLES, "do"):
        history = states_of(one)[f"{LAYER}/{role}"][1][:2] * (twice if role == "do" else 1)
        # an amax after roundings to 8 bits
        np.testing.assert_allclose(
            mine[f"{LAYER}/{role}"][1][:2], history, rtol=2**-3, err_msg=role
        )


@pytest.mark.slow
def test_a_cross_check_holds(config):  # A-2, B-2, B-3
    report = one_device.crosscheck(config, steps=2)
    assert [name for name, check in report.checks.items() if not check.ok] == []
    assert any(name == f"{LAYER}/do/codes/torch" for name in report.checks)


REFUSED = [
    (
        {"attention": "mxfp8"},
        r"'delayed' is of attention with one FP8 scale for a tensor; got numerics.attention "
        r"'mxfp8'. Use variant 'cudnn'",
    ),
    (
        {"attention": None},
        r"'delayed' is of attention with one FP8 scale for a tensor; got numerics.attention None",
    ),
    ({"attention_scaling": "past"}, r"attention_scaling is one of current, delayed; got 'past'"),
]


@pytest.mark.parametrize(("numerics", "said"), REFUSED)
def test_what_has_no_states_is_refused(numerics, said, config):
    with pytest.raises(ValueError, match=said):
        config.replace(numerics=numerics)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"
)  # inductor and dynamo
def test_a_compiled_block_observes_as_eager_does(config):  # A-19, B-9
    """Graphs have eager's bits (tests/torch/test_attention_delayed); inductor keeps norms and
    activations in float32, so that an amax is of numbers a rounding to 8 bits apart."""
    trainers = [
        loop.trainer("torch", config.replace(parallel={"compile": how}))
        for how in ("none", "block")
    ]
    batches = loader.open_batches(config)
    losses = [
        [trainer.step(batches.step(step))["loss"] for step in range(3)] for trainer in trainers
    ]
    assert losses[1] == pytest.approx(losses[0], rel=2**-8)
    eager, compiled = map(states_of, trainers)
    for role in (*ROLES, "do"):
        for mine, right in zip(compiled[f"{LAYER}/{role}"], eager[f"{LAYER}/{role}"], strict=True):
            np.testing.assert_allclose(mine, right, rtol=2**-3, err_msg=role)
        assert compiled[f"{LAYER}/{role}"][2] == 3
    assert all(compiled[f"{LAYER}/{role}"][1][0] > 0 for role in GRADIENT_ROLES)


def test_weights_of_zero_leave_scales_as_they_are(config):  # H-5
    weights = llama.initial_weights(config.model, seed=0)
    for name in weights:
        if ".self_attn." in name:
            weights[name] = np.zeros_like(weights[name])
    trainer = loop.trainer("torch", config, weights)
    trainer.step(loader.open_batches(config).step(0))
    scales = {name: float(state[0]) for name, state in states_of(trainer).items()}
    assert scales.pop(f"{LAYER}/s") == 448  # all keys alike: P is 1 of the largest
    assert set(scales.values()) == {1.0}
