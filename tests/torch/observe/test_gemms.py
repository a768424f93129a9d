import pytest
import torch
from helpers.models.linears import model, run
from torch import nn

from fp8ref.recipe import OPERANDS, RECIPES
from fp8ref.torch.model import convert
from fp8ref.torch.model.parallel import Parallelism, parallelize
from fp8ref.torch.observe import gemms as gemm_observer


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"])
def test_observing_reports_operands_in_their_own_layout(recipe):
    converted, seen = convert.convert(model(), recipe), {}
    x, g = torch.randn(2, 24, 64).bfloat16(), torch.randn(2, 24, 48).bfloat16()
    plain = run(convert.convert(model(), recipe), x, g)
    with gemm_observer.observe_gemms(
        converted, lambda name, which, a, b, out: seen.__setitem__((name, which), (a, b, out))
    ):
        watched = run(converted, x, g)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert set(seen) == {
        (name, which) for name in "02" for which, spec in RECIPES[recipe].gemms.items() if spec.fp8
    }
    shapes = {"input": (48, 64), "weight": (32, 64), "grad_output": (48, 32)}
    for which, roles in OPERANDS.items():
        if ("0", which) in seen:
            for role, (hp, codes, scale, *_) in zip(roles, seen["0", which][:2], strict=True):
                assert hp.shape == codes.shape == shapes[role]
                assert scale.ndim == 0 or (scale * hp).shape == hp.shape
    assert torch.equal(seen["2", "output"][2].reshape(2, 24, 48), watched[0])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp", "delayed"])
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_what_runs_again_is_reported_once(recipe, checkpointing):
    found = []
    for how in ("none", checkpointing):
        made = nn.Sequential(model())
        parallelize(made, recipe, blocks=[made[0]], parallelism=Parallelism(checkpointing=how))
        torch.manual_seed(0)
        x, g, seen = torch.randn(2, 24, 64).bfloat16(), torch.randn(2, 24, 48).bfloat16(), []
        with gemm_observer.observe_gemms(made, lambda *told, to=seen: to.append(told)):
            run(made, x, g)
        found.append(seen)
    plain, again = found
    assert [told[:2] for told in again] == [told[:2] for told in plain]
    for (*_, a, b, out), (*_, expected_a, expected_b, expected_out) in zip(
        again, plain, strict=True
    ):
        for mine, expected in zip(
            (*a[:4], *b[:4], out), (*expected_a[:4], *expected_b[:4], expected_out), strict=True
        ):
            assert torch.equal(mine, expected)
        assert (a.axis, b.axis) == (expected_a.axis, expected_b.axis)


def test_a_linear_that_a_pass_calls_twice_is_refused():
    one = convert.convert(nn.Sequential(nn.Linear(64, 64)), "tensorwise").bfloat16()
    twice = nn.Sequential(one[0], nn.ReLU(), one[0])
    x = torch.randn(32, 64).bfloat16()
    with gemm_observer.observe_gemms(one, lambda *told: None):
        for _ in range(2):
            one(x).sum().backward()
        one(x), one(x)  # without a backward pass
    with (
        gemm_observer.observe_gemms(twice, lambda *told: None),
        pytest.raises(ValueError, match="run once in a pass; it calls 0 again"),
    ):
        twice(x)
