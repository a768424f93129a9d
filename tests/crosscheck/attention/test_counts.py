"""Counts of P and dS that a backend took, next to the simulator's (A-12, Q-13)."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers.attention.attention_cases import call_options

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck.attention import attention
from fp8ref.crosscheck.attention import counts as attention_counts
from fp8ref.spec.attention.variants import VARIANTS, differentiated
from fp8ref.torch.attention import attention as attention_torch
from fp8ref.torch.attention.observer import observe_attention


class Layer(torch.nn.Module):
    """Attention by a variant, observed as a layer's."""

    def __init__(self, variant, **capped):
        super().__init__()
        self.options = call_options(variant=variant, mask=attention.MASK, **capped)

    def forward(self, q, k, v):
        return attention_torch.apply(q, k, v, **self.options)


def passes(variant, tokens=150, **capped):
    """One pass forward and backward whose probabilities range over many binades, of which some are
    lost.
    """
    generator, found = torch.Generator().manual_seed(0), []
    q, k, v = (
        (3 * torch.randn(2, h, tokens, 32, generator=generator)).bfloat16().requires_grad_()
        for h in (4, 2, 2)
    )
    record = attention.recorder("torch", found)
    layer = Layer(variant, **capped)

    def watcher(name, phase, tensors):
        record(
            name,
            phase,
            {
                key: (x if x.dtype in (torch.uint8, torch.int64) else x.float()).numpy()
                for key, x in tensors.items()
            },
        )

    with observe_attention({"layer": layer}, None, watcher):
        layer(q, k, v).float().pow(3).sum().backward()
    return found


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", ["cudnn", "mxfp8", "fa3", "fa4_threshold4"])
def test_counts_are_the_simulators(name):
    variant = VARIANTS[name] if VARIANTS[name].backward else differentiated(name, "bf16")
    found, report = passes(variant), Report()
    assert attention_counts.check(report, found, variant) == (2 if name == "cudnn" else 1)
    assert report.ok, [check.detail for check in report.failures]
    count, saturated, lost = found[0].arrays["p/counts"].tolist()
    assert count == 2 * 4 * 150 * 151 // 2
    assert 0 < lost < count
    assert (saturated > 0) == (name == "fa4_threshold4")


def test_counts_under_a_softcap_and_sinks():
    found, report = (
        passes(VARIANTS["cudnn"], softcap=4.0, sinks=torch.tensor([0.0, 3.0, -2.0, 90.0])),
        Report(),
    )
    assert attention_counts.check(report, found, VARIANTS["cudnn"]) == 2
    assert report.ok, [check.detail for check in report.failures]
    assert report.checks["layer/ds/lost/torch"].compared
    assert found[1].arrays["ds/counts"][2] > 0


@pytest.mark.parametrize(("at", "what"), [(0, "p"), (1, "ds")])
@pytest.mark.parametrize("kind", ["amax", "count", "saturated", "lost"])
def test_a_wrong_count_is_found(at, what, kind, cudnn):
    found, report = list(cudnn), Report()
    arrays = dict(found[at].arrays)
    if kind == "amax":
        arrays[f"{what}/amax"] = np.float32(arrays[f"{what}/amax"] * 1.01)
    else:
        counts = np.array(arrays[f"{what}/counts"])
        counts[attention_counts.COUNTS.index(kind)] += 100
        arrays[f"{what}/counts"] = counts
    found[at] = dataclasses.replace(found[at], arrays=arrays)
    attention_counts.check(report, found, VARIANTS["cudnn"])
    assert [check.name for check in report.failures] == [f"layer/{what}/{kind}/torch"]


@pytest.mark.parametrize(("name", "kind"), [("fa4_threshold4", "saturated"), ("fa3", "lost")])
@pytest.mark.parametrize("by", [100, -100])
def test_a_wrong_count_of_another_variant_is_found(name, kind, by, others):
    found, report = list(others[name]), Report()
    counts = np.array(found[0].arrays["p/counts"])
    counts[attention_counts.COUNTS.index(kind)] += by
    found[0] = dataclasses.replace(found[0], arrays=found[0].arrays | {"p/counts": counts})
    attention_counts.check(report, found, differentiated(name, "bf16"))
    assert [check.name for check in report.failures] == [f"layer/p/{kind}/torch"]


@pytest.fixture(scope="module")
def others():
    return {name: passes(differentiated(name, "bf16")) for name in ("fa4_threshold4", "fa3")}


@pytest.fixture(scope="module")
def cudnn():
    return passes(VARIANTS["cudnn"])


def test_attention_without_fp8_has_no_counts():
    assert (
        attention_counts.check(Report(), [], None)
        == attention_counts.check(Report(), [], VARIANTS["bf16"])
        == 0
    )
