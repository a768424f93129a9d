import copy
import json

import numpy as np
import pytest
import torch
from helpers.models.own_configurations import of, transformers

from fp8ref.shared.errors import ConfigError
from fp8ref.torch.linear.linear import Linear
from fp8ref.train import loop
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import DataConfig, RunConfig
from fp8ref.train.models import export
from fp8ref.train.torch.custom import build as custom_build
from fp8ref.train.torch.llama.cross_entropy import cross_entropy
from fp8ref.train.torch.trainer import Trainer

TOKENS = np.random.default_rng(0).integers(0, 256, (4, 4, 17))


@pytest.fixture
def config(text):
    return Config(
        architecture=of("Tied"),
        data=DataConfig(source=str(text), sequence_length=16, batch_size=4),
        run=RunConfig(steps=4, eval_every=2, eval_batches=1),
    ).replace(optimizer={"warmup_steps": 1})


def test_a_step_is_autograd_s_through_the_rounded_weights_and_adamw_s(config):
    """T-1 to T-3 and T-10 in bf16, written out: tied weights are rounded once, buffers are not."""
    config = config.replace(numerics={"recipe": "bf16"})
    trainer = Trainer(config)
    model = custom_build.build(config.architecture, 256, seed=0)
    keys, params = config.optimizer, dict(model.named_parameters())
    groups = [
        {"params": [p], "weight_decay": keys.weight_decay * (p.ndim > 1)} for p in params.values()
    ]
    adamw = torch.optim.AdamW(groups, betas=(keys.beta1, keys.beta2), eps=keys.eps, foreach=True)
    for i, batch in enumerate(TOKENS[:2]):
        tokens = torch.from_numpy(batch)
        rounded = {name: p.to(torch.bfloat16) for name, p in params.items()}
        logits = torch.func.functional_call(model, rounded, (tokens[:, :-1],), tie_weights=True)
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).mean()
        adamw.zero_grad()
        loss.backward()
        norm = (
            torch.stack([p.grad.double().square().sum() for p in params.values()])
            .sum()
            .sqrt()
            .float()
        )
        for p in params.values():
            p.grad *= torch.clamp(keys.max_norm / norm, max=1.0)
        for group in adamw.param_groups:
            group["lr"] = keys.learning_rate_at(i, config.run.steps)
        adamw.step()
        metrics = trainer.step(batch)
        assert metrics == {"loss": loss.double().item(), "grad_norm": norm.item()}
    for name, value in trainer.weights().items():
        np.testing.assert_array_equal(value, params[name].detach().numpy())


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_resumed_trainer_goes_on_with_the_same_bits(config, recipe, tmp_path):  # K-3
    config = config.replace(numerics={"recipe": recipe})
    first, second = Trainer(config), Trainer(config)
    for batch in TOKENS[:2]:
        first.step(batch)
    first.save(tmp_path / "state")()
    second.load(tmp_path / "state", 2)
    for batch in TOKENS[2:]:
        assert first.step(batch) == second.step(batch)
    for name, value in first.weights().items():
        np.testing.assert_array_equal(value, second.weights()[name])
    assert first.fp8_states().keys() == second.fp8_states().keys()


@pytest.mark.parametrize("kind", ["adamw", "adamw_fused", "adamw_states", "adamw_fp8"])
@torch.compiler.set_stance("force_eager")  # torchao's optimizers compile their step
def test_a_parameter_that_no_pass_used_has_the_gradient_zero(config, kind, tmp_path):  # T-1, K-2
    """A linear is called in steps 2 and 4 alone: a checkpoint after step 1 or 3 continues with the
    same bits.
    """
    config = Config(**{**vars(config), "architecture": of("Sometimes")})
    config = config.replace(optimizer={"kind": kind}, numerics={"recipe": "bf16"})
    batches = TOKENS.copy()
    batches[:, 0, 0] = [1, 2, 3, 4]
    whole, begin = Trainer(config), Trainer(config).weights()["spare.weight"]
    for step, batch in enumerate(batches):
        resumed = Trainer(config)
        whole.save(tmp_path / f"{step}")()
        resumed.load(tmp_path / f"{step}", step)
        assert whole.step(batch) == resumed.step(batch)
        for name, value in whole.weights().items():
            np.testing.assert_array_equal(value, resumed.weights()[name])
        # the moments are 0, so the weight decays alone, in the library's order of roundings
        if step == 0:
            decayed = begin * (
                1
                - config.optimizer.learning_rate_at(0, config.run.steps)
                * config.optimizer.weight_decay
            )
            np.testing.assert_allclose(
                whole.weights()["spare.weight"], decayed, rtol=3 * 2.0**-24, atol=0
            )
    assert {int(state["step"]) for state in whole._optimizer.state.values()} == {len(batches)}


