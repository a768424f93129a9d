"""The choice of a backward pass, and what it makes of sums over tiles (spec A-14 to A-16, A-25).

The values of each pass are in parity/test_attention_torch.py.
"""

import dataclasses
from unittest import mock

import pytest
import torch
from helpers.processes.ranks import run
from torch import distributed

from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import Mask, differentiated
from fp8ref.torch.attention import attention, real
from fp8ref.torch.attention.gradients import fast, gradients, mx, stated
from fp8ref.torch.attention.gradients.parts import Raw, Sums
from fp8ref.torch.attention.operands.kept import Kept, Tally
from fp8ref.torch.quantize import cast
from fp8ref.torch.quantize.scales import Scales

PASSES = {"real": (real, "backward"), "fast": (fast, "run"), "stated": (stated, "run")} | {
    "mx": (mx, "run")
}
CAUSAL = Mask(causal=True)
ROLES = ("dq", "dk", "dv")


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, 40, 32, generator=generator).bfloat16() for heads in (4, 2, 2, 4)]


def arguments(variant, arithmetic="fast", scales=None, sinks=None):
    """do, what the forward pass saved, and the problem, as ``attention.backward`` passes them."""
    *qkv, do = inputs()
    call = Call(variant=variant, mask=CAUSAL, arithmetic=arithmetic)
    result = attention.forward(*qkv, variant=call, sinks=sinks)
    with mock.patch.object(gradients, "gradients", wraps=gradients.gradients) as called:
        attention.backward(do, *qkv, result, variant=call, scales=scales)
    return called.call_args.args


def sums_of(*given, module=fast, **options):
    """The gradients, and the sums over tiles that they are made of."""
    recorded = []

    def recording(*args, original=module.run, **how):
        recorded.append(original(*args, **how))
        return recorded[-1]

    with mock.patch.object(module, "run", recording):
        found = gradients.gradients(*given, **options)
    (sums,) = recorded
    return found, sums


@pytest.mark.parametrize(
    ("variant", "arithmetic", "expected"),
    [
        ("exact", "fast", "real"),
        ("cudnn", "fast", "fast"),
        ("cudnn", "stated", "stated"),
        ("mxfp8", "fast", "mx"),
        (differentiated("mxfp8", "bf16"), "fast", "fast"),
        (differentiated("fa4", "bf16"), "stated", "stated"),
    ],
    ids=str,
)
def test_each_variant_has_its_pass(variant, arithmetic, expected):
    given = arguments(variant, arithmetic)
    called = []
    for name, (module, function) in PASSES.items():
        original = getattr(module, function)

        def counted(*args, original=original, name=name, **how):
            called.append(name)
            return original(*args, **how)

        with mock.patch.object(module, function, counted):
            gradients.gradients(*given, report="all")
    assert called == [expected]


def test_gradients_in_high_precision_are_rounded_once():  # A-15, step 10
    do, saved, problem = arguments("bf16")
    found, sums = sums_of(do, saved, problem, report="all")
    for role, raw in sums.raw._asdict().items():
        assert torch.equal(getattr(found, role), raw.bfloat16().float()), role
        assert found.amaxes[role] == raw.abs().max()  # before it is rounded
    assert found.amaxes["do"] == do.abs().max()
    assert found.amaxes["ds"] == sums.ds.largest > 0
    assert list(found.tensors) == ["do"]


def test_gradients_in_fp8_are_their_codes_times_a_scale():  # A-15, step 10
    do, saved, problem = arguments("cudnn")
    found, sums = sums_of(do, saved, problem, report="all")
    for role, raw in sums.raw._asdict().items():
        tensor = found.tensors[role]
        assert tensor.codes.dtype.itemsize == 1
        expected = cast.decode(tensor.codes, problem.variant.out) * tensor.scale_inv
        assert torch.equal(getattr(found, role), expected), role
        assert found.amaxes[role] == raw.abs().max()


