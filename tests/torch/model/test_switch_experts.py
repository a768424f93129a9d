"""Experts that switch between recipes, and operands of theirs that rules change (spec X-16,
R-8).
"""

import copy

import pytest
import torch
from helpers.models.experts_mixture import mixture
from torch import distributed
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fp8ref.selection.rules import Rule
from fp8ref.torch import delayed
from fp8ref.torch.experts import grouped
from fp8ref.torch.experts import operands as grouped_operands
from fp8ref.torch.model import convert
from fp8ref.torch.model.switch import Switch


def step(model, optimizer, seed):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    delayed.update(model)
    optimizer.zero_grad()
    return loss.item()


OF_EXPERTS = {"tensorwise": True, "delayed": True, "rowwise": False, "bf16": True}
"""{recipe: whether experts are converted too}."""


def mixture_in(recipe, device="cpu"):
    return convert.convert(mixture(device), recipe, experts=OF_EXPERTS[recipe])


@pytest.mark.parametrize("first", ["tensorwise", "bf16"])
def test_experts_switch_to_high_precision_and_back(first):  # T-9, X-16
    """Each step has the bits of a model that was converted so: in high precision those of the
    library's own forward pass.
    """
    others = [recipe for recipe in OF_EXPERTS if recipe != first]
    switch = Switch(
        mixture_in(first), first, {recipe: mixture_in(recipe, "meta") for recipe in others}
    )
    model, kinds, calls = switch.model, [], []
    before = dict(model.named_parameters())
    experts = model.first
    experts.register_forward_hook(lambda *_: calls.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed, recipe in enumerate((first, "delayed", "rowwise", "bf16", "delayed", "tensorwise")):
        switch.to(recipe)
        assert model.first is experts
        assert all(p is before[name] for name, p in model.named_parameters())
        kinds.append(getattr(model.first, "recipe", None) and model.first.recipe.name)
        other = mixture_in(recipe)
        other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        assert step(model, optimizer, seed) == step(
            other, torch.optim.SGD(other.parameters(), lr=0.1), seed
        )
    assert kinds == [
        None if first == "bf16" else first,
        "delayed",
        None,
        None,
        "delayed",
        "tensorwise",
    ]
    assert len(calls) == 6
    states = dict(switch.states())
    assert len(states) == 3 + 2 * 3 * 3  # of a linear; of the three weights of two modules
    assert {int(state.step) for state in states.values()} == {2}
    assert not list(delayed.states(model))  # tensorwise keeps none


@pytest.mark.slow
def test_experts_that_switch_are_compiled_once():  # T-9, X-16
    counter = CompileCounter()
    switch = Switch(
        mixture_in("tensorwise"), "tensorwise", {"delayed": mixture_in("delayed", "meta")}
    )
    compiled = torch.compile(switch.model.first, backend=counter)
    x, counts, found = torch.randn(16, 32).bfloat16(), torch.tensor([4, 0, 9, 3]), []
    for recipe in ("tensorwise", "delayed") * 2:
        switch.to(recipe)
        compiled(x, counts)
        found.append(counter.frame_count)
    assert found == [1, 2, 2, 2]


def test_experts_that_fsdp2_shards_alone_switch():  # T-9, X-16
    """A unit of FSDP2's stays one: its weights are gathered and its gradients reduced in either
    form.
    """
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        model = mixture_in("tensorwise")
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
        switch = Switch(model, "tensorwise", {"bf16": mixture_in("bf16", "meta")})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed, recipe in enumerate(("tensorwise", "bf16", "tensorwise")):
            switch.to(recipe)
            assert isinstance(model.first, FSDPModule)
            other = mixture_in(recipe)
            other.load_state_dict(
                {name: p.full_tensor().clone() for name, p in model.state_dict().items()}
            )
            assert step(model, optimizer, seed) == step(
                other, torch.optim.SGD(other.parameters(), lr=0.1), seed
            )
    finally:
        distributed.destroy_process_group()


def test_rules_change_operands_of_single_weights():
    """An operand left in high precision, and a weight: bits of the parts that are converted so.

    A switch goes between them.
    """
    one = Rule(layers=("first.w2",), gemms=("output",), roles=("input",), recipe="bf16")
    whole = Rule(layers=("second",), recipe="bf16")
    model = convert.convert(mixture(), "tensorwise", experts=True, rules=(one, whole))
    spec = model.first.of_weights["w2"].recipe.output
    assert spec.a is None
    assert spec.b is not None
    assert list(model.first.of_weights) == ["w2"]
    assert (model.first.in_fp8, model.second.in_fp8) == (3 * 4 * 32 * 32, 0)
    x, counts = torch.randn(16, 32).bfloat16(), torch.tensor([4, 0, 9, 3])
    plain, cast = mixture(), mixture_in("tensorwise")
    # The library's own products are of the same sums on a CPU, but by the kernel of matmul:
    # fp8ref's are those of a model in bf16.
    of_bf16 = convert.convert(
        mixture(),
        "tensorwise",
        experts=True,
        rules=(Rule(layers=("first", "second"), recipe="bf16"),),
    )
    assert torch.equal(model.second(x, counts), of_bf16.second(x, counts))
    found = [m.first(x, counts) for m in (model, cast, of_bf16)]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    again = copy.deepcopy(model)
    assert torch.equal(again.first(x, counts), found[0])
    switch = Switch(
        cast,
        "tensorwise",
        {"bf16": convert.convert(mixture("meta"), "tensorwise", experts=True, rules=(one, whole))},
    )
    switch.to("bf16")
    assert torch.equal(switch.model.first(x, counts), found[0])
    switch.to("tensorwise")
    assert torch.equal(switch.model.first(x, counts), found[1])
    convert.deconvert(model)
    assert torch.equal(model.first(x, counts), plain.first(x, counts))


def test_states_are_of_operands_that_are_cast():
    rule = Rule(layers=("first.w1",), roles=("weight",), recipe="bf16")
    model = convert.convert(mixture(), "delayed", experts=True, rules=(rule,))
    assert sorted(model.first.grouped_states["w1"]) == ["grad_output", "input"]
    assert sorted(model.first.grouped_states["w2"]) == ["grad_output", "input", "weight"]
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    assert {int(state.step) for _, state in delayed.states(model)} == {1}


def test_a_rule_that_names_no_weight_is_refused():
    with pytest.raises(ValueError, match=r"rule 1's pattern 'w4' names no linear"):
        convert.convert(
            mixture(), "tensorwise", experts=True, rules=(Rule(layers=("w4",), recipe="bf16"),)
        )


def test_under_delayed_scaling_amaxes_are_of_all_experts():
    """An operand that a rule made tensorwise is scaled over all experts where another of its weight
    is delayed; else by its own group.
    """
    one = Rule(layers=("first.w2",), roles=("weight",), recipe="tensorwise")
    every = Rule(layers=("first.w1",), recipe="tensorwise")
    model = convert.convert(mixture(), "delayed", experts=True, rules=(one, every))
    assert {key: of.amax for key, of in model.first.of_weights.items()} == {
        "w1": "group",
        "w2": "all",
    }
    groups = grouped_operands.groups_of(torch.tensor([4, 4, 13, 16], dtype=torch.int32), 16)
    w = mixture().first.w2.detach()
    for key, experts in (("w1", 4), ("w2", 1)):
        q = grouped.quantize_operand("output", "weight", w, groups, model.first.of_weights[key])
        assert q.scale.unique().numel() == experts
