"""The automatic mu of gradients in FP8 under both trainers, against the simulator (spec P-22, P-25,
Q-14).
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.processes.ranks import run
from helpers.training import gradient_cases as cases

from fp8ref.formats import BFLOAT16
from fp8ref.shared.errors import ConfigError
from fp8ref.sim.distributed import gradient_reduction
from fp8ref.sim.quantize import cast
from fp8ref.spec import llama
from fp8ref.spec.gradient_reduction import AutoScale
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train import loop
from fp8ref.train.config.config import Config, from_dict
from fp8ref.train.config.sections import DataConfig, OptimizerConfig, RunConfig

RANKS, STEPS = 2, 5
# mu reaches 1.41 after a step, whose largest elements saturate
AUTO = AutoScale(window=2, threshold=1e-3)
MODEL = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
LINEARS = llama.linear_shapes(MODEL)
# under local scope a device alone has the same operands
FP8 = {"reduce_dtype": "float8_e4m3fn", "amax_scope": "local"}
MU = {"reduce_mu": "automatic", "mu_window": AUTO.window, "mu_threshold": AUTO.threshold}


def configured(microbatches: int = 1, **parallel) -> Config:
    return Config(
        model=MODEL,
        data=DataConfig(sequence_length=16, batch_size=8, microbatches=microbatches),
        # weights stay: then each step has the gradients that a device alone has
        optimizer=OptimizerConfig(
            learning_rate=1e-30, min_learning_rate=0, weight_decay=0, warmup_steps=0
        ),
        run=RunConfig(steps=STEPS),
    ).replace(parallel=parallel)


def tokens_of(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 256, (8, 17))


def expected(backend: str, microbatches: int) -> list[dict[str, tuple[float, int]]]:
    """(mu after a step, saturated elements) by linear, of the simulator, from the gradients of a
    device alone of each rank's rows of each microbatch; and the gradients of the mean loss by the
    mu of the last step."""
    alone = loop.trainer(
        backend, configured().replace(data={"batch_size": 8 // RANKS // microbatches})
    )
    mu, found = dict.fromkeys(LINEARS, np.float32(1)), []
    # In JAX a device differentiates the mean loss of all ranks.
    share = np.float32(1 / RANKS) if backend == "jax" else np.float32(1)
    for step in range(STEPS):
        saturated, total = dict.fromkeys(LINEARS, 0), {}
        for part in (
            configured(microbatches).data.parts(tokens_of(step)).reshape(microbatches, -1, 17)
        ):
            grads = [alone.gradients(rows) for rows in np.split(part, RANKS)]
            for name in LINEARS:
                of_ranks = [g[f"{name}.weight"] * share for g in grads]
                reduced = gradient_reduction.reduce(of_ranks, mu=mu[name], mean=backend == "torch")
                saturated[name] += reduced.saturated
                value = (
                    cast.round_to(reduced.value, BFLOAT16) if backend == "jax" else reduced.value
                )
                total[name] = total.get(name, np.float32(0)) + value
        gradients = {name: value * np.float32(1 / microbatches) for name, value in total.items()}
        for name, shape in LINEARS.items():
            mu[name] = gradient_reduction.next_mu(
                mu[name], saturated[name], shape[0] * shape[1], AUTO
            )
        found.append(
            {name: (float(mu[name]), saturated[name], gradients[name]) for name in LINEARS}
        )
    return found


def trained(backend: str, config: Config):
    """Of each step (mu, saturated elements, the gradient that it took) by linear."""
    trainer, found = loop.trainer(backend, config), []
    for step in range(STEPS):
        gradients = trainer.gradients(tokens_of(step))
        trainer.step(tokens_of(step))
        factors = trainer.gradient_factors()
        found.append(
            {
                name: (factors[name]["mu"], factors[name]["saturated"], gradients[f"{name}.weight"])
                for name in LINEARS
            }
        )
    return found


def compare(found, wanted):
    halved = grown = 0
    for step, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        for name in LINEARS:
            assert mine[name][:2] == theirs[name][:2], (step, name)
            assert cases.equal(mine[name][2], theirs[name][2]), (step, name)
            before = wanted[step - 1][name][0] if step else 1.0
            halved, grown = halved + (theirs[name][0] < before), grown + (theirs[name][0] > before)
    assert halved > 0
    assert grown > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatches", "parallel"),
    [(1, {"fsdp": 2}), (2, {"data": 2}), (1, {"fsdp": 2, "scan": True})],
    ids=str,
)
def test_jax_tunes_mu_as_the_simulator_does(microbatches, parallel):  # P-22, P-25
    compare(
        trained("jax", configured(microbatches, **parallel, **FP8, **MU)),
        expected("jax", microbatches),
    )


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_torch_tunes_mu_as_the_simulator_does(microbatches):  # P-22, P-25
    for found in run(
        RANKS, trained, "torch", configured(microbatches, fsdp=RANKS, **FP8, **MU), timeout=400
    ):
        compare(found, expected("torch", microbatches))


def resumed(backend: str, config: Config, other: Config, folder: str):
    """Factors and losses of a run, of the same run resumed half way, and of a mesh of its own that
    reads the same state; and those after a step whose gradients are NaN."""
    config, other = (one.replace(optimizer={"learning_rate": 2e-3}) for one in (config, other))
    whole, state = loop.trainer(backend, config), Path(folder, "state")
    for step in range(2):
        whole.step(tokens_of(step))
    whole.save(state)()
    saved = {name: one["mu"] for name, one in whole.gradient_factors().items()}
    again, elsewhere = (
        loop.trainer(backend, config.replace(run={"seed": 5})),
        loop.trainer(backend, other),
    )
    again.load(state, 2)
    elsewhere.load(state, 2)
    read = [
        {name: one["mu"] for name, one in trainer.gradient_factors().items()}
        for trainer in (again, elsewhere)
    ]
    losses = [[trainer.step(tokens_of(step)) for step in range(2, 4)] for trainer in (whole, again)]
    return saved, read, losses, [trainer.gradient_factors() for trainer in (whole, again)]


def held(found):
    saved, read, losses, after = found
    assert read == [saved, saved]
    assert set(saved.values()) != {1.0}
    assert losses[0] == losses[1]
    assert after[0] == after[1]


@pytest.mark.slow
def test_a_run_in_jax_is_resumed_with_its_factors(tmp_path):  # K-2, P-22
    configs = (configured(fsdp=2, **FP8, **MU), configured(data=2, scan=True, **FP8, **MU))
    held(resumed("jax", *configs, str(tmp_path)))


@pytest.mark.slow
def test_a_run_in_torch_is_resumed_with_its_factors(tmp_path):  # K-2, P-22
    config = configured(fsdp=RANKS, **FP8, **MU)
    for found in run(
        RANKS,
        resumed,
        "torch",
        config,
        config.replace(parallel={"compile": "block"}),
        str(tmp_path),
        timeout=400,
    ):
        held(found)


def exchanged(backend: str, folder: str):
    """A run without factors and one with, each of which reads the other's state: the factors
    afterwards, and the parameters that are not the other's."""
    without, own = (
        configured(fsdp=RANKS, **FP8),
        configured(fsdp=RANKS, **FP8, **MU).replace(run={"seed": 1}),
    )
    one, other = loop.trainer(backend, without), loop.trainer(backend, own)
    if backend == "jax":
        other._state = other._state._replace(mu=jax.tree.map(lambda v: v + 3, other._state.mu))
    else:
        other._step.factors.mu.fill_(4)
        other._step.factors.saturated.fill_(3)
    before = (
        {name: value.copy() for name, value in one.weights().items()},
        {name: value.copy() for name, value in other.weights().items()},
    )
    one.save(Path(folder, "one"))()
    other.save(Path(folder, "other"))()
    one.load(Path(folder, "other"), 1)
    other.load(Path(folder, "one"), 1)
    after = other.weights(), one.weights()
    unlike = [
        name
        for mine, theirs in zip(after, before, strict=True)
        for name, value in theirs.items()
        if (mine[name] != value).any()
    ]
    assert any((before[0][name] != before[1][name]).any() for name in before[0])
    return one.gradient_factors(), other.gradient_factors(), unlike


