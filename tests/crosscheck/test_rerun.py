import json
import re

import numpy as np
import pytest
import torch
from helpers.processes import ranks
from torch import distributed
from torchao.float8 import float8_utils

from fp8ref import cli
from fp8ref.crosscheck.rerun import rerun
from fp8ref.shared.errors import ConfigError
from fp8ref.sim.gemm.hardware import Hardware
from fp8ref.spec import llama
from fp8ref.train import loop
from fp8ref.train.config import config as configs
from fp8ref.train.run import checkpoint, failed_step
from fp8ref.train.run.failed_step import Failure
from fp8ref.train.run.processes import Alone

TOKEN = 7  # the one whose embedding does not cancel
TOKENS = np.random.default_rng(0).integers(8, 256, (4, 17))
TOKENS[1, 5] = TOKENS[1, 9] = TOKENS[3, 2] = TOKEN
AT = (1, 5)
# jax compiles for seconds
BACKENDS = pytest.mark.parametrize(
    "backend", [pytest.param("jax", marks=pytest.mark.slow), "torch"]
)
BOTH = pytest.mark.parametrize("backend", ["jax", "torch"])
LAYER = "model.layers.0"


def weights_of(config) -> dict[str, np.ndarray]:
    """Weights at which what enters every linear is known: rows of the embedding are +1, -1, ..., so
    that a sum over them is 0, but TOKEN's, all +1; attention and MLP add nothing to them. A norm
    leaves them as they are: 1 / sqrt(1 + eps) rounds to 1 in bfloat16."""
    found = llama.initial_weights(config.model, seed=0)
    signs = np.where(np.arange(config.model.hidden_size) % 2, -1, 1)
    found[llama.EMBEDDING][:] = signs
    found[llama.EMBEDDING][TOKEN] = 1
    for name in ("self_attn.v_proj", "mlp.down_proj"):
        found[f"{LAYER}.{name}.weight"][:] = 0
    return found


def kept(config, backend, weights, out, *, tokens=TOKENS, change=lambda trainer: None):
    """A step that a run would have kept at these weights."""
    trainer = loop.trainer(backend, config, weights)
    change(trainer)
    return failed_step.write(
        out,
        trainer,
        config,
        tokens,
        {"step": 3, "loss": float("nan"), "grad_norm": float("nan")},
        Alone(),
    )


@BACKENDS
@pytest.mark.parametrize(
    ("recipe", "linear", "row"),
    [
        ("tensorwise", "self_attn.q_proj", 5),
        ("rowwise", "mlp.up_proj", 40),
        ("bf16", "mlp.gate_proj", 3),
        ("delayed", "lm_head", 200),
    ],
)
def test_an_output_that_overflows_is_located(recipe, linear, row, backend, small, tmp_path):  # K-9
    config = small.replace(numerics={"recipe": recipe})
    weights = weights_of(config)
    name = linear if linear == "lm_head" else f"{LAYER}.{linear}"
    weights[f"{name}.weight"][row] = 1e38  # times TOKEN's 32 ones; of the others' it makes 0
    found = rerun(kept(config, backend, weights, tmp_path))
    assert found.first is not None
    assert (found.first.layer, found.first.role, found.first.element, found.first.found_by) == (
        name,
        "output",
        (*AT, row),
        "sim",
    )
    assert found.first.value == np.inf
    assert re.search(
        r"a sum of 32 products, 3\.\d+e\+39 in float64, beyond the largest bfloat16, \S+ the "
        r"largest of them is input (1|0\.9)\S* times weight (9|1\.0)",
        found.first.why,
    )
    assert found.reproduced
    assert found.faithful
    assert not found.ok


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}


