"""Grade somebody's GEMM, or require that it is right (spec B-14).

1. ``structure``: sums of integers that every accumulator of 8 bits has, and every index of K alone.
2. ``codes``: what each code is taken for.
3. Random operands: the distance from the exact result, in ulps and in units of B-1's bound. In a
   long K that bound is wide, so that few products among zeros are asked for too.
4. ``roundings``: how the scales and the output round; ``accumulators``: which narrow accumulator,
   or which plan of the simulator, gives the sums.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fp8ref.conformance.gemm import adapters, bound
from fp8ref.conformance.gemm.grade import (
    codes,
    edges,
    imprecision,
    row_bits,
    scale_ends,
    stimuli,
    structure,
)
from fp8ref.conformance.gemm.grade.scales import reading
from fp8ref.conformance.gemm.grade.stimuli import Asked, Shape, Stimulus
from fp8ref.conformance.gemm.grade.structure import Cause, Tile, first_of
from fp8ref.conformance.gemm.grade.verdict import Grade, Measured
from fp8ref.conformance.gemm.scaled_gemm import RefusedError, ScaledGemm
from fp8ref.formats import E4M3FN, Format
from fp8ref.sim.gemm import accumulate as plans
from fp8ref.sim.gemm import gemm
from fp8ref.sim.gemm.accumulate import Accumulation
from fp8ref.spec import epilogue as epilogues
from fp8ref.spec.epilogue import Epilogue
from fp8ref.spec.granularity import by_name

SHAPES: tuple[Shape, ...] = ((96, 96, 96), (64, 80, 1056), (128, 128, 4096), (272, 272, 96))
"""The shapes that are asked: a cube, in which transposed operands fit; a ragged K; a long one; and
results of several tiles, of 128 and of 256, whose last rows and columns fill none."""

SHAPES_OF_BLOCKS: tuple[Shape, ...] = (
    (128, 128, 128),
    (64, 80, 1152),
    (128, 128, 4096),
    (272, 272, 384),
)
"""The same for scales of blocks, which divide K; in the last, blocks of 128 x 128 have a matrix of
scales, which differs from its transpose."""

CALLS = 2  # how often random operands are multiplied: equal calls have equal bits

MOST_CALLS = 64
"""The most GEMMs that ask for indices of K; of a longer K than they reach the rest is not asked."""


def grade_gemm(
    function: Callable[..., Any] | ScaledGemm,
    *,
    shapes: Sequence[Shape] | None = None,
    formats: tuple[Format, Format] = (E4M3FN, E4M3FN),
    epilogue: str | Epilogue = "scale_then_round",
    accumulate: str | Accumulation | None = None,
    framework: str | None = None,
    granularity: str = "tensorwise",
    seed: int = 0,
) -> Grade:
    """Grade a GEMM: right, imprecise or wrong, by how much and why.

    function     of (a, b), or of codes and scale_inv of both; or ``wrap`` of it, which takes a
                 name, a device and another granularity of b too.
    shapes       M, N and K that it is asked with; by default three, and integers at M = 1, N = 1
                 and a ragged K.
    formats      of a [M, K] and b [N, K].
    epilogue     how it should scale and round: B-1 allows more under G-5.
    accumulate   a plan whose bits it should have, in the place of B-1's bound.
    Others:      as ``wrap``; seed of the random operands.
    Raises:      ValueError: no shape, or one below 1 or with K below 2; unknown names. ProbeError:
                 the GEMM is invalid, or raises for every shape.
    Source:      spec B-1, B-14.

    >>> from fp8ref.sim import gemm
    >>> grade = grade_gemm(lambda a, b: gemm.matmul(a, b, accumulate="f32"), shapes=[(16, 16, 64)])
    >>> grade.verdict, grade.plan
    ('right', 'f32')
    """
    scaled = adapters.wrap(function, framework=framework, granularity=granularity, formats=formats)
    block = by_name(scaled.granularity).reduced
    usual = SHAPES_OF_BLOCKS if block else SHAPES
    at_edges = edges.shapes(*usual[0], block=block) if shapes is None else {}
    shapes = usual if shapes is None else tuple(shapes)
    if not shapes or any(min(shape) < 1 or shape[2] < 2 for shape in shapes):
        raise ValueError(
            "a grade takes shapes M, N, K of at least 1, 1, 2; got "
            f"{[list(shape) for shape in shapes]}."
        )
    named = None if accumulate is None else plans.by_name(accumulate)
    asked = Asked(
        scaled=scaled,
        formats=formats,
        epilogue=epilogues.by_name(epilogue),
        accumulate=named or "exact",
        seed=seed,
    )
    return _graded(asked, shapes, at_edges, named)


def _graded(
    asked: Asked,
    shapes: Sequence[Shape],
    at_edges: dict[str, Shape],
    named: str | Accumulation | None,
) -> Grade:
    """The grade. Structure, edges and scales decide what is wrong; random operands how far results
    are off, and then why.

    at_edges  ``edges.shapes``; named: the plan whose bits it should have.
    """
    scaled = asked.scaled
    causes, dtypes, refused, unasked = _structures(asked, shapes)
    ends = edges.examine(asked, {} if causes else at_edges)
    causes += ends.causes
    if not causes:
        scale_causes, refusals = scale_ends.examine(asked, asked.short(dtypes))
        causes += scale_causes
        unasked += refusals
    unasked += [f"{', '.join(ends.refused)}, for which it raised"] if ends.refused else []
    sampled = [_measured(asked, shape, out, named) for shape, out in dtypes.items()]
    unasked += [words for one in sampled for words in one.unasked]
    measured = {shape: one.measured for shape, one in zip(dtypes, sampled, strict=True)}
    samples = [sample for one in sampled for sample in one.samples]
    longest = max(samples, key=lambda sample: sample[0].shape[2])
    varied = [cause for one in sampled for cause in one.varied]
    rows = row_bits.NOT_ASKED if causes or varied else row_bits.compare(asked, longest[0])
    if not rows.asked:
        unasked.append("whether a row's bits depend on the number of rows")
    why = _why(asked, causes, dtypes, samples, measured)
    return Grade(
        name=scaled.name,
        granularities=scaled.granularities,
        formats=asked.formats,
        out_dtype=next(iter(dtypes.values())),
        bias=scaled.bias,
        about=scaled.about,
        verdict=_verdict(bool(causes), [*why.causes, *varied], measured),
        measured=measured,
        causes=_merged([*why.causes, *varied], len({k for _, _, k in dtypes})),
        rows=rows,
        plan=why.plan,
        epilogue=why.epilogue,
        expected=named if named is None or isinstance(named, str) else named.name,
        compared=sum(one.compared for one in sampled),
        equal=sum(one.equal for one in sampled),
        edges=ends.asked,
        refused=refused,
        unasked=[*unasked, *why.unasked, *_never(scaled, refused)],
    )


def _is_severe(measured: dict[Shape, Measured]) -> bool:
    """Whether results are outside B-1's bound."""
    return any(one.bounds > 1 for one in measured.values())


