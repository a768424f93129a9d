"""Linears of several recipes in one model: they share Parameters, and take each other's places
(T-9).
"""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.processes.ranks import run
from torch import distributed, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8ref.torch import delayed
from fp8ref.torch.delayed import state_checks as delayed_checks
from fp8ref.torch.distributed import fsdp
from fp8ref.torch.model import convert
from fp8ref.torch.model.parallel import Parallelism, amax_group, parallelize
from fp8ref.torch.model.switch import Switch
from fp8ref.train.torch.trainer import Trainer


def plain(device=None):
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 32)),
        nn.Linear(32, 32),
    )
    return made.bfloat16().to(device)


def switched(first, *others):
    model = parallelize(plain(), first)
    return Switch(
        model, first, {recipe: convert.convert(plain("meta"), recipe) for recipe in others}
    )


def step(model, optimizer, seed):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    delayed.update(model)
    optimizer.zero_grad()
    return loss.item()


def test_every_recipe_has_the_parameters_that_the_optimizer_has():  # T-9
    switch = switched("tensorwise", "rowwise", "bf16")
    model, before = switch.model, dict(switch.model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    kinds = {}
    for recipe in ("rowwise", "bf16", "tensorwise"):
        switch.to(recipe)
        assert {name: id(p) for name, p in model.named_parameters()} == {
            name: id(p) for name, p in before.items()
        }
        kinds[recipe] = type(model[0][0]).__name__
        step(model, optimizer, 0)
    assert kinds == {"rowwise": "Float8Linear", "bf16": "Linear", "tensorwise": "Float8Linear"}
    assert {state["step"].item() for state in optimizer.state.values()} == {3.0}
    with pytest.raises(ValueError, match="was made with, tensorwise, rowwise, bf16; got 'delayed'"):
        switch.to("delayed")


def test_losses_are_those_of_models_that_were_converted_so():  # T-9
    switch = switched("tensorwise", "delayed", "bf16")
    optimizer = torch.optim.SGD(switch.model.parameters(), lr=0.1)
    for seed, recipe in enumerate(("tensorwise", "delayed", "bf16", "tensorwise")):
        switch.to(recipe)
        other = convert.convert(plain(), recipe)
        other.load_state_dict(
            {name: value.clone() for name, value in switch.model.state_dict().items()}
        )
        assert step(switch.model, optimizer, seed) == step(
            other, torch.optim.SGD(other.parameters(), lr=0.1), seed
        )


def test_states_wait_and_nobody_misses_their_updates():  # T-9, H-12
    switch = switched("delayed", "bf16")
    optimizer = torch.optim.SGD(switch.model.parameters(), lr=0.1)
    step(switch.model, optimizer, 0)
    kept = {
        name: (state.scale.clone(), state.amax_history.clone()) for name, state in switch.states()
    }
    assert len(kept) == 9
    switch.to("bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(delayed_checks.MOST + 2):
            step(switch.model, optimizer, seed)
        assert not list(delayed.states(switch.model))
        for name, state in switch.states():
            assert state.step == 1
            for mine, before in zip((state.scale, state.amax_history), kept[name], strict=True):
                assert torch.equal(mine, before), name
        switch.to("delayed")
        step(switch.model, optimizer, 1)
    assert all(state.step == 2 for _, state in switch.states())
    # now an update is missed again
    switch.model(torch.ones(16, 32).bfloat16()).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="without one"):
        switch.model(torch.ones(16, 32).bfloat16())


@pytest.mark.parametrize("how", ["block", "model"])
def test_each_recipe_is_compiled_once(how):  # T-9
    torch._dynamo.reset()  # of what other tests compiled
    counter = CompileCounter()
    made = plain()
    model = parallelize(
        made,
        "tensorwise",
        blocks=[made[0]],
        parallelism=Parallelism(compile=how, compile_backend=counter),
    )
    switch = Switch(
        model,
        "tensorwise",
        {recipe: convert.convert(plain("meta"), recipe) for recipe in ("delayed", "bf16")},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for turn in range(2):
        for recipe in ("tensorwise", "delayed", "bf16"):
            switch.to(recipe)
            for seed in range(2):
                step(model, optimizer, 10 * turn + seed)
            counts.append(counter.frame_count)
    assert counts == [1, 2, 3, 3, 3, 3]


def gathered_in_fp8():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    model = convert.convert(nn.Sequential(nn.Linear(32, 32, bias=False)), "tensorwise")
    fully_shard(model, mesh=mesh)
    fsdp.gather_in_fp8(model, dtype=torch.float32)
    return model


def test_weights_that_are_gathered_in_fp8_are_refused():  # T-9, P-6
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = gathered_in_fp8()
        with pytest.raises(ValueError, match=r"0 is gathered in FP8.*gather_fp8=False"):
            Switch(
                model,
                "tensorwise",
                {"bf16": nn.Sequential(nn.Linear(32, 32, bias=False, device="meta"))},
            )
        Switch(model, "tensorwise", {})  # nothing to switch to
    finally:
        distributed.destroy_process_group()


PHASES = ((0, "tensorwise"), (1, "delayed"), (2, "bf16"), (3, "delayed"))


def on_ranks(config, folder):
    """Losses and states of a run that switches, and of runs that are chained by checkpoints while
    they can be.
    """
    batches = [np.random.default_rng(i).integers(0, 256, (4, 17)) for i in range(4)]
    trainer = Trainer(config.replace(numerics={"schedule": PHASES}))
    found, counts = [], []
    for step, recipe in PHASES:
        trainer.switch(recipe)
        found.append(trainer.step(batches[step]))
        counts.append({int(count) for _, _, count in trainer.fp8_states().values()})
    trainer.save(Path(folder) / "last")()
    other = Trainer(config.replace(numerics={"schedule": PHASES}))
    other.load(Path(folder) / "last", 4)
    other.switch("delayed")
    trainer.switch("tensorwise")
    other.switch("tensorwise")
    same = trainer.step(batches[0]) == other.step(batches[0])
    # Without delayed scaling the states of two recipes have the same names.
    pair, chained = (
        Trainer(config.replace(numerics={"schedule": ((0, "tensorwise"), (2, "bf16"))})),
        None,
    )
    for step, recipe in enumerate(("tensorwise", "tensorwise", "bf16", "bf16")):
        pair.switch(recipe)
        if step in (0, 2):
            one = Trainer(config.replace(numerics={"recipe": recipe, "schedule": None}))
            if chained is not None:
                chained.save(Path(folder) / "pair")()
                one.load(Path(folder) / "pair", step)
            chained = one
        same = same and pair.step(batches[step]) == one.step(batches[step])
    return found, counts, same


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {"data": 2}])
def test_a_sharded_model_switches(small, tmp_path, mesh):  # T-9
    config = small.replace(parallel={"gather": "compute", **mesh})
    first, second = run(2, on_ranks, config, str(tmp_path), timeout=300)
    assert first == second
    found, counts, same = first
    assert same
    assert counts == [{0}, {1}, {1}, {2}]
    assert all(np.isfinite(metrics["loss"]) for metrics in found)


