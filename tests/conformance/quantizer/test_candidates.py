"""The tensors of the kit tell apart every two policies that give different scales or codes for any
tensor.
"""

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from fp8ref.conformance import identify_quantizer
from fp8ref.conformance.inputs import dtypes, quantizer_inputs
from fp8ref.conformance.inputs.cast_inputs import CAST_FORMATS
from fp8ref.conformance.kit import subject
from fp8ref.conformance.quantizer import counterexamples, policy_match
from fp8ref.conformance.quantizer import outputs as outputs_of
from fp8ref.conformance.quantizer.candidates import Candidate
from fp8ref.conformance.quantizer.outputs import Quantizer, ScaleLayout
from fp8ref.formats import E4M3FN, Format
from fp8ref.policy import POLICIES
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scales import scales_from_amax
from fp8ref.spec.granularity import GRANULARITIES

SHAPE = (256, 384)
RETURNED = {
    "codes": ("codes",),
    "with scale": ("codes", "scale"),
    "with scale_inv": ("codes", "scale_inv"),
}
ASKED = [
    (fmt, dtype) for fmt in CAST_FORMATS.values() for dtype in ("float32", "bfloat16", "float16")
]
IDS = [f"{fmt}-{dtype}" for fmt, dtype in ASKED]


def tensors(fmt: Format, dtype: str, granularity: str, axis: int) -> Iterator[np.ndarray]:
    """The tensors by which a policy is identified; a tensor for each amax, as rows, under
    tensorwise.
    """
    asked = quantizer_inputs.identifying(fmt, dtype)
    group = quantizer_inputs.groups(SHAPE, granularity, axis)
    if granularity == "tensorwise":
        group = np.repeat(np.arange(asked.amax.size)[:, None], 32, axis=1)
    count = int(group.max()) + 1
    for begin in range(0, asked.amax.size, count):
        parts = asked.largest[begin : begin + count], asked.beside[begin : begin + count]
        missing = count - len(parts[0])
        yield quantizer_inputs.tensor(
            np.pad(parts[0], (0, missing)), np.pad(parts[1], ((0, missing), (0, 0))), group, dtype
        )


def outputs(fmt: Format, dtype: str, granularity: str, axis: int) -> dict[str, dict[str, bytes]]:
    """{policy: {what is returned: its bytes for all tensors}}, every NaN being one."""
    scale_layout = ScaleLayout(
        granularity="rowwise" if granularity == "tensorwise" else granularity, axis=axis
    )
    asked = list(tensors(fmt, dtype, granularity, axis))
    found = {}
    for name, policy in POLICIES.items():
        quantized = [
            Candidate(policy=policy, scale_fmt=fmt, fmt=fmt).quantize(x, scale_layout)
            for x in asked
        ]
        found[name] = {
            "codes": b"".join(cast.canonical_nans(q.codes, fmt).tobytes() for q in quantized)
        }
        for kind in ("scale", "scale_inv"):
            values = np.concatenate([np.reshape(getattr(q, kind), -1) for q in quantized]).astype(
                np.float32
            )
            found[name][kind] = np.where(np.isnan(values), np.float32(np.nan), values).tobytes()
    return found


@functools.cache
def equal_for_all(a: str, b: str, returned: tuple[str, ...], fmt: Format, dtype: str) -> bool:
    """Whether two policies give the same for every amax and element of a dtype of 16 bits.

    Where their scales are equal for an amax and both multiply, or both divide, their codes are.
    Where they are not, every element up to that amax is cast.
    """
    numbers = dtypes.values(np.arange(1 << 15), dtypes.by_name(dtype)).astype(np.float32)
    numbers = numbers[~np.isnan(numbers)]
    scales = [scales_from_amax(numbers, fmt, POLICIES[name]) for name in (a, b)]
    same = {kind: np.equal(*(getattr(s, kind) for s in scales)) for kind in ("scale", "scale_inv")}
    same = {
        kind: equal | (np.isnan(getattr(scales[0], kind)) & np.isnan(getattr(scales[1], kind)))
        for kind, equal in same.items()
    }
    if not all(same[kind].all() for kind in returned if kind != "codes"):
        return False
    divides = {POLICIES[name].stored for name in (a, b)}
    alike = (
        same[divides.pop()]
        if len(divides) == 1 and POLICIES[a].compute == POLICIES[b].compute
        else np.zeros(numbers.size, bool)
    )
    # A power of two may multiply or divide: neither rounds to another code.
    alike |= same["scale"] & same["scale_inv"] & (np.frexp(scales[0].scale)[0] == 0.5)
    differ = numbers[~alike]
    for begin in range(0, differ.size, 64):
        amax = differ[begin : begin + 64, None]
        x = np.concatenate(
            [amax, np.where(numbers <= amax, numbers, np.float32(0))[:, numbers <= amax.max()]],
            axis=1,
        )
        codes = [
            scaling.quantize(x, fmt, granularity="rowwise", policy=name).codes for name in (a, b)
        ]
        if not np.array_equal(*(cast.canonical_nans(c, fmt) for c in codes)):
            return False
    return True