def _why(
    asked: Asked,
    causes: list[Cause],
    dtypes: dict[Shape, Format],
    samples: list[tuple[Stimulus, np.ndarray]],
    measured: dict[Shape, Measured],
) -> imprecision.Found:
    """Why results are imprecise; of a GEMM that is wrong, the causes alone. Products that leave the
    range of a narrow accumulator are a cause that it may explain.
    """
    range_causes = [cause for cause in causes if cause.name == codes.RANGE]
    if causes and not range_causes:
        return imprecision.Found(causes, None, None, ["accumulators and roundings of a wrong GEMM"])
    examined = imprecision.examine(
        asked,
        samples,
        next(iter(dtypes.values())),
        short=asked.short(dtypes),
        severe=_is_severe(measured) or bool(causes),
    )
    return examined._replace(causes=examined.causes or range_causes)


def _verdict(wrong: bool, causes: list[Cause], measured: dict[Shape, Measured]) -> str:
    lost = any(not np.isfinite(one.bounds) for one in measured.values())
    if wrong or lost or any(cause.severity == "wrong" for cause in causes):
        return "wrong"
    varies = any(cause.name == row_bits.VARIES for cause in causes)
    return "imprecise" if varies or _is_severe(measured) else "right"


def require_gemm(function: Callable[..., Any] | ScaledGemm, **options: Any) -> Grade:
    """Require that a GEMM is right, else raise an AssertionError with the causes and the first
    result that shows each.

    options   as ``grade_gemm``. With ``accumulate`` every bit must be that plan's.
    Returns:  the grade, with what was asked and what was not.
    Raises:   AssertionError: it is imprecise or wrong. Others as ``grade_gemm``.
    Source:   spec B-1, B-14.
    """
    return grade_gemm(function, **options).require()


