import json

import numpy as np
import pytest

from fp8ref.sim.attention import attention
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import VARIANTS, Mask
from fp8ref.study import attention_error
from fp8ref.study.recording import Attended, Recording


def call(layer: str = "a", seed: int = 0, scale: float | None = None, width: int = 32) -> Attended:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, heads, 64, width)).astype(np.float32) for heads in (2, 1, 1))
    return Attended(layer=layer, q=q, k=k, v=v, causal=True, scale=scale)


def recording(one: Attended, **refused: str) -> Recording:
    return Recording(framework="torch", attention={one.layer: one}, refused=refused)


def test_errors_are_of_the_simulators_output():
    found = attention_error.judge(recording(call(scale=0.5)), ["fa3", "bf16"])
    given = call(scale=0.5)
    outputs = {
        name: attention.forward(
            given.q, given.k, given.v, variant=Call(variant=name, mask=Mask(causal=True), scale=0.5)
        ).o.astype(np.float64)
        for name in ("exact", "fa3", "bf16")
    }
    for row in found.rows:
        expected = np.linalg.norm(outputs[row.variant] - outputs["exact"]) / np.linalg.norm(
            outputs["exact"]
        )
        assert row.error == expected
    assert [row.variant for row in found.worst()] == ["fa3", "bf16"]


def test_all_variants_are_judged_and_what_one_does_not_take_is_said():
    found = attention_error.judge(recording(call("odd", width=24), other="why"))
    assert {row.variant for row in found.rows} | {
        name.partition(", ")[2] for name in found.refused
    } == {*VARIANTS, ""} - {"exact"}
    assert "odd, mxfp8" in found.refused  # blocks of 32 features
    assert found.refused["other"] == "why"
    assert json.loads(json.dumps(found.to_dict()))["rows"]
    found.print()


def test_nothing_is_no_result():
    assert not attention_error.judge(Recording(framework="torch", refused={"a": "why"})).ok
    with pytest.raises(ValueError, match="the recording has attention; got none"):
        attention_error.judge(Recording(framework="torch"))
