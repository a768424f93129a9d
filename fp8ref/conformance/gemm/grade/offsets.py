"""Check a grouped GEMM that takes offsets: groups without rows, rows of no group, groups along the
reduced axis (spec X-1 to X-6).

``groups.grade_grouped`` grades the arithmetic of groups that are given one by one. This asks a
kernel itself, as torch._scaled_grouped_mm is called, with what its offsets make hard: codes and
scales of NaN in rows of no group, and memory that held NaN before. Operands are small integers
under scales that are powers of two, so that every result has one value.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from fp8ref.conformance.gemm.scaled_gemm import OUT_DTYPES, ProbeError, RefusedError, called
from fp8ref.conformance.kit import subject
from fp8ref.conformance.kit.finding import Described
from fp8ref.conformance.kit.subject import Subject
from fp8ref.formats import E4M3FN, Format
from fp8ref.shared.errors import one_of
from fp8ref.sim.quantize import cast

Which = Literal["output", "grad_weight"]
"""The GEMM: of rows and weights, which grad_input is too, or of rows and rows."""

SIZES = (59, 0, 16, 29)
"""Rows of the groups that are asked: two of them are no multiple of what kernels align to."""

ALIGNED_SIZES = (48, 0, 16, 32)
"""What is asked in their place if a function raises for groups that are not aligned."""

MANY = (0, 0, 1, 255, 0, 17, 2, 275, *(3, 0, 1) * 20, 0)
"""Rows of the groups that are asked next: the first and the last have none, one is longer than a
tile of 128, one than one of 256, and there are more groups than a warp has lanes. Then comes
``SIZES`` again, with no row of no group."""

_LONGER = 3
"""N and K of that question, relative to those of the first: more than a tile."""

TIMES = 4  # how often a function is called: what it does not write is what memory held
ROUNDED = (16, 32, 64, 128)  # to multiples of these a kernel may round a group's rows


class Question(NamedTuple):
    """Rows of the groups, rows of no group, N and K."""

    sizes: tuple[int, ...]
    rest: int
    n: int
    k: int


@dataclass(frozen=True)
class Fault:
    """What is not as a clause says; group is None where no group is meant."""

    group: int | None
    what: str
    clause: str

    def __str__(self) -> str:
        return f"{'' if self.group is None else f'group {self.group}: '}{self.what} ({self.clause})"


@dataclass(frozen=True, kw_only=True)
class OffsetsGrade(Described):
    """The faults of a grouped GEMM that takes offsets; none if it is right.

    sizes     of the first question, or the first that shows a fault; rest: its rows of no group.
    others    how many further questions are asked: ``MANY`` and no row of no group.
    refused   the error that it raised for a question, and what was not asked therefore; "" if none.
    """

    name: str
    which: Which
    sizes: tuple[int, ...]
    rest: int
    faults: tuple[Fault, ...]
    refused: str = ""
    others: int = 0

    @property
    def ok(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    @property
    def message(self) -> str:
        """The faults, one a line."""
        question = f"{self.which} of {_rows_of(self.sizes, self.rest)}"
        unasked = [f"not tested: {self.refused}"] if self.refused else []
        if self.others and self.ok:
            question += f", and of {self.others} further question{'s' * (self.others > 1)}"
        return "\n".join(
            [
                f"{self.name}, {question}, is {'right' if self.ok else 'wrong'}",
                *map(str, self.faults),
                *unasked,
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """What --json writes."""
        return {
            "ok": self.ok,
            "subject": self.name,
            "gemm": self.which,
            "sizes": list(self.sizes),
            "rest": self.rest,
            "faults": [asdict(fault) for fault in self.faults],
            "refused": self.refused,
            "others": self.others,
        }


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Codes, scale_inv and offs of a call, and the numbers they stand for.

    a [M, K] and b [E, N, K], scale_a [M, 1] and scale_b [E, N, 1]; of ``grad_weight`` a [M, N] and
    b [M, K], scale_a [E, N] and scale_b [E, K]. Rows of no group are NaN.
    """

    which: Which
    a: np.ndarray
    b: np.ndarray
    scale_a: np.ndarray
    scale_b: np.ndarray
    ends: np.ndarray

    def rows(self, e: int) -> slice:
        """The rows of a group."""
        return slice(int(self.ends[e - 1]) if e else 0, int(self.ends[e]))

    def result(
        self,
        e: int,
        *,
        weight: int | None = None,
        scaled: int | None = None,
        rows: slice | None = None,
    ) -> np.ndarray:
        """Group e's exact result, float64; or with another's weight, scales or rows."""
        rows = self.rows(e) if rows is None else rows
        scaled = e if scaled is None else scaled
        weight = e if weight is None else weight
        if self.which == "grad_weight":
            sums = self.a[rows].T @ self.b[rows]  # [N, M_e] x [M_e, K]
            return sums * self.scale_a[scaled][:, None] * self.scale_b[scaled]
        sums = self.a[rows] @ self.b[weight].T  # [M_e, K] x [K, N]
        return sums * self.scale_a[rows] * self.scale_b[scaled].T


