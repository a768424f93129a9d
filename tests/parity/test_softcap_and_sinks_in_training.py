"""Models whose attention has a softcap and sinks, in the trainers of both backends (A-28)."""

import numpy as np
import pytest
from helpers.processes import ranks

from fp8ref.crosscheck import one_device
from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.train import loop
from fp8ref.train.data import loader
from fp8ref.train.models import export, hugging_face

KEYS = {"attention_softcap": 3.0, "attention_sinks": True}
SINKS = "model.layers.0.self_attn.sinks"


@pytest.fixture
def config(small):
    return small.replace(model=KEYS, numerics={"recipe": "bf16", "attention": "cudnn"})


def trained(config, backend, steps=3):
    """A trainer after some steps, and their losses.

    Matrices are large, so that scores reach the softcap.
    """
    batches, weights = loader.open_batches(config), llama.initial_weights(config.model, seed=0)
    trainer = loop.trainer(
        backend, config, {name: w * (4 if w.ndim > 1 else 1) for name, w in weights.items()}
    )
    return trainer, [trainer.step(batches.step(step))["loss"] for step in range(steps)]


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_sinks_learn_and_both_keys_change_the_loss(backend, config, tmp_path):
    weights = llama.initial_weights(config.model, seed=0)
    assert not weights[SINKS].any()
    assert weights[SINKS].shape == (config.model.num_attention_heads,)
    plain = llama.initial_weights(config.replace(model={"attention_sinks": False}).model, seed=0)
    assert all(np.array_equal(weights[name], x) for name, x in plain.items())
    trainer, losses = trained(config, backend)
    assert (np.abs(trainer.weights()[SINKS]) > 1e-5).all()
    for key, off in (("attention_softcap", None), ("attention_sinks", False)):
        assert trained(config.replace(model={key: off}), backend)[1][0] != losses[0]
    trainer.save(tmp_path / "state")()
    other = loop.trainer(backend, config)
    other.load(tmp_path / "state", 3)
    tokens = loader.open_batches(config).step(3)
    assert other.step(tokens) == trainer.step(tokens)
    assert np.array_equal(other.weights()[SINKS], trainer.weights()[SINKS])


@pytest.mark.parametrize(
    ("backend", "scan"),
    [
        ("torch", False),
        pytest.param("jax", False, marks=pytest.mark.slow),
        pytest.param("jax", True, marks=pytest.mark.slow),
    ],
)
def test_sinks_do_not_decay(backend, scan, config):  # A-28, T-1
    """Adam's first update of g is lr g / (|g| + eps), of sinks that are not zero without a share of
    them.
    """
    rate = 2.0**-8
    keys = {
        "weight_decay": 0.5,
        "max_norm": 1e9,
        "warmup_steps": 0,
        "learning_rate": rate,
        "min_learning_rate": rate,
    }
    config = config.replace(optimizer=keys, parallel={"scan": scan})
    tokens, weights = (
        loader.open_batches(config).step(0),
        llama.initial_weights(config.model, seed=0),
    )
    weights[SINKS] = np.linspace(2, 3, weights[SINKS].size).astype(np.float32)
    trainer = loop.trainer(backend, config, weights)
    g = trainer.gradients(tokens)
    trainer.step(tokens)
    for name, decays in ((SINKS, 0.0), ("model.layers.0.mlp.up_proj.weight", 0.5)):
        adam, found = g[name] / (np.abs(g[name]) + config.optimizer.eps), trainer.weights()[name]
        wanted = weights[name] - rate * (adam + decays * weights[name])
        # Three roundings of weights up to 4, and Adam's own, of a gradient taken twice: far below a
        # decay of 2 / 2 times the rate.
        np.testing.assert_allclose(
            found, wanted, rtol=0, atol=2.0**-20 + 2.0**-10 * rate, err_msg=name
        )
        assert rate * 0.5 * np.abs(weights[SINKS]).min() > 2 * (2.0**-20 + 2.0**-10 * rate)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["cudnn", "mxfp8"])
