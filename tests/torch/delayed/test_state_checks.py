"""A missing ``delayed.update`` is noticed; what is right stays silent."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
from helpers.processes.ranks import run
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from fp8ref.torch import delayed
from fp8ref.torch.delayed import state_checks as delayed_checks
from fp8ref.torch.experts.layer import GroupedLinear
from fp8ref.torch.model import convert


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def step(model, optimizer, x, *, forward=None):
    optimizer.zero_grad()
    (forward or model)(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forgotten_update_is_warned_of_then_refused(compiled):  # H-12
    """In the second forward pass; of a compiled model, whose passes check nothing, in the second
    optimizer step.
    """
    model, x = convert.convert(made(), "delayed"), torch.ones(8, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    forward = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    step(model, optimizer, x, forward=forward)
    with pytest.warns(
        UserWarning,
        match=r"Call fp8ref.torch.delayed.update\(model\) after each optimizer.step\(\); "
        r"after 10 steps",
    ):
        (step(model, optimizer, x, forward=forward) if compiled else model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = (step(model, optimizer, x, forward=forward) for _ in range(delayed_checks.MOST))
        with pytest.raises(
            ValueError,
            match=r"^delayed scaling computes .*; linear \w had 10 optimizer steps without one\. Call fp8ref",
        ):
            list(steps)
    delayed.update(model)
    model(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_update_before_its_step_is_silent(compiled):  # H-12
    model, x = convert.convert(made(), "delayed"), torch.ones(8, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    forward = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            forward(x).square().mean().backward()
            delayed.update(model, before_step=True)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        step(model, optimizer, x)
    with pytest.warns(UserWarning, match="an optimizer step was taken without one"):
        model(x)


def test_training_in_eval_mode_is_warned_of():  # H-12
    model, x = convert.convert(made(), "delayed"), torch.ones(8, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    delayed.calibrate(model, [x])
    model.eval()
    with pytest.warns(
        UserWarning,
        match=r"took gradients of linear [02] that eval mode computed, and its scales do not "
        r"change\. Call model\.train\(\)",
    ):
        step(model, optimizer, x)
    assert not any(state.seen.any() for _, state in delayed.states(model))
    delayed.forget(model)
    model(x)  # an evaluation with gradients, before a step of training
    model.train()
    step(model, optimizer, x)
    delayed.update(model)
    model.eval()
    model(x).sum().backward()  # a gradient of the input, which no optimizer takes
    optimizer.zero_grad()
    optimizer.step()
    delayed.forget(model)


@pytest.mark.parametrize(
    "optimizer_of",
    [torch.optim.SGD, torch.optim.AdamW, functools.partial(torch.optim.AdamW, fused=True)],
)
def test_what_is_right_stays_silent(optimizer_of):  # H-12: the suite makes every warning an error
    model = convert.convert(nn.Sequential(made(), made()), "delayed")
    optimizer, x = optimizer_of(model.parameters(), lr=1e-3), torch.ones(8, 16)
    for _ in range(delayed_checks.MOST + 2):
        for reentrant in (True, False):  # microbatches, recomputed in the backward pass
            h = checkpoint(model[0], x.clone().requires_grad_(), use_reentrant=reentrant)
            checkpoint(model[1], h, use_reentrant=reentrant).square().mean().backward()
        optimizer.step()
        delayed.update(model)
        with torch.no_grad():
            model(x)
        model.eval()
        model(x)
        model.train()
    for _ in range(2):  # a step that is not taken
        model(x).sum().backward()
        optimizer.step()
        delayed.forget(model)
    other = convert.convert(made(), "delayed")  # whose optimizer takes no step
    optimizer.step()
    for _ in range(2):
        other(x).sum().backward()
    tensorwise = convert.convert(made(), "tensorwise")
    for _ in range(2):
        step(tensorwise, torch.optim.SGD(tensorwise.parameters()), x)


def test_parts_of_one_optimizer_train_in_turns():  # H-12: the suite makes every warning an error
    parts = [convert.convert(made(), "delayed") for _ in range(2)]
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
    for part in (*parts, *parts):
        for _ in range(delayed_checks.MOST + 1):
            step(part, optimizer, torch.ones(8, 16))
            delayed.update(part)
    step(parts[0], optimizer, torch.ones(8, 16))
    with pytest.warns(UserWarning, match="an optimizer step was taken without one"):
        parts[0](torch.ones(8, 16))
    parts[1](torch.ones(8, 16))


class PlainSGD(torch.optim.Optimizer):
    """Whose step has no break of torch's own, so that dynamo can trace it whole."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=2.0**-10)


# dynamo imports it
inductor_warns = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


@inductor_warns
@pytest.mark.parametrize(
    ("optimizer_of", "whole"),
    [(torch.optim.SGD, False), (torch.optim.AdamW, False), (PlainSGD, False), (PlainSGD, True)],
)
# H-12
def test_a_forgotten_update_after_a_compiled_step_is_noticed(optimizer_of, whole, monkeypatch):
    """And the step stays one graph, as it is without delayed scaling."""
    monkeypatch.setattr(delayed_checks, "_untraced", False)
    torch._dynamo.reset()
    graphs, model, x = [], convert.convert(made(), "delayed"), torch.ones(8, 16)
    optimizer = optimizer_of(model.parameters())
    compiled = torch.compile(
        optimizer.step, backend=lambda graph, inputs: graphs.append(graph) or graph, fullgraph=whole
    )
    for _ in range(3):
        for _ in range(2):
            model(x).sum().backward()  # the suite makes every warning an error
        compiled()
        delayed.update(model)
    assert len(graphs) == 1
    assert delayed_checks._untraced == (optimizer_of is PlainSGD)
    model(x).sum().backward()
    compiled()
    with pytest.warns(UserWarning, match="an optimizer step was taken without one"):
        model(x).sum().backward()
    assert {state.missed for _, state in delayed.states(model)} == {1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="had 10 optimizer steps without one"):  # noqa: PT012
            for _ in range(delayed_checks.MOST):
                compiled()
                model(x).sum().backward()
    # each step is counted once, of an optimizer that is not compiled too
    optimizer = torch.optim.SGD(model.parameters())
    delayed.update(model)
    model(x).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="an optimizer step was taken without one"):
        model(x)
    assert {state.missed for _, state in delayed.states(model)} == {1}


