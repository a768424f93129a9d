"""Find the policies that explain a quantizer's scales and codes, else a policy and a deviation.

If no policy agrees, each policy with one known deviation is tried, then a constant factor between
the scales. If nothing agrees, the nearest policy is reported.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from fp8ref import policy as policy_data
from fp8ref.conformance.inputs.cast_inputs import CAST_FORMATS
from fp8ref.conformance.inputs.kinds import AMAX_RANGES
from fp8ref.conformance.quantizer import candidates, outputs
from fp8ref.conformance.quantizer.candidates import Agreement, Candidate
from fp8ref.conformance.quantizer.deviations import DEVIATIONS, NO_DEVIATION, Deviation, pairs, scale_times
from fp8ref.conformance.quantizer.outputs import Quantizer, Response, ScaleLayout
from fp8ref.formats import Format
from fp8ref.granularity import by_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyMatch:
    """The policies that explain a quantizer's scales, or its codes if it returns no scales.

    agreements those policies; empty if there is none.
    nearest    the first of them, else the policy that agrees most.
    considered for each group, whether its response counts (the function ``considered``).
    deviation  how the quantizer departs from the nearest policy, in words; or "".
    explained  for each group, whether the nearest policy with that deviation gives the response.
               What it does not explain has another cause.
    """

    agreements: Sequence[Agreement]
    nearest: Agreement
    responses: Sequence[Response]
    considered: np.ndarray
    deviation: str = ""
    explained: np.ndarray

    def mismatches(self, agreement: Agreement) -> np.ndarray:
        """For each group that counts, whether it disagrees."""
        return ~agreement.both & self.considered

    @property
    def names(self) -> list[str]:
        """The names of the policies that agree."""
        return list(dict.fromkeys(a.candidate.policy.name for a in self.agreements))


def match_policies(
    responses: Sequence[Response], scale_layout: ScaleLayout, found_fmt: Format, considered: np.ndarray, *, fixed: bool, flushing: bool
) -> PolicyMatch:
    """The policies that agree with all responses that count.

    Scaling to the max of found_fmt is tried first, then to another format's max, then codes of
    another format.

    fixed     the dtype of the codes names their format, so that no other is tried.
    flushing  subnormals may be zeros, as under XLA: tried together with policies that keep them.
    """
    others = [f for f in CAST_FORMATS.values() if f is not found_fmt]
    sample, _ = outputs.as_rows([a for a in responses if a.ordinary.any()][:8], scale_layout)
    rows, of_rows = outputs.as_rows(responses, scale_layout)
    best: Agreement | None = None
    for stage in ([(found_fmt, found_fmt)], [(f, found_fmt) for f in others], [] if fixed else [(f, f) for f in others]):
        # Elsewhere than in JAX a policy that flushes is tried only after those that do not.
        for ways in ((False, True),) if flushing else ((False,), (True,)):
            tried = [
                Candidate(policy=policy, scale_fmt=scale_fmt, fmt=of, flushes=flushes)
                for flushes in ways
                for policy in policy_data.POLICIES.values()
                for scale_fmt, of in stage
            ]
            # A few ordinary amaxes rule out most candidates cheaply.
            likely = [c for c in tried if candidates.agrees_at_ordinary(c, sample, of_rows)]
            found = [candidates.agreement(c, rows, of_rows) for c in likely]
            agreed = [a for a in found if (a.deciding | ~considered).all()]
            if agreed:
                top_score = max(score(a, considered) for a in agreed)
                tied = [a for a in agreed if score(a, considered) == top_score]
                return PolicyMatch(agreements=tied, nearest=tied[0], responses=responses, considered=considered, explained=tied[0].both)
            # The nearest policy is that of the first stage: most likely it is meant, and wrong.
            if best is None:
                found = [candidates.agreement(c, rows, of_rows) for c in tried]
                best = max(found, key=lambda a: (bool(a.codes[ordinary(rows)].all()), -a.ulps, score(a, considered)))
    assert best is not None
    deviating = match_deviation(rows, sample, of_rows, found_fmt)
    # A deviation must explain more than the best policy does as it is.
    if deviating is None or score(deviating, considered) <= score(best, considered):
        nearest, text, explained = match_ratio(best, rows, of_rows)
        return PolicyMatch(
            agreements=[], nearest=nearest, responses=responses, considered=considered, deviation=text, explained=explained | nearest.both
        )
    plain = candidates.agreement(dataclasses.replace(deviating.candidate, deviation=NO_DEVIATION), rows, of_rows)
    text = deviating.candidate.deviation.text
    return PolicyMatch(agreements=[], nearest=plain, responses=responses, considered=considered, deviation=text, explained=deviating.both)


def score(a: Agreement, considered: np.ndarray) -> tuple[int, int]:
    """How many groups agree in what decides the policy, and how many in scales and codes."""
    return int((a.deciding & considered).sum()), int((a.both & considered).sum())


def match_deviation(
    responses: Sequence[Response], sample: Sequence[Response], scale_layout: ScaleLayout, found_fmt: Format
) -> Agreement | None:
    """The policy with one deviation, else with a pair, that agrees at all ordinary amaxes and at most others."""
    found = _deviating(responses, sample, scale_layout, found_fmt, DEVIATIONS, factors=True)
    # Pairs are many, and without scales each costs a cast of the sample.
    if not found and scale_layout.scale is not None:
        found = _deviating(responses, sample, scale_layout, found_fmt, tuple(pairs()), factors=False)
    return max(found, key=lambda a: int(a.both.sum())) if found else None


def _deviating(
    responses: Sequence[Response],
    sample: Sequence[Response],
    scale_layout: ScaleLayout,
    found_fmt: Format,
    deviations: Sequence[Deviation],
    *,
    factors: bool,
) -> list[Agreement]:
    """The policies with one of these deviations, or with a power of two as a factor, that agree at all ordinary amaxes."""
    found = []
    for policy in policy_data.POLICIES.values():
        plain = Candidate(policy=policy, scale_fmt=found_fmt, fmt=found_fmt)
        # If the policy agrees at ordinary amaxes as it is, only deviations at the others are left.
        as_is = candidates.agrees_at_ordinary(plain, sample, scale_layout)
        for deviation in (*deviations, *(_power_of_two_factor(plain, sample, scale_layout) if factors else ())):
            candidate = dataclasses.replace(plain, deviation=deviation)
            if (
                deviation.applies_to(policy)
                and not (as_is and deviation.ordinary)
                and candidates.agrees_at_ordinary(candidate, sample, scale_layout)
            ):
                agreed = candidates.agreement(candidate, responses, scale_layout)
                if agreed.both[ordinary(responses)].all():
                    found.append(agreed)
    return found


def _power_of_two_factor(candidate: Candidate, sample: Sequence[Response], scale_layout: ScaleLayout) -> list[Deviation]:
    """The deviation of scales that are all one power of two times the candidate's, if they are."""
    ratios = _ratios(candidate, sample, scale_layout)
    ratios = ratios[ordinary(sample)] if ratios.size else ratios
    exact = ratios.size > 0 and np.all(ratios == ratios[0]) and ratios[0] != 1 and np.frexp(ratios[0])[0] == 0.5
    return [scale_times(float(ratios[0]))] if exact else []


