"""A rank's part of a DTensor: elements of it, never a term of a sum."""

import ast
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8ref
from fp8ref.torch.distributed import tensor_parallel
from fp8ref.torch.model import convert
from fp8ref.torch.tensors.local_part import check_alike, local_like, local_part


@pytest.fixture
def mesh():
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


def placed(mesh, placement, x: torch.Tensor | None = None) -> DTensor:
    return DTensor.from_local(
        torch.ones(2, 4) if x is None else x, mesh, [placement], run_check=False
    )


def test_a_plain_tensor_is_itself():
    x = torch.ones(2, 4)
    assert local_part(x) is local_like(x, torch.zeros(3)) is x


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_a_shard_and_a_copy_are_read_as_they_are(mesh, placement):
    x = torch.ones(2, 4, requires_grad=True)
    part = local_part(placed(mesh, placement, x))
    assert part.data_ptr() == x.data_ptr()
    part.sum().backward()  # gradients flow
    assert torch.equal(x.grad, torch.ones(2, 4))


@pytest.mark.parametrize("linear", [False, True])
def test_a_parameter_that_was_changed_in_place_fails_the_backward_pass(mesh, linear):
    if linear:  # in FP8, which would compute grad_input by the new weight
        model = convert.convert(nn.ModuleDict({"up": nn.Linear(32, 32)}), "delayed")
        function = tensor_parallel.parallelize(model, mesh, plan={"up": "colwise"})["up"]
        weight = function.weight
    else:
        weight = nn.Parameter(placed(mesh, Shard(0), torch.ones(2, 32)))
        function = lambda x: x * local_part(weight)  # noqa: E731
    x = torch.ones(2, 32, requires_grad=True)
    function(x).sum().backward()
    y = function(x)
    with torch.no_grad():
        weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("placement", [Partial(), Partial("avg")])
def test_a_term_of_a_sum_is_refused_or_summed(mesh, placement):
    with pytest.raises(ValueError, match=r"got \(2, 4\) placed as .* Redistribute"):
        local_part(placed(mesh, placement))
    assert local_like(
        placed(mesh, placement), placed(mesh, Replicate()), redistribute=True
    ).shape == (2, 4)
    parameter = placed(mesh, Shard(0), torch.ones(1, 4))
    part = local_like(placed(mesh, placement), parameter, redistribute=True)
    assert part.shape == (1, 4)


def test_another_placement_is_redistributed(mesh):
    whole = torch.arange(8.0).view(2, 4)
    x, parameter = placed(mesh, Replicate(), whole), placed(mesh, Shard(1))
    assert torch.equal(local_like(x, parameter, redistribute=True), whole[:, 2:])
    assert torch.equal(local_like(parameter, parameter), parameter.to_local())


def test_what_belongs_to_a_parameter_is_placed_as_it_is(mesh):
    with pytest.raises(
        ValueError, match=r"is placed as it is, \(Shard.* got .*Replicate.* load it"
    ):
        local_like(placed(mesh, Replicate()), placed(mesh, Shard(1)))


def test_a_plain_tensor_has_no_placements(mesh):
    plain, cut = torch.ones(2, 4), placed(mesh, Shard(0))
    with pytest.raises(
        ValueError, match=r"a gradient or a state is a DTensor on .* got a plain tensor"
    ):
        local_like(plain, cut)
    with pytest.raises(
        ValueError,
        match=r"a gradient or a state is a plain tensor, as its parameter \(2, 4\); got a DTensor on",
    ):
        check_alike(cut, plain)


def test_no_other_code_reads_a_part_of_unknown_placement():
    """to_local follows a redistribute, or is one that states the placements of its gradient."""
    bare = []
    for file in sorted(Path(fp8ref.__file__).parent.rglob("*.py")):
        if file.name == "local_part.py":
            continue
        for call in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr == "to_local"
            ):
                placed = any(key.arg == "grad_placements" for key in call.keywords)
                if not placed and "redistribute" not in ast.unparse(call.func.value):
                    bare.append(f"{file.name}: {ast.unparse(call)}")
    assert bare == []
