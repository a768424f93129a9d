import dataclasses
import json
import sys

import pytest
from helpers.models import own_configurations

from fp8ref.recipe import RECIPES
from fp8ref.shared.errors import ConfigError
from fp8ref.train import loop
from fp8ref.train.config import architecture, user_model
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import ArchitectureConfig

TORCH = {"kind": "torch", "source": "helpers.models.own_torch_models:Tied"}
NNX = {"kind": "nnx", "source": "helpers.models.own_nnx_models:Plain"}


def custom(kind: dict, **sections) -> Config:
    return Config(architecture=ArchitectureConfig(**kind)).replace(**sections)


def test_the_trainer_s_own_model_is_known_without_a_framework():
    found = architecture.shapes(Config())
    assert found.kind == "llama"
    assert found.heads == ("lm_head",)
    assert found.linears["lm_head"] == (256, 128)
    assert architecture.shapes(Config().replace(model={"tie_word_embeddings": True})).heads == ()


@pytest.mark.parametrize(
    ("kind", "sections", "message"),
    [
        (
            TORCH,
            {"model": {"hidden_size": 256}},
            r"of model\.\* takes vocab_size alone.*got model\.hidden_size",
        ),
        (TORCH, {"parallel": {"fsdp": 2}}, "is for one device.*got parallel of 2"),
        (TORCH, {"parallel": {"tensor": 2}}, "is for one device.*got parallel of 2"),
        (TORCH, {"parallel": {"checkpointing": "full"}}, r"got parallel\.checkpointing 'full'"),
        (TORCH, {"parallel": {"compile": "model"}}, r"got parallel\.compile 'model'"),
        (NNX, {"parallel": {"scan": True}}, r"got parallel\.scan"),
        (
            NNX,
            {"parallel": {"loss": "chunked"}},
            r"has a last linear that the trainer does not know; got parallel\.loss 'chunked'",
        ),
        (
            TORCH,
            {"parallel": {"reduce_dtype": "float8_e4m3fn", "reduce_mu": "automatic"}},
            r"got parallel\.reduce_mu 'automatic'",
        ),
        (TORCH, {"numerics": {"attention": "cudnn"}}, r"got numerics\.attention 'cudnn'"),
        (
            TORCH,
            {"optimizer": {"kind": "adamw_states", "layout": "msamp_o2"}},
            r"optimizer\.layout 'msamp_o2' stores narrower ones",
        ),
        (NNX, {"run": {"init_from": "weights"}}, r"got run\.init_from"),
    ],
)
# T-10
def test_what_a_model_of_the_user_s_does_not_take_is_refused_by_name(kind, sections, message):
    with pytest.raises(ValueError, match=f"architecture.kind '{kind['kind']}' .*{message}"):
        custom(kind, **sections)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "x:y"}, "is of a model of yours"),
        ({"kind": "torch"}, "is of a model of yours"),
        ({"kind": "torch", "source": "directory"}, "is module:function of kind 'torch'"),
        ({"kind": "linen", "source": "a:b"}, "architecture.kind"),
    ],
)
def test_a_section_is_checked(keys, message):
    with pytest.raises(ConfigError, match=message):
        configs.from_dict({"architecture": keys})


def test_a_module_of_flax_keeps_the_states_of_one_recipe(monkeypatch):
    monkeypatch.setitem(RECIPES, "again", dataclasses.replace(RECIPES["delayed"], name="again"))
    with pytest.raises(ValueError, match="states of delayed scaling"):
        custom(NNX, numerics={"recipe": "delayed", "schedule": ((0, "delayed"), (5, "again"))})
    assert custom(
        NNX, numerics={"recipe": "delayed", "schedule": ((0, "delayed"), (5, "bf16"))}
    ).recipes == ("delayed", "bf16")


def test_a_model_has_one_backend():
    with pytest.raises(ConfigError, match="'torch' is trained by --backend torch; got jax"):
        loop.trainer("jax", custom(TORCH))
    with pytest.raises(ConfigError, match="'nnx' is trained by --backend jax; got torch"):
        loop.trainer("torch", custom(NNX))