def match_ratio(best: Agreement, responses: Sequence[Response], scale_layout: ScaleLayout) -> tuple[Agreement, str, np.ndarray]:
    """The policy whose scales differ by one factor, the factor in words, and for each group whether its scale has it.

    Without such a policy: the best, "", and no group. The factor may vary by rounding: a ratio of
    scales, or of their reciprocals, has four roundings to float32, each within 2^-24, so that two
    ratios are within 2^-21.
    """
    for policy in policy_data.POLICIES.values():
        candidate = dataclasses.replace(best.candidate, policy=policy)
        every = _ratios(candidate, responses, scale_layout)
        ratios = every[ordinary(responses)] if every.size else every
        ratios = ratios if np.all((ratios > 0) & (ratios < np.inf)) else np.zeros(0)
        # Within 2^-20 of 1 the factor may be rounding alone.
        if ratios.size and ratios.max() / ratios.min() < 1 + 2.0**-21 and abs(np.log2(ratios[0])) > 2.0**-20:
            ratio = float(np.median(ratios))
            other = next(
                (
                    f", as of a max of {f.max:g}"
                    for f in CAST_FORMATS.values()
                    if abs(ratio * candidate.scale_fmt.max / f.max - 1) < 2.0**-20
                ),
                "",
            )
            text = f"its scale is about {ratio:.6g} times that policy's{other}"
            with np.errstate(invalid="ignore"):
                explained = np.abs(every / ratio - 1) < 2.0**-20
            return candidates.agreement(candidate, responses, scale_layout), text, explained
    return best, "", np.zeros(best.both.size, bool)


