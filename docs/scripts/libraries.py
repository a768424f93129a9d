"""Describe the casts and scales of each library by the test vectors of
``fp8ref.conformance.vectors``; writes docs/libraries.md.

python docs/scripts/libraries.py                            # asks all, and writes the page
python docs/scripts/libraries.py --only torch/e4m3fn        # asks and prints the lines of one row,
or several: fnmatch patterns python docs/scripts/libraries.py --only 'torchao*' --count 100000
"""

import argparse
import fnmatch
import importlib.metadata
import importlib.util
import itertools
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fp8ref.conformance import identify_cast
from fp8ref.conformance.cast.e8m0 import DECISIONS
from fp8ref.conformance.inputs import kinds
from fp8ref.conformance.kit import explain
from fp8ref.conformance.libraries import cuda_header
from fp8ref.conformance.libraries import profiles as libraries
from fp8ref.conformance.libraries.profiles import Function
from fp8ref.conformance.libraries.transcriptions import TRANSCRIPTIONS
from fp8ref.conformance.vectors import cast as casts_asked
from fp8ref.conformance.vectors import scale as scales_asked
from fp8ref.formats import E4M3FN, E8M0FNU, Format
from fp8ref.policy import POLICIES
from fp8ref.sim.quantize import cast

_spec = importlib.util.spec_from_file_location("engines", Path(__file__).with_name("engines.py"))
engines = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(engines)

PAGE = Path(__file__).parents[1] / "libraries.md"
LIBRARIES = ("torch", "jax", "ml_dtypes", "torchao", "flax", "gfloat", "numpy")
ORDER = (
    *("ml_dtypes", "torch", "jax", "torchao", "flax", "gfloat", libraries.CUDA_HEADER),
    *dict.fromkeys(known.library for known in (*TRANSCRIPTIONS, *engines.ENGINES)),
    *("fp8ref.torch", "fp8ref.jax"),
)
COUNT = 200_000  # random inputs of a row; SLOWLY for a library that takes one number at a time
SLOWLY = 2_000
DEFAULT = "torchao"  # the simulator's policy, where none is named
CASTS = (
    "row",
    "what",
    "known by",
    "rounding",
    "above max",
    "infinity",
    "NaN",
    "-NaN",
    "subnormals",
    "-0",
    "compared",
    "differ",
    "simplest that differs",
)
SCALES = (
    "row",
    "what",
    "known by",
    "policy",
    "compared",
    "differ from it",
    "those",
    "differ from `torchao`",
    "simplest of them",
)


def known_by(function: Function) -> str:
    """Whether the library ran here, in which version, or its source was transcribed, from which
    file.
    """
    if function.transcribed:
        return f"transcribed: {function.source}"
    if function.library == libraries.CUDA_HEADER:
        version = cuda_header.version()
    else:
        name = function.library.partition(".")[0]
        version = (
            "this"
            if name == "fp8ref"
            else f"{name} {importlib.metadata.version(name).split('+')[0]}"
        )
    return f"run: {version}" + (f" {function.source}" if function.source else "")


def describe_cast(function: Function, count: int) -> list[str]:
    """The cells of a cast's row."""
    question = casts_asked.Cast(format=function.fmt.name, count=count)
    bits, fmt = question.inputs(), function.fmt
    x = bits.astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        raw = function.run(x)
    found, kind = cast.canonical_nans(raw, fmt), np.array(kinds.CASTS)[question.kinds(bits)]
    over = (kind == "above max") & (np.abs(cast.exact(x)) > fmt.max * 1.1)
    inside = np.isin(
        kind, ["zero", "number", "tie", "next to a tie", "underflow", "subnormal", "in range"]
    )
    roundings = [
        r
        for r in explain.ROUNDINGS
        if np.array_equal(cast.encode(x[inside], fmt, rounding=r), found[inside])
    ]
    small = (kind == "number") & (np.abs(x) < fmt.smallest_normal)
    differ = found != cast.encode(x, fmt)
    return [
        f"`{function.row}`",
        function.call,
        known_by(function),
        ", ".join(roundings) or "none",
        _became(found[over], fmt),
        _became(found[kind == "infinite"], fmt),
        " ".join(sorted({f"0x{c:02X}" for c in raw[np.isnan(x) & ~np.signbit(x)]})),
        " ".join(sorted({f"0x{c:02X}" for c in raw[np.isnan(x) & np.signbit(x)]})),
        "kept" if (found[small] != 0).all() and (found[small] != 0x80).all() else "flushed",
        " ".join(sorted({f"0x{c:02X}" for c in raw[(x == 0) & np.signbit(x)]})),
        f"{len(x):,}",
        f"{int(differ.sum()):,}",
        _simplest_cast(x, raw, differ, fmt),
    ]


