"""A model with experts on meshes of devices and on ranks, against one device: gradients, losses,
statistics, proofs, checkpoints.
"""

import dataclasses
import io

import numpy as np
import pytest
from helpers.processes.ranks import run
from rich.console import Console

from fp8ref.estimate import dry_run
from fp8ref.selection import statistics as stats
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.llama import LlamaConfig
from fp8ref.torch.experts import layer as grouped_linear
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.config import device_shapes
from fp8ref.train.data import loader

MODEL = LlamaConfig(
    hidden_size=32,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    qk_norm=True,
    num_experts=4,
    num_experts_per_tok=2,
    shared_expert_intermediate_size=16,
)
APART = {"data": 2, "expert": 2}


@pytest.fixture
def mixture(small):
    """A config of four sequences in a recipe, on a mesh."""

    def of(recipe, parallel, **sections):
        config = dataclasses.replace(small, model=MODEL).replace(
            numerics={"recipe": recipe}, data={"sequence_length": 32, "batch_size": 4}
        )
        return config.replace(parallel=parallel, run={"steps": 4}, **sections)

    return of


def trained(backend, config, save=None, load=None):
    """What one device, or this rank, computes: gradients, statistics, the proof, the metrics of two
    steps, weights before and after.
    """
    config = configs.from_dict(config)
    opened = loader.open_batches(config)
    batches = [opened.step(k) for k in range(4)]
    trainer = loop.trainer(backend, config)
    if load is not None:
        trainer.load(load, 2)
    found = {
        "begins": trainer.weights(),
        "gradients": trainer.gradients(batches[0]),
        "statistics": trainer.statistics(batches[0]),
        "missing": trainer.prove(batches[0])["missing"],
        "names": {operand.name for operand in stats.planned(trainer.decisions)},
        "steps": [trainer.step(tokens) for tokens in batches[2 * (load is not None) :][:2]],
        "weights": trainer.weights(),
        "evaluated": trainer.evaluate(batches[3]),
    }
    if save is not None:
        trainer.save(save)()
    return found


def on_ranks(config, n, **files):
    found = (
        run(n, trained, "torch", configs.to_dict(config), *files.values())
        if n > 1
        else [trained("torch", configs.to_dict(config), *files.values())]
    )
    for one in found[1:]:  # every rank reports the same
        assert one["steps"] == found[0]["steps"]
    return found[0]


def check(many, one, recipe):
    """Codes and scales are one device's where operands are. What the order of a sum can change is
    an operand rounded otherwise to bfloat16, 2^-9 of it, which passes some 20 roundings here: 2^-6
    of a gradient's norm, as in tests/train/jax/test_mesh.py. Experts' gradients that miss a
    device's rows, or count one twice, are wrong by a half or more."""
    for name, value in one["gradients"].items():
        assert np.linalg.norm(many["gradients"][name] - value) <= 2.0**-6 * np.linalg.norm(value), (
            name
        )
    assert many["missing"] == []
    assert many["statistics"].keys() == many["names"]
    for name, of_one in one["statistics"].items():
        if name.endswith("/weight"):  # whose numbers are the same, in as many pieces as there are
            for key in ("amax", "scale_min", "scale_max", "underflow_rate", "saturation_rate"):
                assert many["statistics"][name][key] == of_one[key], (name, key)
    for mine, other in zip(many["steps"], one["steps"], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=2.0**-9)
    assert many["evaluated"] == pytest.approx(one["evaluated"], rel=2.0**-9)


RANKS = [
    ("tensorwise", {"expert": 2}),
    *(
        pytest.param(recipe, parallel, marks=pytest.mark.slow)
        for recipe, parallel in (
            ("rowwise", {"fsdp": 2, "expert": 2, "checkpointing": "full"}),
            ("delayed", APART),
            ("rowwise", {"data": 2}),
            ("tensorwise", {"fsdp": 2}),
            ("tensorwise", {"data": 2, "fsdp": 2}),
        )
    ),
]


@pytest.mark.parametrize(("recipe", "parallel"), RANKS, ids=str)
def test_ranks_train_as_one_process_does(recipe, parallel, mixture):  # X-13, P-10, M-8
    """Under delayed scaling as ranks that all have every expert: a rank's loss is the mean of its
    own tokens, and the first scales are 1, so that gradients lie elsewhere in E5M2's range than one
    process's, whose small ones it rounds more coarsely."""
    config = mixture(recipe, parallel)
    other = mixture(recipe, {"data": 2, "fsdp": 2} if recipe == "delayed" else {})
    check(
        on_ranks(config, config.parallel.devices), on_ranks(other, other.parallel.devices), recipe
    )