def _ratios(candidate: Candidate, sample: Sequence[Response], scale_layout: ScaleLayout) -> np.ndarray:
    """For each group, the quantizer's scale divided by the candidate's; empty without scales."""
    name = scale_layout.scale
    if name is None:
        return np.zeros(0)
    found = []
    for a in sample:
        expected = np.reshape(getattr(candidate.scales(a.x, scale_layout), scale_layout.kinds[name]), -1)
        with np.errstate(all="ignore"):
            ratio = outputs.per_group(a, name, scale_layout).astype(np.float64) / expected
            found.append(ratio if scale_layout.kinds[name] == "scale" else 1 / ratio)
    return np.concatenate(found)


def considered(quantizer: Quantizer, responses: Sequence[Response], scale_layout: ScaleLayout) -> np.ndarray:
    """For each group of all responses, whether it counts in the comparison with a policy.

    A quantizer with a memory is compared at ordinary amaxes alone: what it keeps after other amaxes,
    one call cannot tell. In JAX a NaN does not count if XLA's own max loses it (P-3).
    """
    if quantizer.memory:
        return ordinary(responses)
    counts = []
    for a in responses:
        nan = a.kind == AMAX_RANGES.index("NaN")
        counts.append(~nan if nan.any() and loses_nan(quantizer, a.x, scale_layout) else np.ones_like(nan))
    return np.concatenate(counts)


def loses_nan(quantizer: Quantizer, x: np.ndarray, scale_layout: ScaleLayout) -> bool:
    """Whether jax.numpy.max over the magnitudes of a group of x drops a NaN in it (P-3)."""
    if quantizer.subject.framework != "jax":
        return False
    import jax.numpy as jnp

    magnitudes, axis = jnp.abs(quantizer.subject.make_array(x, quantizer.dtype).astype(jnp.float32)), scale_layout.axis
    # Along the axes that a JAX quantizer reduces: whether XLA loses a NaN depends on them.
    block = by_name(scale_layout.granularity)
    if scale_layout.granularity == "tensorwise":
        found = jnp.max(magnitudes)[None]
    elif block.reduced is None:
        found = jnp.max(magnitudes, axis)
    else:  # the parts of lines in a block, for blocks of several lines too
        lines = magnitudes if axis == -1 else magnitudes.T
        found = jnp.max(lines.reshape(len(lines), -1, block.reduced), -1)
    nan = np.isnan(x)
    wanted = nan.any() if scale_layout.granularity == "tensorwise" else nan.any(axis=axis)
    lines_lost = ~np.isnan(np.asarray(found)).reshape(np.size(wanted), -1).any(axis=1)
    return bool(np.any(lines_lost & np.reshape(wanted, -1)))


def ordinary(responses: Sequence[Response]) -> np.ndarray:
    """For each group of all responses, whether its amax is ordinary."""
    return np.concatenate([a.ordinary for a in responses])