def test_steps_of_weights_that_two_models_share_are_not_counted():
    model = convert.convert(made(), "delayed")
    delayed_checks.unwatch(model)
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.ones(8, 16)
    for _ in range(delayed_checks.MOST + 2):  # the suite makes every warning an error
        step(model, optimizer, x)


def test_a_forgotten_update_of_frozen_linears_is_noticed():  # H-12
    """As under LoRA: no optimizer has the linear's weight."""
    model, adapter, x = (
        convert.convert(made(), "delayed").requires_grad_(False),
        nn.Linear(16, 16),
        torch.ones(8, 16),
    )
    optimizer = torch.optim.SGD(adapter.parameters(), lr=1e-3)
    step(nn.Sequential(adapter, model), optimizer, x)
    with pytest.warns(UserWarning, match="Call fp8ref.torch.delayed.update"):
        model(adapter(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = (
            step(nn.Sequential(adapter, model), optimizer, x) for _ in range(delayed_checks.MOST)
        )
        with pytest.raises(ValueError, match="had 10 optimizer steps without one"):
            list(steps)
    delayed.update(model)
    for _ in range(delayed_checks.MOST + 2):  # steps of another model, which train nothing here
        step(nn.Sequential(adapter, model), optimizer, x)


class Grouped(nn.Module):
    """Experts alone, of 4 rows each."""

    def __init__(self):
        super().__init__()
        self.up = GroupedLinear(2, 16, 32)
        nn.init.ones_(self.up.weight)

    def forward(self, x):
        return self.up(x, torch.tensor([4, 8], dtype=torch.int32))


@pytest.mark.parametrize(
    "change", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_forgotten_update_of_a_grouped_linear_is_noticed(change):  # H-12, X-9
    model, x = change(convert.convert(Grouped(), "delayed")), torch.ones(8, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, x)
    delayed.update(model)
    step(model, optimizer, x)
    with pytest.warns(UserWarning, match="an optimizer step was taken without one"):
        model(x)
    delayed.forget(model)
    with pytest.warns(UserWarning, match="took gradients of up that eval mode computed"):
        step(model.eval(), optimizer, x)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: prune.l1_unstructured(m, "weight", 0.5),
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
    ],
)
def test_a_forgotten_update_of_a_weight_that_is_computed_is_noticed(change):  # H-12
    model, x = convert.convert(nn.Sequential(nn.Linear(16, 16)), "delayed"), torch.ones(8, 16)
    change(model[0])
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, x)
    delayed.update(model)
    buffers = [value.clone() for value in model.buffers()]
    optimizer.step()
    assert all(map(torch.equal, buffers, model.buffers()))  # no pass of the parametrization
    with pytest.warns(UserWarning, match="an optimizer step was taken without one"):
        model(x)


def test_steps_of_another_model_do_not_count_for_one_that_is_frozen_in_turn():
    """Each of the two is updated after steps of its own optimizer only."""
    made_by, judged_by = (
        convert.convert(nn.Sequential(nn.Linear(16, 16)), "delayed") for _ in range(2)
    )
    optimizers, x = (
        [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (made_by, judged_by)],
        torch.ones(8, 16),
    )
    for _ in range(delayed_checks.MOST + 2):  # the suite makes every warning an error
        judged_by.requires_grad_(False)
        judged_by(made_by(x)).mean().backward()
        optimizers[0].step()
        delayed.update(made_by)
        judged_by.requires_grad_(True)
        judged_by(made_by(x).detach()).mean().backward()
        optimizers[1].step()
        delayed.update(judged_by)


def test_copies_are_watched():
    model = copy.deepcopy(convert.convert(made(), "delayed"))
    optimizer, x = torch.optim.SGD(model.parameters()), torch.ones(8, 16)
    step(model, optimizer, x)
    with pytest.warns(UserWarning, match="delayed scaling computes scales in delayed.update"):
        model(x)


def rows():
    return torch.full((8, 16), 1.0 + 3 * distributed.get_rank())


def sharded_and_compiled():
    """What is said in right steps and in a wrong one, of blocks that fully_shard gathers, with a
    compiled optimizer.
    """
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = convert.convert(made(), "delayed", amax_group=mesh.get_group())
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled, said = torch.compile(optimizer.step, backend="aot_eager"), []
    for updates in (True, True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(rows()).sum().backward()
            compiled()
            optimizer.zero_grad()
            if updates:
                delayed.update(model)
        said.append([str(w.message) for w in caught if "delayed" in str(w.message)])
    with pytest.warns(UserWarning, match="an optimizer step was taken without one"):
        model(rows())
    return said


@pytest.mark.slow
def test_a_forgotten_update_of_sharded_weights_after_a_compiled_step_is_noticed():  # H-12
    assert run(2, sharded_and_compiled, timeout=300) == [[[], [], []]] * 2
