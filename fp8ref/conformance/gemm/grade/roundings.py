"""How scales and roundings make an output of a sum: as data, compared with the GEMM bit for bit.

The sums are of one or two products, which every order of float32 sums gives alike.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fp8ref.conformance.gemm.epilogues import combined
from fp8ref.conformance.gemm.grade import faults
from fp8ref.conformance.gemm.grade.accumulators import TF32
from fp8ref.conformance.gemm.grade.stimuli import Stimulus
from fp8ref.formats import BFLOAT16, FLOAT16, FLOAT32, Format
from fp8ref.sim.gemm import accumulate, gemm
from fp8ref.sim.quantize import cast
from fp8ref.spec import epilogue as epilogues
from fp8ref.spec.epilogue import BIASES, Epilogue

FIRST = (None, BFLOAT16, FLOAT16, TF32, FLOAT32)
"""The formats that operands are dequantized and rounded to before products; None: to none."""

VIA = (None, BFLOAT16, FLOAT16, TF32)
"""The formats that a result is rounded to before the output dtype."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """From a sum to an output.

    scale        as of ``Epilogue``; round_first too.
    dequantized  the format that a_k scale_inv is rounded to before the products, and b_k's; None:
                 scales multiply the sum.
    via          a format that the result is rounded to before the output dtype.
    rounding     of the output, and of via.
    each_time    the sum and each product with a scale are rounded to the output dtype.
    """

    scale: epilogues.Scale = "each"
    round_first: bool = False
    dequantized: Format | None = None
    via: Format | None = None
    rounding: epilogues.Rounding = "nearest_even"
    each_time: bool = False

    @property
    def epilogue(self) -> Epilogue | None:
        """The simulator's epilogue of this path, if there is one."""
        if self.dequantized is not None or self.via is not None or self.each_time:
            return None
        return combined(self.scale, self.round_first, None, self.rounding)

    @property
    def odd(self) -> str:
        """What it does that one rounding of the scaled sum does not, in words; '' if nothing."""
        oddities = []
        if self.dequantized not in (None, FLOAT32):
            oddities.append(
                f"operands are dequantized and rounded to {self.dequantized} before they are "
                "multiplied"
            )
        if self.each_time:
            oddities.append(
                "double rounding: the sum and each product with a scale are rounded to the "
                "output dtype"
            )
        if self.round_first:
            oddities.append(
                "double rounding: the sum is rounded to the output dtype before it is scaled (G-5)"
            )
        if self.via is not None:
            oddities.append(f"double rounding: the output is rounded to {self.via} first")
        if self.rounding != "nearest_even":
            oddities.append("outputs are rounded toward zero")
        return "; ".join(oddities)

    @property
    def name(self) -> str:
        """In words: the epilogue's name, or what is odd."""
        if self.epilogue is not None:
            return self.epilogue.name
        return self.odd or "operands are dequantized in float32 before they are multiplied"

    def gives(self, s: Stimulus, out: Format) -> np.ndarray:
        """The outputs of sums of one or two products in the first block of K: float32 [M, N]."""
        a, b = (x[:, :2] for x in faults.values(s))
        scale_a, scale_b = (_first_block_scales(q) for q in (s.a, s.b))
        with np.errstate(all="ignore"):
            if self.dequantized is not None:
                a = cast.round_to(a * scale_a, self.dequantized)
                b = cast.round_to(b * scale_b, self.dequantized)
                # one product: its rounding to float32 is the only one
                result = accumulate.f32(a, b) if a[:, 1].any() else (a[:, :1] * b[:, :1].T)
            elif self.each_time:
                first, last = scale_a, scale_b.T
                if self.scale != "each":
                    first, last = last, first
                sums = cast.round_to(accumulate.f32(a, b), out)
                result = cast.round_to(sums * first, out) * last
            else:
                plain = Epilogue(name="", scale=self.scale)
                acc = accumulate.f32(a, b)
                if self.round_first:
                    acc = cast.round_to(acc, out, rounding=self.rounding)
                scales = scale_a, scale_b.T
                result = gemm.finish_plain(acc, *scales, epilogue=plain, out_dtype=FLOAT32)
            if self.via is not None:
                result = cast.round_to(result, self.via, rounding=self.rounding)
            return cast.round_to(result, out, rounding=self.rounding)


def paths(out: Format) -> Iterator[Path]:
    """The paths that are tried, the likeliest first."""
    for rounding, round_first, scale in itertools.product(
        epilogues.ROUNDINGS, (False, True), ("each", "product", "b_first")
    ):
        if out != FLOAT32 or not (round_first or rounding != "nearest_even"):
            yield Path(scale=scale, round_first=round_first, rounding=rounding)  # type: ignore[arg-type]
    if out != FLOAT32:
        yield from (Path(scale=scale, each_time=True) for scale in ("each", "b_first"))
    for via, first, scale in itertools.product(VIA, FIRST, ("each", "product", "b_first")):
        if (
            via != out
            and (via is not None or first is not None)
            and (first is None or scale == "each")
        ):
            yield Path(scale=scale, dequantized=first, via=via)  # type: ignore[arg-type]
    for via, scale in itertools.product(VIA[1:], ("each", "product", "b_first")):
        if via != out:
            yield Path(scale=scale, via=via, rounding="toward_zero")


def fitting(
    tried: Sequence[Path], stimuli: Sequence[tuple[Stimulus, np.ndarray]], out: Format
) -> list[Path]:
    """The paths that give all results."""
    for s, results in stimuli:
        tried = [p for p in tried if np.array_equal(p.gives(s, out), results, equal_nan=True)]
    return list(tried)


def with_bias(
    tried: Sequence[Path], stimuli: Sequence[tuple[Stimulus, np.ndarray]], out: Format
) -> tuple[Path, epilogues.Bias, int]:
    """The path, and the way to add a bias after it, that give the most results of stimuli with a
    bias; and how many they do not give."""
    wrong = dict.fromkeys(itertools.product(tried, BIASES), 0)
    for (path, bias), (s, results) in itertools.product(wrong, stimuli):
        wrong[path, bias] += int((biased(path, bias, s, out) != results).sum())
    path, bias = min(wrong, key=wrong.__getitem__)
    return path, bias, wrong[path, bias]


def biased(path: Path, bias: epilogues.Bias, s: Stimulus, out: Format) -> np.ndarray:
    """The outputs of sums of two products with a bias that is added so: float32 [M, N]."""
    scale, first, rounding = path.scale, path.round_first, path.rounding
    epilogue = Epilogue(name="", scale=scale, round_first=first, bias=bias, rounding=rounding)
    a, b = (x[:, :2] for x in faults.values(s))
    scales = _first_block_scales(s.a), _first_block_scales(s.b).T
    return gemm.finish_plain(
        accumulate.f32(a, b), *scales, epilogue=epilogue, out_dtype=out, bias=s.bias
    )


def _first_block_scales(q) -> np.ndarray:
    """scale_inv of the first block of K: () or [rows, 1]."""
    return faults.spread(q, q.scale_inv)[:, :1] if q.scale_inv.ndim else q.scale_inv