def of_experts(config) -> dict[str, np.ndarray]:
    """Weights at which feature 5 of each expert's up_proj overflows."""
    weights = llama.initial_weights(config.model, seed=0)
    weights[llama.EMBEDDING][:] = np.where(np.arange(config.model.hidden_size) % 2, -1, 1)
    weights[llama.EMBEDDING][TOKEN] = 1
    weights[f"{LAYER}.self_attn.v_proj.weight"][:] = weights[
        f"{LAYER}.mlp.experts.down_proj.weight"
    ][:] = 0
    weights[f"{LAYER}.mlp.experts.up_proj.weight"][:, 5] = (
        1e38  # of each expert, times TOKEN's 32 ones
    )
    return weights


def kept_on_ranks(config, out):
    """``kept`` by ranks that hold experts apart, under tensorwise scaling."""
    config = configs.from_dict(config)
    trainer = loop.trainer("torch", config, of_experts(config))

    class Ranks(Alone):
        first = distributed.get_rank() == 0

        def gather(self, value):
            found = [None] * distributed.get_world_size()
            distributed.all_gather_object(found, value)
            return found

    metrics = trainer.step(TOKENS)
    assert not np.isfinite(metrics["loss"])
    failed_step.write(out, trainer, config, TOKENS, metrics | {"step": 3}, Ranks())


@pytest.mark.slow
@BOTH
def test_a_step_of_experts_apart_is_rerun_on_one_device(backend, small, tmp_path):  # K-9, M-9
    config = small.replace(numerics={"recipe": "tensorwise"}, model=EXPERTS, parallel={"expert": 2})
    if backend == "torch":
        ranks.run(2, kept_on_ranks, configs.to_dict(config), tmp_path)
        path = tmp_path / failed_step.FOLDER / "step-00000003"
    else:
        path = kept(config, backend, of_experts(config), tmp_path)
    found = rerun(path)
    assert (found.first.layer, found.first.role, found.first.element[-1]) == (
        f"{LAYER}.mlp.experts.up_proj",
        "output",
        5,
    )
    assert found.reproduced
    assert found.faithful


@BACKENDS
def test_an_experts_output_that_overflows_is_located(backend, small, tmp_path):  # K-9, M-8
    config = small.replace(numerics={"recipe": "rowwise"}, model=EXPERTS)
    name = f"{LAYER}.mlp.experts.up_proj"
    found = rerun(kept(config, backend, of_experts(config), tmp_path))
    assert (found.first.layer, found.first.role, found.first.element[-1], found.first.found_by) == (
        name,
        "output",
        5,
        "sim",
    )
    assert found.first.value == np.inf
    assert found.reproduced
    assert found.faithful


@pytest.mark.slow
@BACKENDS
def test_a_step_under_a_plan_is_rerun_under_it(backend, small, tmp_path, monkeypatch):  # K-9, G-19
    plain, asked = Hardware.__call__, []

    def recorded(self, a, b, **how):
        asked.append((self.name, how["accumulate"]))
        return plain(self, a, b, **how)

    config = small.replace(numerics={"recipe": "rowwise", "accumulate": "hopper"})
    weights = weights_of(config)
    weights[f"{LAYER}.mlp.up_proj.weight"][40] = 1e38
    path = kept(config, backend, weights, tmp_path)
    monkeypatch.setattr(Hardware, "__call__", recorded)
    found = rerun(path)
    assert (found.first.layer, found.first.role, found.first.element, found.first.found_by) == (
        f"{LAYER}.mlp.up_proj",
        "output",
        (*AT, 40),
        "sim",
    )
    assert found.reproduced
    assert found.faithful
    gemms = sum(d.fp8 for d in config.decisions())
    # the simulator's forward pass and the backend's; then its backward pass
    assert asked[: 2 * gemms] == [("hopper", "fast")] * (2 * gemms)
    assert set(asked) == {("hopper", "fast"), ("hopper", "slow")}


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_scores_that_overflow_are_located(backend, small, tmp_path):
    weights = weights_of(small)
    for name in ("q_proj", "k_proj"):
        weights[f"{LAYER}.self_attn.{name}.weight"][0] = (
            1e19  # of TOKEN 3.2e20, whose square float32 does not hold
        )
    found = rerun(kept(small, backend, weights, tmp_path))
    # a query of TOKEN with its own key, the first of which it looks at; [sequence, head, query,
    # key]
    assert (found.first.layer, found.first.role, found.first.element) == (
        f"{LAYER}.self_attn",
        "attention scores",
        (AT[0], 0, AT[1], AT[1]),
    )
    assert found.reproduced


