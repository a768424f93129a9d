"""Published claims: how a verdict is reached, and that page and notebook show what was recorded."""

import json
from dataclasses import asdict

import pytest

import finding_casts
import finding_runs
import findings
from claim import Claim

RECORDED = json.loads(findings.RESULTS.read_text())


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.2, 2.0, "reproduced"),
        (1.05, 2.0, "cannot tell"),
        (0.5, 1.05, "not reproduced"),
        (-3.0, 0.5, "not reproduced"),
        (-1.0, 3.0, "cannot tell"),
    ],
)
def test_a_verdict_is_of_the_whole_interval(low, high, verdict):
    assert findings.judge(low, high, above=1.0, margin=0.1) == verdict


def test_an_interval_is_students():
    # t of 3 degrees of freedom at 95 % is 3.1824, and the standard error sqrt(5 / 3) / 2
    mean, low, high = findings.interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    assert high - mean == pytest.approx(3.1824 * (5 / 3) ** 0.5 / 2, rel=1e-4)
    assert mean - low == pytest.approx(high - mean)


def test_every_claim_is_recorded_with_its_source():
    claims = {claim.name: claim for claim in (*finding_casts.CLAIMS, *finding_runs.CLAIMS)}
    assert [one["name"] for one in RECORDED["findings"]] == list(claims)
    for one in RECORDED["findings"]:
        claim = claims[one["name"]]
        assert one["source"]
        assert {
            key: one[key] for key in ("claim", "source", "figure", "how", "above", "margin")
        } == {
            key: getattr(claim, key)
            for key in ("claim", "source", "figure", "how", "above", "margin")
        }
        assert len(one["samples"]) == claim.seeds
        assert one["verdict"] == findings.judge(
            one["low"], one["high"], above=one["above"], margin=one["margin"]
        )
        assert (one["mean"], one["low"], one["high"]) == pytest.approx(
            findings.interval(one["samples"])
        )
    assert RECORDED["seconds"] < 1200


def test_the_page_is_the_one_that_was_recorded():
    assert findings.PAGE.read_text() == findings.page(RECORDED["findings"], RECORDED)


@pytest.mark.parametrize("claim", finding_casts.CLAIMS, ids=lambda claim: claim.name)
def test_a_figure_is_measured_again(claim):
    """The simulator's bits are the same everywhere.

    NumPy's float64 sums differ in order: 2^-30 of a figure is far above that.
    """
    recorded = next(one for one in RECORDED["findings"] if one["name"] == claim.name)
    assert claim.measure(0) == pytest.approx(recorded["samples"][0], rel=2**-30, abs=2**-30)


@pytest.mark.slow
def test_a_claim_about_training_is_measured():
    claim = next(one for one in finding_runs.CLAIMS if one.name == "swiglu_alignment")
    found = asdict(findings.measured(Claim(**{**vars(claim), "seeds": 2})))
    assert len(set(found["samples"])) == 2
    assert 0 < found["mean"] < 1