def _structures(
    asked: Asked, shapes: Iterable[Shape]
) -> tuple[list[Cause], dict[Shape, Format], dict[Shape, str], list[str]]:
    """(causes, {shape: output dtype}, {shape: why it was refused}, what was not asked)."""
    causes: list[Cause] = []
    dtypes: dict[Shape, Format] = {}
    refused: dict[Shape, str] = {}
    unasked: list[str] = []
    tile: Tile | None = None
    for shape in shapes:
        stimulus = stimuli.integers(asked, shape)
        try:
            results, out = asked.run(stimulus)
        except RefusedError as error:
            refused[shape] = str(error).partition("\n")[0]
            continue
        dtypes[shape] = out
        more, tile = _structure(asked, shape, stimulus, results, out, unasked, tile)
        causes += more
    if not dtypes:
        raise RefusedError("\n".join(refused.values()))
    if not causes:
        causes += _short_causes(asked, asked.short(dtypes), next(iter(dtypes.values())))
    return _merged(causes, len({k for _, _, k in dtypes})), dtypes, refused, unasked


def _short_causes(asked: Asked, shape: Shape, out: Format) -> list[Cause]:
    """The causes that one shape shows as well as any: the bias, and what codes are taken for."""
    if asked.scaled.bias:
        stimulus = stimuli.integers(asked, shape, bias=True)
        causes = structure.integer_causes(stimulus, asked.run(stimulus)[0], out, None)[0]
        if causes:
            return causes
    cause = codes.judge([(s, asked.run(s)[0]) for s in stimuli.codes(asked, shape)], out)
    return [cause] if cause else []


