import torch
from torch import nn

from fp8ref.torch.linear.model_checks import is_compiled


def test_compiled_is_a_module_that_went_through_compile_in_any_way():
    assert not is_compiled(nn.Linear(4, 4))
    assert is_compiled(torch.compile(nn.Linear(4, 4), backend="eager"))
    in_place = nn.Linear(4, 4)
    in_place.compile(backend="eager")
    assert is_compiled(in_place)
    by_forward = nn.Linear(4, 4)
    by_forward.forward = torch.compile(by_forward.forward, backend="eager")
    assert is_compiled(by_forward)
    other = nn.Linear(4, 4)
    other.forward = lambda x: x
    assert not is_compiled(other)
    assert not is_compiled(nn.Sequential(in_place))  # what is in it is