MESHES = [
    ("tensorwise", {"expert": 2, "fsdp": 2, "scan": True, "checkpointing": "full"}),
    ("rowwise", APART),
    ("delayed", APART),
    ("tensorwise", {"data": 2, "fsdp": 2}),
    ("rowwise", {"data": 2, "reduce_dtype": "bfloat16"}),
    ("blockwise", {"expert": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "parallel"), MESHES, ids=str)
def test_meshes_train_as_one_device_does(recipe, parallel, mixture):  # X-13, P-10, M-8
    # each device's piece of every matrix has whole blocks
    sizes = dict.fromkeys(
        ("hidden_size", "intermediate_size", "shared_expert_intermediate_size"), 256
    ) | {"num_key_value_heads": 2}
    blocks = {"model": sizes, "data": {"sequence_length": 128}}
    many, one = (
        trained(
            "jax", configs.to_dict(mixture(recipe, keys, **blocks if recipe == "blockwise" else {}))
        )
        for keys in (parallel, {})
    )
    check(many, one, recipe)


@pytest.mark.slow
def test_a_checkpoint_of_ranks_is_read_by_others(mixture, tmp_path):  # K-2, M-9
    """Two steps apart, then two on one device and on meshes: they begin with the same weights, bit
    for bit, and train as one device does.
    """
    saved = on_ranks(mixture("delayed", {"expert": 2}), 2, save=tmp_path / "state")
    one, *many = (
        on_ranks(config, config.parallel.devices, save=None, load=tmp_path / "state")
        for config in (
            mixture("delayed", parallel) for parallel in ({}, {"fsdp": 2}, {"expert": 2})
        )
    )
    assert any(
        (saved["begins"][name] != value).any()
        for name, value in saved["weights"].items()
        if "experts" in name
    )
    for found in (one, *many):
        assert found["begins"].keys() == saved["weights"].keys()
        for name, value in saved["weights"].items():
            np.testing.assert_array_equal(found["begins"][name], value, err_msg=name)
        check(found, one, "delayed")


def switched(config):
    """(the groups that share amaxes before and after the switch; gradients, losses of two steps) on
    this rank.
    """
    config = configs.from_dict(config)
    trainer, opened = loop.trainer("torch", config), loader.open_batches(config)
    shared = []
    for recipe in ("rowwise", "tensorwise"):
        trainer.switch(recipe)
        shared.append(
            {linear.shared for linear in grouped_linear.grouped_linears(trainer.model).values()}
        )
    return shared, trainer.gradients(opened.step(0))


@pytest.mark.slow
def test_experts_apart_share_no_amax_after_a_switch_either(mixture):  # X-3, T-9
    """Ranks with different experts: a scale of theirs would be of another's rows too."""
    of_orders = []
    # of either recipe once the model's, and once a twin's
    for first, second in (("rowwise", "tensorwise"), ("tensorwise", "rowwise")):
        config = mixture(first, {"expert": 2, "gather": "compute"}).replace(
            numerics={"schedule": ((0, first), (2, second))}
        )
        of_orders.append(run(2, switched, configs.to_dict(config))[0])
    (shared, gradients), (_, expected) = of_orders
    assert shared == [{None}, {None}]
    for name, value in expected.items():
        np.testing.assert_array_equal(gradients[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tensor": 2}, "devices that share the batch; got parallel.tensor 2"),
        (
            {"context": 2},
            r"devices that have whole sequences; got parallel\.context 2\. Set it to 1",
        ),
        (
            {"context": 2, "expert": 2},
            r"devices that have whole sequences; got parallel\.context 2\. Set it to 1",
        ),
        ({"expert": 3}, "equal numbers of experts on each of parallel.expert 3; got 4"),
        ({"expert": 2, "through": "jit"}, "rows that devices send"),
        ({"fsdp": 2, "reduce": "accumulators"}, "rows that devices send"),
        (
            {"fsdp": 2, "reduce_dtype": "float8_e4m3fn"},
            "gradients that are summed in float32 or bfloat16",
        ),
    ],
)
def test_what_experts_on_meshes_do_not_take_is_refused_by_name(keys, said, mixture):  # M-9
    with pytest.raises((ValueError, ConfigError), match=said):
        mixture("rowwise", keys)


def test_a_model_without_experts_holds_none_apart(small):
    with pytest.raises(
        (ValueError, ConfigError), match=r"parallel\.expert is for a model with experts; got 2"
    ):
        small.replace(parallel={"expert": 2})


@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_messages_and_the_dry_run_name_expert_among_the_axes(backend, mixture):  # P-10
    config = mixture("rowwise", {"data": 2, "expert": 4})
    with pytest.raises(
        ConfigError,
        match=r"data\.batch_size is divisible by data x fsdp x expert = 8 devices; got 4",
    ):
        device_shapes.check(config, backend)
    console = Console(file=io.StringIO(), width=160, color_system=None)
    dry_run.show(config.replace(data={"batch_size": 8}), backend, console)
    assert "data 2 x fsdp 1 x expert 4 x tensor 1 " in console.file.getvalue()


def test_jax_cuts_experts_evenly(mixture):
    with pytest.raises(
        ConfigError, match=r"model\.num_experts is divisible by parallel\.fsdp x expert = 8; got 4"
    ):
        device_shapes.check(
            mixture("rowwise", {"fsdp": 4, "expert": 2}).replace(data={"batch_size": 8}), "jax"
        )