def _structure(
    asked: Asked,
    shape: Shape,
    stimulus: Stimulus,
    results: np.ndarray,
    out: Format,
    unasked: list[str],
    earlier: Tile | None,
) -> tuple[list[Cause], Tile | None]:
    """The causes for one shape, and the tile that is wrong.

    earlier   the tile of an earlier shape.
    """
    m, n, k = shape
    calls = -(-k // (m * n))
    if k > stimuli.LONG:
        unasked.append(
            f"every index of K = {k} in every tile of a result: one result asks for each, and "
            "many for both ends"
        )
    if calls > MOST_CALLS:
        unasked.append(f"indices of K from {MOST_CALLS * m * n} on, of K = {k}")
    causes, tile = structure.integer_causes(stimulus, results, out, None, earlier)
    named = bool(causes) and causes[0].exact
    if causes and (read := reading.causes(asked, stimulus, results, out, causes)):
        return read, earlier
    seen: dict[str, tuple[list[np.ndarray], Any]] = {}
    factors = np.ones(k, np.float32)
    for places, product in itertools.islice(stimuli.single(asked, shape), MOST_CALLS):
        alone = asked.run(product)[0]
        skipped = tile if named else None
        for kind, numbers, first in structure.indices(places, product, alone, skipped):
            seen.setdefault(kind, ([], first))[0].append(numbers)
        present = places >= 0
        factors[places[present]] = alone[present]
    if not seen:
        return causes, tile or earlier
    explained = not structure.integer_causes(stimulus, results, out, factors)[0]
    if not explained and tile is None and named:
        return causes, earlier  # a named fault, which single products show too
    if explained or tile is None:
        causes, tile = [], None  # the indices say all that is known
    for kind, (parts, first) in seen.items():
        numbers = np.concatenate(parts)
        evidence = f"K = {k}: each index of K was asked alone"
        evidence += ", and sums of integers have the bits of it" if explained else ""
        words = structure.in_words(kind, numbers, k)
        part = structure.part_of(kind, numbers, k)
        causes.append(Cause(words, evidence, "wrong", first, part))
    return causes, tile or earlier


def _merged(causes: list[Cause], lengths: int) -> list[Cause]:
    """Causes of the same name once, the first of them, with the count of shapes.

    A part of K has a length for every K, and one name; where one K was asked it has both names.
    """
    alike = Counter(part for _, part in {(cause.name, cause.part) for cause in causes})
    merged: dict[str, tuple[Cause, int]] = {}
    for cause in causes:
        name = cause.name
        if cause.part:
            if alike[cause.part] > 1:
                name = cause.part
            elif lengths == 1:
                name = f"{name}, or {cause.part}"
        first, count = merged.get(name, (cause._replace(name=name, part=""), 0))
        merged[name] = first, count + 1
    return [
        first._replace(evidence=f"{first.evidence}; in {count} shapes") if count > 1 else first
        for first, count in merged.values()
    ]


class _Sampled(NamedTuple):
    """The errors of one shape; random operands with their results; how many have the expected
    plan's bits, of how many; what was not asked; and the cause if equal calls differ.
    """

    measured: Measured
    samples: list[tuple[Stimulus, np.ndarray]]
    equal: int
    compared: int
    unasked: list[str]
    varied: list[Cause]


def _measured(
    asked: Asked, shape: Shape, out: Format, named: str | Accumulation | None
) -> _Sampled:
    """Compare random operands of one shape; of a long K also few products among zeros."""
    m, n, k = shape
    dense = stimuli.random(asked, shape, out)
    pairs = [(dense, dense)]
    if k > stimuli.LONG:
        few = stimuli.random(asked, (m, n, stimuli.LONG), out)
        pairs.append((stimuli.thinned(few, k), few))
    errors, samples, equal, compared = [], [], 0, 0
    unasked, varied = list[str](), list[Cause]()
    for stimulus, same in pairs:
        try:
            results, *again = (asked.run(stimulus)[0] for _ in range(CALLS))
        except RefusedError as error:
            if stimulus is dense:
                raise
            first_line = str(error).partition("\n")[0][:240]
            unasked.append(f"{stimulus}, for which it raised ({first_line})")
            continue
        epilogue = asked.epilogue
        simulated = gemm.matmul(same.a, same.b, epilogue=epilogue, out_dtype=out)
        others = [other for other in again if other.tobytes() != results.tobytes()]
        outputs = (results, *others)
        errors += [_errors(stimulus, same, x, simulated, out, epilogue) for x in outputs]
        varied += [_varied(stimulus, results, other) for other in others[:1]]
        samples.append((stimulus, results))
        if named is not None:
            expected = simulated
            if named != "exact":
                a, b = stimulus.a, stimulus.b
                expected = gemm.matmul(a, b, accumulate=named, epilogue=epilogue, out_dtype=out)
            equal += int((expected.view(np.uint32) == results.view(np.uint32)).sum())
            compared += results.size
    measured = dataclasses.replace(
        max(errors, key=lambda one: (one.bounds, one.ulps)),
        ulps=max(one.ulps for one in errors),
        median_ulps=max(one.median_ulps for one in errors),
        error=max(one.error for one in errors),
        count=sum(one.count for one in errors),
    )
    return _Sampled(measured, samples, equal, compared, unasked, varied)


def _varied(stimulus: Stimulus, results: np.ndarray, other: np.ndarray) -> Cause:
    """The cause of two calls with the same operands that differ."""
    differ = other.view(np.uint32) != results.view(np.uint32)
    evidence = f"{int(differ.sum())} of {differ.size} results of an equal call are others"
    first = first_of(stimulus, other, results, differ, "B-14")
    return Cause(row_bits.VARIES, evidence, "imprecise", first)


def _errors(
    stimulus: Stimulus,
    same: Stimulus,
    results: np.ndarray,
    simulated: np.ndarray,
    out: Format,
    epilogue: Epilogue,
) -> Measured:
    """The errors of random results; same: the operands without the zeros between them."""
    far = bound.distance(same.a, same.b, results, simulated, out_dtype=out, epilogue=epilogue)
    exact = bound.exact(same.a, same.b)
    with np.errstate(all="ignore"):
        finite = np.isfinite(results)
        squares = (results[finite] - exact[finite]) ** 2
        error = np.inf
        if finite.any():
            error = float(np.sqrt(np.mean(squares) / np.mean(exact**2)))
    at = np.unravel_index(int(np.argmax(far.bounds)), results.shape)
    worst = structure.counterexample(stimulus, at, results[at], simulated[at], "B-1")  # type: ignore[arg-type]
    return Measured(
        ulps=float(far.ulps.max()),
        median_ulps=float(np.median(far.ulps)),
        bounds=float(far.bounds[at]),
        error=error,
        count=results.size,
        worst=worst if far.bounds[at] else None,
    )


def _never(scaled: ScaledGemm, refused: dict[Shape, str]) -> list[str]:
    """What no grade asks, and the shapes that were refused."""
    return [
        *(
            f"[{m}, {n}] K = {k}, for which it raised ({error[:120]})"
            for (m, n, k), error in refused.items()
        ),
        *["a bias"] * (not scaled.bias),
        "other shapes, formats, dtypes, scales and devices",
        "results below the smallest normal number",
        "signs of zeros",
    ]
