"""The optimizers of a config, on one process and on two."""

import numpy as np
import pytest
import torch
from helpers.processes import ranks
from helpers.states import adamw
from torchao.optim.subclass_fp8 import OptimStateFp8

from fp8ref.shared.errors import ConfigError
from fp8ref.torch.tensors.local_part import local_part
from fp8ref.train import loop
from fp8ref.train.config.sections import OptimizerConfig
from fp8ref.train.data import loader
from fp8ref.train.torch import optimizer
from fp8ref.train.torch.step import Step
from fp8ref.train.torch.trainer import Trainer

KINDS = ("adamw", "adamw_fused", "adamw_fp8")


@pytest.fixture(autouse=True)
def eager():
    """torchao's optimizers compile their step; as plain torch it computes the same, up to
    inductor's fused roundings.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


def stepped(config, kind, steps):
    """A trainer after as many steps on one batch, and their losses."""
    trainer = Trainer(config.replace(optimizer={"kind": kind, "warmup_steps": 0}))
    batch = loader.open_batches(config).step(0)
    return trainer, [trainer.step(batch)["loss"] for _ in range(steps)]


def moments(trainer):
    """(name, this rank's piece, this rank's first and second moment) of every parameter."""
    for name, p in trainer._params.items():
        state = trainer._optimizer.state[p]
        yield (name, local_part(p), [local_part(state[key]) for key in ("exp_avg", "exp_avg_sq")])


def check_kinds(config):
    """One step, from moments of zero, takes the same gradients to the same weights; six learn."""
    (plain, _), *others = (stepped(config, kind, 1) for kind in KINDS)
    lr = config.optimizer.learning_rate
    expected = plain.weights()
    for other, _ in others:
        for name, value in other.weights().items():
            # either way the first update is at most lr, after some ten roundings, and three more
            # are of values between p before and after
            bound = 2 * 2.0**-24 * (10 * lr + 3 * (np.abs(expected[name]) + lr))
            assert (np.abs(value - expected[name]) <= bound).all(), name
            assert (value != plain.weights()[name]).mean() < 0.5
    fp8 = others[-1][0]
    formats = {}
    for (name, piece, kept), (_, _, exact) in zip(moments(fp8), moments(plain), strict=True):
        formats[name] = {type(moment) for moment in kept}
        assert formats[name] == {
            OptimStateFp8 if piece.numel() >= 4096 and piece.numel() % 256 == 0 else torch.Tensor
        }
        for got, value in zip(kept, exact, strict=True):
            if isinstance(got, OptimStateFp8):
                assert got.codes.dtype == torch.float8_e4m3fn
                assert got.scale.shape == (piece.numel() // 256,)
                # e4m3 has 3 bits, and 2^-10 is half its smallest value; a scale, a product and a
                # quotient are rounded besides
                blocks = value.view(-1, 256)
                bound = (2.0**-4 * blocks.abs() + 2.0**-10 * got.scale[:, None]) * (1 + 2.0**-20)
                assert ((got.dequantize().view(-1, 256) - blocks).abs() <= bound).all()
                # no token is above 127: half of the embedding has no gradient
                assert not value.any() or (got.dequantize() != value).any()
    for of_one in fp8.moments().values():  # of all ranks
        assert {name: x.shape for name, x in of_one.items()} == {
            name: x.shape for name, x in expected.items()
        }
    for kind in KINDS:
        losses = stepped(config, kind, 6)[1]
        assert losses[-1] < losses[0] - 0.1
    return {name: found == {OptimStateFp8} for name, found in formats.items()}


def refusal(config, shape):
    """What check_states says of moments of the embedding that are float32 of a shape; nothing of
    the right ones.
    """
    trainer, _ = stepped(config, "adamw_fp8", 1)
    trainer._optimizer.load_state_dict(trainer._optimizer.state_dict())
    optimizer.check_states(trainer._optimizer)
    name = "model.embed_tokens.weight"
    trainer._optimizer.state[trainer._params[name]]["exp_avg"] = torch.zeros(shape)
    with pytest.raises(ValueError, match="Load states into the sharding that saved them") as raised:
        optimizer.check_states(trainer._optimizer)
    return str(raised.value)


def on_two(config):
    torch.compiler.set_stance("force_eager")
    return check_kinds(config), refusal(config, (256, 32))


@pytest.mark.slow
def test_kinds_agree_and_fp8_moments_follow_the_piece(small):  # T-1, T-6
    """A matrix of 48 x 128 has whole blocks on one process, and fewer than 4096 values on each of
    two.
    """
    config = small.replace(model={"hidden_size": 128, "num_key_value_heads": 2})
    one = check_kinds(config)
    ((two, said), (other, _)) = ranks.run(2, on_two, config.replace(parallel={"fsdp": 2}))
    assert two == other
    assert {name for name in one if one[name] and not two[name]} == {
        f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")
    }
    assert one["model.embed_tokens.weight"]
    assert two["model.embed_tokens.weight"]
    assert not one["model.norm.weight"]
    assert said.startswith(
        "exp_avg of a parameter whose piece here is (128, 128) is FP8 of that shape; got "
        "float32 (256, 32)."
    )


@pytest.mark.parametrize("shape", [(256, 32), (128, 32)])
def test_states_of_another_sharding_are_refused(small, shape):  # T-6
    assert f"got float32 {shape}" in refusal(small, shape)


def test_the_fused_optimizer_is_clipped_adamw_as_specified(small, monkeypatch):  # T-1, T-2, T-3
    slope = adamw.slopes(small)
    monkeypatch.setattr(
        Step,
        "loss",
        lambda self, tokens: sum(
            (p * torch.from_numpy(slope[name])).sum() for name, p in self.params.items()
        ),
    )
    adamw.check(Trainer, small.replace(optimizer={"kind": "adamw_fused"}), slope)


@pytest.mark.parametrize("kind", KINDS)
def test_the_config_builds_the_optimizer_that_it_names(small, kind):
    built = Trainer(small.replace(optimizer={"kind": kind}))._optimizer
    assert type(built).__name__ == ("AdamWFp8" if kind == "adamw_fp8" else "AdamW")
    assert bool(built.defaults.get("fused")) == (kind == "adamw_fused")


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_train_as_vectors_do_and_do_not_decay(kind):  # T-1
    """Parameters without dims: the first update of one whose gradient is 1 is by the learning rate,
    and none is of one whose gradient is 0.
    """
    params = [torch.nn.Parameter(torch.full(shape, 4.0)) for shape in ((), (), (1,), (1, 1))]
    built = optimizer.build(params, OptimizerConfig(kind=kind, weight_decay=0.5))
    optimizer.set_learning_rate(built, 0.25)
    for p, slope in zip(params, (1.0, 0.0, 0.0, 0.0), strict=True):
        p.grad = torch.full_like(p, slope)
    built.step()
    # eps is 1e-8, which float32 drops next to 1; the matrix alone decays, by 0.25 * 0.5 of it
    assert [p.item() for p in params] == [3.75, 4.0, 4.0, 3.5]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_jax_has_one_optimizer(small, kind):
    with pytest.raises(
        ConfigError,
        match=r"optimizer.kind of --backend jax is .*; got .*\. Use one of them, or --backend "
        r"torch",
    ):
        loop.trainer("jax", small.replace(optimizer={"kind": kind}))


def compiled_on_two(config):
    return stepped(config, "adamw_fp8", 3)[1]


@pytest.mark.slow
def test_fp8_moments_train_on_two_processes_as_torchao_compiles_them(small):
    """Through inductor, on DTensors.

    Against plain torch on one process: as between meshes (test_processes), 2^-9 of a loss.
    """
    config = small.replace(parallel={"fsdp": 2})
    one, two = ranks.run(2, compiled_on_two, config, timeout=600)
    assert one == two
    assert one[-1] < one[0]
    assert one == pytest.approx(stepped(small, "adamw_fp8", 3)[1], rel=2.0**-9)
