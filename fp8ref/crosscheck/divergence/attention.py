"""Explain why two backends differ in a value of attention by a variant (spec A, B-10)."""

from typing import Any

import numpy as np

from fp8ref.crosscheck.attention import attention
from fp8ref.crosscheck.attention.attention import MASK, SYMBOLS, AttentionPass
from fp8ref.crosscheck.divergence.report import Reason, fault
from fp8ref.crosscheck.divergence.step_values import Value
from fp8ref.crosscheck.operands import States
from fp8ref.formats import BFLOAT16
from fp8ref.sim.attention import attention as simulator
from fp8ref.sim.attention.gradients import gradients as attention_gradients
from fp8ref.sim.gemm import hardware
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import GRADIENT_ROLES, ROLES, Variant, differentiated
from fp8ref.spec.hardware import Multiply
from fp8ref.train.config.sections import NumericsConfig

WHAT = {symbol: what for what, symbol in SYMBOLS.items()}
"""{symbol: its name in ``attention.products.SHOWN``}."""


def explain(
    a: Value,
    b: Value,
    names: tuple[str, str],
    numerics: tuple[NumericsConfig, NumericsConfig],
    multiply: tuple[Multiply | None, ...],
    states: States,
) -> Reason:
    """Why A's and B's value of attention differ.

    Scales and codes of q, k, v and dO are defined, and so is all of the stated form under one
    simulated hardware: a backend that differs from the simulator is at fault. All else is held to
    the exact result of its own equal operands (A-18).
    """
    what = WHAT.get(a.role, a.role)
    forms = [one.attention_arithmetic for one in numerics]
    keys = ("attention", "attention_scaling", "attention_backward")
    choices = [tuple(getattr(one, key) for key in keys) for one in numerics]
    if choices[0] != choices[1]:
        a_has, b_has = (
            f"{variant!r} with {scaling} scales and the backward pass {backward!r}"
            for variant, scaling, backward in choices
        )
        return Reason(
            ("A-1", "A-12", "A-25"),
            f"numerics.attention, its scaling or backward pass differ: {a_has}, and {b_has}",
        )
    assert numerics[0].attention is not None
    variant = differentiated(numerics[0].attention, numerics[0].attention_backward)
    if a.part == "value" and what in ("q", "k", "v", "do"):
        return _input_reason(what)
    if what in attention.QUANTIZED:
        return _cast_reason(a, b, what, names, variant, states)
    if a.part == "scale" and (what == "p" or f"{a.layer}/{what}" in states):
        return fault(f"the scale of {a.role} is a state's or a constant (A-8, H-1): a fault")
    # multiplied by the hardware
    uses_codes = variant.fmt.bits == 8 and (a.phase == "forward" or variant.backward == "cast")
    alike = None not in multiply and multiply[0] == multiply[1]
    if uses_codes and forms == ["stated", "stated"] and alike:
        return _bits_reason(a, b, what, names, variant, multiply[0], states)
    if what == "p":
        return _probability_reason(a, b, " and ".join(dict.fromkeys(forms)))
    if a.part != "value":
        return Reason(
            ("A-18",),
            f"it is made of the amax of {a.role}, whose elements are sums in the library's order",
        )
    return _sum_reason(a, b, what, names, variant)


def _probability_reason(a: Value, b: Value, form: str) -> Reason:
    """Of codes of P; form: of the arithmetic."""
    equal = "q, k and the log-sum-exp are of equal operands"
    if a.phase == "forward":
        equal = "scores are equal"
    if attention.neighbors(np.asarray(a.value), np.asarray(b.value)):
        return Reason(
            ("A-5", "A-18"),
            f"{equal}; exponentials of the {form} form may differ by two units in the last "
            "place, and codes by one",
        )
    return fault(f"{equal}, but codes of P are more than neighbors (A-5, A-18): a fault")


def _sum_reason(a: Value, b: Value, what: str, names: tuple[str, str], variant: Variant) -> Reason:
    """Of sums, whose order is the library's: each within A-18's bound, or a fault."""
    distances = []
    for v in (a, b):
        right = attention.exact(what, *_pair(v.passes), variant)
        if right is None:
            return Reason(
                ("A-18",),
                f"all before it is equal; {a.role} of variant {variant.name!r} has no bound here: "
                "not all of its operands are shown, or its scores are not those of base e",
            )
        distances.append(attention.distance(np.asarray(v.value), right))
    shown = " and ".join(f"{name} at {u:.2g}" for name, u in zip(names, distances, strict=True))
    operands = f"the operands of {a.role} are equal"
    if not max(distances) <= 1:
        return fault(
            f"{operands}, but the bound of A-18 is exceeded ({shown} of "
            "the bound): a fault of attention"
        )
    return Reason(
        ("G-7", "A-18"),
        f"{operands}; the sum's order is the library's. Distances from the exact result in "
        f"units of A-18's bound: {shown}",
    )


