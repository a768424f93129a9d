"""Why an optimizer is not AdamW, where no order of operations says so (spec O)."""

import numpy as np
import pytest

from fp8ref.conformance import identify_optimizer
from fp8ref.conformance.kit.subject import ConformanceError
from fp8ref.conformance.optimizer.forms import Numbers
from fp8ref.sim.quantize import cast

F = np.float32


def adamw(*, step=lambda t: t + 1, betas=lambda b: b, store_v=lambda v: v):
    """AdamW in clause O's order; the arguments plant faults."""

    def update(p, g, state, learning_rate, b1, b2, eps, weight_decay):
        m, v, t = state or (np.zeros_like(p), np.zeros_like(p), 0)
        t, own1, own2 = step(t), betas(b1), betas(b2)
        m = F(own1) * m + F(1 - own1) * g
        v = F(own2) * v + F(1 - own2) * (g * g)
        i1, i2 = F(1 / (1 - b1**t)), F(1 / np.sqrt(1 - b2**t))
        ratio = (m * i1) / (np.sqrt(v) * i2 + F(eps))
        return p - F(learning_rate) * (ratio + F(weight_decay) * p), (m, store_v(v), t)

    return update


def shared_counter():
    steps = [0]

    def count(t):
        steps[0] += 1
        return steps[0]

    return count


def to_bfloat16(beta):
    return float(cast.round_to(np.float64(beta), "bfloat16"))


def test_a_right_one_has_no_fault():
    outcome = identify_optimizer(adamw(), expect="float32")
    assert outcome.ok
    assert list(outcome.faults) == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (adamw(step=lambda t: 1), "biases are corrected as at step 1 for ever"),
        (adamw(step=lambda t: min(t + 1, 3)), "biases are corrected as at steps 1, 2, 3, 3, 3, 3"),
        (adamw(step=lambda t: min(t + 1, 256)), "its step stays 256: steps 297 to 300"),
        (adamw(step=lambda t: min(t + 1, 127)), "its step stays 127: steps 297 to 300"),
        (adamw(step=lambda t: t % 256 + 1), "its step begins again: steps 297 to 300"),
        (adamw(step=lambda t: min(t + 1, 50)), "its step stays 50: steps 297 to 300"),
        (adamw(step=lambda t: t + 1 + 10**6 * (t >= 100)), "its weights change at step 101"),
        (adamw(step=lambda t: (t + 2**15 + 1) % 2**16 - 2**15), "it raises at step 32767 or later"),
        (adamw(step=lambda t: t % (2**16 - 1) + 1), "its weights change at step 65536"),
        (adamw(betas=to_bfloat16), "betas are rounded to bfloat16 in the averages"),
    ],
)
def test_faults_have_names(fault, words):
    outcome = identify_optimizer(fault, expect="float32")
    assert not outcome.ok
    assert any(fault.startswith(words) for fault in outcome.faults), outcome.message
    assert f". Fault: {words}" in outcome.message


def test_betas_that_bfloat16_rounds_to_1_are_not_tried():
    outcome = identify_optimizer(adamw(step=lambda t: 1), numbers=Numbers(b2=0.999))
    assert ". Fault: biases are corrected as at step 1 for ever" in outcome.message


def test_one_counter_of_all_tensors():
    words = r"One counter of steps serves all tensors: their first steps are \[1, 2, 3, 4\]"
    with pytest.raises(ConformanceError, match=words):
        identify_optimizer(adamw(step=shared_counter()))
    random = np.random.default_rng(0)
    with pytest.raises(ConformanceError, match="Turn off random state"):
        identify_optimizer(adamw(store_v=lambda v: v * F(random.uniform(0.9, 1))))


def test_a_moment_in_float16_has_a_name():
    narrow = adamw(store_v=lambda v: v.astype(np.float16).astype(F))
    outcome = identify_optimizer(
        lambda p, g, state: narrow(p, g, state, 1e-3, 0.9, 0.95, 1e-8, 0.1)
    )
    assert not outcome.ok
    assert "float32 with fmt float16 of v" in outcome.message


def test_zeros_are_told():
    def store(v):
        return np.where(v.any(), v, np.full_like(v, np.nan))

    def update(p, g, state, learning_rate, b1, b2, eps, weight_decay):
        named = state and (state["m"], state["v"], state["step"])
        numbers = (learning_rate, b1, b2, eps, weight_decay)
        p, (m, v, t) = adamw(store_v=store)(p, g, named, *numbers)
        return p, {"m": m, "v": v, "step": t}

    outcome = identify_optimizer(update, expect="float32")
    assert "v of a tensor without gradients is NaN, or has no finite scale" in outcome.faults


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.95, 0.99)])
def test_other_betas_in_the_corrections_are_solved(betas):
    """Powers of the betas that an optimizer had before a checkpoint restored others."""

    def resumed(p, g, state, learning_rate, b1, b2, eps, weight_decay):
        t = 1 if state is None else state["step"] + 1
        m, v = (np.zeros_like(p) if state is None else state[name] for name in "mv")
        m = np.float32(b1) * m + np.float32(1 - b1) * g
        v = np.float32(b2) * v + np.float32(1 - b2) * (g * g)
        i1 = np.float32(1 / (1 - betas[0] ** t))
        i2 = np.float32(1 / (1 - betas[1] ** t) ** 0.5)
        ratio = (m * i1) / (np.sqrt(v) * i2 + np.float32(eps))
        p = p - np.float32(learning_rate) * (ratio + np.float32(weight_decay) * p)
        return p, {"m": m, "v": v, "step": t}

    outcome = identify_optimizer(resumed)
    assert f"biases are corrected with betas {betas[0]} and {betas[1]}" in outcome.message