@BACKENDS
@pytest.mark.parametrize("place", ["mlp.gate_proj", "post_attention_layernorm"])
def test_a_weight_that_is_not_finite_is_located(place, backend, small, tmp_path):
    def broken(trainer):
        """As an update leaves it: a fresh trainer takes no such weights."""
        name = f"{LAYER}.{place}.weight"
        if backend == "torch":
            with torch.no_grad():
                trainer._params[name].view(-1)[37 % trainer._params[name].numel()] = float("nan")
        else:
            node, *path = trainer._params, *name.split(".")
            for key in path[:-1]:
                node = node[int(key) if key.isdecimal() else key]
            shape = node["weight"].shape
            node["weight"] = (
                node["weight"].reshape(-1).at[37 % node["weight"].size].set(np.nan).reshape(shape)
            )

    found = rerun(kept(small, backend, weights_of(small), tmp_path, change=broken))
    assert (found.first.layer, found.first.role) == (f"{LAYER}.{place}", "weight")
    assert found.first.element == ((1, 5) if place == "mlp.gate_proj" else (5,))
    assert found.first.why == "float32 master nan: an earlier step made it so"


@BACKENDS
def test_a_weight_beyond_the_compute_dtype_is_located(backend, small, tmp_path):  # M-2
    weights = weights_of(small)
    weights[f"{LAYER}.mlp.up_proj.weight"][2, 3] = 3.4e38
    first = rerun(kept(small, backend, weights, tmp_path)).first
    assert (first.layer, first.role, first.element) == (f"{LAYER}.mlp.up_proj", "weight", (2, 3))
    assert "float32 master 3.39999995e+38" in first.why
    assert "beyond the largest bfloat16" in first.why


def steep(config, gain: float) -> dict[str, np.ndarray]:
    """A finite loss, and in down_proj's backward pass a gradient of about 1e6 times gain, in its
    input's feature 9.

    Logits are of 1e8, so that all of a token's probability lies on one of them, and the gradient by
    the last hidden state is a difference of two rows of lm_head, by 64 tokens: below 300 in one
    element with a probability of 300 / (1e8 / 64) at most.
    """
    weights = llama.initial_weights(config.model, seed=0)
    weights["lm_head.weight"] *= 1e8 / config.model.initializer_range
    weights[f"{LAYER}.mlp.up_proj.weight"][:] = 0  # the forward pass never sees down_proj
    weights[f"{LAYER}.mlp.down_proj.weight"][:] = 0
    weights[f"{LAYER}.mlp.down_proj.weight"][4, 9] = gain
    return weights


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [
        ("torch", "tensorwise"),
        ("torch", "rowwise"),
        *(
            pytest.param("jax", recipe, marks=pytest.mark.slow)
            for recipe in ("tensorwise", "rowwise")
        ),
    ],
)
def test_a_gradient_that_overflows_is_located(recipe, backend, small, tmp_path):
    config = small.replace(numerics={"recipe": recipe})
    found = rerun(kept(config, backend, steep(config, 1e36), tmp_path))
    first = found.first
    assert (first.layer, first.role, first.element) == (
        f"{LAYER}.mlp.down_proj",
        "grad_input",
        (0, 0, 9),
    )
    assert first.found_by == backend
    assert "a sum of 32 products" in first.why
    assert first.why.endswith("at k = 4")
    assert np.isfinite(found.metrics["loss"])
    assert not np.isfinite(found.metrics["grad_norm"])
    assert found.faithful


@BACKENDS
def test_without_fp8_the_first_gradient_of_a_parameter_is_named(backend, small, tmp_path):
    config = small.replace(numerics={"recipe": "bf16"})
    found = rerun(kept(config, backend, steep(config, 1e36), tmp_path))
    # down_proj's own is of an input of zeros; of up_proj's rows the one that made feature 9 gets it
    assert (found.first.layer, found.first.role, found.first.element[0]) == (
        f"{LAYER}.mlp.up_proj",
        "weight's gradient",
        9,
    )
    assert found.operands == 0