def compiled_on_ranks(how):
    """Losses of a sharded model that switches, and how many graphs each switch adds."""
    mesh, counter = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)), CompileCounter()
    made = plain()
    model = parallelize(
        made,
        "tensorwise",
        mesh=mesh,
        blocks=[made[0]],
        parallelism=Parallelism(
            amax_scope="global", gather_fp8=False, compile=how, compile_backend=counter
        ),
    )
    group = amax_group(mesh, "global")
    switch = Switch(
        model,
        "tensorwise",
        {
            recipe: convert.convert(plain("meta"), recipe, amax_group=group)
            for recipe in ("delayed", "bf16")
        },
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, counts = [], []
    for turn in range(2):
        for recipe in ("tensorwise", "delayed", "bf16"):
            switch.to(recipe)
            losses += [step(model, optimizer, 10 * turn + distributed.get_rank()) for _ in range(2)]
            counts.append(counter.frame_count)
    return losses, counts


@pytest.mark.slow
def test_a_sharded_model_that_is_compiled_switches():  # T-9, P-12
    eager = run(2, compiled_on_ranks, "none", timeout=300)
    compiled = run(2, compiled_on_ranks, "block", timeout=300)
    assert [losses for losses, _ in eager] == [losses for losses, _ in compiled]
    assert [counts for _, counts in compiled] == [[1, 2, 3, 3, 3, 3]] * 2