def _input_reason(what: str) -> Reason:
    if what == "do":
        return fault(
            "M-3 states where the forward pass rounds; none states where "
            "the backward pass rounds between GEMMs"
        )
    if what == "v":
        return fault("the output of v_proj is v itself, if it was observed")
    return Reason(
        ("M-3",),
        f"the projection is equal, if it was observed. The rotary embedding of {what} is a "
        "float32 sum, rounded once: its parts may round apart",
    )


def _cast_reason(
    a: Value, b: Value, what: str, names: tuple[str, str], variant: Variant, states: States
) -> Reason:
    wrong, state = [], states.get(f"{a.layer}/{what}")
    for name, v in zip(names, (a, b), strict=True):
        one = v.passes[-1]
        right = attention.simulated(what, one, variant, None if state is None else state.stored)
        sim_array = np.asarray(right.scale if a.part == "scale" else right.codes)
        off = int((sim_array != np.asarray(v.value).reshape(sim_array.shape)).sum())
        wrong += [f"{name}'s ({off} of {sim_array.size})"] if off else []
    clauses, of = "A-2, C-1, C-2, S-5", "values and scale are"
    if a.part == "scale":
        clauses, of = "A-2, S-2, S-9", "values are"
    return fault(
        f"its {of} equal, and {clauses} define every bit of its "
        f"{a.part}; different from the simulator's: {' and '.join(wrong)}: a fault"
    )


def _bits_reason(
    a: Value,
    b: Value,
    what: str,
    names: tuple[str, str],
    variant: Variant,
    multiply,
    states: States,
) -> Reason:
    """Of the stated form under simulated hardware every bit is defined."""
    right = _simulated(a, what, hardware.attending(variant, multiply), states)
    off = [
        f"{name}'s ({int((np.asarray(v.value) != right).sum())} of {right.size})"
        for name, v in zip(names, (a, b), strict=True)
        if not np.array_equal(np.asarray(v.value), right)
    ]
    return fault(
        "all before it is equal, and the stated form under "
        f"{multiply.name} defines every bit (A-4 to A-15, G-19); different from the "
        f"simulator's: {' and '.join(off) or 'none'}: a fault"
    )


def _simulated(v: Value, what: str, variant: Variant, states: States) -> np.ndarray:
    forward, backward = _pair(v.passes)
    scales = {
        name.rpartition("/")[2]: state.stored
        for name, state in states.items()
        if name.startswith(f"{v.layer}/")
    }
    forward_scales = {role: scale for role, scale in scales.items() if role in ROLES}
    backward_scales = {role: scale for role, scale in scales.items() if role in GRADIENT_ROLES}
    q, k, v_values = map(forward.tensor, "qkv")
    call = Call(
        variant=variant, mask=MASK, softcap=forward.softcap, keep_p=True, keep_s=True, keep_ds=True
    )
    result = simulator.forward(
        q, k, v_values, variant=call, scales=forward_scales, sinks=forward.sinks
    )
    if v.phase == "forward":
        assert result.scores is not None
        assert result.p_codes is not None
        o = result.tensors.get("o")
        arrays: dict[str, Any] = {
            "s/value": result.scores,
            "p/scale": result.scale_p,
            "p/codes": result.p_codes,
            "o/value": cast.round_to(result.o, BFLOAT16),  # the model's
        }
        arrays |= {} if o is None else {"o/scale": o.scale, "o/codes": o.codes}
        return np.asarray(arrays[f"{what}/{v.part}"])
    assert backward is not None
    gradients = attention_gradients.backward(
        backward.tensor("do"), q, k, v_values, result, variant=call, scales=backward_scales
    )
    matrices = gradients.matrices
    arrays = {
        "p/codes": matrices["p_codes"],
        "ds/value": matrices["ds"],
        "ds/scale": gradients.scale_ds.scale,
        "ds/codes": matrices["ds_codes"],
    }
    for role in ("dq", "dk", "dv"):
        arrays[f"{role}/value"] = getattr(gradients, role)
        if role in gradients.tensors:
            arrays |= {
                f"{role}/scale": gradients.tensors[role].scale,
                f"{role}/codes": gradients.tensors[role].codes,
            }
    return np.asarray(arrays[f"{what}/{v.part}"])


def _pair(passes: tuple[AttentionPass, ...]) -> tuple[AttentionPass, AttentionPass | None]:
    """The forward pass of a layer, and its backward pass if it was reached."""
    return passes[0], passes[1] if len(passes) > 1 else None
