import pytest
import torch
from linears import model, run

from fp8ref.recipe import OPERANDS, RECIPES
from fp8ref.torch import linear, observing


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"])
def test_observing_reports_operands_in_their_own_layout(recipe):
    converted, seen = linear.convert(model(), recipe), {}
    x, g = torch.randn(2, 24, 64).bfloat16(), torch.randn(2, 24, 48).bfloat16()
    plain = run(linear.convert(model(), recipe), x, g)
    with observing.observing(converted, lambda name, which, a, b, out: seen.__setitem__((name, which), (a, b, out))):
        watched = run(converted, x, g)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert set(seen) == {(name, which) for name in "02" for which, spec in RECIPES[recipe].gemms.items() if spec.fp8}
    shapes = {"input": (48, 64), "weight": (32, 64), "grad_output": (48, 32)}
    for which, roles in OPERANDS.items():
        if ("0", which) in seen:
            for role, (hp, codes, scale) in zip(roles, seen["0", which][:2], strict=True):
                assert hp.shape == codes.shape == shapes[role]
                assert scale.ndim == 0 or (scale * hp).shape == hp.shape
    assert torch.equal(seen["2", "output"][2].reshape(2, 24, 48), watched[0])
