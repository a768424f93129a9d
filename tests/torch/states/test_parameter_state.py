"""One parameter's state.

What ranks have of it is tested with the optimizer, in ``test_states.py``.
"""

import dataclasses

import pytest
import torch
from helpers.states.state_layouts import MASTERED, STOCHASTIC
from torch import distributed
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8ref.spec.states.layouts import LAYOUTS, WITH_MASTERS, by_name
from fp8ref.torch.states import parameter_state
from fp8ref.torch.tensors import local_part


@pytest.mark.parametrize("name", [*LAYOUTS, *WITH_MASTERS])
def test_a_layout_takes_parameters_that_its_master_can_be_of(name):  # O-14
    """Without masters a parameter is its own, in float32; a bfloat16 master is the parameter; a
    float16 one is in the state.
    """
    layout = by_name(name)
    master = layout.master.fmt.name if layout.keeps_master else "float32"
    taken = {"float32": {torch.float32}, "bfloat16": {torch.bfloat16}}.get(
        master, {torch.float32, torch.bfloat16}
    )
    assert set(parameter_state.dtypes(layout)) == taken
    assert (
        parameter_state.keeps_apart(layout)
        == parameter_state.in_state(layout, torch.ones(4))
        == (len(taken) == 2)
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if dtype in taken:
            parameter_state.check(torch.ones(4, dtype=dtype), layout)
        else:
            with pytest.raises(
                ValueError,
                match=rf"layout '{name}' takes .*; got {dtype} \(4,\). Cast the parameter",
            ):
                parameter_state.check(torch.ones(4, dtype=dtype), layout)


def test_seeds_are_of_a_seed_a_step_a_tensor_and_what_is_kept():  # O-8
    name = next(iter(STOCHASTIC))
    layout = STOCHASTIC[name]
    found = [
        parameter_state.keys(*of, layout)
        for of in ((0, 1, 0), (1, 1, 0), (1 << 32, 1, 0), (0, 2, 0), (0, 1, 1))
    ]
    drawn = [key for keys in found for key in keys if key is not None]
    assert len(drawn) == len(set(drawn)) >= len(found)
    assert set(parameter_state.keys(0, 1, 0, by_name("sqrt_e4m3"))) == {None}


def test_a_plain_tensor_is_all_on_this_rank():
    x = torch.arange(6.0).view(2, 3).T
    assert parameter_state.flat(x).tolist() == [0, 3, 1, 4, 2, 5]
    assert parameter_state.place(x) == (0, ())
    state = {"m_codes": torch.zeros(2, 3, dtype=torch.uint8), "m_scale_inv": torch.ones(())}
    found = parameter_state.moment_state(x, state, "m")
    assert found.codes.shape == (6,)
    assert found.scale_inv is state["m_scale_inv"]
    assert found.amax is None


@pytest.mark.parametrize("rank", range(4))
def test_experts_that_ranks_of_a_batch_cut_again_are_rows(rank):  # O-11, X-12
    """FSDP2 writes its own cut of rows as strided, where ranks have different experts."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "expert"))

        def cut(*placements):
            return DTensor.from_local(
                torch.zeros(2, 4), mesh, placements, run_check=False, shape=(8, 4), stride=(4, 1)
            )

        experts = cut(_StridedShard(0, split_factor=2), Shard(0))
        own = by_name("sqrt_e5m2")
        drawn = dataclasses.replace(own, m=dataclasses.replace(own.m, rounding="stochastic"))
        parameter_state.check_cut(experts, by_name("sqrt_e4m3"))
        fsdp, expert = divmod(rank, 2)
        # its first row, of experts and then of fsdp
        assert parameter_state.place(experts)[0] == 4 * (4 * expert + 2 * fsdp)
        parameter_state.check_cut(cut(Replicate(), Shard(0)), by_name("sqrt_e4m3"))
        for other in (
            (_StridedShard(0, split_factor=4), Shard(0)),
            (_StridedShard(1, split_factor=2), Shard(1)),
            (Replicate(), Shard(1)),
        ):
            with pytest.raises(ValueError, match="cut by rows"):
                parameter_state.check_cut(cut(*other), by_name("sqrt_e4m3"))
            parameter_state.check_cut(cut(*other), by_name("sqrt_e5m2"))  # of one scale a tensor
            # O-8: random numbers by the flat index
            for layout in (drawn, MASTERED["stochastic_half"]):
                with pytest.raises(
                    ValueError,
                    match="rounds by the index of an element, so a parameter is cut by rows",
                ):
                    parameter_state.check_cut(cut(*other), layout)
                parameter_state.check_cut(experts, layout)
    finally:
        distributed.destroy_process_group()


def test_a_parameter_is_no_term_of_a_sum():  # O-11
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        p = DTensor.from_local(
            torch.ones(4), init_device_mesh("cpu", (2,)), [Partial()], run_check=False
        )
        with pytest.raises(
            ValueError, match=r"a parameter is whole or cut on each rank; got .*Partial"
        ):
            parameter_state.check(p, by_name("float32"))
    finally:
        distributed.destroy_process_group()


def test_a_gradient_is_placed_on_its_parameters_mesh():  # O-11
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        p, plain = distribute_tensor(torch.ones(4), mesh, [Replicate()]), torch.ones(4)
        p.grad_dtype = None
        p.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        parameter_state.check_step(p, {}, by_name("float32"))
        assert parameter_state.flat_gradient(p).shape == (4,)
        with pytest.raises(ValueError, match="got a DTensor on"):
            local_part.local_like(p.grad, plain)
    finally:
        distributed.destroy_process_group()
