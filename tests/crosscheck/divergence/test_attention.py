"""The first value of attention in which two trainings differ, planted, and why (spec A, B-10)."""

from unittest import mock

import pytest
import torch

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck.divergence import live
from fp8ref.shared.errors import ConfigError
from fp8ref.torch.attention import output as attention_forward
from fp8ref.torch.attention.fast import output as attention_fast
from fp8ref.torch.attention.fast.operands import Layout
from fp8ref.torch.attention.gradients import fast as attention_fast_gradients
from fp8ref.torch.attention.gradients import parts
from fp8ref.torch.attention.operands import operands as attention_operands
from fp8ref.torch.quantize.scales import Scales
from fp8ref.train import loop
from fp8ref.train.data import loader

LAYER = "model.layers.0.self_attn"


@pytest.fixture
def config(small):
    return small.replace(numerics={"recipe": "tensorwise", "attention": "cudnn"})


@pytest.fixture
def planted(monkeypatch):
    """plant(owner, name, replacement): in the second of two trainers a function is another, made of
    the original.
    """

    def plant(owner, name, replacement):
        made, original = [], loop.trainer

        def trainer(*args):
            made.append(original(*args))
            if len(made) == 2:
                patch = mock.patch.object(owner, name, replacement(getattr(owner, name)))
                run = made[-1]._step.backward
                made[-1]._step.backward = lambda tokens: [patch.start(), run(tokens), patch.stop()][
                    1
                ]
            return made[-1]

        monkeypatch.setattr(loop, "trainer", trainer)

    return plant


def larger(original, factor=1.5):
    return lambda *args, **kwargs: original(*args, **kwargs) * factor


def of_tuple(at: int, factor: float):
    """The original, whose result has one tensor multiplied."""

    def replacement(original):
        def changed(*args, **kwargs):
            found = list(original(*args, **kwargs))
            found[at] = found[at] * factor
            return Scales(*found)

        return changed

    return replacement


def quantized_by(role: str, change):
    """``attention_operands.quantize`` with one tensor changed."""

    def replacement(original):
        def changed(*args, **kwargs):
            found = original(*args, **kwargs)
            return found | {role: change(found[role])}

        return changed

    return replacement


def next_code(x):
    codes = x.codes.view(torch.uint8).clone()
    codes[1, 0, 3, 2] ^= 1
    return x._replace(codes=codes.view(x.codes.dtype))


FAULTS = {
    "scale of q": (
        (
            attention_operands,
            "quantize",
            quantized_by(
                "q", lambda x: x._replace(scale=x.scale * 1.5, scale_inv=x.scale_inv / 1.5)
            ),
        ),
        ("forward", "q", "scale"),
    ),
    "code of v": (
        (attention_operands, "quantize", quantized_by("v", next_code)),
        ("forward", "v", "codes"),
    ),
    "scores": ((Layout, "scores", larger), ("forward", "S", "value")),
    "scale of P": (
        (attention_operands, "probability_scale", of_tuple(0, 0.75)),
        ("forward", "P", "scale"),
    ),
    "denominator": ((attention_fast, "_inverse", larger), ("forward", "O", "value")),
    "dO": (
        (parts, "quantized_do", lambda f: lambda *a, **k: next_code(f(*a, **k))),
        ("backward", "dO", "codes"),
    ),
    "dS": (
        (attention_fast_gradients.Pass, "_grad_probabilities", larger),
        ("backward", "dS", "value"),
    ),
    "dV": (
        (
            attention_fast_gradients.Pass,
            "raw",
            lambda f: lambda *a: (r := f(*a))._replace(dv=r.dv * 1.25),
        ),
        ("backward", "dV", "value"),
    ),
}


@pytest.mark.grid(3)
@pytest.mark.parametrize("fault", FAULTS)
# B-10
def test_a_planted_fault_is_located_and_named(fault, config, planted):
    (owner, name, replacement), place = FAULTS[fault]
    planted(owner, name, replacement)
    first = live.compare_backends(config, "torch", "torch", steps=1).first
    assert (first.step, first.layer) == (0, LAYER)
    assert (first.phase, first.role, first.part) == place
    assert first.reason.clauses == ()
    assert first.reason.text.startswith("no clause explains it: ")
    assert ": a fault" in first.reason.text


def last_bit(original):
    """The original's sums, each moved by one unit in the last place."""

    def moved(*args, **kwargs):
        found = original(*args, **kwargs)
        return torch.nextafter(found, torch.full_like(found, torch.inf))

    return moved


def sides(*configs) -> list[live.Side]:
    return [
        live.Side(
            name=name,
            config=each,
            trainer=loop.trainer("torch", each),
            batches=loader.open_batches(each),
        )
        for name, each in zip("ab", configs, strict=True)
    ]


@pytest.mark.parametrize("accumulate", [None, "hopper"])
# A-18, G-7, G-19
def test_the_order_of_a_sum_is_the_librarys_but_under_simulated_hardware(
    accumulate, config, monkeypatch
):
    config = config.replace(numerics={"attention_arithmetic": "stated", "accumulate": accumulate})
    a, b = sides(config, config)
    run, original = b.trainer._step.backward, attention_forward.scores

    def backward(tokens):
        with mock.patch.object(attention_forward, "scores", last_bit(original)):
            return run(tokens)

    monkeypatch.setattr(b.trainer._step, "backward", backward)
    # Such a step leaves no trace in its result: all its values are looked at.
    first = live._first_in_step(a, b, a.batches.step(0), 0, Report())
    assert (first.layer, first.phase, first.role, first.part) == (LAYER, "forward", "S", "value")
    assert first.reason.clauses == (() if accumulate else ("G-7", "A-18"))
    assert ("under hopper defines every bit" in first.reason.text) == bool(accumulate)
    assert ("different from the simulator's: b's (" in first.reason.text) == bool(accumulate)


def test_numbers_without_codes_have_no_stated_bits_here(config, monkeypatch):  # B-10
    """Variants in bfloat16, whose probabilities have no codes, are explained too."""
    config = config.replace(
        numerics={"attention": "bf16", "attention_arithmetic": "stated", "accumulate": "hopper"}
    )
    a, b = sides(config, config)
    run, original = b.trainer._step.backward, attention_forward.scores

    def backward(tokens):
        with mock.patch.object(attention_forward, "scores", last_bit(original)):
            return run(tokens)

    monkeypatch.setattr(b.trainer._step, "backward", backward)
    first = live._first_in_step(a, b, a.batches.step(0), 0, Report())
    assert (first.layer, first.phase, first.role, first.part) == (LAYER, "forward", "S", "value")
    assert first.reason.clauses == ("A-18",)
    assert "has no bound here" in first.reason.text


def test_a_kernel_is_refused(by_kernel):
    with pytest.raises(
        ConfigError,
        match=r"takes attention by tiles; got parallel.attention 'kernel', which shows nothing. "
        r"Set it to tiles",
    ):
        live.compare_backends(by_kernel, "torch", "torch", steps=1)


def test_another_variant_is_named(config):
    a, b = sides(config, config.replace(numerics={"attention": None}))
    first = live.find_divergence(a, b, Report(), start=0, stop=1)
    assert (first.layer, first.phase, first.role) == (LAYER, "forward", "q")
    assert first.reason.clauses == ("A-1",)
