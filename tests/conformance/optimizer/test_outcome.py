"""What is said of an optimizer. Which one it is: ``test_identify.py``."""

import pytest

from fp8ref.conformance.optimizer.forms import Form
from fp8ref.conformance.optimizer.outcome import OptimizerOutcome, summary
from fp8ref.spec.states.layouts import LAYOUTS

TE = LAYOUTS["te"]


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"exact": False}, False),
        ({"layout": None}, False),
        ({"layout": "te with block 128 of m"}, False),
        ({"form": Form(decay="none")}, False),
        ({"expected": "te"}, True),
        ({"expected": "coat"}, False),
    ],
    ids=str,
)
def test_an_outcome_is_ok_if_all_is_explained_by_the_layout_that_it_should_have(change, ok):
    given = {
        "name": "mine",
        "kind": "function",
        "layout": "te",
        "form": Form(),
        "known": True,
        "exact": True,
        "shown": True,
    }
    outcome = OptimizerOutcome(**given | {"findings": (), "summary": "it is"} | change)
    assert outcome.ok is outcome.to_dict()["ok"] is ok
    assert outcome.message.startswith(
        "it is"
        if outcome.expected is None
        else f"mine is {'' if ok else 'not '}{outcome.expected!r}: "
    )


def test_a_summary_says_which_steps_are_others():
    assert (
        summary(TE, Form(), True, TE, has_form=True)
        == "layout 'te', bit for bit, in the order of clause O"
    )
    assert "another form: decay is coupled. It is Adam" in summary(
        TE, Form(decay="coupled"), True, TE, has_form=True
    )
    assert "the nearest is 'te'" in summary(None, Form(), False, TE, has_form=True)
    assert "its states are those of layout 'te', its weights are not" in summary(
        TE, Form(), False, TE, has_form=False
    )
