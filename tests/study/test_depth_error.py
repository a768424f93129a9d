import numpy as np
import pytest

from fp8ref.recipe import fp8_recipes
from fp8ref.study import depth_error
from fp8ref.study.depth_error import Seen
from fp8ref.study.recording import Operand

X = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def seen(inputs, result, in_fp8=0, rows=2):
    made = {
        name: Operand(kept=x, amax=np.abs(x).max(), columns=np.abs(x).max(axis=0), rows=rows)
        for name, x in inputs.items()
    }
    return Seen(made, result, in_fp8)


FIRST = seen({"a": X, "b": 2 * X}, X)


def test_errors_and_divergence_by_hand():
    other = X.copy()
    other[0] = [2.0, 1.5]
    found = depth_error.compare(
        FIRST, FIRST, lambda recipe: seen({"a": X, "b": X}, other, 1), ["tensorwise"]
    )
    one = found.outcomes["tensorwise"]
    assert one.inputs == {"a": 0.0, "b": 0.5}
    assert one.in_fp8 == 1
    assert one.output == pytest.approx(np.sqrt(1.25 / 30), rel=1e-15)
    # Of the first row the softmax is (1 - p, p), then (q, 1 - q); of the second KL is 0.
    p, q = 1 / (1 + np.exp(-1)), 1 / (1 + np.exp(-0.5))
    expected = (1 - p) * np.log((1 - p) / q) + p * np.log(p / (1 - q))
    assert one.divergence == pytest.approx(expected / 2, rel=1e-12)
    assert one.agreement == 0.5


def test_refusals_of_recipes_that_nobody_named_are_kept():
    def under(recipe):
        if recipe.in_blocks:
            raise ValueError("no blocks")
        return FIRST

    found = depth_error.compare(FIRST, FIRST, under, None)
    assert set(found.refused) == {
        name for name, recipe in fp8_recipes().items() if recipe.in_blocks
    }
    assert set(found.outcomes) == {
        name for name, recipe in fp8_recipes().items() if not recipe.in_blocks
    }
    assert found.ok
    with pytest.raises(ValueError, match="no blocks"):
        depth_error.compare(FIRST, FIRST, under, ["blockwise"])


def test_the_best_result_is_first():
    errors = {"tensorwise": 0.3, "rowwise": 0.1}
    found = depth_error.compare(
        FIRST, FIRST, lambda recipe: seen({"a": X}, X * (1 + errors[recipe.name]), 1), list(errors)
    )
    assert list(found.outcomes) == ["rowwise", "tensorwise"]


def test_a_result_that_is_no_number_is_last():
    errors = {"tensorwise": np.nan, "rowwise": 0.3, "mxfp8": 0.1}
    found = depth_error.compare(
        FIRST,
        FIRST,
        lambda recipe: seen({"a": X}, X * np.float32(1 + errors[recipe.name]), 1),
        list(errors),
    )
    assert list(found.outcomes) == ["mxfp8", "rowwise", "tensorwise"]


def test_layers_with_other_tokens_are_left_out():
    """As experts, to which a router in FP8 sends others."""
    found = depth_error.compare(
        FIRST, FIRST, lambda recipe: seen({"a": X[:1], "b": 2 * X}, X, 2), ["rowwise"]
    )
    assert found.outcomes["rowwise"].inputs == {"b": 0.0}
    other = seen({"a": X}, X, rows=300)  # as many rows are kept
    assert (
        depth_error.compare(FIRST, FIRST, lambda recipe: other, ["rowwise"])
        .outcomes["rowwise"]
        .inputs
        == {}
    )


def test_masked_logits_count_nothing():
    masked = np.array([[1.0, -np.inf], [0.0, 1.0]], np.float32)
    first = seen({"a": X}, masked)
    one = depth_error.compare(
        first, first, lambda recipe: seen({"a": X}, masked + np.float32(1), 1), ["rowwise"]
    ).outcomes["rowwise"]
    assert one.divergence == pytest.approx(0, abs=1e-15)
    assert one.output == pytest.approx(np.sqrt(3 / 2))
    assert one.agreement == 1


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="got a scalar"):
        depth_error.compare(seen({"a": X}, np.float32(1)), FIRST, lambda recipe: FIRST, ["rowwise"])
    with pytest.raises(ValueError, match="no linear of it was called"):
        depth_error.compare(seen({}, X), FIRST, lambda recipe: FIRST, ["rowwise"])


@pytest.mark.parametrize("recipes", [["rowwise"], None])
def test_a_pass_that_calls_the_model_of_outside_is_refused(recipes):
    """Its copy was not called, and the same result twice is no error of 0."""
    with pytest.raises(ValueError, match="no linear of the copy was called"):
        depth_error.compare(FIRST, FIRST, lambda recipe: seen({}, X, 2), recipes)


def test_a_pass_that_changes_is_refused():
    with pytest.raises(ValueError, match="run gives the same result each time; two runs differed"):
        depth_error.compare(FIRST, seen({}, X + 1), lambda recipe: FIRST, ["tensorwise"])


def test_a_row_with_a_nan_agrees_with_none():
    nan = np.float32([[1, 0], [np.nan, 1]])
    once = seen({"a": X}, nan)
    found = depth_error.compare(once, once, lambda recipe: once, ["rowwise"]).outcomes["rowwise"]
    assert found.agreement == 0.5


def test_a_name_in_the_place_of_names():
    once = seen({"a": X}, np.float32([[1, 0]]))
    with pytest.raises(ValueError, match="recipes are a list of names; got 'rowwise'"):
        depth_error.compare(once, once, lambda recipe: once, "rowwise")


def test_recipes_rank_by_kl_and_not_by_the_norm_that_an_outlier_owns():
    """One logit of 1000 hardly changes under the recipe that loses all small ones."""
    logits = np.array([[1000.0, 1.0, 2.0, 4.0], [0.0, 1.0, 2.0, 4.0]], np.float32)
    first = seen({"a": X}, logits)
    changed = {"tensorwise": np.where(logits < 8, 0, logits), "rowwise": logits * np.float32(1.01)}
    found = depth_error.compare(
        first, first, lambda recipe: seen({"a": X}, changed[recipe.name], 1), list(changed)
    )
    assert list(found.outcomes) == ["rowwise", "tensorwise"]
    better, worse = found.outcomes.values()
    assert better.output > worse.output
    assert better.divergence < worse.divergence
    assert found.sentence().startswith("rowwise (KL ")
    assert ", tensorwise (KL " in found.sentence()


def test_a_reference_of_zeros_has_no_finite_error():
    zeros = seen({"a": 0 * X}, X)
    found = depth_error.compare(
        zeros, zeros, lambda recipe: seen({"a": X}, X, 1), ["rowwise"]
    ).outcomes["rowwise"]
    assert found.inputs == {"a": np.inf}
    assert depth_error.compare(zeros, zeros, lambda recipe: zeros, ["rowwise"]).outcomes[
        "rowwise"
    ].inputs == {"a": 0.0}
