"""Context parallelism in the trainers, parallel.context (spec A-21, A-24), next to one device."""

import io

import numpy as np
import pytest
from helpers.processes import ranks
from rich.console import Console

from fp8ref.crosscheck.operands import observe
from fp8ref.estimate import dry_run
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.attention.variants import GRADIENT_ROLES, ROLES
from fp8ref.train import loop
from fp8ref.train.config import device_shapes
from fp8ref.train.data import loader
from fp8ref.train.torch.trainer import Trainer

LAYER = "model.layers.0.self_attn"


@pytest.fixture
def config(small):
    """Under ``stated`` rows of queries are computed alike, whatever part of the tokens a device
    has.
    """
    numerics = {"recipe": "tensorwise", "attention": "cudnn", "attention_arithmetic": "stated"}
    return small.replace(
        model={"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64},
        numerics=numerics,
    )


def found_by(trainer, tokens, batches=()) -> dict:
    """What one trainer makes of a batch, and then of some steps."""
    return {
        "logits": trainer.logits(tokens[:, :-1]),
        "loss": trainer.evaluate(tokens),
        "gradients": trainer.gradients(tokens),
        "statistics": trainer.statistics(tokens),
        "missing": trainer.prove(tokens)["missing"],
        "losses": [trainer.step(batch)["loss"] for batch in batches],
        "states": trainer.fp8_states(),
    }


def of_ranks(config, tokens, batches=()):
    return found_by(Trainer(config), tokens, batches)


def compare(found: dict, right: dict, *, cut: bool = False, apart: float = 2**-6) -> None:
    """cut: linears are cut too, and sum bfloat16 parts of their outputs, so that logits are not the
    same bits.

    The loss is a mean of float32 means: T / 2 of them, each off by half a unit. A weight's gradient
    is a sum over parts of the tokens, each rounded once to bfloat16 (P-8), after codes of dK and dV
    that are neighbors at most (A-21): 2^-6, unless ``apart`` is of cut linears.
    """
    if not cut:
        np.testing.assert_array_equal(found["logits"], right["logits"])
        assert found["loss"] == pytest.approx(right["loss"], rel=2**-22)
    assert found["loss"] == pytest.approx(right["loss"], rel=2**-10)
    assert found["gradients"].keys() == right["gradients"].keys()
    for name, gradient in right["gradients"].items():
        assert np.linalg.norm(found["gradients"][name] - gradient) < apart * np.linalg.norm(
            gradient
        ), name
    assert found["missing"] == right["missing"] == []
    assert found["statistics"].keys() == right["statistics"].keys()
    for name, one in right["statistics"].items():
        # amaxes and scales of whole tensors
        if LAYER in name and name.split("/")[-1] in "qkv" and not cut:
            for key in ("amax", "scale_min", "scale_max", "saturation_rate"):
                assert found["statistics"][name][key] == one[key], name
    assert found["losses"] == pytest.approx(right["losses"], rel=2**-10)


# Accumulators differ from one device's by the order of their sum alone, so cut linears have its
# codes, and the bound is that of whole ones.
CUT = {"fsdp": 2, "context": 2, "tensor": 2, "reduce": "accumulators"}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"context": 2}, {"data": 2, "context": 2}, CUT], ids=str)
def test_a_jax_mesh_has_one_devices_logits_and_loss(parallel, config):
    tokens, batches = (
        loader.open_batches(config).step(0),
        [loader.open_batches(config).step(step) for step in range(2)],
    )
    one, mesh = (
        found_by(loop.trainer("jax", config.replace(parallel=keys)), tokens, batches)
        for keys in ({}, parallel)
    )
    compare(mesh, one, cut="tensor" in parallel)


@pytest.mark.slow
def test_a_scan_and_microbatches_take_parts_in_jax(config):  # A-24, T-7
    config = config.replace(model={"num_hidden_layers": 2}, data={"microbatches": 2})
    tokens = loader.open_batches(config).step(0)
    keys = {"context": 2, "scan": True, "checkpointing": "full"}
    one, mesh = (loop.trainer("jax", config.replace(parallel=keys)) for keys in ({}, keys))
    assert mesh.evaluate(tokens) == pytest.approx(one.evaluate(tokens), rel=2**-22)
    assert mesh.step(tokens)["grad_norm"] == pytest.approx(one.step(tokens)["grad_norm"], rel=2**-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [{"context": 2}, {"context": 2, "checkpointing": "selective"}], ids=str
)
def test_ranks_have_one_processes_logits_and_loss_in_pytorch(parallel, config):
    check_ranks(config, parallel)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "apart"), [("bf16", 2**-5), ("tensorwise", 2**-3)])
def test_ranks_cut_heads_beside_tokens_in_pytorch(recipe, apart, config):  # A-24, P-9
    """PyTorch sums rounded parts. An operand off by d, in a format whose neighbors are s apart, has
    d / s of its codes at a neighbor, and is then off by sqrt(d s) in norm: with d = 2^-9 (bfloat16)
    and s = 2^-2.5 (E5M2, a mean) 2^-5.7. Under bf16 linears dO alone is in E5M2, and q, k and v in
    E4M3 give less: 2^-5. Where linears cast too, these pass d on, at most until codes are as far
    apart as those of two rounding errors, sqrt(2) of one's: FP8 itself moves these gradients by 7
    to 11 % of the norm, so 2^-3. Tokens or heads that are missed or counted twice are wrong by a
    half or more."""
    check_ranks(
        config.replace(numerics={"recipe": recipe}),
        {"context": 2, "tensor": 2, "sequence": True},
        cut=True,
        apart=apart,
    )


