"""The shapes of scales, and documents (spec A-2, A-12).

What is refused is in test_attention.py.
"""

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental import symbolic_shapes

from fp8ref.sim.attention import attention as sim
from fp8ref.spec.attention.variants import VARIANTS
from fp8ref.torch.attention.operands import inputs as attention_inputs
from fp8ref.torch.attention.operands.problem import Shape


@pytest.mark.parametrize("name", ["fa3", "cudnn", "fa3_paper"])
def test_scales_have_the_shapes_of_the_simulators(name, rng):
    q, k, v = (
        rng.normal(size=(2, h, t, 64)).astype(np.float32) for h, t in ((4, 150), (2, 300), (2, 300))
    )
    tensors = sim.forward(q, k, v, variant=name).tensors
    for role, x in tensors.items():
        assert (
            attention_inputs.scale_shape(VARIANTS[name], role, Shape(2, 4, 2, 150, 300, 64))
            == x.scale.shape
        )


def test_sizes_of_scales_may_be_other_symbols_than_those_of_q():
    """As a compiler names them that gives equal sizes no common name."""
    mode = FakeTensorMode(shape_env=symbolic_shapes.ShapeEnv(duck_shape=False))
    dynamic = [symbolic_shapes.DimDynamic.DYNAMIC] * 4
    context = symbolic_shapes.StatelessSymbolicContext(dynamic_sizes=dynamic)
    q, scale = (
        mode.from_tensor(torch.ones(shape), symbolic_context=context)
        for shape in ((2, 4, 64, 32), (2, 4, 1, 1))
    )
    b, h, t, d = q.shape
    assert str(b) != str(scale.shape[0])
    shape = Shape(b, h, h, t, t, d)
    given = attention_inputs.check_scales({"q": scale}, VARIANTS["fa3"], ("q",), shape)
    assert given == {"q": scale}


def test_documents_of_both_or_of_each():
    shape, one = Shape(2, 4, 2, 5, 5, 64), torch.zeros(2, 5, dtype=torch.int32)
    assert attention_inputs.check_documents(None, shape) == (None, None)
    assert all(x is one for x in attention_inputs.check_documents(one, shape))
    for bad in (one.float(), one.bool(), one[:1], (one, one, one), (one, one[:, :3])):
        with pytest.raises(ValueError, match=r"documents are (a tensor|integers)"):
            attention_inputs.check_documents(bad, shape)