@pytest.mark.parametrize(
    "backend", ["jax", pytest.param("torch", marks=pytest.mark.slow)]
)  # of torch's store: tests/train/torch
def test_an_automatic_mu_is_turned_on_and_off_by_a_resume(backend, tmp_path):  # K-2, P-22
    for found in (
        run(RANKS, exchanged, backend, str(tmp_path), timeout=400)
        if backend == "torch"
        else [exchanged(backend, str(tmp_path))]
    ):
        assert found == ({}, {name: {"mu": 1.0, "saturated": 0.0} for name in LINEARS}, [])


def skipping() -> tuple:
    """mu and counts in PyTorch around a step whose gradients are not finite; and their metrics in a
    run.
    """
    trainer = loop.trainer("torch", configured(fsdp=RANKS, **FP8, **MU))
    trainer.step(tokens_of(0))
    before = trainer.gradient_factors()
    for p in trainer._step.params.values():
        p.register_post_accumulate_grad_hook(lambda p: p.grad.fill_(np.nan))
    trainer.step(tokens_of(1))
    return before, trainer.gradient_factors()


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_no_factor():  # T-4, P-22
    for before, after in run(RANKS, skipping, timeout=400):
        assert before == after


@pytest.mark.slow
def test_a_run_records_its_factors(tmp_path):
    for i in range(40):  # a file belongs to one split
        (tmp_path / f"{i}.txt").write_bytes(
            np.random.default_rng(i).integers(97, 123, 1000, np.uint8).tobytes()
        )
    config = configured(fsdp=RANKS, **FP8, **MU).replace(
        data={"source": str(tmp_path)},
        statistics={"every": 1},
        run={"steps": 2, "eval_every": 0, "eval_batches": 1},
    )
    lines = loop.train(config, "jax", tmp_path / "run")
    records = [
        json.loads(line)
        for line in (tmp_path / "run" / "statistics.jsonl").read_text().splitlines()
    ]
    assert [set(record["gradients"]) for record in records] == [set(LINEARS)] * 2
    for record, line in zip(records, lines, strict=True):
        of_each = record["gradients"].values()
        assert line["gradient_mu_max"] == max(one["mu"] for one in of_each)
        assert line["gradient_saturated"] == sum(one["saturated"] for one in of_each)
    # grown once
    assert records[0]["gradients"]["lm_head"] == {"mu": float(np.float32(2**0.5)), "saturated": 0}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"reduce_mu": "automatic"},
            "parallel.reduce_mu 'automatic' is of gradients in FP8; got parallel.reduce_dtype "
            "'float32'",
        ),
        (
            {"mu_window": 5},
            "parallel.mu_window is of parallel.reduce_mu 'automatic'; got 5 with reduce_mu 'one'",
        ),
        (FP8 | MU | {"mu_threshold": 0.1}, r"parallel.mu_threshold is in \[0, 1e-3\]; got 0.1"),
        (FP8 | MU | {"mu_window": 0}, "parallel.mu_window is at least 1; got 0"),
    ],
    ids=str,
)
def test_keys_that_do_not_fit_are_refused(keys, message):  # P-22
    with pytest.raises(ConfigError, match=message):
        from_dict({"parallel": {"fsdp": 2, **keys}})