def check(fmt: Format, dtype: str, granularity: str, axis: int) -> None:
    found = outputs(fmt, dtype, granularity, axis)
    for returned in RETURNED.values():
        for a, b in itertools.combinations(found, 2):
            if all(found[a][kind] == found[b][kind] for kind in returned):
                # At a first call a kept scale is 1. In float32 no other two policies are one.
                same = {a, b} == {"te_current", "te_delayed"} or (
                    dtype != "float32" and equal_for_all(a, b, returned, fmt, dtype)
                )
                assert same, (
                    f"{a} and {b} are not told apart by {returned}, from {dtype}, "
                    f"{granularity}, axis {axis}"
                )


@pytest.mark.grid(3)
@pytest.mark.parametrize(("fmt", "dtype"), ASKED, ids=IDS)
def test_all_pairs_of_policies_are_told_apart(fmt, dtype):  # S-16
    check(fmt, dtype, "mx_1x32", -1)  # a small group has few disputed elements


# The axis plays no part where a whole tensor or a square shares a scale.
LAYOUTS = [
    (granularity, axis)
    for granularity, block in GRANULARITIES.items()
    for axis in ((-1,) if granularity == "tensorwise" or block.other == block.reduced else (-1, 0))
    if not granularity.startswith("nvfp4")
]


@pytest.mark.slow
@pytest.mark.parametrize(("granularity", "axis"), LAYOUTS)
@pytest.mark.parametrize(("fmt", "dtype"), ASKED, ids=IDS)
def test_all_pairs_of_policies_for_each_granularity(fmt, dtype, granularity, axis):  # S-16
    check(fmt, dtype, granularity, axis)


def quantizer(policy: str, granularity: str = "mx_1x32"):
    def function(x):
        q = scaling.quantize(x, E4M3FN, granularity=granularity, policy=policy)
        return q.codes, q.scale_inv

    return function


# Pairs that make the same scale_inv: x / s, x * (1 / s).
@pytest.mark.parametrize(
    ("policy", "other"),
    [("deepgemm_cpu", "deepseek_v3"), pytest.param("sglang", "vllm", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "granularity", ["mx_1x32", pytest.param("tensorwise", marks=pytest.mark.slow)]
)
def test_scales_of_another_policy_are_not_enough(policy, other, granularity):  # S-16
    for a, b in ((policy, other), (other, policy)):
        found = identify_quantizer(quantizer(a, granularity), E4M3FN, expect=b)
        assert not found.ok
        assert (found.found["policy"], found.found["same_policies"]) == (a, [])
        assert found.differences


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_passes_as_another(policy):  # S-16
    """All ordered pairs by the answers to one set of tensors, as an expected policy is compared;
    one pair by the whole verdict.
    """
    made = subject.wrap("mine", quantizer(policy), framework="numpy", device="cpu", shape=SHAPE)
    asked = Quantizer(subject=made, dtype="float32")
    responses = outputs_of.ask(
        asked, quantizer_inputs.identifying(E4M3FN, "float32"), SHAPE, "mx_1x32", -1
    )
    scale_layout = outputs_of.identify_returned(responses, "mx_1x32", -1)
    answers = policy_match.Answers(
        quantizer=asked, responses=responses, scale_layout=scale_layout, fmt=E4M3FN, shape=SHAPE
    )
    matched = policy_match.match_policies(answers, None)
    for other in POLICIES:
        found = counterexamples.unexpected_policy(matched, POLICIES[other], E4M3FN, right_cast=True)
        assert bool(found) == (
            policy != other and {policy, other} != {"te_current", "te_delayed"}
        ), other
    names = list(POLICIES)
    following = names[(names.index(policy) + 2) % len(names)]
    assert identify_quantizer(quantizer(policy), E4M3FN, expect=policy).ok
    assert not identify_quantizer(quantizer(policy), E4M3FN, expect=following).ok