@BACKENDS
def test_a_norm_that_overflows_is_not_blamed_on_its_gradients(backend, small, tmp_path):  # T-2
    found = rerun(kept(small, backend, steep(small, 1e25), tmp_path))
    if backend == "torch":  # which sums the squares in float64
        assert (found.first, found.reproduced, found.ok) == (None, False, True)
    else:
        assert (found.first.layer, found.first.role, found.first.element) == (
            "gradient",
            "norm",
            (),
        )
        assert re.search(
            r"the sum of their squares is \S+e\+\d\d, the largest model\.", found.first.why
        )


def set_scale(trainer, name: str, role: str, factor: float) -> None:
    if trainer.backend == "torch":
        trainer.model.get_submodule(f"{name}.states.{role}").scale.mul_(factor)
    else:
        state = trainer._state.fp8[name][role]
        trainer._state.fp8[name][role] = state._replace(stored=state.stored * factor)


@BACKENDS
def test_a_stale_scale_saturates_and_nothing_is_located(backend, small, tmp_path):  # H-1
    config = small.replace(numerics={"recipe": "delayed"})

    def stale(trainer):
        trainer.step(TOKENS)
        # both read one input (H-9)
        for name, role in (
            ("gate_proj", "input"),
            ("up_proj", "input"),
            ("up_proj", "grad_output"),
        ):
            set_scale(trainer, f"{LAYER}.mlp.{name}", role, 2.0**40)

    found = rerun(kept(config, backend, None, tmp_path, change=stale))
    assert found.first is None
    assert not found.reproduced
    assert found.ok
    assert found.operands == 2 * 3 * 7
    codes = found.report.checks[f"{LAYER}.mlp.up_proj/grad_output/codes/{backend}"]
    assert codes.compared == codes.equal == 2 * 64 * 48


@BACKENDS
def test_a_scale_that_is_not_finite_is_located(backend, small, tmp_path):
    config = small.replace(numerics={"recipe": "delayed"})

    def change(trainer):
        for name in ("gate_proj", "up_proj"):  # which read one input (H-9)
            set_scale(trainer, f"{LAYER}.mlp.{name}", "input", float("inf"))

    first = rerun(kept(config, backend, None, tmp_path, change=change)).first
    assert (first.layer, first.role, first.element, first.value) == (
        f"{LAYER}.mlp.gate_proj",
        "input scale",
        (),
        np.inf,
    )


def test_a_fault_of_the_backend_is_not_blamed_on_training(small, tmp_path, monkeypatch, capsys):
    weights = weights_of(small)
    weights["lm_head.weight"][200] = 1e38  # later in the simulator's pass
    path = kept(small, "torch", weights, tmp_path)
    original = float8_utils.amax_to_scale
    monkeypatch.setattr(
        float8_utils, "amax_to_scale", lambda *args, **kwargs: original(*args, **kwargs) * torch.nan
    )
    found = rerun(path)
    assert (found.first.layer, found.first.role) == (f"{LAYER}.self_attn.q_proj", "input scale")
    assert found.first.found_by == "torch"
    assert found.first.why == "the tensor's values are finite"
    assert not found.faithful
    found.print()
    assert "a fault of the implementation" in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_of_a_mesh_is_rerun_on_one_device(small, tmp_path, capsys):  # K-2, K-9
    """Also one whose state has factors mu, which one device has no use for."""
    config = small.replace(
        parallel={"fsdp": 2, "reduce_dtype": "float8_e4m3fn", "reduce_mu": "automatic"}
    )
    weights = weights_of(config)
    weights[f"{LAYER}.mlp.up_proj.weight"][40] = 1e38
    found = rerun(kept(config, "jax", weights, tmp_path))
    assert (found.first.layer, found.first.element) == (f"{LAYER}.mlp.up_proj", (*AT, 40))
    found.print()
    shown = capsys.readouterr().out
    assert "as it failed, on 2 devices: loss nan" in shown
    assert "on one device, with all 4 sequences of 16 tokens" in shown


