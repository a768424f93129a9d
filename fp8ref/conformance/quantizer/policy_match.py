"""Find the policies that explain a quantizer's scales and codes, else a policy and deviations.

If no policy agrees, policies with deviations are tried (``deviation_search``), then a constant
factor between the scales. If nothing agrees, the nearest policy is reported.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from fp8ref import policy as policy_data
from fp8ref.conformance.inputs.cast_inputs import CAST_FORMATS
from fp8ref.conformance.inputs.kinds import AMAX_RANGES
from fp8ref.conformance.quantizer import candidates, deviation_search, outputs
from fp8ref.conformance.quantizer.candidates import Agreement, Candidate, Comparison
from fp8ref.conformance.quantizer.deviation_search import Search
from fp8ref.conformance.quantizer.deviations import NO_DEVIATION
from fp8ref.conformance.quantizer.outputs import Quantizer, Response, ScaleLayout
from fp8ref.formats import Format
from fp8ref.policy import ScalePolicy
from fp8ref.spec.granularity import by_name

_FEW = 2  # deviations from the expected policy that come before fewer from another one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """What a quantizer gave for amaxes, one for each group, and how to read it.

    fmt    of its codes; shape: of the tensors that hold the amaxes.
    """

    quantizer: Quantizer
    responses: Sequence[Response]
    scale_layout: ScaleLayout
    fmt: Format
    shape: tuple[int, int]

    @cached_property
    def rows(self) -> tuple[Sequence[Response], ScaleLayout]:
        """The responses ``outputs.as_rows``."""
        return outputs.as_rows(self.responses, self.scale_layout)

    @cached_property
    def considered(self) -> np.ndarray:
        """For each group of all responses, whether it counts in the comparison with a policy.

        A quantizer with a memory is compared at ordinary amaxes alone: what it keeps after other
        amaxes, one call cannot tell. In JAX a NaN does not count if XLA's own max loses it (P-3).
        """
        if self.quantizer.memory:
            return ordinary(self.responses)
        counts = []
        for a in self.responses:
            nan = a.kind == AMAX_RANGES.index("NaN")
            lost = nan.any() and loses_nan(self.quantizer, a.x, self.scale_layout)
            counts.append(~nan if lost else np.ones_like(nan))
        return np.concatenate(counts)

    def comparison(self, candidate: Candidate) -> Comparison:
        """The quantizer with a candidate."""
        layout = self.scale_layout
        return Comparison(quantizer=self.quantizer, candidate=candidate, scale_layout=layout)

    def score(self, a: Agreement) -> tuple[int, int]:
        """As ``Agreement.score``, of the groups that count."""
        return a.score(self.considered)

    @property
    def flushing(self) -> bool:
        """Whether float32 subnormals may be zeros, as under XLA (S-12)."""
        return self.quantizer.subject.framework == "jax"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyMatch:
    """The policies that explain a quantizer's scales, or its codes if it returns no scales.

    agreements those policies; empty if there is none.
    nearest    the first of them, else the policy that agrees most, as it is.
    deviation  how the quantizer departs from the nearest policy, in words; or "".
    explained  for each group, whether the nearest policy with that deviation gives the response.
               What it does not explain has another cause.
    departs    how it departs from the expected policy, where others explain it; or "".
    deviating  the nearest policy with deviations that explain its scales at all amaxes; or None.
    """

    agreements: Sequence[Agreement]
    nearest: Agreement
    answers: Answers
    deviation: str = ""
    explained: np.ndarray
    deviating: Agreement | None = None
    departs: str = ""

    @property
    def basis(self) -> Agreement | None:
        """The agreement that explains what decides a policy, at all amaxes; None without one."""
        return self.nearest if self.agreements else self.deviating

    @property
    def chosen(self) -> Candidate:
        """The candidate of the basis, else of the nearest policy."""
        return (self.basis or self.nearest).candidate

    def mismatches(self, agreement: Agreement) -> np.ndarray:
        """For each group that counts, whether it disagrees."""
        return ~agreement.both & self.answers.considered

    @property
    def names(self) -> list[str]:
        """The names of the policies that agree."""
        return list(dict.fromkeys(a.candidate.policy.name for a in self.agreements))


def match_policies(answers: Answers, expected: ScalePolicy | None) -> PolicyMatch:
    """The policies that agree with all responses that count, else the nearest one and how the
    quantizer departs from it; of equal deviations, that from the expected policy.
    """
    tied, best = _named(answers)
    as_named = PolicyMatch(agreements=tied, nearest=best, answers=answers, explained=best.both)
    named = tied and not as_named.mismatches(best).any()
    if named and (expected is None or expected.name in as_named.names):
        return as_named
    # A few deviations from the policy that is expected say more than another policy.
    deviating = _deviating(answers, [expected]) if expected else None
    if deviating is not None and as_named.mismatches(deviating).any():
        deviating = None
    if named:
        text = deviating.candidate.words if deviating else ""
        return dataclasses.replace(as_named, departs=text)
    if deviating is None or deviating.candidate.deviation.parts > _FEW:
        policies = sorted(policy_data.POLICIES.values(), key=lambda p: p != expected)
        deviating = _deviating(answers, policies)
    # Codes that are wrong beside right scales: the cast decides them, unless a deviation does.
    if tied and (deviating is None or as_named.mismatches(deviating).any()):
        return as_named
    # Deviations must explain more than the best policy does as it is.
    if deviating is None or answers.score(deviating) <= answers.score(best):
        nearest, text, explained = match_ratio(best, *answers.rows)
        return dataclasses.replace(
            as_named, nearest=nearest, deviation=text, explained=explained | nearest.both
        )
    plain = dataclasses.replace(deviating.candidate, deviation=NO_DEVIATION)
    return PolicyMatch(
        agreements=[],
        nearest=candidates.agreement(plain, *answers.rows),
        answers=answers,
        deviation=deviating.candidate.deviation.text,
        explained=deviating.both,
        deviating=deviating if (deviating.deciding | ~answers.considered).all() else None,
    )


def _deviating(answers: Answers, policies: Sequence[ScalePolicy]) -> Agreement | None:
    """The policy and the deviations that explain most; None where groups have several sizes."""
    rows, row_layout = answers.rows
    if len(rows) != 1:
        return None
    every, width = np.arange(rows[0].amax.size), deviation_search.WIDTH
    underflow = deviation_search.asked_for_underflow(answers.quantizer, answers.shape)
    search = Search(
        rows=outputs.some_rows(rows[0], every, width),
        scale_layout=row_layout,
        considered=answers.considered,
        fmt=answers.fmt,
        flushing=answers.flushing,
        underflow=underflow,
    )
    partial = search.run(policies)
    return partial and candidates.agreement(partial.candidate, rows, row_layout)


def _named(answers: Answers) -> tuple[list[Agreement], Agreement]:
    """The policies that agree best, and the first of them; or none, and the nearest one.

    Scaling to the max of the format found is tried first, then to another format's max, then codes
    of another format. In JAX subnormals may be zeros: tried together with policies that keep them.
    """
    (rows, row_layout), found_fmt = answers.rows, answers.fmt
    fixed = rows[0].output.dtype.startswith("float8")  # it names the format
    others = [f for f in CAST_FORMATS.values() if f is not found_fmt]
    sample = rows
    if len(rows) == 1:
        sample = [outputs.some_rows(a, a.ordinary, deviation_search.WIDTH) for a in rows]
    best: Agreement | None = None
    for stage in (
        [(found_fmt, found_fmt)],
        [(f, found_fmt) for f in others],
        [] if fixed else [(f, f) for f in others],
    ):
        # Elsewhere than in JAX a policy that flushes is tried only after those that do not.
        for ways in ((False, True),) if answers.flushing else ((False,), (True,)):
            tried = [
                Candidate(policy=policy, scale_fmt=scale_fmt, fmt=of, flushes=flushes)
                for flushes in ways
                for policy in policy_data.POLICIES.values()
                for scale_fmt, of in stage
            ]
            # A few elements of ordinary groups rule out most candidates cheaply.
            likely = [c for c in tried if candidates.agrees(c, sample, row_layout)]
            agreements = [candidates.agreement(c, rows, row_layout) for c in likely]
            agreed = [a for a in agreements if (a.deciding | ~answers.considered).all()]
            if agreed:
                top_score = max(answers.score(a) for a in agreed)
                tied = [a for a in agreed if answers.score(a) == top_score]
                return tied, tied[0]
            # The nearest policy is that of the first stage: most likely it is meant, and wrong.
            if best is None:
                usual = ordinary(rows)

                def rank(a: Agreement, usual: np.ndarray = usual) -> tuple:
                    return bool(a.codes[usual].all()), -a.ulps, answers.score(a)

                best = max((candidates.agreement(c, rows, row_layout) for c in tried), key=rank)
    assert best is not None
    return [], best


def match_ratio(
    best: Agreement, responses: Sequence[Response], scale_layout: ScaleLayout
) -> tuple[Agreement, str, np.ndarray]:
    """The policy whose scales differ by one factor, the factor, and which groups' scales have it.

    Without such a policy: the best, "", and no group. The factor may vary by rounding: a ratio of
    scales, or of reciprocals, has four float32 roundings of 2^-24, so two differ by 2^-21 at most.
    """
    for policy in policy_data.POLICIES.values():
        candidate = dataclasses.replace(best.candidate, policy=policy)
        every = _ratios(candidate, responses, scale_layout)
        ratios = every[ordinary(responses)] if every.size else every
        ratios = ratios if np.all((ratios > 0) & (ratios < np.inf)) else np.zeros(0)
        # Within 2^-20 of 1 the factor may be rounding alone.
        alike = ratios.size and ratios.max() / ratios.min() < 1 + 2.0**-21
        if alike and abs(np.log2(ratios[0])) > 2.0**-20:
            ratio, largest = float(np.median(ratios)), candidate.scale_fmt.max
            text = f"its scale is about {ratio:.6g} times that policy's"
            for fmt in CAST_FORMATS.values():
                if abs(ratio * largest / fmt.max - 1) < 2.0**-20:
                    text += f", as of a max of {fmt.max:g}"
                    break
            with np.errstate(invalid="ignore"):
                explained = np.abs(every / ratio - 1) < 2.0**-20
            agreement = candidates.agreement(candidate, responses, scale_layout)
            return agreement, text, explained
    return best, "", np.zeros(best.both.size, bool)


def _ratios(
    candidate: Candidate, sample: Sequence[Response], scale_layout: ScaleLayout
) -> np.ndarray:
    """For each group, the quantizer's scale divided by the candidate's; empty without scales."""
    name = scale_layout.scale
    if name is None:
        return np.zeros(0)
    ratios = []
    for a in sample:
        kind = scale_layout.kinds[name]
        expected = candidates.by_group(candidate.scales(a.x, scale_layout), kind)
        with np.errstate(all="ignore"):
            ratio = outputs.per_group(a, name, scale_layout).astype(np.float64) / expected
            ratios.append(ratio if kind == "scale" else 1 / ratio)
    return np.concatenate(ratios)


def loses_nan(quantizer: Quantizer, x: np.ndarray, scale_layout: ScaleLayout) -> bool:
    """Whether jax.numpy.max over the magnitudes of a group of x drops a NaN in it (P-3)."""
    if quantizer.subject.framework != "jax":
        return False
    import jax.numpy as jnp

    array, axis = quantizer.subject.make_array(x, quantizer.dtype), scale_layout.axis
    magnitudes = jnp.abs(array.astype(jnp.float32))
    # Along the axes that a JAX quantizer reduces: whether XLA loses a NaN depends on them.
    block = by_name(scale_layout.granularity)
    if scale_layout.granularity == "tensorwise":
        maxima = jnp.max(magnitudes)[None]
    elif block.reduced is None:
        maxima = jnp.max(magnitudes, axis)
    else:  # the parts of lines in a block, for blocks of several lines too
        lines = magnitudes if axis == -1 else magnitudes.T
        maxima = jnp.max(lines.reshape(len(lines), -1, block.reduced), -1)
    nan = np.isnan(x)
    has_nan = nan.any() if scale_layout.granularity == "tensorwise" else nan.any(axis=axis)
    lines_lost = ~np.isnan(np.asarray(maxima)).reshape(np.size(has_nan), -1).any(axis=1)
    return bool(np.any(lines_lost & np.reshape(has_nan, -1)))


def ordinary(responses: Sequence[Response]) -> np.ndarray:
    """For each group of all responses, whether its amax is ordinary."""
    return np.concatenate([a.ordinary for a in responses])
