"""Assert that codes or scales are those specified; errors show the simplest wrong input.

Arrays may be NumPy's, JAX's or PyTorch's; codes are uint8 or FP8 dtypes. All NaN codes count as
equal (C-5), and so do NaN scales.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from fp8ref import formats
from fp8ref import policy as policies
from fp8ref.conformance.inputs import dtypes, kinds
from fp8ref.conformance.kit import explain
from fp8ref.conformance.kit.arrays import as_numpy, named, same_bits
from fp8ref.conformance.kit.explain import Rules
from fp8ref.conformance.quantizer import candidates
from fp8ref.conformance.quantizer.candidates import Candidate
from fp8ref.conformance.quantizer.deviation_search import Search
from fp8ref.conformance.quantizer.outputs import QuantizerOutput, Response, ScaleLayout
from fp8ref.conformance.vectors import quantize, scale
from fp8ref.formats import E8M0FNU, Format
from fp8ref.policy import ScalePolicy
from fp8ref.sim.quantize import cast, scaling
from fp8ref.sim.quantize.scaling import Quantized
from fp8ref.spec import granularity as granularities

__all__ = ["Inverses", "require_cast", "require_dequantized", "require_quantized", "require_scales"]

_FEW = 16  # scales: fewer have too many explanations


def require_cast(
    x, found_codes, fmt: Format | str, *, rounding: str = "nearest_even", saturate: bool = True
) -> None:
    """Require that found_codes are the cast of x to fmt (spec C), else raise AssertionError.

    Shapes:   x any, float64, float32, float16 or bfloat16; found_codes of the same shape.
    Specials: all NaN codes count as equal. An empty x passes. A NaN cast to a format that has none,
              such as e2m1fn, has no right code, and is not compared (C-9).
    Raises:   ValueError: unfit shapes or dtypes; unknown or stochastic rounding (no single code).
    Source:   spec C-1 to C-7.
    """
    rules, fmt = Rules(rounding=rounding, saturate=saturate), formats.by_name(fmt)
    x, codes = as_numpy(x), _codes(found_codes, as_numpy(x).shape, fmt)
    differ = rules.differ(x, codes, fmt)
    if not differ.any():
        return
    i = explain.simplest(x, differ)
    value = x.reshape(-1)[i : i + 1]
    kind = kinds.CASTS[int(kinds.cast_kinds(value, dtypes.by_name(x.dtype.name), fmt)[0])]
    place = f"bits {_bits(value)}{_at(i, x.shape)} ({kind})"
    lines = {
        "input": f"{x.dtype.name} {explain.decimal(value[0])}, {place}",
        "expected": explain.code(int(rules.encode(value, fmt)[0]), fmt),
        "got": explain.code(int(codes.reshape(-1)[i]), fmt),
        "rule": rules.rule(kind, fmt),
    }
    title = f"{int(differ.sum())} of {x.size} codes of {fmt} differ; the simplest:"
    raise AssertionError(_message(title, lines, rules.note(x, codes, fmt)))


def require_scales(
    amax, found, fmt: Format, *, policy: str = "torchao", made: str = "scale"
) -> None:
    """Require that found are a policy's scales of float32 amaxes, else raise an AssertionError.

    made      what found holds: ``scale``, ``scale_inv``, or ``e8m0``, the code of scale_inv.
    Shapes:   amax float32 of any shape; found of as many elements, float32, of e8m0 uint8. A
              previous scale is 1 (S-11).
    Specials: all NaNs count as equal; any other bit counts. Of 16 scales or more, the error says
              which policy, or which deviation, gives them.
    Raises:   ValueError: shapes or dtypes that do not fit; negative amaxes; an unknown policy or
              made; e8m0 of a policy without e8m0 scales.
    Source:   spec S-3, S-4, S-9 to S-15.
    """
    amax = as_numpy(amax)
    bits = _scales(found, made, amax.shape)
    expected = scale.expected_bits(amax.reshape(-1), fmt, policy, made)
    differ = ~scale.same(bits, expected, made)
    if not differ.any():
        return
    i = explain.simplest(amax, differ)
    value = amax.reshape(-1)[i : i + 1]
    kind = kinds.AMAXES[int(kinds.amax_kinds(value, fmt, policy)[0])]
    place = f"bits {_bits(value)}{_at(i, amax.shape)} ({kind})"
    lines = {
        "input": f"amax {explain.decimal(value[0])}, {place}",
        "expected": scale.scale_text(expected[i], made),
        "got": scale.scale_text(bits[i], made),
        "rule": explain.scale_rule(kind, policy),
    }
    title = f"{int(differ.sum())} of {amax.size} scales to {fmt} differ; the simplest:"
    values = cast.decode(bits, E8M0FNU) if made == "e8m0" else bits.view(np.float32)
    kind = "scale" if made == "scale" else "scale_inv"
    note = _scale_note(amax.reshape(-1), values, kind, fmt, policies.by_name(policy))
    raise AssertionError(_message(title, lines, note))


def _scale_note(
    amax: np.ndarray, values: np.ndarray, kind: str, fmt: Format, policy: ScalePolicy
) -> str:
    """A sentence: the policy, or its deviations, that gives the scales found; '' if none does."""
    order, count = np.argsort(amax), amax.size
    if count < _FEW:
        return ""
    amax = amax[order]
    small = [amax == 0, amax < 2.0**-126, amax < 1e-12]
    ends = [*small, np.isinf(amax), amax > 1e30, np.isnan(amax)]
    ranges = ("zero", "subnormal", "tiny", "infinite", "huge", "NaN")
    scales = {"": values[order][:, None]}
    rows = Response(
        x=amax[:, None],
        group=np.arange(count)[:, None],
        kind=np.select(ends, [kinds.AMAX_RANGES.index(name) for name in ranges], 0),
        largest=amax,
        output=QuantizerOutput(codes=None, values=None, dtype="", place="", scales=scales),
    )
    layout = ScaleLayout(granularity="rowwise", axis=-1, kinds={"": kind})

    def agrees(other: ScalePolicy) -> bool:
        return candidates.agrees(Candidate(policy=other, scale_fmt=fmt, fmt=fmt), [rows], layout)

    search = Search(
        rows=rows,
        scale_layout=layout,
        considered=np.ones(count, bool),
        fmt=fmt,
        flushing=False,
        underflow=lambda: None,
    )
    best = search.run([policy])
    right = 0 if best is None else int(best.both.sum())
    share = "All" if right == count else f"{right} of {count}"
    # another policy as it is says more than several deviations from this one
    others = best is None or right < count or best.candidate.deviation.parts > 1
    if others and (names := [p.name for p in policies.POLICIES.values() if agrees(p)]):
        return f"All scales are those of policy {' or '.join(names)}."
    if best is None or right <= 0.9 * count:
        return ""
    return f"{share} scales are those of policy {best.candidate.words}."


class Inverses(NamedTuple):
    """What a quantizer may return in the place of a scale, or beside it.

    scale_inv         float32; e8m0: its codes.
    tensor_scale_inv  of a policy with a scale of the tensor, or of each row (S-22).
    """

    scale_inv: Any = None
    e8m0: Any = None
    tensor_scale_inv: Any = None


def require_quantized(
    x,
    found_codes,
    fmt: Format,
    *,
    scale=None,
    inverses: Inverses | None = None,
    granularity: str = "tensorwise",
    policy: str = "torchao",
    axis: int = -1,
) -> None:
    """Require codes and scales to be ``sim.scaling.quantize``'s, else raise AssertionError.

    Give at least one of scale and, as ``inverses``, scale_inv and e8m0, the codes of scale_inv; of
    a policy with a scale of the tensor, tensor_scale_inv too (S-22). All given are compared, scales
    before codes. Codes of 4 bits are one a byte: ``packing.unpack`` makes them of pairs.

    Shapes:   x float32, float16 or bfloat16, found_codes of its shape; scales in any shape with as
              many elements as ``scale_shape`` gives.
    Specials: all NaN codes count as equal, and so do NaN scales.
    Raises:   ValueError: shapes or dtypes that do not fit, or no scales; as
              ``sim.scaling.quantize``.
    Source:   spec S-5, S-6, S-13, S-14, S-22.
    """
    x = as_numpy(x)
    inverses = inverses or Inverses()
    scales = {"scale": scale, "scale_inv": inverses.scale_inv, "e8m0": inverses.e8m0}
    if all(value is None for value in scales.values()):
        raise ValueError(
            "quantized codes need scales; got none. Give scale, or inverses with scale_inv or e8m0."
        )
    way = quantize.Way(fmt, policies.by_name(policy), granularity, axis)
    _require_tensor_scale(x, inverses.tensor_scale_inv, way)
    codes = _codes(found_codes, x.shape, fmt)
    shape = granularities.scale_shape(granularity, x.shape, axis)
    for scale_kind, value in scales.items():
        if value is None:
            continue
        bits = _scales(value, scale_kind, shape)
        why = quantize.difference(x, codes, bits, scale_kind, way)
        if why is not None:
            raise _differs(f"{granularity} {fmt} of shape {x.shape} differs:", why)


def require_dequantized(
    codes,
    found,
    fmt: Format | str,
    *,
    scale_inv=None,
    tensor_scale_inv=None,
    granularity: str = "tensorwise",
    axis: int = -1,
) -> None:
    """Require found to be the numbers of codes, times any scale_inv, else raise AssertionError.

    Shapes:   codes uint8 or an FP8 dtype, of 4 bits one a byte; found of their shape in float32,
              bfloat16 or float16, to which the product is rounded; scale_inv float32, or e8m0 codes
              in their own dtype, of ``scale_shape``; tensor_scale_inv float32 (), or of rows [M,
              1] (S-22).
    Specials: all NaNs count as equal; any other bit counts.
    Raises:   ValueError: shapes or dtypes that do not fit; unknown names.
    Source:   spec S-8, S-22.
    """
    fmt, (values, dtype) = formats.by_name(fmt), named(found)
    codes = _codes(codes, values.shape, fmt)
    shape = granularities.scale_shape(granularity, codes.shape, axis, ragged=True)
    if scale_inv is None:
        scale_inv, granularity, shape = np.float32(1), "tensorwise", ()
    kind = "e8m0" if named(scale_inv)[1].endswith(E8M0FNU.name) else "scale_inv"
    bits = _scales(scale_inv, kind, shape).reshape(shape)
    scales = cast.decode(bits, E8M0FNU) if kind == "e8m0" else bits.view(np.float32)
    tensor = (
        None if tensor_scale_inv is None else np.asarray(as_numpy(tensor_scale_inv), np.float32)
    )
    q = Quantized(codes, scales, scales, fmt, granularity, axis, tensor)
    out = dtypes.rounded(scaling.dequantize(q), dtype)
    differ = ~same_bits(values.astype(np.float32), out)
    if differ.any():
        i = int(np.argmax(differ))
        lines = {
            "input": f"{explain.code(int(codes.reshape(-1)[i]), fmt)}{_at(i, codes.shape)}",
            "expected": explain.decimal(out.reshape(-1)[i]),
            "got": explain.decimal(values.reshape(-1)[i]),
            "rule": "the code's number times scale_inv, rounded to float32 (F-1, S-8)",
        }
        title = f"{int(differ.sum())} of {codes.size} numbers of {fmt} differ; the first:"
        raise AssertionError(_message(title, lines))


def _require_tensor_scale(x: np.ndarray, tensor_scale_inv, way: quantize.Way) -> None:
    """Check the tensor's or its rows' scale_inv; ValueError unless the policy has one (S-22)."""
    shape = way.tensor_shape(x.shape)
    if (shape is not None) != (tensor_scale_inv is not None):
        need = "needs" if tensor_scale_inv is None else "has no"
        raise ValueError(
            f"policy {way.policy.name!r} {need} tensor_scale_inv (S-22). "
            f"{'Give it' if tensor_scale_inv is None else 'Leave it out'}."
        )
    if shape is None:
        return
    got = as_numpy(tensor_scale_inv)
    if got.dtype != np.float32 or got.size != math.prod(shape):
        raise ValueError(
            f"tensor_scale_inv is float32 of shape {shape}; got {got.dtype} {got.shape}."
        )
    if why := quantize.tensor_difference(x, got.reshape(-1).view(np.uint32), way):
        raise _differs(f"tensor_scale_inv of {way.fmt} differs:", why)


def _differs(title: str, why: dict[str, str]) -> AssertionError:
    lines = {key: why[key] for key in ("expected", "got", "rule")}
    return AssertionError(_message(title, {"input": why["vector"]} | lines))


def _codes(codes, shape: tuple[int, ...], fmt: Format) -> np.ndarray:
    codes, dtype = named(codes)
    if codes.dtype != np.uint8 or codes.shape != shape:
        raise ValueError(
            f"codes are uint8 or an FP8 dtype, of the input's shape {shape}; got {codes.dtype} "
            f"{codes.shape}."
        )
    _check_dtype(dtype, fmt.name)
    return codes


def _check_dtype(dtype: str, fmt: str) -> None:
    """ValueError where a dtype of FP8 or FP4 names another format."""
    if dtype.partition("_")[2] not in ("", fmt):
        raise ValueError(
            f"codes of {fmt} are uint8 or of its own dtype; got {dtype}. View them as uint8 if "
            f"they are codes of {fmt}."
        )


def _scales(scales, scale_kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """The bits of found scales, flat."""
    scales, scale_dtype = named(scales)
    size = int(np.prod(shape))
    dtype = np.uint8 if scale_kind == "e8m0" else np.float32
    if scales.dtype != dtype or scales.size != size:
        raise ValueError(
            f"{scale_kind} is {np.dtype(dtype)} with {size} elements, shape {shape}; got "
            f"{scales.dtype} {scales.shape}."
        )
    if scale_kind == "e8m0":
        _check_dtype(scale_dtype, E8M0FNU.name)
    bits = np.uint8 if scale_kind == "e8m0" else np.uint32
    return np.ascontiguousarray(scales).reshape(-1).view(bits)


def _bits(value: np.ndarray) -> str:
    width = value.dtype.itemsize
    return f"{int(value.view(f'uint{8 * width}')[0]):0{2 * width}X}"


def _at(i: int, shape: tuple[int, ...]) -> str:
    return f", at{quantize.at(i, shape)}" if shape else ""


def _message(title: str, lines: dict[str, str], note: str = "") -> str:
    listed = [f"  {name:<8}  {line}" for name, line in lines.items()]
    return "\n".join([title, *listed, *([f"  {note}"] if note else [])])