def test_moments_of_several_processes_are_refused(small, tmp_path):  # T-6
    config = small.replace(parallel={"fsdp": 2}, optimizer={"kind": "adamw_fp8"})
    about = {
        "backend": "torch",
        "config": configs.to_dict(config),
        "metrics": {"step": "3", "loss": "nan", "grad_norm": "nan"},
        "step": 3,
    }
    np.save(tmp_path / "batch.npy", TOKENS.astype(np.int32))
    checkpoint.write_manifest(tmp_path, about)
    with pytest.raises(ConfigError, match="one process cannot replay a step of 2"):
        rerun(tmp_path)


def run(*arguments) -> int:
    return cli.main([str(a) for a in arguments])


@pytest.fixture
def failed(small, tmp_path, capsys, monkeypatch):
    """A run of the command line that failed; the path that its message names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "small.toml").write_text("")
    keys = {
        "model.hidden_size": 32,
        "model.intermediate_size": 48,
        "model.num_hidden_layers": 1,
        "model.num_attention_heads": 2,
        "model.num_key_value_heads": 1,
        # a query is of 1e19, and a score, before it is divided by 4, of four of its squares
        "model.initializer_range": 2e18,
        "data.source": small.data.source,
        "data.sequence_length": 16,
        "data.batch_size": 4,
    }
    options = [part for key, value in keys.items() for part in (f"--{key}", value)]
    assert run("train", "small.toml", "--backend", "torch", "--run.out", "here", *options) == 3
    return re.search(r"fp8ref crosscheck --replay (\S+) ", capsys.readouterr().err)[1]


def test_the_command_names_the_place_and_writes_it(failed, tmp_path, capsys):
    assert run("crosscheck", "--replay", failed, "--json", "found.json") == 1
    shown = capsys.readouterr().out
    assert (
        "first not finite, by the simulator: model.layers.0.self_attn, attention scores, "
        "element [0, " in shown
    )
    assert "are the simulator's: the numbers diverged" in shown
    written = json.loads((tmp_path / "found.json").read_text())
    assert not written["ok"]
    assert written["reproduced"]
    assert written["faithful"]
    assert (written["first"]["layer"], written["first"]["role"]) == (
        "model.layers.0.self_attn",
        "attention scores",
    )
    assert len(written["first"]["element"]) == 4
    assert {check["name"] for check in written["checks"] if not check["ok"]} == {
        "model.layers.0.self_attn/attention scores/finite/sim"
    }
    for options, named in (
        (["small.toml"], "CONFIG"),
        (["--backend", "jax"], "--backend"),
        (["--steps", "0"], "--steps"),
        (["--sharded", "2"], "--sharded"),
        (["--run.steps", "3"], "--run.steps"),
    ):
        assert run("crosscheck", "--replay", failed, *options) == 2
        assert (
            f"--replay takes config and backend from the step that failed; got {named}"
            in capsys.readouterr().err
        )


def test_what_is_no_failure_is_refused(tmp_path, capsys):
    assert run("crosscheck", "--replay", tmp_path / "absent") == 2
    assert (
        "a replay takes the directory of a step that failed, RUN/failures/step-...; "
        in capsys.readouterr().err
    )


def test_a_step_by_a_kernel_is_refused(by_kernel, tmp_path, monkeypatch):
    """By tiles another computation would be replayed."""
    failed = Failure(
        tmp_path, TOKENS, by_kernel, "jax", "bf16", {"step": "3", "loss": "nan", "grad_norm": "nan"}
    )
    monkeypatch.setattr(failed_step, "read", lambda path: failed)
    with pytest.raises(
        ConfigError,
        match=r"a replay takes attention by tiles; got parallel.attention 'kernel', which shows "
        r"nothing. Set it to tiles",
    ):
        rerun(tmp_path)
