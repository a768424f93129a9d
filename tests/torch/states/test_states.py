"""AdamW with narrow states in PyTorch against the simulator: 0 bits differ (spec O)."""

import copy
import dataclasses
import functools
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.processes.ranks import run
from helpers.states.state_layouts import EXTRA, MASTERED, NEAREST, SHAPES, STOCHASTIC, differing
from helpers.states.torch_states import (
    EVERY,
    HYPER,
    SEED,
    count,
    gradients_of,
    parameters,
    simulated,
    start,
    trained,
)
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from fp8ref.sim.states import states as sim
from fp8ref.spec.states.layouts import LAYOUTS, WITH_MASTERS
from fp8ref.torch.states import states
from fp8ref.torch.states import update as adamw_update


@pytest.mark.parametrize("name", EVERY)
def test_a_step_has_the_simulators_bits(name):  # O-2 to O-10, O-14, O-15
    assert trained(EVERY[name], 8) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, *STOCHASTIC, *WITH_MASTERS])
def test_fifty_steps(name):  # O-2 to O-10, O-14, O-15
    assert trained(EVERY[name], 50, b2=0.999) == 0


def test_float32_parameters_hold_what_a_master_reads():  # O-14
    layout, p = MASTERED["msamp_o2"], nn.Parameter(torch.tensor(start()["ragged"]))
    optimizer = states.AdamW([p], lr=1e-3, layout=layout, **HYPER)
    master, state = sim.master(start()["ragged"], layout), sim.init(SHAPES["ragged"], layout)
    for t in range(3):
        g = gradients_of(t)["ragged"]
        p.grad = torch.tensor(g)
        optimizer.step()
        master, state = sim.step(
            master, g, state, sim.AdamW(learning_rate=1e-3, layout=layout, **HYPER)
        )
        assert count(optimizer, p, master, state) == 0
    with torch.no_grad():
        p.add_(1.0)  # from outside: the master is what the next step reads
    optimizer.step()
    assert (
        count(
            optimizer,
            p,
            *sim.step(master, g, state, sim.AdamW(learning_rate=1e-3, layout=layout, **HYPER)),
        )
        == 0
    )


@pytest.mark.parametrize("name", WITH_MASTERS)
def test_a_weight_is_set_before_a_parameter_rounds_it(name):  # O-14
    w = start()["ragged"]
    p = nn.Parameter(torch.tensor(w).bfloat16())
    rounded = p.detach().float().numpy()
    optimizer, master = states.AdamW([p], layout=name), sim.master(w, name)
    states.set_weight(optimizer, p, torch.tensor(w))
    codes = optimizer.state[p]["master_codes"].float().numpy()
    assert differing(codes, np.asarray(master.codes, np.float32)) == 0
    assert differing(codes, np.asarray(sim.master(rounded, name).codes, np.float32)) > 0
    assert (
        differing(states.weight(optimizer, p, torch.float32).numpy(), sim.weight(master, name)) == 0
    )
    expected = torch.tensor(sim.weight(master, name)).bfloat16()
    assert torch.equal(p.detach(), expected)
    with torch.no_grad():
        p.zero_()
    states.write(optimizer, p)
    assert torch.equal(p.detach(), expected)
    with pytest.raises(ValueError, match=r"before the first step; the parameter has a state"):
        states.set_weight(optimizer, p, torch.tensor(w))
    with pytest.raises(
        ValueError, match=r"w is float32 .*, the parameter's shape here; got torch.bfloat16"
    ):
        states.set_weight(states.AdamW([p], layout=name), p, p.detach())
    wide = nn.Parameter(torch.tensor(w))
    with pytest.raises(ValueError, match=r"'sqrt_e4m3' keeps no masters\. Copy"):
        states.set_weight(states.AdamW([wide]), wide, wide.detach())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
@pytest.mark.parametrize("name", EVERY)
def test_a_compiled_update_has_them_too(name):  # O-2 to O-10, O-14, O-15
    assert trained(EVERY[name], 50, compiled=True) == 0


def model(layout=None) -> nn.Module:
    """Parameters of SHAPES but the number, which FSDP does not cut."""
    found = nn.Module()
    for name, p in parameters(layout).items():
        if p.ndim:
            found.register_parameter(name, p)
    return found


def step_sharded(found: nn.Module, optimizer, t: int) -> None:
    g = gradients_of(t, optimizer.layout)
    for name, p in found.named_parameters():
        p.grad = distribute_tensor(torch.tensor(g[name]).to(p.dtype), p.device_mesh, p.placements)
    optimizer.step()


