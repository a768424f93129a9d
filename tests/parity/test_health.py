"""The health of optimizer states that a run records, in either backend."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from helpers.training.given_gradients import configured, fed

from fp8ref.sim.states import health as simulated
from fp8ref.sim.states import states as sim
from fp8ref.spec.states import health
from fp8ref.train import loop
from fp8ref.train.data import loader
from fp8ref.train.run import log

BACKENDS = pytest.mark.parametrize(
    "backend", [pytest.param("jax", marks=pytest.mark.slow), "torch"]
)


@BACKENDS
def test_equal_gradients_have_the_simulators_record(backend, small):  # O-12, Q-12
    config = configured(small, "fishman")
    trainer, tokens = loop.trainer(backend, config), loader.open_batches(config).step(0)
    rng = np.random.default_rng(0)
    gradients = {
        name: (1e-2 * rng.standard_t(2, p.shape) ** 3).astype(np.float32)
        for name, p in trainer.weights().items()
    }
    fed(trainer, gradients)
    _, operands, found = trainer.measured_step(tokens)
    assert operands == {}
    assert set(found) == {"", *gradients}
    keys, counted = config.optimizer, dict.fromkeys(health.COUNTS, 0)
    given = {"b1": keys.beta1, "b2": keys.beta2, "eps": keys.eps, "layout": "fishman"}
    for name, g in gradients.items():
        before = sim.init(g.shape, "fishman")
        after = sim.step(g, g, before, sim.AdamW(learning_rate=0.0, **given))[1]
        wanted = asdict(simulated.measure(g, before, after, **given))
        for key in (*health.COUNTS, "bytes_per_parameter"):
            assert found[name][key] == wanted[key], (name, key)
        # float32 sums over at most 256 rows and columns, in JAX
        for key in ("root_bias", "update_error", "largest_ratio"):
            assert found[name][key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), (name, key)
        counted = {key: counted[key] + wanted[key] for key in counted}
    assert {key: found[""][key] for key in counted} == counted
    assert counted["v_lost"] > 0


@BACKENDS
def test_a_run_has_columns_and_records_and_the_same_losses(backend, small, tmp_path):
    config = configured(small, "sqrt_e5m2", run={"steps": 3, "eval_every": 3, "eval_batches": 1})
    plain = loop.train(config, backend, tmp_path / "plain")
    measured = loop.train(config.replace(statistics={"every": 2}), backend, tmp_path / "measured")
    assert [line["loss"] for line in measured] == [line["loss"] for line in plain]
    columns = {
        f"state_{key}"
        for key in (
            *health.RATES,
            "root_bias",
            "update_error",
            "largest_ratio",
            "bytes_per_parameter",
        )
    }
    assert [columns <= line.keys() for line in log.read_metrics(tmp_path / "measured")] == [
        True,
        False,
        True,
    ]
    assert not any(columns & line.keys() for line in plain)
    lines = [
        json.loads(line)
        for line in (tmp_path / "measured" / log.STATISTICS).read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [0, 2]
    assert lines[0]["states"][""]["stalled_v"] > 0
    assert (
        lines[1]["states"][""]["count"]
        == lines[0]["states"][""]["count"]
        == sum(p["count"] for p in list(lines[0]["states"].values())[1:])
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "parallel"), [("sqrt_e4m3", {"fsdp": 2}), ("sqrt_e4m3", {"scan": True})]
)
def test_a_mesh_and_a_stack_of_layers_in_jax(layout, parallel, small):  # O-11, Q-12
    config = configured(small, layout)
    tokens, found = loader.open_batches(config).step(0), []
    for given in ({}, parallel):
        trainer, rng = loop.trainer("jax", config.replace(parallel=given)), np.random.default_rng(0)
        fed(
            trainer,
            {
                name: (1e-2 * rng.standard_t(3, p.shape)).astype(np.float32)
                for name, p in sorted(trainer.weights().items())
            },
        )
        found.append(trainer._states(tokens))
    one, other = found
    assert one.keys() == other.keys()
    for name in one:
        for key in health.COUNTS:
            assert one[name][key] == other[name][key], (name, key)