@pytest.mark.parametrize("variant", ["bf16", "cudnn", "exact"])
def test_a_report_changes_no_gradient(variant):
    given = arguments(variant)
    every, amaxes, nothing = (
        gradients.gradients(*given, report=report) for report in ("all", "amaxes", "nothing")
    )
    for role in ROLES:
        assert torch.equal(getattr(nothing, role), getattr(every, role)), role
    assert amaxes.amaxes == every.amaxes
    assert min(every.amaxes.values()) > 0
    # scales in FP8 need amaxes
    unknown = {"bf16": {"dq", "dk", "dv"}, "cudnn": set(), "exact": set(every.amaxes)}[variant]
    assert all(not nothing.amaxes.get(role, 0) for role in unknown)


def test_elements_that_casts_clip_are_counted_in_a_whole_report():
    given = arguments("cudnn", scales={"ds": torch.tensor(2.0**20)})
    every, amaxes = (gradients.gradients(*given, report=report) for report in ("all", "amaxes"))
    assert every.saturated_ds > 0
    assert every.saturated >= every.saturated_ds
    assert (amaxes.saturated, amaxes.saturated_ds) == (0, 0)
    assert torch.equal(amaxes.dq, every.dq)
    assert every.scale_ds.scale == 2**20


def test_matrices_are_kept_for_who_asks():
    given = arguments("cudnn")
    assert gradients.gradients(*given, report="nothing").matrices == {}
    kept = gradients.gradients(*given, report="nothing", keep=("ds", "ds_codes")).matrices
    assert {name: tuple(x.shape) for name, x in kept.items()} == {
        "ds": (1, 4, 40, 40),
        "ds_codes": (1, 4, 40, 40),
    }
    assert not kept["ds"].triu(1).any()  # no query sees a later key
    assert kept["ds"].any()


def test_sinks_alone_have_their_gradient():
    assert gradients.gradients(*arguments("bf16"), report="nothing").dsinks is None
    dsinks = gradients.gradients(*arguments("bf16", sinks=torch.ones(4)), report="nothing").dsinks
    assert dsinks.shape == (4,)
    assert dsinks.all()


def test_the_pass_in_bfloat16_takes_the_output_and_the_log_sums_of_the_other():
    *qkv, do = inputs()
    low = differentiated("fa4", "bf16")
    result = attention.forward(*qkv, variant=low, mask=CAUSAL)
    found = attention.backward(do, *qkv, result, variant=low, mask=CAUSAL)
    own = attention.forward(*qkv, variant="bf16", mask=CAUSAL)
    by_own = attention.backward(do, *qkv, own, variant="bf16", mask=CAUSAL)
    mixed = own._replace(o=result.o, lse=result.lse)
    expected = attention.backward(do, *qkv, mixed, variant="bf16", mask=CAUSAL)
    for role in ROLES:
        assert torch.equal(getattr(found, role), getattr(expected, role)), role
    assert not torch.equal(found.dq, by_own.dq)


def test_what_is_in_bfloat16_is_not_copied():
    x = torch.tensor([1.0, 1 + 2**-9])
    assert gradients.in_bf16(x).tolist() == [1, 1]
    assert gradients.in_bf16(x.bfloat16()).dtype == torch.bfloat16
    assert gradients.in_bf16(same := x.bfloat16()) is same


def gradient_of_keys(terms):
    """dk of a rank that has a third of the keys, where each rank's term is one of terms."""
    do, saved, problem = arguments("bf16")
    call = dataclasses.replace(problem.call, context="0")
    problem = dataclasses.replace(
        problem, call=call, shape=dataclasses.replace(problem.shape, keys=120)
    )
    keys = torch.full((1, 2, 120, 32), terms[distributed.get_rank()])
    unit = torch.ones(())
    tallies = [Tally(problem.variant.fmt, "nothing", do.device) for _ in range(2)]
    raw = Raw(torch.zeros(do.shape), keys, 2 * keys)
    sums = Sums(raw, saved.lse, *tallies, Scales(unit, unit), Kept((), (), do.device))
    with mock.patch.object(fast, "run", return_value=sums):
        found = gradients.gradients(do, saved, problem, report="nothing")
    return tuple(found.dk.shape), found.dk.unique().tolist(), found.dv.unique().tolist()


def test_ranks_add_the_gradients_of_a_ranks_keys_in_their_order():  # P-26
    """(2^24 + 1) rounds to 2^24: from the back the sum would be 1."""
    assert run(3, gradient_of_keys, [2.0**24, 1.0, -(2.0**24)]) == [((1, 2, 40, 32), [0], [0])] * 3