def test_a_cross_check_holds(attention, config):  # A-28, B-2, B-3, Q-13
    config = config.replace(
        numerics={"attention": attention},
        model={"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    )
    report = one_device.crosscheck(config, steps=1)
    assert report.ok, [check.detail for check in report.failures]
    for backend in loop.BACKENDS:
        assert report.checks[f"model.layers.0.self_attn/p/lost/{backend}"].compared
        assert (f"model.layers.0.self_attn/ds/lost/{backend}" in report.checks) == (
            attention == "cudnn"
        )
        assert report.checks[f"weights/initial/value/{backend}"].compared


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [{"scan": True, "checkpointing": "full"}, {"data": 2, "fsdp": 2}], ids=str
)
def test_scans_and_meshes_train_the_same(keys, config):
    """Devices sum the gradients of sinks, and differ by roundings of bfloat16 alone: 2^-8 of a
    gradient.
    """
    config = config.replace(model={"num_hidden_layers": 2})
    tokens, weights = (
        loader.open_batches(config).step(0),
        llama.initial_weights(config.model, seed=0),
    )
    found = [
        loop.trainer("jax", c, weights).gradients(tokens)[SINKS]
        for c in (config, config.replace(parallel=keys))
    ]
    assert np.linalg.norm(found[0] - found[1]) <= 2.0**-5 * np.linalg.norm(found[0]) > 0


def of_rank(config, tokens):
    """The logits, the gradient of the sinks, and them after a step, by a rank of PyTorch's or by
    one process.
    """
    weights = llama.initial_weights(config.model, seed=0)
    trainer = loop.trainer(
        "torch", config, {name: w * (4 if w.ndim > 1 else 1) for name, w in weights.items()}
    )
    logits, gradient = trainer.logits(tokens[:, :-1]), trainer.gradients(tokens)[SINKS]
    trainer.step(tokens)
    return logits, gradient, trainer.weights()[SINKS]


@pytest.mark.slow
def test_ranks_of_fsdp2_train_the_same(config):  # A-28, P-11
    """Amaxes are of whole tensors, and each sequence is one rank's, so that in the stated form
    logits are one process's bits. A rank rounds its sum of the sinks' gradient to bfloat16: by 2^-9
    of each rank's. 2^-5 leaves room for parts that are 16 times as large as their sum."""
    config = config.replace(numerics={"attention_arithmetic": "stated"})
    tokens = loader.open_batches(config).step(0)
    logits, gradient, stepped = of_rank(config, tokens)
    of_ranks = ranks.run(2, of_rank, config.replace(parallel={"fsdp": 2}), tokens)
    for found in of_ranks:
        assert np.array_equal(found[0], logits)
        assert 0 < np.linalg.norm(found[1] - gradient) <= 2.0**-5 * np.linalg.norm(gradient)
        assert np.array_equal(found[1], of_ranks[0][1])
        assert (np.abs(stepped) > 1e-5).all()
        assert np.array_equal(np.sign(found[2]), np.sign(stepped))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"
)  # inductor and dynamo
def test_a_compiled_block_trains_the_same(config):  # A-28, B-9
    """The loss is eager's, but for roundings of norms and activations that inductor keeps in
    float32: 2^-8 each, averaged over tokens. Sinks learn.
    """
    eager, compiled = (
        trained(config.replace(parallel={"compile": how}), "torch") for how in ("none", "block")
    )
    assert compiled[1] == pytest.approx(eager[1], rel=2**-8)
    assert (np.abs(compiled[0].weights()[SINKS]) > 1e-5).all()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"numerics": {"attention": None}}, "are of attention by a whole variant"),
        ({"numerics": {"attention_operands": ("q",)}}, "are of attention by a whole variant"),
        ({"parallel": {"context": 2}}, "parallel.context 2"),
        ({"parallel": {"tensor": 2}}, "tensor 2"),
        ({"model": {"attention_softcap": 0.0}}, "attention_softcap is positive"),
    ],
    ids=str,
)
def test_what_has_neither_is_refused(keys, said, config):
    with pytest.raises(ValueError, match=said):
        config.replace(**keys)


def test_transformers_models_have_no_place_for_them(config, tmp_path):
    with pytest.raises(
        ConfigError, match=r"no place for model.attention_softcap and model.attention_sinks"
    ):
        hugging_face.kind(config.model)
    loop.train(config.replace(run={"steps": 1}, checkpoint={"every": 1}), "torch", tmp_path / "run")
    with pytest.raises(ConfigError, match="no place"):
        export.export(tmp_path / "run", tmp_path / "out")
