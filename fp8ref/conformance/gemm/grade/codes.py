"""What a GEMM takes codes for: numbers, subnormals, NaN, Inf; each product of two alone."""

import numpy as np

from fp8ref.conformance.decoder import readings
from fp8ref.conformance.gemm.grade.stimuli import Stimulus
from fp8ref.conformance.gemm.grade.structure import Cause, first_of
from fp8ref.conformance.kit.arrays import equal
from fp8ref.formats import FLOAT16, Format
from fp8ref.sim.quantize import cast

RANGE = "products outside of float16's range are lost"
"""A cause that a float16 accumulator or output has; how it rounds may be known better."""


def judge(samples: list[tuple[Stimulus, np.ndarray]], out: Format) -> Cause | None:
    """The cause if products of codes are wrong: two readings, RANGE, or what is seen."""
    a, b = (_tables(q.fmt) for q in (samples[0][0].a, samples[0][0].b))
    right = a[""], b[""]
    wrong = [(s, results, _products(s, *right, out)) for s, results in samples]
    wrong = [(s, f, g) for s, f, g in wrong if not np.array_equal(f, g, equal_nan=True)]
    if not wrong:
        return None
    stimulus, results, expected = wrong[0]
    differ = ~equal(results, expected)
    count = sum(int((~equal(f, g)).sum()) for _, f, g in wrong)
    evidence = f"{count} of {sum(f.size for _, f in samples)} products of two codes differ"
    name = "products of codes"
    both = [(which, which) for which in a if which in b]  # one wrong kernel reads both
    for name_a, name_b in [*((one, "") for one in a), *(("", one) for one in b), *both]:
        read = ((_products(s, a[name_a], b[name_b], out), f) for s, f in samples)
        if all(np.array_equal(g, f, equal_nan=True) for g, f in read):
            parts = name_a.format("a"), name_b.format("b")
            name = ", and ".join(part for part in parts if part)
            evidence = f"all products have the bits of it; {evidence}"
            break
    else:
        name = RANGE
        if not all(_out_of_range(f, g) for _, f, g in wrong):
            i, j = np.argwhere(differ)[0]
            a_code, b_code = int(stimulus.a.codes[i, 0]), int(stimulus.b.codes[j, 0])
            name = f"the product of code 0x{a_code:02X} of a and code 0x{b_code:02X} of b"
    return Cause(name, evidence, "wrong", first_of(stimulus, results, expected, differ, "G-6"))


def _tables(fmt: Format) -> dict[str, np.ndarray]:
    """{reading of codes, with {} for the operand: numbers of all codes}, the right ones first."""
    right = readings.right_numbers(fmt)
    wrong = {r.name: np.where(r.codes, r.table, right) for r in readings.readings(fmt)}
    return {"": right} | wrong


def _products(s: Stimulus, table_a: np.ndarray, table_b: np.ndarray, out: Format) -> np.ndarray:
    with np.errstate(all="ignore"):
        products = np.outer(table_a[s.a.codes[:, 0]], table_b[s.b.codes[:, 0]])
        return cast.round_to(products, out) + np.float32(0)


def _out_of_range(results: np.ndarray, expected: np.ndarray) -> bool:
    """Whether results are wrong only where float16 has no normal number."""
    differ = ~equal(results, expected)
    size = np.abs(expected[differ])
    outside = (size > FLOAT16.max) | (size < FLOAT16.smallest_normal)
    return bool((np.isfinite(size) & outside).all())
