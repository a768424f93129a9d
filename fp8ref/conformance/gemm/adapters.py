"""A function of framework arrays as a ``ScaledGemm``: codes and scales in, a matrix out."""

import dataclasses
import inspect
import itertools
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

from fp8ref.conformance.decoder.subject import CODES_AS, scale_array, scale_format
from fp8ref.conformance.gemm.scaled_gemm import ProbeError, RefusedError, ScaledGemm
from fp8ref.conformance.kit import arrays, subject
from fp8ref.formats import E4M3FN, Format
from fp8ref.shared import registry
from fp8ref.shared.errors import one_of
from fp8ref.sim.quantize import cast
from fp8ref.sim.quantize.scale_layouts import SCALE_LAYOUTS
from fp8ref.sim.quantize.scaling import Quantized


def wrap(
    function: Callable[..., Any] | ScaledGemm,
    *,
    name: str | None = None,
    framework: str | None = None,
    device: str = "cpu",
    granularity: str = "tensorwise",
    granularity_b: str = "",
    formats: tuple[Format, Format] = (E4M3FN, E4M3FN),
    scale_layout: str = "row_major",
) -> ScaledGemm:
    """A function as a ScaledGemm; a ScaledGemm is itself.

    A function of two arguments is called with a and b as a ScaledGemm's is. A function of four is
    called with arrays of a framework: codes of a [M, K] and of b [N, K] in float8 or float4
    (``native_array``), then scale_inv of a and of b, which multiply the sum. An argument called
    ``bias`` gets [N] of float32. Scales of MX and NVFP4 blocks are tried as float32, in float8 and
    as codes in uint8: the first under which ones have the right sum.

    formats    of a and b, with which frameworks are tried.
    scale_layout where scales of blocks lie in memory, such as swizzled_128x4.
    framework  of the arrays: numpy (float8 of ml_dtypes), torch or jax; by default the first
               imported one that it takes.
    Raises:    ValueError: another count of arguments, an unknown framework or layout. RefusedError:
               it takes no arrays. ProbeError: it gives no such array.
    """
    if isinstance(function, ScaledGemm):
        return function
    name = name or subject.name_of(function)
    count, bias = _arguments(function)
    scaled = ScaledGemm(
        name=name,
        function=_with_bias(function) if bias and count == 2 else function,
        granularity=granularity,
        granularity_b=granularity_b,
        bias=bias,
        about={"numpy": version("numpy")},
        scale_layout=registry.lookup("scale_layout is", SCALE_LAYOUTS, scale_layout).name,
    )
    if count == 2:
        return scaled
    if count != 4:
        raise ValueError(
            "a GEMM takes (a, b) or (codes of a, codes of b, scale_inv of a, scale_inv of b); "
            f"{name} takes {count} arguments."
        )
    if framework is not None:
        one_of("framework", framework, subject.FRAMEWORKS)
    loaded = {"numpy", *sys.modules}
    imported = [one for one in subject.FRAMEWORKS if one in loaded]
    frameworks = [framework] if framework else imported
    return _in_framework(scaled, frameworks, device, formats)


def _in_framework(
    scaled: ScaledGemm, frameworks: list[str], device: str, formats: tuple[Format, Format]
) -> ScaledGemm:
    """The GEMM of arrays of the first framework that it takes; RefusedError if it takes none."""
    ones = np.ones((128, 128), np.float32)
    a, b = scaled.operands([cast.encode(ones, fmt) for fmt in formats], formats)
    twice = a._replace(scale=a.scale / 2, scale_inv=a.scale_inv * 2)
    coded = any(map(scale_format, scaled.granularities))
    refused, accepted = list[ProbeError](), list[ScaledGemm]()
    scale_dtypes = ("float32", *CODES_AS[::-1]) if coded else ("float32",)
    for framework, scales_as in itertools.product(frameworks, scale_dtypes):
        about = {framework: version(framework), "device": device}
        about |= {} if scales_as == "float32" else {"scales": scales_as}
        tried = dataclasses.replace(
            scaled, about=about, scale_bytes=4 if scales_as == "float32" else 1
        )
        tried = dataclasses.replace(
            tried, function=_array_gemm(tried, framework, device, scales_as)
        )
        try:
            sums, doubled = (tried.multiply(x, b, repeat=False)[0] for x in (a, twice))
        except ProbeError as error:
            refused.append(error)
            continue
        if (sums == len(ones)).all() and (doubled == 2 * len(ones)).all():
            return tried
        accepted.append(tried)
    if accepted:
        return accepted[0]
    for invalid in refused:
        if not isinstance(invalid, RefusedError):
            raise invalid
    raise RefusedError("\n".join(map(str, refused)))


def _arguments(function: Callable[..., Any]) -> tuple[int, bool]:
    """(how many arguments besides ``bias`` have no default, whether one is called bias)."""
    try:
        inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return 4, False
    names = subject.parameters(function)
    return len(set(subject.needed(function)) - {"bias"}), "bias" in names


def _with_bias(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a bias of zeros where none is given, if it needs one."""
    if subject.parameters(function)["bias"].default is not inspect.Parameter.empty:
        return function
    return lambda a, b, bias=None: function(
        a, b, bias=np.zeros(len(b.codes), np.float32) if bias is None else bias
    )


def _array_gemm(
    scaled: ScaledGemm, framework: str, device: str, scales_as: str
) -> Callable[..., Any]:
    function, layout = scaled.function, SCALE_LAYOUTS[scaled.scale_layout]
    tested = subject.Subject(name="", function=function, framework=framework, device=device)

    def multiply(a: Quantized, b: Quantized, bias: np.ndarray | None = None) -> Any:
        operands = [subject.native_array(tested, q.codes, q.fmt) for q in (a, b)]
        operands += [
            scale_array(tested, q.scale_inv, scale_format(q.granularity), scales_as, layout)
            for q in (a, b)
        ]
        call = function
        if scaled.bias:
            added = np.zeros(len(b.codes), np.float32) if bias is None else bias
            operands.append(tested.make_array(added, "float32"))
            call = lambda *arrays: function(*arrays[:-1], bias=arrays[-1])  # noqa: E731
        before = [arrays.written(x) for x in operands]
        output = call(*operands)
        if [arrays.written(x) for x in operands] != before:
            raise ProbeError("changed its operands. Let it work on copies.")
        return output

    return multiply