def describe_scale(function: Function, count: int) -> list[str]:
    """The cells of a scale's row. Its policy is the one with the fewest differing scales, which
    need not be none.
    """
    question = scales_asked.Scale(
        format=function.fmt.name, count=min(count, SLOWLY) if function.slow else count
    )
    bits, fmt, made = question.inputs().astype(np.uint32), function.fmt, function.made
    amax = bits.view(np.float32)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = function.run(amax)
    found = found if made == "e8m0" else found.view(np.uint32)
    wrong = {}
    for policy, of in POLICIES.items():
        if of.margin == 0 and of.name != "flax_bf16" and (made != "e8m0" or of.e8m0 is not None):
            wrong[policy] = ~scales_asked.same(
                found, scales_asked.expected_bits(amax, fmt, policy, made), made
            )
    nearest = min(wrong, key=lambda policy: int(wrong[policy].sum()))
    alike = [policy for policy in wrong if np.array_equal(wrong[policy], wrong[nearest])]
    kind = np.array(kinds.AMAXES)[kinds.amax_kinds(amax, fmt, nearest)]
    those = Counter(kind[wrong[nearest]].tolist())
    met = "; ".join(f"{name} {n:,}" for name, n in those.items())
    default = scales_asked.expected_bits(
        amax, fmt, DEFAULT, "scale_inv" if made != "scale" else "scale"
    )
    other = ~scales_asked.same(*_in_float32(found, made, default))
    return [
        f"`{function.row}`",
        f"{function.call}: {made}",
        known_by(function),
        ", ".join(f"`{p}`" for p in alike) if not those else f"nearest `{nearest}`",
        f"{len(amax):,}",
        f"{sum(those.values()):,}",
        f"{met}: {_simplest_scale(amax, found, wrong[nearest], fmt, nearest, made)}"
        if those
        else "-",
        f"{int(other.sum()):,}",
        _simplest_scale(amax, found, other, fmt, DEFAULT, made) if other.any() else "-",
    ]


def _in_float32(
    found: np.ndarray, made: str, expected: np.ndarray
) -> tuple[np.ndarray, np.ndarray, str]:
    """e8m0 codes as the float32 bits of their scale_inv."""
    if made == "e8m0":
        return cast.decode(found, E8M0FNU).view(np.uint32), expected, "scale_inv"
    return found, expected, made


def _became(codes: np.ndarray, fmt: Format) -> str:
    """What values above max became: max, Inf or NaN."""
    magnitude = codes & 0x7F if fmt.negative_zero else codes
    magnitude = np.where(codes == fmt.nan_code, fmt.nan_code, magnitude & 0x7F)
    names = {fmt.max_code: "max", fmt.nan_code: "NaN"} | (
        {fmt.inf_code: "Inf"} if fmt.inf_code is not None else {}
    )
    return ", ".join(dict.fromkeys(names.get(int(m), f"0x{m:02X}") for m in np.unique(magnitude)))


def _simplest_cast(x: np.ndarray, found: np.ndarray, differ: np.ndarray, fmt: Format) -> str:
    if not differ.any():
        return "-"
    i = explain.simplest(x, differ)
    expected = int(cast.encode(x[i : i + 1], fmt)[0])
    return (
        f"{_bits(x[i])} ({explain.decimal(x[i])}): {explain.code(int(found[i]), fmt)} for "
        f"{explain.code(expected, fmt)}"
    )


def _simplest_scale(
    amax: np.ndarray, found: np.ndarray, differ: np.ndarray, fmt: Format, policy: str, made: str
) -> str:
    i = explain.simplest(amax, differ)
    of = made if made != "e8m0" or POLICIES[policy].e8m0 is not None else "scale_inv"
    got = int(found[i]) if of == made else int(_in_float32(found[i : i + 1], made, found)[0][0])
    expected = int(scales_asked.expected_bits(amax[i : i + 1], fmt, policy, of)[0])
    return (
        f"amax {_bits(amax[i])} ({explain.decimal(amax[i])}): {scales_asked.scale_text(got, of)} "
        f"for {scales_asked.scale_text(expected, of)}"
    )


def _bits(value: np.float32) -> str:
    return f"{int(value.view(np.uint32)):08X}"


def functions(kind: str) -> list[Function]:
    """The "casts" or "scales" that the page lists, in its order."""
    every = libraries.every_cast() if kind == "casts" else libraries.every_scale()
    if kind == "scales":
        every = itertools.chain(every, _engines())
    return sorted(every, key=lambda function: ORDER.index(function.library))


def _engines() -> Iterable[Function]:
    """The scales of ``engines``, which cast to e4m3fn alone."""
    for known in engines.ENGINES:
        yield Function(
            known.library,
            E4M3FN,
            known.of(E4M3FN),
            variant=known.variant,
            call=known.call,
            made=known.made,
            source=known.source,
            transcribed=True,
        )


def table(kind: str, count: int, only: Iterable[str] = ("*",)) -> list[list[str]]:
    """The rows of "casts" or "scales" whose names match one of the patterns; those of "e8m0"."""
    if kind == "e8m0":
        return e8m0_table()
    asked = [
        function
        for function in functions(kind)
        if any(fnmatch.fnmatchcase(function.row, pattern) for pattern in only)
    ]
    describe = describe_cast if kind == "casts" else describe_scale
    return [describe(function, count) for function in asked]


def versions() -> str:
    return ", ".join(f"{name} {_version(name)}" for name in LIBRARIES)