def grade_offsets(
    function: Callable[..., Any] | Subject,
    *,
    which: Which = "output",
    sizes: Sequence[int] | None = None,
    rest: int = 16,
    n: int = 48,
    k: int = 64,
    fmt: Format = E4M3FN,
    framework: str = "numpy",
) -> OffsetsGrade:
    """Call a grouped GEMM with groups that its offsets make hard, and name what is wrong.

    function   (codes of a, codes of b, scale_inv of a, scale_inv of b, offs) -> the result, in
               float32, bfloat16 or float16. Shapes of ``which`` "output": a [M, K], b [E, N, K],
               scales [M, 1] and [E, N, 1] -> [M, N]. "grad_weight": a [M, N], b [M, K], scales [E,
               N] and [E, K] -> [E, N, K]. offs are int32 [E]. Or a ``kit.subject.Subject``, which
               has a name, a framework and a device.
    sizes      rows of the groups; rest: rows of no group, after them. None: ``SIZES``, or
               ``ALIGNED_SIZES`` if the function raises for those; then ``MANY``, under 3 n and 3 k,
               and ``SIZES`` with no rows of no group.
    framework  of a function's arrays: numpy (float8 of ml_dtypes), torch or jax.
    Raises:    ValueError: another ``which`` or framework, no group with rows, a negative size.
               RefusedError: the function raises. ProbeError: it gives no such array.
    Source:    spec X-1 to X-6.
    """
    one_of("which", which, get_args(Which))
    one_of("framework", framework, subject.FRAMEWORKS)
    if rest < 0 or (sizes is not None and (not any(sizes) or min(sizes) < 0)):
        raise ValueError(
            "groups have sizes of 0 or more rows, and one has rows; got "
            f"{list(SIZES if sizes is None else sizes)} and {rest} of no group."
        )
    if not isinstance(function, Subject):
        function = Subject(name=subject.name_of(function), function=function, framework=framework)
    ask = functools.partial(_asked, function, which, fmt=fmt)
    question = Question(tuple(SIZES if sizes is None else sizes), rest, n, k)
    refused, others = "", 0
    if sizes is not None:
        faults = ask(question)
    else:
        question, faults, refused, others = _usual(question, ask)
    return OffsetsGrade(
        name=function.name,
        which=which,
        sizes=question.sizes,
        rest=question.rest,
        faults=tuple(faults),
        refused=refused,
        others=others,
    )


