"""Passes of attention that a backend ran, next to the simulator's codes and the exact result (A-2,
A-18).
"""

import dataclasses

import numpy as np
import pytest
import torch
from helpers.attention.attention_cases import call_options

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck.attention import attention
from fp8ref.spec.attention.products import SHOWN
from fp8ref.spec.attention.variants import VARIANTS
from fp8ref.torch.attention import attention as attention_torch
from fp8ref.torch.attention.observer import observe_attention


class Layer(torch.nn.Module):
    """Attention by a variant, observed as a layer's."""

    def __init__(self, variant, arithmetic, **capped):
        super().__init__()
        how = {"variant": variant, "mask": attention.MASK, "arithmetic": arithmetic}
        self.options = call_options(**how, **capped)

    def forward(self, q, k, v):
        return attention_torch.apply(q, k, v, **self.options)


def passes(variant="cudnn", arithmetic="fast", size=1.0, tokens=150, **capped):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        (size * torch.randn(2, h, tokens, 32, generator=generator)).bfloat16().requires_grad_()
        for h in (4, 2, 2)
    )
    layer, found = Layer(variant, arithmetic, **capped), []
    record = attention.recorder("torch", found)

    def watcher(name, phase, tensors):
        record(
            name,
            phase,
            {
                key: (x if x.dtype == torch.uint8 else x.float()).numpy()
                for key, x in tensors.items()
            },
        )

    with observe_attention({"layer": layer}, None, watcher):
        layer(q, k, v).float().pow(3).sum().backward()
    return found


@pytest.mark.grid(2)
@pytest.mark.parametrize("arithmetic", ["fast", "stated"])
@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize("variant", ["cudnn", "mxfp8"])
#
def test_codes_are_the_simulators_and_all_else_lies_within_its_bound(variant, size, arithmetic):
    forward, backward = passes(variant, arithmetic, size)
    report = Report()
    assert attention.check_codes(report, (forward, backward), VARIANTS[variant]) == 4
    assert all(check.ok for check in report.checks.values())
    for one in (forward, backward):
        for what in set(SHOWN[one.phase]) & {"s", "o", "dv", "ds", "dk", "dq"}:
            right = attention.exact(what, forward, backward, VARIANTS[variant])
            if variant == "mxfp8" and what not in ("s", "o"):
                assert right is None
                continue
            distance = attention.distance(one.arrays[f"{what}/value"], right)
            # An output's bound is mostly one unit of its format, of which rounding to nearest takes
            # up to a half.
            assert 0 < distance < 0.6, what


SINKS = torch.tensor([-9.0, 1.0, 40.0, 300.0])
"""Sinks below all maxima, among them, above them, and so far above that the keys leave nothing
(A-23).
"""


@pytest.mark.grid(3)
@pytest.mark.parametrize("arithmetic", ["fast", "stated"])
@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize(
    "capped",
    [{"softcap": 3.0}, {"sinks": SINKS}, {"softcap": 50.0, "sinks": SINKS}],
    ids=["softcap", "sinks", "both"],
)
def test_softcaps_and_sinks_are_in_the_exact_results(capped, size, arithmetic):
    forward, backward = passes("cudnn", arithmetic, size, **capped)
    found = {
        what: attention.exact(what, forward, backward, VARIANTS["cudnn"])
        for what in ("s", "o", "dv", "ds", "dk", "dq")
    }
    for what, right in found.items():
        one = forward if what in ("s", "o") else backward
        assert 0 < attention.distance(one.arrays[f"{what}/value"], right) < 0.6, what
    assert "sinks" not in capped or not forward.arrays["o/value"][:, 3].any()
    # With half of the softcap, or other sinks, the results lie beyond the bound.
    for name, changes in (
        ("softcap", {"softcap/value": np.float32(capped.get("softcap", 0) / 2)}),
        ("sinks", {"sinks/value": -SINKS.numpy()}),
    ):
        if name in capped:
            wrong = dataclasses.replace(forward, arrays={**forward.arrays, **changes})
            for what in ("s", "ds") if name == "softcap" else ("o", "ds"):
                one = forward if what in ("s", "o") else backward
                assert (
                    attention.distance(
                        one.arrays[f"{what}/value"],
                        attention.exact(what, wrong, backward, VARIANTS["cudnn"]),
                    )
                    > 1
                ), what


@pytest.mark.parametrize(
    ("what", "by"),
    [("s", 2.0**-18), ("o", 0.1), ("ds", 2.0**-10), ("dq", 0.1), ("dk", 0.1), ("dv", 0.1)],
)
def test_a_small_error_is_beyond_the_bound(what, by):
    forward, backward = passes()
    one = forward if what in ("s", "o") else backward
    right = attention.exact(what, forward, backward, VARIANTS["cudnn"])
    changed = one.arrays[f"{what}/value"].copy()
    largest = np.unravel_index(
        np.nanargmax(np.where(np.isfinite(changed), np.abs(changed), np.nan) / right.bound),
        changed.shape,
    )
    changed[largest] += by * abs(changed[largest]) + right.bound[largest]
    assert attention.distance(changed, right) > 1


def test_a_wrong_code_and_a_wrong_scale_are_found():
    forward, _ = passes()
    codes = forward.arrays["k/codes"].copy()
    codes[0, 0, 0, 0] ^= 1
    wrong = dataclasses.replace(
        forward, arrays=dict(forward.arrays) | {"k/codes": codes, "v/scale": np.float32(3)}
    )
    report = Report()
    attention.check_codes(report, [wrong], VARIANTS["cudnn"])
    assert {name for name, check in report.checks.items() if not check.ok} == {
        "layer/k/codes/torch",
        "layer/v/scale/torch",
    }


def test_neighbors_are_codes_of_neighboring_probabilities():
    a = np.array([0, 1, 120], np.uint8)
    assert attention.neighbors(a, np.array([1, 0, 119], np.uint8))
    assert not attention.neighbors(a, np.array([2, 1, 120], np.uint8))
