import hashlib
from pathlib import Path

import numpy as np
import pytest
from helpers.gemm import scaled_mm
from helpers.processes.ranks import run

import fp8ref.configs
from fp8ref.recipe import OPERANDS, RECIPES
from fp8ref.shared.errors import ConfigError
from fp8ref.torch import delayed
from fp8ref.torch.linear.linear import Linear
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.data import loader
from fp8ref.train.run import coverage
from fp8ref.train.torch.trainer import Trainer


@pytest.mark.grid(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(recipe, small):
    """Dims of 128, of which every block is one."""
    config = small.replace(
        numerics={"recipe": recipe},
        model={"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 2},
        data={"sequence_length": 32},
    )
    trainer, batches = Trainer(config), loader.open_batches(config)
    losses = [trainer.step(batches.step(0))["loss"] for _ in range(6)]  # one batch, again and again
    assert losses[-1] < losses[0]


def test_delayed_states_roll_once_a_step_and_not_without_one(small):  # H-5, T-4
    config = small.replace(numerics={"recipe": "delayed"})
    trainer, batches = Trainer(config), loader.open_batches(config)
    states = dict(delayed.states(trainer.model))
    assert len(states) == 3 * sum(d.fp8 for d in trainer.decisions)
    with pytest.warns(UserWarning, match="no update has set its scales"):
        trainer.evaluate(batches.held_out(0))
    trainer.gradients(batches.held_out(0))
    trainer.observe(batches.held_out(0), lambda *reported: None)
    assert not any(state.seen.any() for state in states.values())
    trainer.step(batches.step(0))
    assert all(state.step == 1 for state in states.values())
    trainer._params["model.norm.weight"].data.fill_(np.nan)
    trainer.step(batches.step(1))
    assert all(state.step == 1 and not state.seen.any() for state in states.values())


def eight_billion(ranks, text):
    """A layer of Llama-8B at its widths, on ranks; one process takes their rows in turn (T-7,
    H-4).
    """
    config = configs.load(Path(fp8ref.configs.__file__).parent / "llama-8b.toml")
    return config.replace(
        model={"num_hidden_layers": 1, "vocab_size": 512},
        data={
            "source": str(text),
            "sequence_length": 32,
            "batch_size": 2,
            "microbatches": 3 - ranks,
        },
        numerics={"recipe": "delayed"},
        optimizer={"warmup_steps": 1},
        parallel={"fsdp": ranks},
        run={"steps": 4, "eval_every": 4},
    )


def digests(ranks, text):
    """Loss, norm and states of a step; and digests of what each of two ranks holds of the weights,
    before the step and after.
    """
    trainer = Trainer(eight_billion(ranks, text))
    found = []
    for trained in (False, True):
        metrics = (
            trainer.step(np.random.default_rng(0).integers(0, 512, (2, 33))) if trained else {}
        )
        for name, p in trainer._params.items():
            held = [p.to_local()] if ranks == 2 else p.detach().chunk(2)
            found.append(
                (
                    name,
                    [
                        hashlib.sha256(x.detach().contiguous().numpy().data).hexdigest()
                        for x in held
                    ],
                )
            )
    return (
        metrics,
        {key: [x.tolist() for x in state] for key, state in trainer.fp8_states().items()},
        found,
    )


@pytest.mark.slow
def test_two_ranks_hold_the_bits_of_one_process_at_the_widths_of_8b(text):  # M-6, P-4, P-11, P-13
    """218 million parameters a layer.

    Each rank makes its own halves, and a step of delayed scaling moves them as one process does.
    """
    first, second = run(2, digests, 2, text, timeout=1200)
    metrics, states, whole = digests(1, text)
    assert first[:2] == second[:2] == (metrics, states)
    assert len(whole) == 2 * (2 + 7 + 3)
    for (name, (one,)), (_, (other,)), expected in zip(first[2], second[2], whole, strict=True):
        assert (name, [one, other]) == expected


@pytest.mark.parametrize(
    ("recipe", "accumulate"),
    [("tensorwise", None), ("delayed", None), ("rowwise", None), ("tensorwise", "hopper")],
)
def test_triton_kernels_train_with_the_bits_of_plain_operations(recipe, accumulate, small):  # M-11
    pytest.importorskip("triton")
    results = {}
    for kernels in ("plain", "triton"):
        config = small.replace(
            numerics={"recipe": recipe, "kernels": kernels, "accumulate": accumulate},
            model={"num_hidden_layers": 1},
            data={"batch_size": 1},
        )
        trainer, batches = loop.trainer("torch", config), loader.open_batches(config)
        assert [ran.triton for ran in trainer.kernels.values()] == [kernels == "triton"]
        results[kernels] = trainer.step(batches.step(0)), trainer.weights()
    (metrics, weights), (plain_metrics, plain_weights) = results["triton"], results["plain"]
    assert metrics == plain_metrics
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, plain_weights[name])


def test_what_casts_is_recorded_by_device(small):
    (device, ran), *more = Trainer(small).kernels.items()
    assert (device, ran.text, more) == ("cpu", "plain operations (on a CPU)", [])


def test_kernels_that_cast_no_operand_are_refused(small):
    pytest.importorskip("triton")
    with pytest.raises(
        ConfigError, match=r"numerics.kernels: kernels 'triton' .* got recipe mxfp8"
    ):
        Trainer(small.replace(numerics={"recipe": "mxfp8", "kernels": "triton"}))


def test_linears_of_all_recipes_of_a_schedule_cast_by_the_choice(small):  # T-9
    pytest.importorskip("triton")
    schedule = ((0, "tensorwise"), (3, "delayed"))
    trainer = Trainer(small.replace(numerics={"schedule": schedule, "kernels": "triton"}))
    for recipe in ("tensorwise", "delayed"):
        trainer.switch(recipe)
        linears = [m for m in trainer.model.modules() if isinstance(m, Linear)]
        assert len(linears) == sum(d.fp8 for d in trainer.decisions)
        assert {m.kernels for m in linears} == {"triton"}


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_products_by_scaled_mm_train_and_are_proven(recipe, small, monkeypatch):  # B-8, G-26
    """The losses are those of dequantized operands, up to the order of sums."""
    config = small.replace(
        numerics={"recipe": recipe, "products": "scaled_mm"},
        model={"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 2},
        data={"sequence_length": 32},
    )
    emulated = Trainer(config.replace(numerics={"products": "emulated"}))
    kernel = scaled_mm.install(monkeypatch)
    trainer, batches = Trainer(config), loader.open_batches(config)
    proof = trainer.prove(batches.step(0))
    names = [f"{d.path}/{which}" for d in trainer.decisions if d.fp8 for which in OPERANDS]
    ran = [g for g in proof["gemms"] if g["accumulate"] == f"{recipe}, cuBLASLt"]
    assert sorted(g["gemm"] for g in ran) == sorted(names)
    assert not proof["on_dequantised_operands"] + proof.get("emulated", [])
    assert len(kernel.calls) == len(names)
    losses = [t.step(batches.step(0))["loss"] for t in (trainer, emulated)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert "in emulated" not in coverage.of(config, trainer.decisions)["summary"]


@pytest.mark.parametrize(
    ("numerics", "message"),
    [
        ({"recipe": "mxfp8", "products": "scaled_mm"}, r"10\.0 or later; got cpu.*'emulated'"),
        ({"recipe": "rowwise", "products": "scaled_mm"}, "no linear has any. Leave it out"),
        (
            {"recipe": "blockwise", "products": "scaled_mm"},
            "got e4m3fn x e4m3fn in blockwise_1x128",
        ),
    ],
)
def test_products_that_are_not_there_are_refused(numerics, message, small):  # G-26
    config = small.replace(numerics=numerics, model={"hidden_size": 128, "intermediate_size": 128})
    with pytest.raises(ConfigError, match=rf"^numerics\.products .*{message}"):
        Trainer(config)
