"""A missing ``delayed.update`` is noticed, and so are ranks that train one model with separate states; what is right stays silent."""

import contextlib
import copy
import functools
import pickle
import warnings

import pytest
import torch
from ranks import run
from torch import distributed, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from fp8ref.torch import compiled_fsdp, convert, delayed, delayed_checks
from fp8ref.torch.grouped_linear import GroupedLinear

STEPS = 3


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def step(model, optimizer, x, *, forward=None):
    optimizer.zero_grad()
    (forward or model)(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forgotten_update_is_warned_of_then_refused(compiled):  # H-12
    """In the second forward pass; of a compiled model, whose passes check nothing, in the second optimizer step."""
    model, x = convert.convert(made(), "delayed"), torch.ones(8, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    forward = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    step(model, optimizer, x, forward=forward)
    with pytest.warns(UserWarning, match=r"Call fp8ref.torch.delayed.update\(model\) after each optimizer.step\(\); after 10 steps"):
        (step(model, optimizer, x, forward=forward) if compiled else model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = (step(model, optimizer, x, forward=forward) for _ in range(delayed_checks.MOST))
        with pytest.raises(
            ValueError, match=r"^delayed scaling computes .*; linear \w had 10 optimizer steps without one, .*\. Call fp8ref"
        ):
            list(steps)
    delayed.update(model)
    model(x)


def test_training_in_eval_mode_is_warned_of():  # H-12
    model, x = convert.convert(made(), "delayed"), torch.ones(8, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    delayed.calibrate(model, [x])
    model.eval()
    with pytest.warns(
        UserWarning, match=r"took gradients of linear [02] that eval mode computed, and its scales do not change\. Call model\.train\(\)"
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


EVALUATIONS = {
    "eval mode": lambda model, x: model.eval()(x),
    "without gradients": lambda model, x: torch.no_grad()(model)(x),
    "inference mode": lambda model, x: torch.inference_mode()(model)(x),
    "compiled": lambda model, x: torch.compile(model.eval(), backend="eager", fullgraph=True)(x),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_before_any_update_is_warned_of(name):  # H-12; TransformerEngine#982
    """Once a model, by the name of its first linear; never after an update, or with a state that was loaded or filled in place."""
    torch._dynamo.reset()
    model, x, evaluate = convert.convert(nn.Sequential(made(), made()), "delayed"), torch.ones(8, 16), EVALUATIONS[name]
    who = "a compiled linear" if name == "compiled" else "linear 0\\.0"
    with pytest.warns(UserWarning, match=rf"^{who} scales by earlier steps .*calibrate\(model, batches\)"):
        evaluate(model, x)
    evaluate(model, x)
    trained = convert.convert(made(), "delayed")
    trained(x).sum().backward()
    delayed.update(trained)
    evaluate(trained, x)
    loaded = convert.convert(made(), "delayed")
    loaded.load_state_dict(trained.state_dict())
    evaluate(loaded, x)
    if name != "compiled":
        filled = convert.convert(made(), "delayed")
        for (_, state), (_, other) in zip(delayed.states(filled), delayed.states(trained), strict=True):
            state.step.copy_(other.step)
        evaluate(filled, x)


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.AdamW, functools.partial(torch.optim.AdamW, fused=True)])
def test_what_is_right_stays_silent(optimizer_of):  # H-12: the suite makes every warning an error
    model = convert.convert(nn.Sequential(made(), made()), "delayed")
    optimizer, x = optimizer_of(model.parameters(), lr=1e-3), torch.ones(8, 16)
    for _ in range(delayed_checks.MOST + 2):
        for reentrant in (True, False):  # microbatches, recomputed in the backward pass
            h = checkpoint(model[0], x.clone().requires_grad_(), use_reentrant=reentrant)
            checkpoint(model[1], h, use_reentrant=reentrant).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(x)
        model.eval()
        model(x)
        model.train()
        delayed.update(model)
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


inductor_warns = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # dynamo imports it


@inductor_warns
@pytest.mark.parametrize(
    ("optimizer_of", "whole"), [(torch.optim.SGD, False), (torch.optim.AdamW, False), (PlainSGD, False), (PlainSGD, True)]
)
def test_a_forgotten_update_after_a_compiled_step_is_noticed(optimizer_of, whole, monkeypatch):  # H-12
    """And the step stays one graph, as it is without delayed scaling."""
    monkeypatch.setattr(delayed_checks, "_untraced", False)
    torch._dynamo.reset()
    graphs, model, x = [], convert.convert(made(), "delayed"), torch.ones(8, 16)
    optimizer = optimizer_of(model.parameters())
    compiled = torch.compile(optimizer.step, backend=lambda graph, inputs: graphs.append(graph) or graph, fullgraph=whole)
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
    optimizer = torch.optim.SGD(model.parameters())  # each step is counted once, of an optimizer that is not compiled too
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
    model, adapter, x = convert.convert(made(), "delayed").requires_grad_(False), nn.Linear(16, 16), torch.ones(8, 16)
    optimizer = torch.optim.SGD(adapter.parameters(), lr=1e-3)
    step(nn.Sequential(adapter, model), optimizer, x)
    with pytest.warns(UserWarning, match="Call fp8ref.torch.delayed.update"):
        model(adapter(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = (step(nn.Sequential(adapter, model), optimizer, x) for _ in range(delayed_checks.MOST))
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


@pytest.mark.parametrize("change", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
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
    [lambda m: prune.l1_unstructured(m, "weight", 0.5), nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm],
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
    made_by, judged_by = (convert.convert(nn.Sequential(nn.Linear(16, 16)), "delayed") for _ in range(2))
    optimizers, x = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (made_by, judged_by)], torch.ones(8, 16)
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


# ---- ranks ----


def rows():
    return torch.full((8, 16), 1.0 + 3 * distributed.get_rank())


def stepped(model, update=None):
    """What the first update says, or "" if nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(rows()).square().mean().backward()
    optimizer.step()
    try:
        delayed.update(update or model)
    except ValueError as error:
        return str(error)
    return ""


def sharded_and_compiled():
    """What is said in right steps and in a wrong one, of blocks that fully_shard gathers, with a compiled optimizer."""
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


def separate():
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    group, found = mesh.get_group(), {}
    found["fully_shard"] = stepped(fully_shard(convert.convert(made(), "delayed"), mesh=mesh))
    found["DDP"] = stepped(DistributedDataParallel(convert.convert(made(), "delayed")))
    inner = convert.convert(made(), "delayed")
    found["DDP, its module"] = stepped(DistributedDataParallel(inner, broadcast_buffers=False), inner)
    inner = convert.convert(made(), "delayed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replicate(inner)
    found["replicate"] = stepped(inner)
    inner = convert.convert(made(), "delayed", amax_group=group)
    found["DDP, broadcast"] = stepped(DistributedDataParallel(inner), inner)
    try:
        compiled_fsdp.shard(convert.convert(made(), "delayed"), group, gather_fp8=False)
    except ValueError as error:
        found["compiled_fsdp"] = str(error)
    by_hand = convert.convert(made(), "delayed")
    for p in by_hand.parameters():
        p.register_hook(lambda grad: distributed.nn.functional.all_reduce(grad))
    found["by hand"] = stepped(by_hand)
    # right ones
    found["shared"] = stepped(fully_shard(convert.convert(made(), "delayed", amax_group=group), mesh=mesh))
    found["another model on each rank"] = stepped(
        convert.convert(nn.Sequential(nn.Linear(16, 16 * (1 + distributed.get_rank()))), "delayed")
    )
    return found


def test_separate_states_are_refused():  # H-12
    first, second = run(2, separate)
    for found in (first, second):
        for case in ("fully_shard", "DDP, its module", "replicate", "compiled_fsdp"):
            assert "is of this rank alone. Pass their process group to" in found[case], case
        for case in ("DDP", "DDP, broadcast"):
            assert "Give it broadcast_buffers=False (forward_sync_buffers=False" in found[case]
        assert [found[case] for case in ("shared", "another model on each rank")] == ["", ""]
    # no rank waits for another: the last of them finds out
    assert any("is of this rank alone" in found["by hand"] for found in (first, second))


def no_change():
    """Equal weights that a step leaves as they are: of a model's copies, and of models that differ."""
    found = {}
    for case in ("copies", "others", "others, no gradient at first"):
        torch.manual_seed(0)
        model = convert.convert(nn.Sequential(nn.Linear(16, 16, bias=False)), "delayed")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if case == "copies":
            for p in model.parameters():
                p.register_hook(lambda grad: distributed.nn.functional.all_reduce(grad))
        found[case] = ""
        for index in range(1 if case == "copies" else STEPS):  # a rank that is refused leaves the others alone in collectives
            scale = 0.0 if index == 0 and case.endswith("at first") else 1.0
            (scale * model(rows()).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            try:
                delayed.update(model)
            except ValueError as error:
                found[case] = str(error)
                break
    return found


def test_a_state_outside_of_a_linear_is_not_compared():  # H-12
    model = convert.convert(nn.Sequential(nn.Linear(32, 32)).bfloat16(), "delayed")
    state = next(iter(model[0].states.values()))
    assert delayed_checks.check_copies(nn.ParameterDict(), [("amaxes", state)])
    assert [delayed_checks._linear(name) for name in ("states.input", "0.states.input", "amaxes")] == ["", "0", None]


def test_equal_weights_of_other_models_are_not_refused():  # H-12
    """As the stages of a pipeline, made of one seed, while a learning rate warms up from 0."""
    found = run(2, no_change)
    assert any("is of this rank alone" in of_rank["copies"] for of_rank in found)
    for of_rank in found:
        assert of_rank["others"] == of_rank["others, no gradient at first"] == ""


def stages():
    torch.manual_seed(0)
    return [convert.convert(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), "delayed") for _ in range(2)]


def pipelined():
    """What the first update says of stages that ran to learn shapes; and this rank's stage after steps in a pipeline and in one process."""
    from torch.distributed import pipelining

    rank, given = distributed.get_rank(), functools.partial(torch.empty, 8, 16)

    def loss(y, target):
        return (y - target).square().mean()

    def trained(schedule_of, lr, **args):
        stage = stages()[rank]
        schedule = schedule_of(pipelining.PipelineStage(stage, rank, 2, torch.device("cpu"), **args), n_microbatches=4, loss_fn=loss)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.0)
        for index in range(STEPS):
            x = torch.full((32, 16), 1.0 + index)
            schedule.step(*([] if rank else [x]), **({"target": x.flip(0)} if rank else {}))
            optimizer.step()
            optimizer.zero_grad()
            delayed.update(stage)
            optimizer.param_groups[0]["lr"] = lr  # after a step that changes no weight
        return stage.state_dict()

    try:
        trained(pipelining.Schedule1F1B, 0.1)
        refused = ""
    except ValueError as error:
        refused = str(error)
    args = {"input_args": given(requires_grad=rank > 0), "output_args": given(requires_grad=True)}
    found = trained(pipelining.Schedule1F1B, 0.1, **args)
    first, second = alone = stages()
    optimizer = torch.optim.SGD([p for m in alone for p in m.parameters()], lr=0.0)
    for m in alone:
        for _, state in delayed.states(m):
            state.checked = state.compared = True  # both ranks have both models
    for index in range(STEPS):
        x = torch.full((32, 16), 1.0 + index)
        for a, b in zip(x.chunk(4), x.flip(0).chunk(4), strict=True):
            loss(second(first(a)), b).backward()
        for p in optimizer.param_groups[0]["params"]:
            p.grad /= 4  # as a schedule does
        optimizer.step()
        optimizer.zero_grad()
        for m in alone:
            delayed.update(m)
        optimizer.param_groups[0]["lr"] = 0.1
    expected = alone[rank].state_dict()
    return refused, [key for key, value in expected.items() if not torch.equal(value, found[key])]


@pytest.mark.slow
def test_stages_of_a_pipeline():  # H-12
    """A stage that ran on no values to learn its shapes is refused, one whose shapes are given trains as in one process."""
    for refused, different in run(2, pipelined, timeout=400):
        assert "observed it. Give PipelineStage input_args and output_args" in refused
        assert not different


def data_parallel():
    """Whether DistributedDataParallel trains as one process does, in scales and weights; and all ranks' scales."""
    group = distributed.group.WORLD
    model = convert.convert(made(), "delayed", amax_group=group)
    trained = DistributedDataParallel(model, broadcast_buffers=False)
    alone = convert.convert(made(), "delayed", amax_group=distributed.new_group([distributed.get_rank()], use_local_synchronization=True))
    optimizers = [torch.optim.SGD(m.parameters(), lr=2.0**-4) for m in (trained, alone)]
    for index in range(STEPS):
        parts = [torch.full((8, 16), 2.0 ** (rank + index)) for rank in range(2)]
        for last in (False, True):  # microbatches
            with contextlib.nullcontext() if last else trained.no_sync():
                trained(parts[distributed.get_rank()] * (1 + last)).square().mean().backward()
            for part in parts:
                (alone(part * (1 + last)).square().mean() / 2).backward()
        for optimizer, m in zip(optimizers, (trained, alone), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            delayed.update(m)
    return {name: value.tolist() for name, value in model.state_dict().items()}, {k: v.tolist() for k, v in alone.state_dict().items()}


def test_distributed_data_parallel_shares_scales():  # H-4, H-12
    (first, alone), (second, _) = run(2, data_parallel)
    assert first == second
    of_input = [key for key in first if key.endswith(("0.states.input.scale", "0.states.input.amax_history"))]
    assert of_input
    assert {key: first[key] for key in of_input} == {key: alone[key] for key in of_input}
