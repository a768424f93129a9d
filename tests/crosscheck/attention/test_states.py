"""Delayed states of attention next to the simulator's: all hold, and each planted fault is named
(spec A-19).
"""

import numpy as np
import pytest

from fp8ref.conformance.kit.compare import Report
from fp8ref.crosscheck.attention import attention
from fp8ref.crosscheck.attention import states as attention_states
from fp8ref.crosscheck.operands import observe
from fp8ref.sim.quantize import cast
from fp8ref.spec.attention.variants import GRADIENT_ROLES, ROLES
from fp8ref.train import loop
from fp8ref.train.data import loader

LAYER = "model.layers.0.self_attn"


def stepped(backend, config, steps):
    """(passes, the simulator's states before, the trainer's after) of the last step; the simulator
    follows the steps before it.
    """
    trainer, batches, states = (
        loop.trainer(backend, config),
        loader.open_batches(config),
        attention.first_states(config),
    )
    for step in range(steps):
        passes, before = [], states
        observe(trainer, batches.step(step), passes)
        trainer.step(batches.step(step))
        trained = {
            name: tuple(map(np.asarray, state)) for name, state in trainer.fp8_states().items()
        }
        states = attention.states_after(before, config, passes, trained)
    return passes, before, trained


def checked(backend, config, passes, before, trained) -> Report:
    report = Report()
    after = attention.states_after(before, config, passes, trained)
    attention_states.check(report, backend, config, passes, before, after, trained)
    return report


@pytest.fixture
def config(small):
    return small.replace(
        numerics={"recipe": "bf16", "attention": "cudnn", "attention_scaling": "delayed"}
    )


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_all_states_hold_and_planted_faults_are_named(backend, config):  # A-19, H-3
    """After four steps no tensor is cast to 0, so that each code shows its amax."""
    passes, before, trained = stepped(backend, config, 4)
    report = checked(backend, config, passes, before, trained)
    assert [name for name, check in report.checks.items() if not check.ok] == []
    for role in (*ROLES, *GRADIENT_ROLES):
        assert {
            f"{LAYER}/{role}/state.{part}/{backend}" for part in ("stored", "amax_history", "step")
        } <= report.checks.keys()
    for role in ("o", "ds", "dq", "dk", "dv"):
        name = f"{LAYER}/{role}"
        stored, history, step = trained[name]
        wrong = history.copy()
        wrong[0] *= 1.5  # above half a binary digit: other codes, and another state
        faults = [
            n
            for n, check in checked(
                backend, config, passes, before, trained | {name: (stored, wrong, step)}
            ).checks.items()
            if not check.ok
        ]
        assert f"{name}/amax/{backend}" in faults, role
        faults = [
            n
            for n, check in checked(
                backend, config, passes, before, trained | {name: (2 * stored, history, step)}
            ).checks.items()
            if not check.ok
        ]
        assert faults == [f"{name}/state.stored/{backend}"], role
        if backend == "torch":  # a JAX step is another program than the observed one
            fmt, scale = config.attention_casts[LAYER][role][0], before[name].stored
            code = cast.encode(np.atleast_1d(history[0] * scale), fmt)
            neighbor = history.copy()
            neighbor[0] = cast.decode(code + np.uint8(1), fmt)[0] / scale
            states = trained | {name: (stored, neighbor, step)}
            report = checked(backend, config, passes, before, states)
            assert not report.checks[f"{name}/amax/{backend}"].ok, role
    of_s = trained[f"{LAYER}/s"]
    wrong = of_s[1].copy()
    wrong[0] = 0.75
    found = checked(
        backend, config, passes, before, trained | {f"{LAYER}/s": (of_s[0], wrong, of_s[2])}
    )
    assert not found.checks[f"{LAYER}/s/amax/{backend}"].ok
    scaled = before | {f"{LAYER}/dv": before[f"{LAYER}/dv"]._replace(stored=np.float32(3))}
    assert (
        not checked(backend, config, passes, scaled, trained)
        .checks[f"{LAYER}/dv/scale/{backend}"]
        .ok
    )