def _usual(
    first: Question, ask: Callable[[Question], dict[Fault, None]]
) -> tuple[Question, dict[Fault, None], str, int]:
    """(question, faults, what was refused, how many others were asked) by the usual groups, and
    then by many and by none without a group.
    """
    refused = ""
    try:
        faults = ask(first)
    except RefusedError as error:
        refused = _refusal(first, error)
        first = first._replace(sizes=ALIGNED_SIZES)
        faults = ask(first)
    if faults:
        return first, faults, refused, 0
    aligned = 16 if refused else 1
    many = Question(
        tuple(-(-size // aligned) * aligned for size in MANY),
        max(first.rest, 150 // aligned * aligned),
        _LONGER * first.n,
        _LONGER * first.k,
    )
    others = 0
    for question in (many, first._replace(rest=0)):
        try:
            faults = ask(question)
        except RefusedError as error:
            refused = refused or _refusal(question, error)
            continue
        others += 1
        if faults:
            return question, faults, refused, others
    return first, {}, refused, others


def _rows_of(sizes: Sequence[int], rest: int) -> str:
    return f"groups of {', '.join(map(str, sizes))} rows, and {rest} of no group"


def _refusal(question: Question, error: RefusedError) -> str:
    first_line = str(error).partition("\n")[0]
    return f"{_rows_of(question.sizes, question.rest)}, for which it raised ({first_line})"


def _asked(tested: Subject, which: Which, question: Question, fmt: Format) -> dict[Fault, None]:
    """The faults, once each, in the answers to one question."""
    operands = _operands(which, question)
    if which == "grad_weight":
        shape: tuple[int, ...] = (len(question.sizes), question.n, question.k)
    else:
        shape = (len(operands.a), question.n)
    called = (_called(tested, operands, fmt, shape) for _ in range(TIMES))
    answers = {out.tobytes(): (out, dtype) for out, dtype in called}  # each once
    return dict.fromkeys(
        fault for answer in answers.values() for fault in _faults(operands, *answer)
    )


def require_offsets(function: Callable[..., Any], **options: Any) -> OffsetsGrade:
    """Require that a grouped GEMM reads its offsets right, else raise AssertionError with faults.

    options   as ``grade_offsets``.
    Raises:   AssertionError: there is a fault. Others as ``grade_offsets``.
    """
    return grade_offsets(function, **options).require()


def _operands(which: Which, question: Question) -> Operands:
    """Integers up to 3 and 2, a quarter of them not zero: sums of 128 have at most 8 bits."""
    rng = np.random.default_rng(28)
    n, k = question.n, question.k
    m, e = sum(question.sizes) + question.rest, len(question.sizes)

    def integers(shape: tuple[int, ...], largest: int) -> np.ndarray:
        drawn = rng.integers(-largest, largest + 1, shape)
        return drawn * (rng.random(shape) < 0.25).astype(np.float64)

    shapes: list[tuple[int, ...]] = [(m, k), (e, n, k), (m, 1), (e, n, 1)]
    if which == "grad_weight":
        shapes = [(m, n), (m, k), (e, n), (e, k)]
    a, b = integers(shapes[0], 3), integers(shapes[1], 2)
    scale_a, scale_b = (2.0 ** rng.integers(-3, 4, shape) for shape in shapes[2:])
    ends = np.cumsum(question.sizes).astype(np.int32)
    for rows in (a, b if which == "grad_weight" else scale_a):
        rows[ends[-1] :] = np.nan
    return Operands(which=which, a=a, b=b, scale_a=scale_a, scale_b=scale_b, ends=ends)


def _called(
    tested: Subject, operands: Operands, fmt: Format, shape: tuple[int, ...]
) -> tuple[np.ndarray, Format]:
    """The function's result and its dtype, in memory that held NaN if a framework reuses it."""
    a, b = (cast.encode(x.astype(np.float32), fmt) for x in (operands.a, operands.b))
    codes = [subject.native_array(tested, x, fmt) for x in (a, b)]
    scales = [tested.make_array(x, "float32") for x in (operands.scale_a, operands.scale_b)]
    offs = tested.make_array(operands.ends, "int32")
    nan = np.full(shape, np.nan, np.float32)
    held = [tested.make_array(nan, dtype) for dtype in OUT_DTYPES for _ in range(3)]
    del held
    call = functools.partial(tested.function, *codes, *scales, offs)
    output, dtype = called(tested.name, call)
    if output.shape != shape:
        raise ProbeError(f"{tested.name} gives {list(shape)}; got shape {list(output.shape)}.")
    return output, dtype


def _faults(operands: Operands, out: np.ndarray, dtype: Format) -> Iterator[Fault]:
    """What is not as the clauses say."""
    if misread := _misread(operands, out, dtype):
        yield Fault(None, misread, "X-1")
        return
    for e in range(len(operands.ends)):
        rows = operands.rows(e)
        if operands.which == "output" and rows.start == rows.stop:
            continue
        part = out[e] if operands.which == "grad_weight" else out[rows]
        if rows.start == rows.stop:
            if _bits(part).any():
                yield Fault(
                    e, f"has no rows, and its grad_weight is {_shown(part)}, not zeros", "X-4"
                )
        elif (what := _wrong(operands, e, part, dtype)) is not None:
            yield Fault(e, what[0], what[1])
    tail = out[operands.ends[-1] :]
    if operands.which == "output" and _bits(tail).any():
        yield Fault(None, f"rows of no group are {_shown(tail)}, not zeros", "X-5")


def _misread(operands: Operands, out: np.ndarray, dtype: Format) -> str:
    """What offs are taken for, if that explains every row of a group; "" if they are right."""
    ends, last = operands.ends, len(operands.a)
    sizes = np.diff(ends, prepend=0)
    for words, begins, stops in (
        ("sizes, of groups one after another", np.cumsum(ends) - ends, np.cumsum(ends)),
        ("the first rows of groups", ends, np.append(ends[1:], last)),
        ("first rows of groups of the right sizes", ends, ends + sizes),
        ("ends of groups that begin at row 0", 0 * ends, ends),
    ):
        expected = np.zeros(out.shape, np.float32)
        for e, (begin, stop) in enumerate(np.minimum(np.stack([begins, stops], 1), last)):
            rows = slice(int(begin), int(stop))
            part = operands.result(e, rows=rows)
            expected[e if operands.which == "grad_weight" else rows] = part
        expected = cast.round_to(expected, dtype)
        inside = np.ones(len(out), bool)
        if operands.which == "output":
            inside[ends[-1] :] = False
        right = np.array_equal(sizes, stops - begins) and np.array_equal(stops, ends)
        if not right and np.array_equal(out[inside], expected[inside], equal_nan=True):
            return f"offs are read as {words}"
    return ""


def _wrong(operands: Operands, e: int, part: np.ndarray, dtype: Format) -> tuple[str, str] | None:
    """What became of a group's result, and the clause; None if it is right."""

    def equals(expected: np.ndarray) -> bool:
        return np.array_equal(part, cast.round_to(expected.astype(np.float32), dtype))

    if equals(operands.result(e)):
        return None
    if np.isnan(part).any():
        return "holds NaN: rows of no group are read", "X-5"
    if operands.which == "output" and not part.any():
        return "is all zeros", "X-1"
    others = [j for j in range(len(operands.ends)) if j != e]
    for j in others:
        if operands.which == "output" and equals(operands.result(e, weight=j, scaled=j)):
            return f"is multiplied by the weight of group {j}", "X-1"
        if operands.which == "output" and equals(operands.result(e, weight=j)):
            return f"is multiplied by the codes of the weight of group {j}", "X-1"
        if equals(operands.result(e, scaled=j)):
            return f"is scaled as group {j}", "X-3"
    if operands.which == "output":
        if unscaled := _unscaled(operands, e, equals):
            return unscaled, "X-2"
        if tiles := _overwritten(operands, e, part, dtype):
            return tiles, "X-2"
    for what, rows in _other_rows(operands, e) if operands.which == "grad_weight" else ():
        if equals(operands.result(e, rows=rows)):
            return what, "X-2"
    right = cast.round_to(operands.result(e).astype(np.float32), dtype)
    for size in ROUNDED if operands.which == "output" else ():
        if equals(_wrapped(operands, e, size)):
            return f"is written again by rows behind its last tile of {size}, which wrap", "X-2"
    for size in ROUNDED if operands.which == "output" else ():
        whole = len(part) // size * size
        if (
            whole < len(part)
            and np.array_equal(part[:whole], right[:whole])
            and not part[whole:].any()
        ):
            return f"drops its rows after a multiple of {size}", "X-2"
    return "has other numbers", "X-2"


def _unscaled(operands: Operands, e: int, equals: Callable[[np.ndarray], bool]) -> str:
    """Which scales are not used, if that explains a group's rows."""
    right, rows, weight = operands.result(e), operands.scale_a[operands.rows(e)], operands.scale_b
    for words, scales in (("a", rows), ("b", weight[e].T), ("a or b", rows * weight[e].T)):
        if equals(right / scales):
            return f"is not scaled by scale_inv of {words}"
    return ""


def _overwritten(operands: Operands, e: int, part: np.ndarray, dtype: Format) -> str:
    """Which rows hold the product with another group's weight, if all others are right."""
    right = (part == cast.round_to(operands.result(e), dtype)).all(axis=1)
    for j in range(len(operands.ends)):
        tile = part == cast.round_to(operands.result(e, weight=j, scaled=j), dtype)
        if (right | (other := tile.all(axis=1))).all() and other.any():
            first, last = np.flatnonzero(~right)[[0, -1]]
            return f"rows {first} to {last} are overwritten by the last tile of group {j}"
    return ""


def _wrapped(operands: Operands, e: int, size: int) -> np.ndarray:
    """A group's rows if those behind it, up to a whole tile, wrap around to its first ones, under
    scales of their own.
    """
    rows = operands.rows(e)
    count = rows.stop - rows.start
    last = np.arange(-(-count // size) * size)
    scaled = np.zeros(count, np.int64)
    scaled[last % count] = np.minimum(rows.start + last, len(operands.a) - 1)
    sums = operands.a[rows] @ operands.b[e].T  # [M_e, K] x [K, N]
    return sums * operands.scale_a[scaled] * operands.scale_b[e].T


def _other_rows(operands: Operands, e: int) -> Iterator[tuple[str, slice]]:
    """Rows that a group of rows may be taken for."""
    rows, last = operands.rows(e), int(operands.ends[-1])
    yield "sums the rows of all groups", slice(0, last)
    yield "sums the rows from the first group on", slice(0, rows.stop)
    for size in ROUNDED:
        count = rows.stop - rows.start
        end = min(rows.start - -count // size * size, last)
        words = f"sums rows of the next group, up to a multiple of {size}"
        yield words, slice(rows.start, end)
        end = rows.start + count // size * size
        yield f"drops its rows after a multiple of {size}", slice(rows.start, end)


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


def _shown(x: np.ndarray) -> str:
    """A number that is not +0, for a message."""
    if np.isnan(x).any():
        return "NaN"
    return f"{x.reshape(-1)[np.argmax(_bits(x).reshape(-1) != 0)]:.9g}"
