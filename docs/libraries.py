"""What each library's casts and scales are, asked by the test vectors of ``fp8ref.conformance.vectors``: writes docs/LIBRARIES.md.

python docs/libraries.py                            # asks all, and writes the page
python docs/libraries.py --only torch/e4m3fn        # asks and prints the lines of one row, or several: fnmatch patterns
python docs/libraries.py --only 'torchao*' --count 100000
"""

import argparse
import fnmatch
import functools
import importlib.metadata
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fp8ref.conformance import explain, libraries
from fp8ref.conformance.arrays import as_numpy, as_torch
from fp8ref.conformance.inputs import kinds as input_kinds
from fp8ref.conformance.vectors import cast as casts_asked
from fp8ref.conformance.vectors import scale as scales_asked
from fp8ref.formats import E4M3FN, E5M2, E8M0FNU, FP8_FORMATS, Format
from fp8ref.policy import POLICIES
from fp8ref.sim import cast

PAGE = Path(__file__).with_name("LIBRARIES.md")
LIBRARIES = ("torch", "jax", "ml_dtypes", "torchao", "flax", "gfloat", "numpy")
ORDER = ("ml_dtypes", "torch", "jax", "torchao", "flax", "gfloat", "fp8ref.torch", "fp8ref.jax")
COUNT = 200_000  # random inputs of a row; of a library that takes one number at a time SLOWLY
SLOWLY = 2_000
DEFAULT = "torchao"  # the simulator's policy, where none is named
CASTS = (
    "row",
    "what",
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
SCALES = ("row", "what", "policy", "compared", "differ from it", "those", "differ from `torchao`", "simplest of them")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A cast, float32 [n] -> codes, or a scale, amax float32 [n] -> what ``made`` names."""

    library: str
    name: str  # what is called
    fmt: Format
    run: Callable[[np.ndarray], np.ndarray]
    made: str = ""  # of a scale: scale, scale_inv or e8m0
    kind: str = ""  # which of several
    slow: bool = False

    @property
    def row(self) -> str:
        return f"{self.library}/{self.kind}{'/' if self.kind else ''}{self.fmt}"


def casts() -> Iterator[Subject]:
    """Every cast there is, with its overflow as the library does it when nothing is said."""
    names = {"torch": "`x.to(dtype)`", "jax": "`x.astype(dtype)`, jitted", "ml_dtypes": "`x.astype(dtype)`"}
    names |= {"fp8ref.torch": "`cast.encode(x, fmt)`", "fp8ref.jax": "`cast.encode(x, fmt)`, jitted"}
    for fmt in FP8_FORMATS.values():
        for library, (run, _) in libraries.casts(fmt).items():
            if library in names:  # and not those of a GPU
                yield Subject(library=library, name=names[library], fmt=fmt, run=run)
    for fmt in (E4M3FN, E5M2):
        yield Subject(
            library="torchao", kind="saturated", name="`to_fp8_saturated(x, dtype)`", fmt=fmt, run=functools.partial(_torchao, fmt=fmt)
        )
        yield Subject(
            library="flax", kind="quantize", name="`fp8_ops.quantize(x, dtype, 1, float32)`", fmt=fmt, run=functools.partial(_flax, fmt=fmt)
        )
        for sat in (False, True):
            name = f"`encode_ndarray(fi, round_ndarray(fi, x, sat={sat}))`"
            run = functools.partial(_gfloat, fmt=fmt, sat=sat)
            yield Subject(library="gfloat", kind="sat" if sat else "", name=name, fmt=fmt, run=run)


def scales() -> Iterator[Subject]:
    """Every scale there is."""
    for fmt in (E4M3FN, E5M2):
        for power in (False, True):
            run = functools.partial(_torchao_scale, fmt=fmt, power=power)
            kind = "amax_to_scale" + ("_pow2" if power else "")
            name = f"`amax_to_scale(amax, dtype{', round_scales_to_power_of_2=True' if power else ''})`"
            yield Subject(library="torchao", kind=kind, name=name, fmt=fmt, run=run, made="scale")
        for mode in ("floor", "rceil", "ceil", "even"):
            run = functools.partial(_mx, fmt=fmt, mode=mode)
            yield Subject(
                library="torchao", kind=f"mx_{mode}", name=f"`to_mx(x, dtype, 32, {mode.upper()})`", fmt=fmt, run=run, made="e8m0"
            )
        run = functools.partial(_flax_scale, fmt=fmt)
        yield Subject(
            library="flax", kind="compute_scale", name="`fp8_ops.compute_scale(amax, 1, max)`", fmt=fmt, run=run, made="scale_inv"
        )
        run = functools.partial(_gfloat_scale, fmt=fmt)
        name = "`compute_scale_amax(fi.emax, x)`"
        yield Subject(library="gfloat", kind="compute_scale_amax", name=name, fmt=fmt, run=run, made="e8m0", slow=True)
        for library, of in (("fp8ref.torch", _fp8ref_torch), ("fp8ref.jax", _fp8ref_jax)):
            for policy in ("torchao", "torchao_pow2", "torchao_mask", "mx_floor", "mx_rceil", "te_mxfp8"):
                run = functools.partial(of, fmt=fmt, policy=policy)
                name = f"`scaling.scale_from_amax(amax, fmt, {policy!r})`"
                yield Subject(library=library, kind=policy, name=name, fmt=fmt, run=run, made="scale")


def describe_cast(subject: Subject, count: int) -> list[str]:
    """The cells of a cast's row."""
    question = casts_asked.Cast(format=subject.fmt.name, count=count)
    bits, fmt = question.inputs(), subject.fmt
    x = bits.astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        raw = as_numpy(subject.run(x))
    found, kinds = cast.canonical_nans(raw, fmt), np.array(input_kinds.CASTS)[question.kinds(bits)]
    over = (kinds == "above max") & (np.abs(cast.exact(x)) > fmt.max * 1.1)
    inside = np.isin(kinds, ["zero", "number", "tie", "beside a tie", "underflow", "subnormal", "in range"])
    roundings = [r for r in casts_asked.ROUNDINGS if np.array_equal(cast.encode(x[inside], fmt, rounding=r), found[inside])]
    small = (kinds == "number") & (np.abs(x) < fmt.smallest_normal)
    differ = found != cast.encode(x, fmt)
    return [
        f"`{subject.row}`",
        subject.name,
        ", ".join(roundings) or "none",
        _became(found[over], fmt),
        _became(found[kinds == "infinite"], fmt),
        " ".join(sorted({f"0x{c:02X}" for c in raw[np.isnan(x) & ~np.signbit(x)]})),
        " ".join(sorted({f"0x{c:02X}" for c in raw[np.isnan(x) & np.signbit(x)]})),
        "kept" if (found[small] != 0).all() and (found[small] != 0x80).all() else "flushed",
        " ".join(sorted({f"0x{c:02X}" for c in raw[(x == 0) & np.signbit(x)]})),
        f"{len(x):,}",
        f"{int(differ.sum()):,}",
        _simplest_cast(x, raw, differ, fmt),
    ]


def describe_scale(subject: Subject, count: int) -> list[str]:
    """The cells of a scale's row. Its policy is the one whose answers are nearest, which need not be all of them."""
    question = scales_asked.Scale(format=subject.fmt.name, count=min(count, SLOWLY) if subject.slow else count)
    bits, fmt, made = question.inputs().astype(np.uint32), subject.fmt, subject.made
    amax = bits.view(np.float32)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found = as_numpy(subject.run(amax))
    found = found if made == "e8m0" else found.view(np.uint32)
    wrong = {}
    for policy, of in POLICIES.items():
        if of.margin == 0 and of.name != "flax_bf16" and (made != "e8m0" or of.e8m0 is not None):
            wrong[policy] = ~scales_asked.same(found, scales_asked.expected(amax, fmt, policy, made), made)
    nearest = min(wrong, key=lambda policy: int(wrong[policy].sum()))
    alike = [policy for policy in wrong if np.array_equal(wrong[policy], wrong[nearest])]
    kinds = np.array(input_kinds.AMAXES)[input_kinds.of_amaxes(amax, fmt, nearest)]
    those = Counter(kinds[wrong[nearest]].tolist())
    met = "; ".join(f"{kind} {n:,}" for kind, n in those.items())
    default = scales_asked.expected(amax, fmt, DEFAULT, "scale_inv" if made != "scale" else "scale")
    other = ~scales_asked.same(*_in_float32(found, made, default))
    return [
        f"`{subject.row}`",
        f"{subject.name}: {made}",
        ", ".join(f"`{p}`" for p in alike) if not those else f"nearest `{nearest}`",
        f"{len(amax):,}",
        f"{sum(those.values()):,}",
        f"{met}: {_simplest_scale(amax, found, wrong[nearest], fmt, nearest, made)}" if those else "-",
        f"{int(other.sum()):,}",
        _simplest_scale(amax, found, other, fmt, DEFAULT, made) if other.any() else "-",
    ]


def _in_float32(found: np.ndarray, made: str, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray, str]:
    """e8m0 codes as the bits of the scale_inv that they are."""
    if made == "e8m0":
        return cast.decode(found, E8M0FNU).view(np.uint32), expected, "scale_inv"
    return found, expected, made


def _became(codes: np.ndarray, fmt: Format) -> str:
    """What numbers that are too large became."""
    magnitude = codes if fmt.specials == "fnuz" else codes & 0x7F
    magnitude = np.where(codes == fmt.nan_code, fmt.nan_code, magnitude & 0x7F)
    names = {fmt.max_code: "max", fmt.nan_code: "NaN"} | ({fmt.inf_code: "Inf"} if fmt.inf_code is not None else {})
    return ", ".join(dict.fromkeys(names.get(int(m), f"0x{m:02X}") for m in np.unique(magnitude)))


def _simplest_cast(x: np.ndarray, found: np.ndarray, differ: np.ndarray, fmt: Format) -> str:
    if not differ.any():
        return "-"
    i = explain.simplest(x, differ)
    expected = int(cast.encode(x[i : i + 1], fmt)[0])
    return f"{_bits(x[i])} ({explain.decimal(x[i])}): {explain.code(int(found[i]), fmt)} for {explain.code(expected, fmt)}"


def _simplest_scale(amax: np.ndarray, found: np.ndarray, differ: np.ndarray, fmt: Format, policy: str, made: str) -> str:
    i = explain.simplest(amax, differ)
    of = made if made != "e8m0" or POLICIES[policy].e8m0 is not None else "scale_inv"
    got = int(found[i]) if of == made else int(_in_float32(found[i : i + 1], made, found)[0][0])
    expected = int(scales_asked.expected(amax[i : i + 1], fmt, policy, of)[0])
    return f"amax {_bits(amax[i])} ({explain.decimal(amax[i])}): {scales_asked.shown(got, of)} for {scales_asked.shown(expected, of)}"


def _bits(value: np.float32) -> str:
    return f"{int(value.view(np.uint32)):08X}"


def table(kind: str, count: int, only: Iterable[str] = ("*",)) -> list[list[str]]:
    """The rows of "casts" or "scales" whose names match one of the patterns."""
    made, describe = (casts(), describe_cast) if kind == "casts" else (scales(), describe_scale)
    asked = [subject for subject in made if any(fnmatch.fnmatchcase(subject.row, pattern) for pattern in only)]
    return [describe(subject, count) for subject in sorted(asked, key=lambda subject: ORDER.index(subject.library))]


def versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name).split('+')[0]}" for name in LIBRARIES)