def check_ranks(config, parallel, **bounds) -> None:
    tokens, batches = (
        loader.open_batches(config).step(0),
        [loader.open_batches(config).step(step) for step in range(2)],
    )
    one = found_by(loop.trainer("torch", config), tokens, batches)
    config = config.replace(parallel=parallel)
    parts = ranks.run(config.parallel.devices, of_ranks, config, tokens, batches)
    for part in parts:
        compare(part, one, **bounds)
        np.testing.assert_array_equal(part["logits"], parts[0]["logits"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no update has set its scales:UserWarning")
@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_parts_of_the_tokens_share_delayed_states(backend, config):  # H-4
    """Amaxes of q, k, v and o are of the same numbers, so the states are one device's bits after
    the first step; a rank's loss is the mean of its own tokens in PyTorch, so that dO is twice as
    large."""
    config = config.replace(numerics={"attention_scaling": "delayed", "recipe": "delayed"})
    tokens = loader.open_batches(config).step(0)
    cut = config.replace(parallel={"context": 2})
    one = found_by(loop.trainer(backend, config), tokens, [tokens])
    found = (
        ranks.run(2, of_ranks, cut, tokens, [tokens])[0]
        if backend == "torch"
        else found_by(loop.trainer(backend, cut), tokens, [tokens])
    )
    assert (
        found["states"].keys()
        == one["states"].keys()
        >= {f"{LAYER}/{role}" for role in (*ROLES, *GRADIENT_ROLES)}
    )
    for role in ("q", "k", "v", "o"):
        for mine, right in zip(
            found["states"][f"{LAYER}/{role}"], one["states"][f"{LAYER}/{role}"], strict=True
        ):
            np.testing.assert_array_equal(mine, right, err_msg=role)
    twice = 2 if backend == "torch" else 1
    history, right = (
        np.asarray(states[f"{LAYER}/do"][1])[0] for states in (found["states"], one["states"])
    )
    # of a loss whose gradients are rounded to bfloat16
    assert history == pytest.approx(twice * right, rel=2**-6)


def of_operands(config, tokens) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Codes and scales of q, k and v as this rank quantized its part of them."""
    trainer, passes = Trainer(config), []
    observe(trainer, tokens, passes)
    forward = next(one for one in passes if one.phase == "forward")
    return {
        role: (forward.arrays[f"{role}/value"], forward.arrays[f"{role}/scale"]) for role in "qkv"
    }


@pytest.mark.slow
# codes and scales, bit for bit
def test_a_rank_has_its_part_of_q_k_and_v_under_the_scales_of_all(config):
    """Values before the cast and their scales: A-2 makes codes of both."""
    tokens = loader.open_batches(config).step(0)
    whole = of_operands(config, tokens)
    parts = ranks.run(2, of_operands, config.replace(parallel={"context": 2}), tokens)
    for role, (value, scale) in whole.items():
        np.testing.assert_array_equal(
            np.concatenate([part[role][0] for part in parts], axis=2), value, err_msg=role
        )
        assert {float(part[role][1]) for part in parts} == {float(scale)}, role


REFUSED = [
    (
        {"numerics": {"attention": None, "attention_arithmetic": "fast"}},
        r"takes attention with one scale for a tensor, or none; got .* None",
    ),
    ({"numerics": {"attention": "exact"}}, r"got numerics.attention 'exact'. Use cudnn or bf16"),
    (
        {"parallel": {"context": 2, "through": "jit"}},
        r"parallel.context needs visible devices.*Use parallel.through 'shard_map'",
    ),
    (
        {
            "numerics": {"attention_arithmetic": "fast"},
            "parallel": {"context": 2, "compile": "block"},
        },
        r"within attention, which is traced eagerly alone; got parallel.compile 'block'",
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_what_cannot_be_cut_is_refused(change, said, config):
    with pytest.raises(ValueError, match=said):
        config.replace(**({"parallel": {"context": 2}} | change))


@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_sequences_that_do_not_divide_are_refused(backend, config):
    uneven = config.replace(data={"sequence_length": 15}, parallel={"context": 2})
    with pytest.raises(
        ValueError, match=r"data.sequence_length is divisible by parallel.context = 2; got 15"
    ) as caught:
        device_shapes.check(uneven, backend)
    assert "parallel.fsdp" not in str(caught.value)


@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_messages_and_the_dry_run_name_context_among_the_axes(backend, config):  # P-10
    cut = config.replace(parallel={"data": 3, "context": 2})
    with pytest.raises(
        ConfigError, match=r"data\.batch_size is divisible by data x fsdp = 3 devices; got 4"
    ):
        device_shapes.check(cut, backend)
    console = Console(file=io.StringIO(), width=160, color_system=None)
    dry_run.show(cut.replace(data={"batch_size": 6}), backend, console)
    assert "data 3 x fsdp 1 x context 2 x tensor 1 " in console.file.getvalue()
