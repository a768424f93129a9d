"""The states of delayed scaling, as linears read and observe them (spec H-2, H-4).

Updates, checkpoints of models and calibration are in test_delayed.py.
"""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from fp8ref.formats import E4M3FN, E5M2
from fp8ref.recipe import RECIPES, delayed_casts
from fp8ref.spec.delayed import DELAYED
from fp8ref.torch.delayed import role_states
from fp8ref.torch.delayed.role_states import Notice, RoleState, RoleStates

CPU = torch.device("cpu")
CONFIG = DELAYED["delayed"]


def state() -> RoleState:
    return RoleState(E4M3FN, CONFIG, CPU)


def trained() -> RoleState:
    """A state after an update, with an observation of the next step."""
    one = state()
    one.scale.fill_(3.0)
    one.amax_history[0] = 149.3
    one.step.fill_(1)
    one.observe(torch.tensor([1.0, -2.0]))
    return one


def states_of(group=None) -> RoleStates:
    return role_states.role_states(delayed_casts(RECIPES["delayed"]), CPU, group)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_states_of_any_shape_begin_with_scale_1(shape):  # H-2
    made = role_states.init("delayed", shape)
    assert [x.dtype for x in made] == [torch.float32, torch.float32, torch.int64]
    assert made.scale.shape == made.step.shape == shape
    assert made.amax_history.shape == (*shape, CONFIG.history_length)
    assert (made.scale == 1).all()
    assert not made.amax_history.any()
    assert not made.step.any()


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ([0.5, -3.0], [3, 0, 1]),
        ([0.0, -0.0], [0, 0, 1]),
        ([2.0**-140, 0.0], [2.0**-140, 0, 1]),  # a subnormal counts
        ([1.0, torch.inf], [0, 1, 1]),
        ([-torch.inf, torch.nan], [0, 1, 1]),
        ([torch.nan, 5.0], [0, 1, 1]),
    ],
    ids=str,
)
def test_an_observation_is_an_amax_or_a_flag(x, expected):  # H-4, H-5
    assert role_states.observe(torch.tensor(x)).tolist() == expected
    assert role_states.observe(torch.tensor(x, requires_grad=True)).requires_grad is False


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_observation_is_float32(dtype):
    seen = role_states.observe(torch.tensor([2.5], dtype=dtype))
    assert (seen.dtype, seen.tolist()) == (torch.float32, [2.5, 0, 1])


@pytest.mark.parametrize("x", [torch.empty(0, 4), torch.ones(2, dtype=torch.float64)], ids=str)
def test_what_is_never_cast_is_not_observed(x):
    one = state()
    with pytest.raises(ValueError, match=r"at least one element|got torch\.float64"):
        one.observe(x)
    assert not one.seen.any()


def test_observations_merge_in_place_and_in_any_order():  # H-4
    one, other = state(), state()
    address = one.seen.data_ptr()
    tensors = [torch.tensor([v]) for v in (1.0, 4.0, torch.nan, 2.0)]
    for x in tensors:
        one.observe(x)
    for x in tensors[::-1]:
        other.observe(x)
    assert one.seen.tolist() == other.seen.tolist() == [4, 1, 1]
    assert one.seen.data_ptr() == address


def test_an_observation_has_no_gradient():
    one, x = state(), torch.ones(2, 2, requires_grad=True)
    one.observe(x * 2)
    assert not one.seen.requires_grad
    one.seen.zero_()  # in place: autograd keeps nothing of it


@pytest.mark.parametrize("name", ["te_delayed", "flax"])
def test_histories_of_others_are_refused(name):
    with pytest.raises(ValueError, match="keeps histories as 'delayed' does"):
        role_states.implemented(name)
    with pytest.raises(ValueError, match="keeps histories as 'delayed' does"):
        RoleState(E4M3FN, DELAYED[name], CPU)


def test_a_reset_keeps_addresses():  # P-12: graphs of CUDA have read them
    one = trained()
    addresses = [x.data_ptr() for x in one.buffers()]
    one.reset()
    assert [x.data_ptr() for x in one.buffers()] == addresses
    assert one.scale == 1
    assert not any(x.any() for x in (one.amax_history, one.step, one.seen))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_no_dtype_rounds_a_state(dtype):
    one = trained()
    before = {key: x.clone() for key, x in one.named_buffers()}
    nn.Sequential(one).to(dtype)
    for key, x in one.named_buffers():
        assert x.dtype == before[key].dtype, key
        assert torch.equal(x, before[key]), key


def test_the_state_that_is_read_first_is_no_submodule():
    first, second = state(), state()
    second.first = (first,)
    assert (first.origin, second.origin) == (first, first)
    assert list(second.children()) == []
    assert set(second.state_dict()) == {"scale", "amax_history", "step"}


def test_a_checkpoint_has_no_observation_and_clears_one():  # H-4
    saved, one = trained().state_dict(), trained()
    one.missed, one.version = 3, 7
    assert "seen" not in saved
    one.load_state_dict(saved)
    assert not one.seen.any()
    assert (one.missed, one.version, one.updated, one.scaled) == (0, None, True, True)


def test_a_state_of_no_step_sets_no_scale():
    one = state()
    one.load_state_dict(state().state_dict())
    assert (one.updated, one.scaled) == (True, False)


def test_a_checkpoint_without_states_keeps_them():
    holder = nn.Sequential(trained())
    holder[0].missed = 3
    holder.load_state_dict({})
    assert (holder[0].scale, holder[0].step, holder[0].missed) == (3, 1, 3)
    assert (holder[0].updated, holder[0].scaled) == (False, False)
    assert not holder[0].seen.any()


@pytest.mark.parametrize("key", ["scale", "amax_history", "step"])
def test_a_part_of_a_state_is_missed(key):
    saved = trained().state_dict()
    del saved[key]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{key}"'):
        state().load_state_dict(saved)


def test_roles_have_their_formats_and_one_group():
    states = states_of("7")
    assert {role: one.fmt for role, one in states.items()} == {
        "input": E4M3FN,
        "weight": E4M3FN,
        "grad_output": E5M2,
    }
    assert {one.group for one in states.values()} == {"7"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_states_and_their_copies_are_registered_while_they_live(copied):
    states = states_of()
    other = copied(states)
    keys = {id(states), id(other)}
    assert role_states.registered[id(states)] is states
    assert role_states.registered[id(other)] is other
    assert states["input"].scale.data_ptr() != other["input"].scale.data_ptr()
    del states, other
    gc.collect()
    assert not keys & set(role_states.registered)


def test_a_copy_of_a_model_has_a_name_of_its_own():
    first, second = Notice.new_model(), Notice.new_model()
    first.settled = True
    other = copy.deepcopy(first)
    assert len({first.model, second.model, other.model}) == 3
    assert (first.settled, second.settled, other.settled) == (True, False, True)
    assert copy.copy(Notice()).model == ""  # no conversion made it