@pytest.mark.parametrize("kind", [TORCH, NNX])
def test_a_trainer_of_a_user_s_model_has_all_that_the_loop_calls(kind):
    trainer = loop.trainer(architecture.BACKEND[kind["kind"]], custom(kind))
    assert isinstance(trainer, loop.Provable)
    assert [
        name
        for name in vars(loop.Trainer)
        if not name.startswith("_") and not hasattr(trainer, name)
    ] == []
    assert trainer.gradient_factors() == {}


def test_who_knows_the_layers_of_the_trainer_s_own_alone_says_so():
    architecture.require_llama(Config(), "a replay")
    with pytest.raises(ConfigError, match="a replay takes the trainer's own Llama"):
        architecture.require_llama(custom(TORCH), "a replay")


@pytest.mark.parametrize(
    "source", ["absent_module:Model", "helpers.models.own_torch_models:Absent"]
)
def test_what_cannot_be_imported_is_named(source, monkeypatch):
    monkeypatch.setattr(user_model, "_TRUSTED", {source.partition(":")[0]})
    with pytest.raises(ConfigError, match=f"architecture.source '{source}' cannot be imported"):
        user_model.imported(source)


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """Sections of a config whose module leaves a file behind when it is imported, and that file."""
    (tmp_path / "foreign_model.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\nfrom "
        "helpers.models.own_torch_models import Tied\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(user_model, "_TRUSTED", set())
    yield {"kind": "torch", "source": "foreign_model:Tied"}, tmp_path / "ran"
    sys.modules.pop("foreign_model", None)


def test_nothing_is_imported_before_it_is_trusted(foreign):  # T-10
    keys, ran = foreign
    for use in (
        lambda: custom(keys).decisions(),
        lambda: architecture.described(custom(keys)),
        lambda: loop.trainer("torch", custom(keys)),
    ):
        with pytest.raises(
            ConfigError, match=r"'foreign_model:Tied' is code.*Read it, then add --trust"
        ):
            use()
    assert not ran.exists()
    user_model.trust("foreign_model:Tied")
    assert custom(keys).shapes.kind == "helpers.models.own_torch_models.Tied"
    assert ran.exists()


def test_a_module_that_raises_is_named(tmp_path, monkeypatch):
    (tmp_path / "raising_model.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    user_model.trust("raising_model:Made")
    with pytest.raises(
        ConfigError, match=r"cannot be imported \(ZeroDivisionError: division by zero\)"
    ):
        user_model.imported("raising_model:Made")


def test_keys_that_name_code_leave_a_config_json():  # K-7, T-10
    nested = {
        "auto_map": {"AutoModel": "a/b--c.D"},
        "_attn_implementation": "owner/kernel",
        "attn_implementation": "flash_attention_2",
    }
    given = {
        "hidden_size": 32,
        "layer_types": ["full_attention"],
        "text_config": nested | {"head_dim": 16},
        **nested,
        "parts": [nested],
    }
    kept = {
        "hidden_size": 32,
        "layer_types": ["full_attention"],
        "text_config": {"head_dim": 16},
        "parts": [{}],
    }
    assert user_model.without_code(given) == kept


def test_a_kernel_of_a_hub_is_not_asked_for(tmp_path):
    from fp8ref.train.torch.custom import build as custom_build

    keys = own_configurations.transformers(
        tmp_path,
        _attn_implementation="owner/kernel",
        auto_map={"AutoModelForCausalLM": "owner/repo--code.Model"},
    )
    built = custom_build.build(keys, 256, seed=0)
    assert built.config._attn_implementation in ("sdpa", "eager")
    assert not hasattr(built.config, "auto_map")
    assert (
        json.loads((tmp_path / "config.json").read_text())["_attn_implementation"] == "owner/kernel"
    )
