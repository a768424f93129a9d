"""A quantiser beyond the tensors that its policy was told by: other shapes and dtypes, other places of what counts, other strides."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from fp8ref import policy as policy_data
from fp8ref.check.conformance import amaxes, asking, policies, shrink
from fp8ref.check.conformance.asking import Asked, Sharing
from fp8ref.check.conformance.outcome import Finding
from fp8ref.check.conformance.policies import Candidate
from fp8ref.check.conformance.quantized import Quantizer, Reading
from fp8ref.check.conformance.subject import VIEWS, RefusedError
from fp8ref.check.conformance.witness import Witness, bits_of, rounded, show
from fp8ref.policy import ScalePolicy

# K as S-6 asks; one row, a square, rows that no block divides, long rows, more than a million elements
SHAPES = ((1, 128), (3, 256), (128, 128), (131, 128), (7, 8192), (1031, 1152))
_PLANTED = {"the largest": 4.0, "NaN": np.nan, "an infinity": np.inf}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """x float32 [M, K] and, if something was planted in its groups, what, and the flat index of each."""

    x: np.ndarray
    planted: str = ""
    at: np.ndarray | None = None

    def __str__(self) -> str:
        return f"x {list(self.x.shape)}" + (f" in [1, 2), {self.planted} in each group" if self.planted else "")


def hold(quantizer: Quantizer, candidate: Candidate, sharing: Sharing, shape: tuple[int, int]) -> tuple[list[Finding], list[Witness]]:
    """Shapes, strides and dtypes, as far as the first that is unlike; shape is what the dtypes are asked in."""
    findings, found = list[Finding](), list[Witness]()
    for asked in (shapes, strides, functools.partial(dtypes, shape=shape)):
        if not found:
            more, found = asked(quantizer, candidate, sharing)
            findings += more
    return findings, found


def shapes(quantizer: Quantizer, candidate: Candidate, sharing: Sharing) -> tuple[list[Finding], list[Witness]]:
    """Hold tensors of other shapes to the policy that was found, with what counts last in its group and somewhere inside."""
    taken, refused, found, lost = [], [], list[Witness](), list[Witness]()
    for rows, columns in SHAPES:
        shape = (columns, rows) if sharing.axis == 0 else (rows, columns)
        try:
            for tensor in _tensors(shape, sharing, quantizer):
                unlike = _unlike(tensor, quantizer.ask(tensor.x), candidate, sharing, quantizer.dtype)
                if quantizer.subject.framework == "jax" and tensor.planted.startswith("NaN"):  # XLA's max, and nobody's decision
                    lost = lost or unlike
                else:
                    found = found or unlike
        except RefusedError:
            refused.append(shape)
        else:
            taken.append(shape)
    evidence = f"{_listed(taken)}: so too, with the largest, NaN or an infinity last in its group and inside"
    evidence += f"; it raises for {_listed(refused)}" if refused else ""
    said = "not all alike" if found else "all alike"
    findings = [Finding(what="shapes", value=not found, said=said, evidence=str(found[0]) if found else evidence)]
    findings += [Finding(what="NaN inside", value=False, said="lost in some places, as by XLA's max", evidence=str(w)) for w in lost]
    return findings, found


def strides(quantizer: Quantizer, candidate: Candidate, sharing: Sharing) -> tuple[list[Finding], list[Witness]]:
    """Hold tensors that do not lie in memory one element after the other to the same."""
    tensor = next(_tensors((128, 256), sharing, quantizer))
    taken, refused, found = [], [], list[Witness]()
    for view in VIEWS if quantizer.subject.framework != "jax" else ():
        try:
            reading = quantizer.ask(tensor.x, view=view)
        except RefusedError:
            refused.append(view)
            continue
        taken.append(view)
        found = found or [
            replace(w, input=f"{w.input}, {view} in memory") for w in _unlike(tensor, reading, candidate, sharing, quantizer.dtype)
        ]
    return [strides_finding(taken, refused, found)], found


def strides_finding(taken: list[str], refused: list[str], found: list[Witness]) -> Finding:
    said = "not all alike" if found else "all alike" if taken else "not taken" if refused else "not asked"
    evidence = f"{', '.join(taken)}: as contiguous" if taken else "" if refused else "jax has none"
    evidence += f"{'; ' * bool(taken)}it raises for {', '.join(refused)}" if refused else ""
    return Finding(what="strides", value=not found, said=said, evidence=str(found[0]) if found else evidence)


def dtypes(quantizer: Quantizer, candidate: Candidate, sharing: Sharing, shape: tuple[int, int]) -> tuple[list[Finding], list[Witness]]:
    """From bfloat16 and float16: by the same policy, or by one that differs in what it computes in alone (S-13)."""
    findings, found = [], []
    for dtype in ("bfloat16", "float16"):
        if dtype == quantizer.dtype:
            continue
        other = replace(quantizer, dtype=dtype)
        try:
            other.once(np.ones(shape, np.float32))
            asked = asking.ask(other, amaxes.questions(candidate.fmt, dtype), shape, sharing.granularity, sharing.axis)
        except RefusedError as error:
            findings.append(Finding(what=f"from {dtype}", value=None, said="not taken", evidence=str(error)))
            continue
        alike = [p for p in policy_data.POLICIES.values() if _decisions(p) == _decisions(candidate.policy)]
        held = [
            policies.agreement(replace(candidate, policy=p), asked, sharing) for p in sorted(alike, key=lambda p: p != candidate.policy)
        ]
        agreed = [a for a in held if a.both[asking.ordinary(asked) if quantizer.memory else slice(None)].all()]
        if agreed:
            findings.append(
                Finding(
                    what=f"from {dtype}",
                    value=agreed[0].candidate.policy.name,
                    evidence=f"{agreed[0].both.size} groups are as by it",
                )
            )
            continue
        wrong = _unlike_of(asked, held[0].both, candidate, sharing, dtype)
        findings.append(Finding(what=f"from {dtype}", value=None, said="something else", evidence=str(wrong[0])))
        if dtype == "bfloat16" or candidate.policy.stored == "scale":  # of quotients in float16 no policy speaks (S-13)
            found += wrong
    return findings, found


def _decisions(policy: ScalePolicy) -> dict[str, Any]:
    """All but what it is called and computes in."""
    return {f.name: getattr(policy, f.name) for f in fields(policy) if f.name not in ("name", "compute")}


def _tensors(shape: tuple[int, int], sharing: Sharing, quantizer: Quantizer) -> Iterator[Tensor]:
    """One of random numbers of few bits, whose products with a scale are ties too; then with something planted in each group."""
    rng = np.random.default_rng(0)
    random = (rng.standard_normal(shape) * 2.0 ** rng.integers(-4, 5, shape)).astype(np.float32)
    yield Tensor(x=rounded(rounded(random, "bfloat16"), quantizer.dtype))
    group = amaxes.groups(shape, sharing.granularity, sharing.axis).reshape(-1)
    order = np.argsort(group, kind="stable")
    last = np.searchsorted(group[order], np.arange(group.max() + 1), side="right") - 1
    size = np.bincount(group)
    inside = order[last - (size * rng.uniform(0, 1, size.size)).astype(np.int64)]
    for name, value in _PLANTED.items():
        if quantizer.memory and not np.isfinite(value):  # what it keeps then one call cannot tell
            continue
        for where, at in (("last", order[last]), ("inside", inside)):
            x = (1 + rng.integers(0, 8, shape) / 8).astype(np.float32)
            x.reshape(-1)[at] = value
            yield Tensor(x=x, planted=f"{name} {where}", at=at)


def _unlike(tensor: Tensor, reading: Reading, candidate: Candidate, sharing: Sharing, dtype: str) -> list[Witness]:
    """The first element of a tensor whose code, or whose group's scale, is not the candidate's."""
    x = tensor.x
    group = amaxes.groups(x.shape, sharing.granularity, sharing.axis)
    none = np.zeros(int(group.max()) + 1, np.float32)
    asked = Asked(x=x, group=group, kind=np.zeros(none.size, np.int64), largest=none, reading=reading)
    expected = candidate.quantize(x, sharing)
    scales = policies.agreement(candidate, [asked], sharing).scales
    differs = policies.unlike(reading, expected, candidate)
    differs |= False if scales is None else ~scales[group]
    if not differs.any():
        return []
    at = np.unravel_index(int(np.argmax(differs)), x.shape)
    place = "" if tensor.at is None else f" as {_named(tensor.at[group[at]], x)}"
    got = {name: asking.per_group(asked, name, sharing)[group[at]] for name in sharing.kinds}
    shown = shrink.shown(reading, at, got, expected, group[at], sharing)
    return [
        Witness(
            input=f"x{_index(at)} = {show(x[at])} of {tensor}{place}",
            bits=(bits_of(x[at], dtype),),
            dtype=dtype,
            got=shown[0] + _as_without(tensor, candidate, sharing, group[at], got),
            expected=f"{shown[1]} by {candidate.policy.name}",
            clause="S-2, S-5, S-6",
        )
    ]


def _as_without(tensor: Tensor, candidate: Candidate, sharing: Sharing, group: int, got: Mapping[str, float]) -> str:
    """Whether the scale is that of the group without what was planted in it, in words."""
    name = sharing.scale
    if tensor.at is None or name is None:
        return ""
    x = tensor.x.copy()
    x.reshape(-1)[tensor.at] = 0
    without = np.reshape(getattr(candidate.quantize(x, sharing), sharing.kinds[name]), -1)[group]
    return f" (as without x{_index(np.unravel_index(tensor.at[group], x.shape))})" if without == got[name] else ""


def _unlike_of(asked: list[Asked], right: np.ndarray, candidate: Candidate, sharing: Sharing, dtype: str) -> list[Witness]:
    """Of the first question that was answered otherwise."""
    begin = 0
    for a in asked:
        wrong = ~right[begin : begin + a.amax.size]
        begin += a.amax.size
        if wrong.any():
            return _unlike(Tensor(x=a.x), a.reading, candidate, sharing, dtype)
    return []


def _named(at: int, x: np.ndarray) -> str:
    index = np.unravel_index(at, x.shape)
    return f"x{_index(index)} = {show(x[index])}"


def _index(at: tuple) -> list[int]:
    return [int(i) for i in at]


def _listed(shapes: list[tuple[int, int]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