def seeded(layout) -> dict:
    return {**HYPER, "seed": SEED * layout.stochastic}


def on_ranks(names: list[str], steps: int) -> dict[str, int]:
    """Elements that differ after each of so many steps, by layout, under FSDP2."""
    totals = {}
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    for name in names:
        layout = EVERY[name]
        found = fully_shard(model(layout), mesh=mesh)
        optimizer = states.AdamW(found.parameters(), lr=1e-3, layout=layout, **seeded(layout))
        totals[name] = 0
        for t, (q, state) in enumerate(simulated(layout, steps)):
            step_sharded(found, optimizer, t)
            totals[name] += sum(
                count(optimizer, p, q[key], state[key]) for key, p in found.named_parameters()
            )
    return totals


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp2_changes_nothing(ranks):  # O-11
    """Also of rows that ranks do not divide, of blocks that ranks share, and of ranks that have
    nothing of a tensor.
    """
    names = [*LAYOUTS, "previous", "predicted", "predicted_v", *STOCHASTIC, *MASTERED]
    assert run(ranks, on_ranks, names, 6, timeout=300) == [dict.fromkeys(names, 0)] * ranks


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "names",
    [list(LAYOUTS), list(EXTRA), list(STOCHASTIC), list(MASTERED)],
    ids=["named", "extra", "stochastic", "masters"],
)
def test_fifty_steps_on_ranks(names, ranks):  # O-11
    assert run(ranks, on_ranks, names, 50, timeout=600) == [dict.fromkeys(names, 0)] * ranks


def saved(folder: str, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    for name in names:
        layout = EVERY[name]
        found = fully_shard(model(layout), mesh=mesh)
        optimizer = states.AdamW(found.parameters(), lr=1e-3, layout=layout, **seeded(layout))
        for t in range(25):
            step_sharded(found, optimizer, t)
        dcp.save(
            {"model": found.state_dict(), "optimizer": get_optimizer_state_dict(found, optimizer)},
            checkpoint_id=f"{folder}/{name}",
        )


def resumed(folder: str, names: list[str]) -> dict[str, int]:
    totals = {}
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    for name in names:
        layout = EVERY[name]
        found = fully_shard(model(layout), mesh=mesh)
        optimizer = states.AdamW(found.parameters(), lr=1e-3, layout=layout, **seeded(layout))
        step_sharded(found, optimizer, 9)  # states to load into
        into = {
            "model": found.state_dict(),
            "optimizer": get_optimizer_state_dict(found, optimizer),
        }
        dcp.load(into, checkpoint_id=f"{folder}/{name}")
        found.load_state_dict(into["model"])
        set_optimizer_state_dict(found, optimizer, into["optimizer"])
        totals[name] = 0
        for t, (q, state) in enumerate(simulated(layout, 50)):
            if t >= 25:
                step_sharded(found, optimizer, t)
                totals[name] += sum(
                    count(optimizer, p, q[key], state[key]) for key, p in found.named_parameters()
                )
    return totals


@pytest.mark.slow
def test_a_checkpoint_resumes_on_another_mesh(tmp_path: Path):  # O-11
    names = list(EVERY)
    run(4, saved, str(tmp_path), names, timeout=600)
    assert run(2, resumed, str(tmp_path), names, timeout=600) == [dict.fromkeys(names, 0)] * 2


def cut_by_columns() -> tuple[str, int]:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",))
    said, total = "", 0
    for name in ("sqrt_e4m3", "sqrt_e5m2"):
        p = nn.Parameter(distribute_tensor(torch.tensor(start()["blocks"]), mesh, [Shard(1)]))
        optimizer = states.AdamW([p], lr=1e-3, layout=name, **HYPER)
        for t, (q, state) in enumerate(simulated(LAYOUTS[name], 3)):
            p.grad = distribute_tensor(torch.tensor(gradients_of(t)["blocks"]), mesh, [Shard(1)])
            try:
                optimizer.step()
            except ValueError as error:
                said = str(error)
                break
            total += count(optimizer, p, q["blocks"], state["blocks"])
    return said, total


@pytest.mark.slow
def test_another_cut_than_by_rows():  # O-11
    for said, total in run(2, cut_by_columns):
        assert (
            "'sqrt_e4m3' has blocks of consecutive elements, so a parameter is cut by rows" in said
        )
        assert "such as 'sqrt_e5m2'" in said
        assert total == 0


def cut_by_experts(names: list[str]) -> dict[str, int]:
    """As ``on_ranks``, of parameters that ranks of expert have rows of, which those of fsdp cut
    again.
    """
    totals, mesh = {}, init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "expert"))
    for name in names:
        layout, found = EVERY[name], nn.Module()
        for key, p in parameters(layout).items():
            if p.ndim and p.shape[0] % 2 == 0:
                found.register_parameter(
                    key, nn.Parameter(distribute_tensor(p.detach(), mesh["expert"], [Shard(0)]))
                )
        optimizer = states.AdamW(
            fully_shard(found, mesh=mesh["fsdp"]).parameters(), lr=1e-3, layout=layout, **HYPER
        )
        totals[name] = 0
        for t, (q, state) in enumerate(simulated(layout, 3)):
            step_sharded(found, optimizer, t)
            totals[name] += sum(
                count(optimizer, p, q[key], state[key]) for key, p in found.named_parameters()
            )
        assert any(type(x) is not Shard for p in found.parameters() for x in p.placements)
    return totals


