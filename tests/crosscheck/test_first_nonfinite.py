import json
import types

import numpy as np
import pytest

from fp8ref.conformance.kit.compare import Check
from fp8ref.crosscheck import first_nonfinite
from fp8ref.crosscheck.attention.attention import AttentionPass
from fp8ref.sim.llama import Site


def checked(value, **made_of):
    check = Check(name="a/b/finite/sim")
    return first_nonfinite.check_site(
        Site(module="a", role="b", value=np.asarray(value), **made_of), check, by="sim"
    ), check


def test_finite_values_are_counted():
    found, check = checked(np.zeros((2, 3)))
    assert found is None
    assert (check.compared, check.equal, check.ok) == (6, 6, True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_in_the_order_of_rows_is_found(bad):
    value = np.zeros((2, 3))
    value[0, 2] = value[1, 0] = bad
    found, check = checked(value)
    assert found.element == (0, 2)
    assert (check.compared, check.equal, check.ok) == (6, 4, False)
    assert check.detail.startswith(
        f"a/b/finite/sim: 2 of 6 are not finite, first a, b, element [0, 2]: {bad}"
    )
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["value"] == str(bad)


def test_a_number_has_no_element():
    found, _ = checked(np.float64(np.nan))
    assert found.element == ()
    assert str(found) == "a, b: nan"


def test_finite_parts_are_named():
    gate = np.array([[1.0, 3e38]])
    found, _ = checked(np.array([[1.0, np.inf]]), parts={"gate": gate, "up": np.array([[2.0]])})
    assert found.why == "gate 3e+38, up 2: beyond the largest bfloat16, 3.39e+38"


@pytest.mark.parametrize("lead", [True, False], ids=["batched", "one matrix"])
def test_the_largest_product_is_named(lead):
    a, b = np.ones((2, 3, 4)), np.ones((2, 5, 4) if lead else (5, 4))
    a[1, 2, 3], b[..., 4, 3] = -1e20, 1e20
    value = np.where(np.arange(30).reshape(2, 3, 5) == 29, -np.inf, 0)
    found, _ = checked(value, factors={"input": a, "weight": b})
    assert found.element == (1, 2, 4)
    assert found.why == (
        "a sum of 4 products, -1e+40 in float64, beyond the largest bfloat16, 3.39e+38; the "
        "largest of them is input -1e+20 times weight 1e+20, at k = 3"
    )


def test_a_factor_that_is_not_finite_is_named():
    a, b = np.ones((1, 4)), np.ones((1, 4))
    b[0, 2] = np.nan
    found, _ = checked(np.array([[np.nan]]), factors={"input": a, "weight": b})
    assert found.why == "its factor weight is nan at k = 2 of 4"


def test_attentions_backward_pass_is_searched_behind_a_finite_step(small):  # K-9
    """In bfloat16's linears too, none of which is observed."""
    config = small.replace(numerics={"recipe": "bf16", "attention": "cudnn"})
    do = np.zeros((1, 2, 16, 16), np.float32)
    do[0, 1, 2, 3] = np.nan
    one = AttentionPass("torch", "model.layers.0.self_attn", "backward", {"do/value": do})
    trainer = types.SimpleNamespace(backend="torch")
    metrics = {"loss": 1.0, "grad_norm": 1.0}
    observed = first_nonfinite.Observed(np.zeros((1, 17), int), config, [], [one], metrics)
    sites = first_nonfinite.in_backend(trainer, observed)
    [(site, why)] = sites
    found = first_nonfinite.check_site(site, Check(name="dO"), by="torch", why=why)
    assert (found.layer, found.role, found.element) == (
        "model.layers.0.self_attn",
        "dO",
        (0, 1, 2, 3),
    )
    assert found.why == "it comes from model.layers.0.self_attn.o_proj's grad_input"