def page(count: int) -> str:
    parts = [
        "# What each library is",
        f"Written by `make libraries` (docs/libraries.py), on a CPU: {versions()}.",
        "`python docs/libraries.py --only ROW` asks and prints a row again. Inputs are the vectors of `fp8ref vectors`: every number and tie of a format\n"
        "with their neighbours, every power of two and edge of an amax, specials, and random float32 bits.",
        "## Casts",
        "From float32. *rounding* is that of everything within range; *above max* are finite values well above it; NaN and -NaN are the codes emitted,\n"
        "which comparisons take for one (SEMANTICS C-5). *differ*: from the simulator's default, to nearest even and saturating (C-2, C-3); of the simplest\n"
        "input that does, the code found, *for* the simulator's.",
        _markdown(CASTS, table("casts", count)),
        "## Scales",
        "*policy*: the one of SEMANTICS S-9 or S-14 whose scales they are on all amaxes compared, a previous scale being 1; else the nearest, with the\n"
        "kinds of amaxes on which it is another, and the simplest of them. Last, the simulator's default, `torchao`; e8m0 codes are compared with it as\n"
        "the scale_inv that they are.",
        _markdown(SCALES, table("scales", count)),
        "ml_dtypes, torch and jax have no scales of their own. XLA on a CPU flushes subnormal float32 numbers to zero (S-12): flax there takes a subnormal\n"
        "amax for zero, and its `scale_inv` is zero where it would be subnormal. gfloat takes log2 in the amax's dtype: that of a float32 just below a power\n"
        "of two rounds up to its exponent.",
    ]
    return "\n\n".join(parts) + "\n"


