import numpy as np
import pytest

from fp8ref.crosscheck.one_device import crosscheck
from fp8ref.crosscheck.operands import in_pass_order, observe
from fp8ref.jax import linear as jax_linear
from fp8ref.recipe import OPERANDS


def test_gemms_are_put_in_the_order_of_the_pass(small):
    """Whatever order callbacks come in."""
    names = [d.path for d in small.decisions() if d.fp8]
    calls = [(name, which) for name in names for which in OPERANDS]
    np.random.default_rng(0).shuffle(calls)

    class Shuffled:
        backend = "jax"

        def observe(self, tokens, observer):
            for name, which in calls:
                observer(name, which, None, None, None)

    found = [(o.layer, o.gemm) for o in in_pass_order(observe(Shuffled(), np.zeros((4, 17), np.int32)), small)]
    assert found[: len(names)] == [(name, "output") for name in names]
    assert found[len(names) :] == [(name, which) for name in names[::-1] for which in ("grad_input", "grad_weight")]


def test_a_gemm_that_was_planned_and_did_not_run_fails(small, monkeypatch):
    monkeypatch.setattr(
        jax_linear, "_observer", type("Deaf", (), {"get": lambda self: None, "set": lambda *a: None, "reset": lambda *a: None})()
    )
    report = crosscheck(small, backends=("jax",), steps=0)
    failed = {check.name: check.detail for check in report.failures}
    assert "did not run" in failed["model.layers.0.mlp.up_proj/grad_weight/value/jax"]


@pytest.mark.slow
def test_a_wrong_gemm_breaks_its_bound(small, monkeypatch):
    from fp8ref.jax import gemm

    original = gemm._dot

    def wrong(*args):
        right = original(*args)
        return (right * np.float32(1.02)).astype(right.dtype)

    monkeypatch.setattr(gemm, "_dot", wrong)
    report = crosscheck(small, backends=("jax",), steps=0)
    assert any("/grad_weight/value/jax" in check.name for check in report.failures)