@pytest.mark.slow
def test_experts_are_cut_twice():  # O-11
    names = ["sqrt_e4m3", "coat", "torchao", "sqrt_e4m3_f16"]
    assert run(4, cut_by_experts, names) == [dict.fromkeys(names, 0)] * 4


@pytest.mark.parametrize(
    "name",
    [
        "sqrt_e4m3",
        "msamp",
        "coat",
        "previous",
        "bfloat16",
        "stochastic",
        "msamp_o2",
        "stochastic_bfloat16",
    ],
)
def test_states_are_saved_and_loaded_bit_for_bit(name):  # O-4
    layout = EVERY[name]
    p = parameters(layout)
    optimizer = states.AdamW(p.values(), lr=1e-3, layout=layout, **seeded(layout))
    half = functools.partial(apply, p, optimizer)
    for t in range(3):
        half(t)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = {key: nn.Parameter(x.detach().clone()) for key, x in p.items()}
    other = states.AdamW(again.values(), lr=1.0, layout=layout)
    other.load_state_dict(torch.load(file, weights_only=True))
    for t in range(3, 6):
        apply(again, other, t)
    *_, (q, state) = simulated(layout, 6)
    assert sum(count(other, again[key], q[key], state[key]) for key in SHAPES) == 0


def apply(p, optimizer, t: int) -> None:
    for name, g in gradients_of(t, optimizer.layout).items():
        p[name].grad = torch.tensor(g).to(p[name].dtype)
    optimizer.step()


def test_groups_closures_and_parameters_without_gradients():
    p = parameters()
    optimizer = states.AdamW(
        [
            {"params": [p["blocks"]], "weight_decay": 0.0},
            {"params": [p["ragged"], p["vector"]], "lr": 0.0},
        ],
        lr=1e-3,
        **HYPER,
    )
    p["blocks"].grad = torch.tensor(gradients_of(0)["blocks"])
    p["ragged"].grad = torch.tensor(gradients_of(0)["ragged"])
    before = p["vector"].detach().clone()

    def closure():
        assert torch.is_grad_enabled()
        return torch.tensor(3.0)

    assert optimizer.step(closure) == 3
    assert torch.equal(p["vector"], before)
    assert not optimizer.state[p["vector"]]
    assert torch.equal(p["ragged"], torch.tensor(start()["ragged"]))
    wanted = sim.step(
        start()["blocks"],
        gradients_of(0)["blocks"],
        sim.init(SHAPES["blocks"]),
        sim.AdamW(learning_rate=1e-3),
    )
    assert count(optimizer, p["blocks"], *wanted) == 0
    m, v = states.decode(optimizer, p["blocks"])
    for found, expected in zip((m, v), sim.decode(wanted[1]), strict=True):
        assert differing(found.numpy(), expected) == 0
    with pytest.raises(ValueError, match="has moments after its first step"):
        states.decode(optimizer, p["vector"])