def test_a_run_of_transformers_is_recorded_whole(config, tmp_path):
    folder = tmp_path / "qwen3"
    folder.mkdir()
    config = config.replace(
        statistics={"every": 2},
        numerics={"recipe": "tensorwise", "schedule": ((0, "tensorwise"), (2, "bf16"))},
    )
    config = Config(**{**vars(config), "architecture": transformers(folder)})
    lines = loop.train(config, "torch", tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(np.isfinite(line["loss"]) for line in lines)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["model"]["class"].endswith("Qwen3ForCausalLM")
    assert manifest["model"]["parameters"] == sum(
        np.prod(shape) for shape in config.shapes.parameters.values()
    )
    proved = {gemm["gemm"] for gemm in manifest["proof"]["gemms"] if gemm["fp8"]}
    assert len(proved) == 3 * 7
    assert manifest["proof"]["missing"] == []
    statistics = [
        json.loads(line)
        for line in (tmp_path / "run" / "statistics.jsonl").read_text().splitlines()
    ]
    assert len(statistics[0]["statistics"]) == 6 * 7


def test_a_linear_that_is_not_called_is_missing_from_the_proof(config):
    config = Config(**{**vars(config), "architecture": of("Uncalling")})
    with pytest.raises(ConfigError, match="spare/output"):
        Trainer(config).prove(TOKENS[0])


def test_statistics_leave_out_a_linear_that_is_not_called(config):
    config = Config(**{**vars(config), "architecture": of("Uncalling")}).replace(
        run={"allow_fallback": True}
    )
    trainer = Trainer(config)
    assert trainer.prove(TOKENS[0])["missing"]
    _, found, _ = trainer.measured_step(TOKENS[0])
    assert {name.split("/")[0] for name in found} == {"up", "down"}


def test_weights_of_a_directory_are_compared_with_the_model(config):
    weights = custom_build.build(config.architecture, 256, seed=5).state_dict()
    # tied ones under both names, as transformers writes them
    given = {name: value.numpy() for name, value in weights.items()}
    trainer = Trainer(config, copy.deepcopy(given))
    np.testing.assert_array_equal(trainer.weights()["up.weight"], given["up.weight"])
    for name in ("embed.weight", "head.weight"):
        one = {other: value for other, value in given.items() if other != name}
        np.testing.assert_array_equal(
            Trainer(config, one).weights()["embed.weight"], given["embed.weight"]
        )
    with pytest.raises(
        ConfigError,
        match=r"embed\.weight and head\.weight are one parameter of the model; their weights "
        r"differ",
    ):
        Trainer(config, given | {"head.weight": given["head.weight"] + 1})
    with pytest.raises(ConfigError, match=r"missing \['up\.weight'\]"):
        Trainer(config, {name: value for name, value in given.items() if name != "up.weight"})
    with pytest.raises(ConfigError, match=r"up\.bias is \[64\]; the weights have \[3\]"):
        Trainer(config, given | {"up.bias": np.zeros(3, np.float32)})


def test_other_logits_are_refused(config):
    with pytest.raises(ConfigError, match="returns logits"):
        Trainer(Config(**{**vars(config), "architecture": of("Misshapen")}))


@pytest.mark.parametrize("name", ["Frozen", "Detached"])
def test_logits_without_a_gradient_are_refused(config, name):  # T-10
    made = Trainer(Config(**{**vars(config), "architecture": of(name)}))
    with pytest.raises(
        ConfigError,
        match=rf"'helpers.models.own_torch_models:{name}' have no gradient\. Give a parameter requires_grad=True",
    ):
        made.step(TOKENS[0])


def test_a_trainer_probes_its_model(config):
    with pytest.raises(
        ConfigError, match=r"'helpers\.models\.own_torch_models:Averaging' changes average"
    ):
        Trainer(Config(**{**vars(config), "architecture": of("Averaging")}))


@pytest.mark.slow
def test_simulated_hardware_multiplies_a_user_s_linears(config):
    config = config.replace(numerics={"accumulate": "exact"})
    trainer = loop.trainer("torch", config)
    assert np.isfinite(trainer.step(TOKENS[0])["loss"])
    assert {gemm["plan"] for gemm in trainer.prove(TOKENS[0])["simulated"]} == {"exact"}


def test_linears_cast_by_the_choice_of_kernels(config):
    pytest.importorskip("triton")
    trainer = Trainer(config.replace(numerics={"recipe": "tensorwise", "kernels": "triton"}))
    linears = [module for module in trainer.model.modules() if isinstance(module, Linear)]
    assert [m.kernels for m in linears] == ["triton"] * sum(d.fp8 for d in trainer.decisions)


def test_an_export_is_of_the_configuration_that_was_trained(config, tmp_path):  # K-7, T-10
    config = Config(
        **{**vars(config), "architecture": transformers(tmp_path, torch_dtype="bfloat16")}
    ).replace(run={"steps": 1})
    loop.train(config, "torch", tmp_path / "run")
    transformers(tmp_path, hidden_size=64, rms_norm_eps=0.5)
    export.export(tmp_path / "run", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["hidden_size"], written.get("rms_norm_eps"), written["dtype"]) == (
        32,
        None,
        "float32",
    )
    assert "torch_dtype" not in written
    stored = export.stored(tmp_path / "out")
    assert stored["model.norm.weight"].shape == (32,)