def _markdown(head: Iterable[str], rows: list[list[str]]) -> str:
    lines = [list(head), ["---" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _torchao(x: np.ndarray, fmt: Format) -> np.ndarray:
    import torch
    from torchao.float8.float8_utils import to_fp8_saturated

    return as_numpy(to_fp8_saturated(torch.from_numpy(x), getattr(torch, f"float8_{fmt}")))


def _flax(x: np.ndarray, fmt: Format) -> np.ndarray:
    import jax.numpy as jnp
    from flax.linen import fp8_ops

    return as_numpy(fp8_ops.quantize(jnp.asarray(x), getattr(jnp, f"float8_{fmt}"), jnp.float32(1), jnp.float32))


def _gfloat(x: np.ndarray, fmt: Format, sat: bool) -> np.ndarray:
    import gfloat

    info = _gfloat_info(fmt)
    return gfloat.encode_ndarray(info, gfloat.round_ndarray(info, x.astype(np.float64), sat=sat)).astype(np.uint8)


def _gfloat_info(fmt: Format):
    from gfloat import formats

    return {"e4m3fn": formats.format_info_ocp_e4m3, "e5m2": formats.format_info_ocp_e5m2}[fmt.name]


def _torchao_scale(amax: np.ndarray, fmt: Format, power: bool) -> np.ndarray:
    import torch
    from torchao.float8.float8_utils import amax_to_scale

    return as_numpy(amax_to_scale(as_torch(amax), getattr(torch, f"float8_{fmt}"), round_scales_to_power_of_2=power))


def _mx(amax: np.ndarray, fmt: Format, mode: str) -> np.ndarray:
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    blocks = as_torch(np.pad(amax[:, None], [(0, 0), (0, 31)]))  # [n, 32]: an amax and 31 zeros
    return to_mx(blocks, getattr(torch, f"float8_{fmt}"), 32, ScaleCalculationMode(mode))[0].view(torch.uint8).numpy().reshape(-1)


def _flax_scale(amax: np.ndarray, fmt: Format) -> np.ndarray:
    import jax.numpy as jnp
    from flax.linen import fp8_ops

    return as_numpy(fp8_ops.compute_scale(jnp.asarray(amax), jnp.float32(1), jnp.float32(fmt.max)))


def _gfloat_scale(amax: np.ndarray, fmt: Format) -> np.ndarray:
    from gfloat.block import compute_scale_amax

    emax = _gfloat_info(fmt).emax
    return cast.encode(np.float64([float(compute_scale_amax(emax, np.full(1, a))) for a in amax]), E8M0FNU)


def _fp8ref_torch(amax: np.ndarray, fmt: Format, policy: str) -> np.ndarray:
    from fp8ref.torch import scaling

    return as_numpy(scaling.scale_from_amax(as_torch(amax), fmt, policy))


def _fp8ref_jax(amax: np.ndarray, fmt: Format, policy: str) -> np.ndarray:
    import jax

    from fp8ref.jax import scaling

    return as_numpy(jax.jit(lambda a: scaling.scale_from_amax(a, fmt, policy))(amax))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="print these rows, and write nothing")
    parser.add_argument("--count", type=int, default=COUNT, help=f"random inputs of a row (default {COUNT})")
    known = parser.parse_args()
    if known.only is None:
        PAGE.write_text(page(known.count), encoding="utf-8")
        print(f"wrote {PAGE}")
        return
    found = False
    for kind, head in (("casts", CASTS), ("scales", SCALES)):
        for cells in table(kind, known.count, known.only):
            found = True
            print("\n".join(f"{name:<24}{cell}" for name, cell in zip(head, cells, strict=True)), end="\n\n")
    if not found:
        parser.error(f"no row matches {' '.join(known.only)}; {PAGE.name} names them all, such as torch/e4m3fn")


if __name__ == "__main__":
    main()