def test_pieces_and_parameters_that_are_not_contiguous(monkeypatch):  # O-11
    """A tensor in pieces, small tensors together, and a weight of other strides have the bits of
    whole tensors.
    """
    for piece in (512, 4096):
        monkeypatch.setattr(adamw_update, "PIECE", piece)
        for name in (
            "sqrt_e4m3",
            "sqrt_e5m2",
            "msamp",
            "coat",
            "predicted",
            "predicted_v",
            "previous",
            "torchao",
            *STOCHASTIC,
            *MASTERED,
        ):
            assert trained(EVERY[name], 3) == 0, (piece, name)
    p = nn.Parameter(torch.tensor(start()["ragged"]).t().contiguous().t())
    assert not p.is_contiguous()
    p.grad = torch.tensor(gradients_of(0)["ragged"])
    optimizer = states.AdamW([p], lr=1e-3, **HYPER)
    optimizer.step()
    wanted = sim.step(
        start()["ragged"],
        gradients_of(0)["ragged"],
        sim.init(SHAPES["ragged"]),
        sim.AdamW(learning_rate=1e-3, **HYPER),
    )
    assert count(optimizer, p, *wanted) == 0


def test_a_scheduler_and_copies():
    p = parameters()
    optimizer = states.AdamW(p.values(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
    apply(p, optimizer, 0)
    scheduler.step()
    twin = copy.deepcopy(optimizer.state_dict())
    assert twin["param_groups"][0]["lr"] == 5e-3
    assert twin["param_groups"][0]["layout"] == "sqrt_e4m3"


def test_what_is_not_finite_is_nan():  # O-2
    for name, layout in NEAREST.items():
        p, g = nn.Parameter(torch.ones(2, 256)), torch.ones(2, 256)
        g[0, 3] = torch.inf
        p.grad = g
        optimizer = states.AdamW([p], lr=1e-3, layout=layout)
        optimizer.step()
        wanted = sim.step(
            np.ones((2, 256), np.float32),
            g.numpy(),
            sim.init((2, 256), layout),
            sim.AdamW(learning_rate=1e-3, layout=layout),
        )
        assert p.isnan().sum() == 1, name
        assert (
            differing(
                optimizer.state[p]["m_codes"].float().isnan().numpy(), np.isnan(wanted[1].m.codes)
            )
            == 0
        )


def test_bad_input_is_refused_by_name():  # O-1, O-2
    p = [nn.Parameter(torch.ones(4))]
    for changes, message in (
        ({"layout": "adam8bit"}, "layout is a Layout or one of"),
        ({"eps": 0.0}, "eps is in"),
        ({"lr": -1.0}, "learning_rate is in"),
        ({"seed": 1}, "'sqrt_e4m3' rounds to nearest and has no use for a seed; got seed=1"),
        ({"seed": -1, "layout": STOCHASTIC["stochastic"]}, r"seed is an integer in \[0, 2\^64\)"),
        ({"betas": (0.99, 0.9)}, "bounded"),
        (
            {"params": [nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]},
            "takes non-empty float32 parameters",
        ),
        ({"params": [nn.Parameter(torch.ones(0))]}, "non-empty"),
        (
            {"params": [nn.Parameter(torch.ones(4))], "layout": MASTERED["bfloat16_master"]},
            "takes non-empty bfloat16 parameters",
        ),
        (
            {"params": [nn.Parameter(torch.ones(4).half())], "layout": "msamp_o2"},
            "takes non-empty float32 or bfloat16 parameters; got torch.float16",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            states.AdamW(**{"params": p, **changes})
    optimizer, other = states.AdamW(p), states.AdamW(p, layout="msamp")
    p[0].grad = torch.ones(4)
    optimizer.step()
    before = optimizer.state[p[0]]["m_codes"].clone()
    with pytest.raises(
        ValueError, match="states of layout 'sqrt_e4m3' are loaded; got \\['msamp'\\]"
    ):
        optimizer.load_state_dict(other.state_dict())
    assert torch.equal(optimizer.state[p[0]]["m_codes"], before)
    optimizer.param_groups[0]["eps"] = 0.0
    with pytest.raises(ValueError, match="eps is in"):
        optimizer.step()


def made(layout="sqrt_e4m3", shape=(4, 128)) -> tuple[nn.Parameter, states.AdamW]:
    """A parameter and its optimizer, after one step."""
    p = nn.Parameter(torch.ones(shape))
    optimizer = states.AdamW([p], lr=1e-3, layout=layout)
    p.grad = torch.full(shape, 0.5)
    optimizer.step()
    return p, optimizer


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("name", ["sqrt_e4m3", "msamp_o2"])
def test_a_copied_optimizer_makes_the_same_steps(copied, name):
    p, optimizer = made(name)
    twin = copied(optimizer)
    q = twin.param_groups[0]["params"][0]
    assert q is not p
    for one, of in ((p, optimizer), (q, twin)):
        one.grad = torch.full((4, 128), 0.25)
        of.step()
    assert differing(q.detach().numpy(), p.detach().numpy()) == 0
    assert [
        key for key, x in optimizer.state[p].items() if not torch.equal(x, twin.state[q][key])
    ] == []


def test_states_of_other_decisions_and_shapes_are_refused_at_load():  # O-4
    """Also those that have the layout's name, or as many elements: read by it, they would be other
    moments.
    """
    own = LAYOUTS["sqrt_e4m3"]
    wider = dataclasses.replace(own, m=dataclasses.replace(own.m, block=256))
    same_shapes = dataclasses.replace(
        own, m=dataclasses.replace(own.m, scaling="divide"), bounded=False
    )
    p, optimizer = made()
    before = {key: x.clone() for key, x in optimizer.state[p].items()}
    for saved, message in (
        (
            made(wider)[1].state_dict(),
            r"layout 'sqrt_e4m3' has m.block = 128, saved 256. States of another layout are not "
            r"converted",
        ),
        (
            made(same_shapes)[1].state_dict(),
            "has m.scaling = 'multiply', saved 'divide'; bounded = True, saved False. States of",
        ),
        (
            {"state": {}, "param_groups": [{"layout": "sqrt_e4m3"}]},
            "have numbers and their layout's decisions; got a group without",
        ),
        (
            made(shape=(128, 4))[1].state_dict(),
            r"shape \(4, 128\) has m_codes = uint8 \(4, 128\); got uint8 \(128, 4\)",
        ),
        (
            made(shape=(8, 128))[1].state_dict(),
            r"has m_codes = uint8 \(4, 128\); got uint8 \(8, 128\)",
        ),
        (
            {**optimizer.state_dict(), "state": {0: {"step": torch.ones(())}}},
            r"has m_codes = uint8 \(4, 128\); got nothing",
        ),
        (
            {**optimizer.state_dict(), "state": {0: {**before, "amsgrad": torch.ones(())}}},
            r"has amsgrad = nothing; got float32 \(\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["betas"] = (0.9, 2.0)
    with pytest.raises(ValueError, match="b2 is in"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert [key for key, x in optimizer.state[p].items() if not torch.equal(x, before[key])] == []


def test_a_group_that_is_refused_is_not_added():  # O-2
    optimizer = states.AdamW([nn.Parameter(torch.ones(4))])
    for changes, message in (
        ({"params": [nn.Parameter(torch.ones(0))]}, "non-empty"),
        ({"eps": 0.0}, "eps is in"),
        (
            {"layout": "coat"},
            "parameters of an optimizer have one layout, 'sqrt_e4m3'; a group has 'coat'",
        ),
        ({"seed": 3}, "has no use for a seed; got seed=3"),
        ({"betas": 0.9}, r"betas are two numbers, such as \(0.9, 0.95\); got 0.9"),
        ({"lr": None}, "lr is a number, or a tensor of one element; got None"),
        ({"maximize": True}, "has no maximize; a group sets it"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], **changes})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        # it was rounded to, from then on
        (
            lambda model: model.bfloat16(),
            r"takes non-empty float32 parameters; got torch.bfloat16 \(4,\)",
        ),
        (
            lambda model: model.double(),
            r"takes non-empty float32 parameters; got torch.float64 \(4,\)",
        ),
        (
            lambda model: setattr(model.bias, "data", torch.ones(2)),
            r"its state's shape, \(4,\); got \(2,\)",
        ),
        (
            lambda model: give_float64(model.bias),
            r"a gradient is float32, float16 or bfloat16; got torch.float64. Cast",
        ),
    ],
)
def test_a_model_that_is_changed_after_its_optimizer_is_built(changed, message):
    model = nn.Linear(4, 4)
    optimizer = states.AdamW([model.weight, model.bias])
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before, steps = model.weight.detach().clone(), optimizer.state[model.weight]["step"].clone()
    weight, grad = model.weight.data, model.weight.grad.clone()
    changed(model)
    model.weight.data, model.weight.grad = weight, grad  # only the second is wrong
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(model.weight, before)
    assert optimizer.state[model.weight]["step"] == steps


def give_float64(p: nn.Parameter) -> None:
    """Give a parameter a gradient in float64."""
    p.grad_dtype = None
    p.grad = p.grad.double()


def test_hooks_of_loading_have_the_first_and_the_last_word():
    p, optimizer = made()
    saved, seen = optimizer.state_dict(), []

    def earlier(_, given):
        return {**given, "state": {0: {**given["state"][0], "step": torch.tensor(7.0)}}}

    optimizer.register_load_state_dict_pre_hook(earlier)
    optimizer.register_load_state_dict_post_hook(
        lambda one: seen.append(one.state[p]["m_codes"].dtype)
    )
    optimizer.load_state_dict(
        {**saved, "state": {0: {**saved["state"][0], "step": torch.tensor(3.0)}}}
    )
    assert optimizer.state[p]["step"] == 7
    assert seen == [torch.uint8]
    optimizer.load_state_dict(saved)  # no hook of an earlier loading is left
    assert seen == [torch.uint8] * 2
    for broken, message in (
        ({}, "got no param_groups and no state"),
        ({"param_groups": [{"layout": "sqrt_e4m3"}], "state": {}}, "without lr, "),
    ):
        with pytest.raises(ValueError, match=message):
            states.AdamW([p]).load_state_dict(broken)


def test_a_sparse_gradient_is_refused_before_anything_changes():
    p, q = nn.Parameter(torch.ones(4)), nn.Embedding(4, 2, sparse=True)
    optimizer = states.AdamW([p, q.weight])
    p.grad = torch.ones(4)
    q(torch.tensor([1])).sum().backward()
    with pytest.raises(
        ValueError, match=r"a gradient is dense; got layout torch.sparse_coo for \(4, 2\)"
    ):
        optimizer.step()
    assert torch.equal(p, torch.ones(4))
    assert not optimizer.state


def test_a_parameter_without_a_master_has_no_weight_of_one():  # O-14
    p, optimizer = made()
    with pytest.raises(ValueError, match="got none under layout 'sqrt_e4m3'"):
        states.weight(optimizer, p)
    q = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="after its first step"):
        states.weight(states.AdamW([q], layout="msamp_o2"), q)


def train_a_norm(kind: str) -> tuple[list[float], list[float], str]:
    """Five steps of a norm whose tokens two ranks share: this rank's weights, those of whole
    gradients, and how gradients are placed.
    """
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), distributed.get_rank()
    norms = [nn.LayerNorm(32), nn.LayerNorm(32)]
    parallelize_module(norms[0], mesh, SequenceParallel())
    optimizers = [
        torch.optim.AdamW(norm.parameters(), lr=1e-2)
        if kind == "torch"
        else states.AdamW(norm.parameters(), lr=1e-2, layout=kind)
        for norm in norms
    ]
    for t in range(5):
        x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(t))
        mine = DTensor.from_local(x[:, 4 * rank :][:, :4].contiguous(), mesh, [Shard(1)])
        for norm, optimizer, tokens in zip(norms, optimizers, (mine, x), strict=True):
            optimizer.zero_grad()
            (norm(tokens) ** 3).sum().backward()
            # one rank's sum has another order: the terms are those of the ranks
            if norm is norms[1]:
                for p, q in zip(norm.parameters(), norms[0].parameters(), strict=True):
                    p.grad.copy_(q.grad.full_tensor())
            optimizer.step()
    return (
        norms[0].weight.to_local().tolist(),
        norms[1].weight.tolist(),
        str(norms[0].weight.grad.placements),
    )


@pytest.mark.parametrize("kind", ["float32", "sqrt_e4m3", "torch"])
def test_gradients_that_ranks_have_terms_of_are_summed(kind):  # O-11
    """As torch's AdamW: copies stay equal, and have the bits of the whole gradient."""
    ranks = run(2, train_a_norm, kind)
    for copied, whole, placed in ranks:
        assert placed == "(Partial(sum),)"
        assert copied == whole == ranks[0][0]


def shard_flat(original: bool) -> list[str]:
    """What an optimizer says to the parameters of FSDP1, built before and after."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    early = states.AdamW(model.parameters())
    sharded = FullyShardedDataParallel(
        model, use_orig_params=original, device_id=torch.device("cpu")
    )
    said = []
    sharded(torch.ones(2, 8)).sum().backward()
    for use in (
        lambda: states.AdamW(sharded.parameters(), layout="sqrt_e5m2"),
        early.step if original else early.zero_grad,
    ):
        try:
            use()
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("original", [False, True])
def test_flat_shards_of_fsdp1_are_refused(original):  # O-11; axolotl#2744, bitsandbytes#2080
    for said in run(2, shard_flat, original):
        assert len(said) == 1 + original
        assert all(
            "FullyShardedDataParallel flattens" in one and "Use fully_shard" in one for one in said
        )