def page(count: int) -> str:
    parts = [
        "# What each library is",
        f"Written by `make libraries` (docs/scripts/libraries.py), on a CPU: {versions()}.",
        "*known by*: *run* means that the installed library was called here; *transcribed* "
        "means that fp8ref/conformance/libraries/transcriptions.py\nor docs/scripts/engines.py "
        "repeats the steps of its source. "
        "`cuda_fp8.hpp` is CUDA's header, compiled for the host.",
        "`python docs/scripts/libraries.py --only ROW` computes and prints a row. Inputs are "
        "the vectors of `fp8ref vectors`: every number and tie of a format\nwith their "
        "neighbors, every power of two and edge of an amax, specials, and random float32 bits.",
        "## Casts",
        "From float32. *rounding* applies to all numbers in range; *above max* to finite values "
        "well above it; NaN and -NaN are the emitted codes,\nwhich comparisons treat as equal. "
        "*differ* counts differences from the simulator's default, nearest even and saturating. "
        "The last column shows the\nsimplest: the library's code *for* the simulator's.",
        _markdown(CASTS, table("casts", count)),
        "## Casts to e8m0",
        "The decisions of [C-10](spec/c.md#c-10), found by `identify_cast`, and the names of casts "
        "with the same ones. The simulator's default is `saturating`.",
        _markdown(E8M0_CASTS, table("e8m0", count)),
        "## Scales",
        "*policy*: the [policy](concepts/scaling.md) that gives the same scales for all amaxes "
        "compared, with a previous scale of 1. If there is none, the\nnearest policy, with the "
        "kinds of amaxes that differ, and the simplest. The last columns compare with "
        "`torchao`, the simulator's default;\ne8m0 codes are compared as the scale_inv that they "
        "stand for.",
        _markdown(SCALES, table("scales", count)),
        "ml_dtypes, torch and jax have no scales of their own. XLA on a CPU flushes subnormal "
        "float32 numbers to zero. So flax there treats a\nsubnormal amax as zero, and flushes a "
        "subnormal `scale_inv` to zero. gfloat computes log2 in the amax's dtype: for a float32 "
        "just\nbelow a power of two, it rounds up to that power's exponent.",
        "SageAttention (INT8 attention for inference) is out of scope: its q and k are not in "
        "FP8, and it has no backward pass.",
    ]
    return "\n\n".join(parts) + "\n"


E8M0_CASTS = ("row", "what", "known by", *DECISIONS, "names")


def e8m0_table() -> list[list[str]]:
    """The casts to e8m0fnu of the installed libraries and of CUDA's header, by their decisions."""
    import jax.numpy as jnp
    import ml_dtypes
    import torch

    rows = {
        "ml_dtypes": ("x.astype(dtype)", "numpy", lambda x: x.astype(ml_dtypes.float8_e8m0fnu)),
        "torch": ("x.to(dtype)", "torch", lambda x: x.to(torch.float8_e8m0fnu)),
        "jax": ("x.astype(dtype)", "jax", lambda x: x.astype(jnp.float8_e8m0fnu)),
    }
    for up, mode in ((True, "cudaRoundPosInf"), (False, "cudaRoundZero")):
        for saturate, kind in ((True, "__NV_SATFINITE"), (False, "__NV_NOSAT")):

            def function(x, up=up, saturate=saturate):
                return cuda_header.encode_e8m0(x, up=up, saturate=saturate)

            name = f"{libraries.CUDA_HEADER}/{'up' if up else 'zero'}{'/sat' * saturate}"
            rows[name] = (f"__nv_cvt_float_to_e8m0(x, {kind}, {mode})", "numpy", function)
    cells = []
    for name, (what, framework, function) in rows.items():
        found = identify_cast(function, "e8m0fnu", framework=framework).found
        of_header = name.startswith(libraries.CUDA_HEADER)
        version = cuda_header.version() if of_header else f"{name} {_version(name)}"
        decided = [str(found[decision]) for decision in DECISIONS]
        names = ", ".join(f"`{known}`" for known in found["behavior"])
        cells.append([f"`{name}`", f"`{what}`", f"run: {version}", *decided, names])
    return cells


def _version(library: str) -> str:
    return importlib.metadata.version(library).split("+")[0]


def _markdown(head: Iterable[str], rows: list[list[str]]) -> str:
    lines = [list(head), ["---" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="ROW", help="print these rows, and write nothing"
    )
    parser.add_argument(
        "--count", type=int, default=COUNT, help=f"random inputs of a row (default {COUNT})"
    )
    known = parser.parse_args()
    if known.only is None:
        PAGE.write_text(page(known.count), encoding="utf-8")
        print(f"wrote {PAGE}")
        return
    found = False
    for kind, head in (("casts", CASTS), ("scales", SCALES)):
        for cells in table(kind, known.count, known.only):
            found = True
            print(
                "\n".join(f"{name:<24}{cell}" for name, cell in zip(head, cells, strict=True)),
                end="\n\n",
            )
    if not found:
        parser.error(
            f"no row matches {' '.join(known.only)}; {PAGE.name} names them all, such as "
            "torch/e4m3fn"
        )


if __name__ == "__main__":
    main()
