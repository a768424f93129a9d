import dataclasses
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from fp8ref import configs as shipped
from fp8ref.recipe import RECIPES
from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import config as configs
from fp8ref.train.config import options
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import (
    DataConfig,
    NumericsConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def keys_and_values(config: Config) -> dict:
    """Every key as section.key, by the dataclasses themselves."""
    return {
        f"{s}.{key}": value
        for s, section in dataclasses.asdict(config).items()
        for key, value in section.items()
    }


def test_an_empty_file_is_the_default(tmp_path):
    assert configs.load(write(tmp_path, "")) == Config()


def test_a_file_sets_its_keys_and_no_others(tmp_path):
    loaded = configs.load(
        write(
            tmp_path,
            '[run]\nsteps = 7\nout = "there"\n[numerics]\nfilter_fqns = ["mlp", "*.q_proj"]\n',
        )
    )
    defaults = keys_and_values(Config())
    changed = {
        key: value for key, value in keys_and_values(loaded).items() if value != defaults[key]
    }
    assert changed == {
        "run.steps": 7,
        "run.out": "there",
        "numerics.filter_fqns": ("mlp", "*.q_proj"),
    }


def test_an_integer_is_a_float_where_a_float_is_meant(tmp_path):
    assert configs.load(write(tmp_path, "[optimizer]\nmax_norm = 2\n")).optimizer.max_norm == 2.0


@pytest.mark.parametrize("name", shipped.NAMES)
def test_shipped_configs_load_and_plan(name):
    config = configs.load(name)
    for section, keys in tomllib.loads(shipped.find(name).read_text()).items():
        for key, value in keys.items():
            assert keys_and_values(config)[f"{section}.{key}"] == (
                tuple(value) if isinstance(value, list) else value
            )
    assert config.decisions()


def test_there_is_a_shipped_config():
    assert "tiny" in shipped.NAMES


def test_each_shipped_config_has_a_line():
    lines = [shipped.summary(name) for name in shipped.NAMES]
    assert all(line.endswith(".") and 20 < len(line) <= 100 for line in lines)
    assert len(set(lines)) == len(lines)


def test_a_folder_of_its_name_does_not_hide_a_shipped_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert configs.load("tiny").run.steps == configs.load(shipped.FOLDER / "tiny.toml").run.steps
    (tmp_path / "tiny").rmdir()
    (tmp_path / "tiny").write_text("[run]\nsteps = 7\n")
    assert configs.load("tiny").run.steps == 7


@pytest.mark.parametrize(
    ("text", "unknown", "nearest"),
    [
        ("[run]\nstep = 3", "run.step", "run.steps"),
        ("[data]\nseq_length = 3", "data.seq_length", "data.sequence_length"),
        ("[optimser]\nbeta1 = 0.5", "optimser", "optimizer"),
        ("[run]\nlearning_rate = 1.0", "run.learning_rate", "optimizer.learning_rate"),
        ("steps = 3", "steps", "run.steps"),
        ("[model]\nnum_layers = 3", "model.num_layers", "model.num_hidden_layers"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(tmp_path, text, unknown, nearest):
    with pytest.raises(ConfigError, match=rf"unknown key '{unknown}'\. Did you mean '{nearest}'"):
        configs.load(write(tmp_path, text))


@pytest.mark.parametrize(("section", "key"), [("data", "foo"), ("model", "xyzzy"), ("run", "qqq")])
def test_a_key_like_no_other_names_the_keys_of_its_section(tmp_path, section, key):
    known = [field.name for field in dataclasses.fields(getattr(Config(), section))]
    with pytest.raises(ConfigError, match=f"unknown key '{section}.{key}'") as error:
        configs.load(write(tmp_path, f"[{section}]\n{key} = 1\n"))
    names = ", ".join(f"{section}.{name}" for name in known)
    assert str(error.value).endswith(f" Known keys: {names}.")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run]\nsteps = '3'", "run.steps: .*integer; got '3'"),
        ("[run]\nsteps = 3.0", "run.steps: .*integer; got 3.0"),
        ("[run]\nsteps = true", "run.steps: .*integer; got True"),
        ("[run]\nout = 3", "run.out: .*string; got 3"),
        ("[optimizer]\nlearning_rate = '1e-3'", "optimizer.learning_rate: .*number; got '1e-3'"),
        (
            "[optimizer]\nlearning_rate = 1979-05-27",
            "optimizer.learning_rate: .*number; got '1979-05-27'",
        ),
        ("[numerics]\nfilter_fqns = 'lm_head'", "numerics.filter_fqns: .*array; got 'lm_head'"),
        ("[numerics]\nfilter_fqns = [1]", "numerics.filter_fqns.0: .*string; got 1"),
        ("[model]\ntie_word_embeddings = 1", "model.tie_word_embeddings: .*boolean; got 1"),
        ("data = 3", "data: .*object; got 3"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_its_key(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        configs.load(write(tmp_path, text))


RANGES = [
    ("data", "sequence_length", 0),
    ("data", "batch_size", 0),
    ("data", "validation_fraction", 0.0),
    ("data", "validation_fraction", 1.0),
    ("data", "seed", -1),
    ("optimizer", "learning_rate", 0.0),
    ("optimizer", "learning_rate", 1e-5),  # below the default min_learning_rate
    ("optimizer", "learning_rate", math.nan),
    ("optimizer", "min_learning_rate", -1e-4),
    ("optimizer", "warmup_steps", -1),
    ("optimizer", "beta1", 1.0),
    ("optimizer", "beta2", -0.1),
    ("optimizer", "beta2", math.nan),
    ("optimizer", "eps", 0.0),
    ("optimizer", "max_norm", 0.0),
    ("optimizer", "max_norm", math.nan),
    ("optimizer", "weight_decay", -0.1),
    ("run", "steps", 0),
    ("run", "eval_every", -1),
    ("optimizer", "decay", "step"),
    ("optimizer", "decay_steps", 0),
    ("run", "eval_batches", 0),
    ("run", "seed", -1),
    ("model", "vocab_size", 255),  # D-1: tokens are bytes
    ("model", "num_hidden_layers", 0),
    ("model", "num_key_value_heads", 3),
]


@pytest.mark.parametrize(("section", "key", "value"), RANGES)
def test_a_value_out_of_range_is_named_with_its_key(tmp_path, section, key, value):
    path = write(tmp_path, tomli_w.dumps({section: {key: value}}))
    with pytest.raises(ConfigError, match=key) as error:
        configs.load(path)
    assert str(value) in str(error.value)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize(("section", "key", "value"), RANGES)
def test_a_value_out_of_range_is_refused_where_it_is_built(section, key, value):
    with pytest.raises(ValueError, match=key):
        Config().replace(**{section: {key: value}})


def test_every_mistake_of_a_file_is_reported_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        configs.load(write(tmp_path, "[run]\nsteps = 'x'\n[data]\nseed = -1\n[model]\nlayer = 1\n"))
    assert all(part in str(error.value) for part in ("run.steps", "data.seed", "model.layer"))


@pytest.mark.parametrize("recipe", ["rowwize", "", "BF16"])
def test_an_unknown_recipe_names_the_known_ones(tmp_path, recipe):
    with pytest.raises(ConfigError, match=f"{', '.join(RECIPES)}; got '{recipe}'"):
        configs.load(write(tmp_path, f"[numerics]\nrecipe = '{recipe}'"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read"):
        configs.load(tmp_path / "absent.toml")


def test_a_directory_is_no_config(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        configs.load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"steps: 3\n", b"[run\n", b"\xff\xfe[run]\n", b'{"run": {"steps": 3}}']
)
def test_what_is_not_toml_is_said_to_be_so(tmp_path, content):
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.toml: is not TOML"):
        configs.load(path)


CHANGED = Config().replace(
    run={"steps": 9, "out": "there"},
    numerics={"recipe": "rowwise", "fp8_fqns": ("lm_head",)},
    model={"tie_word_embeddings": True},
)


@pytest.mark.parametrize("config", [Config(), CHANGED], ids=["default", "changed"])
def test_a_config_survives_a_dict_and_a_file(tmp_path, config):
    as_dict = configs.to_dict(config)
    assert configs.from_dict(as_dict) == config
    assert configs.load(write(tmp_path, tomli_w.dumps(as_dict))) == config


def test_to_dict_holds_every_key_but_those_that_are_none():
    flat = {f"{s}.{key}" for s, section in configs.to_dict(Config()).items() for key in section}
    assert flat == {key for key, value in keys_and_values(Config()).items() if value is not None}


def test_from_dict_names_its_source():
    with pytest.raises(ConfigError, match=r"^manifest: run\.steps"):
        configs.from_dict({"run": {"steps": None}}, source="manifest")


def test_rules_are_checked_with_the_model(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key 'numerics\.rules.*layer"):
        configs.from_dict({"numerics": {"rules": [{"layer": ["q_proj"], "recipe": "bf16"}]}})
    with pytest.raises(ConfigError, match=r"Did you mean 'tensorwise'"):
        configs.from_dict({"numerics": {"rules": [{"layers": ["q_proj"], "recipe": "tensorwize"}]}})
    for keys, message in (
        ({"parallel": {"fsdp": 2}}, "for one device; parallel has 2"),
        (
            {"numerics": {"schedule": [[0, "tensorwise"], [5, "bf16"]]}},
            "change one recipe; got numerics.schedule",
        ),
    ):
        rules = [{"layers": ["q_proj"], "recipe": "bf16"}]
        with pytest.raises(ConfigError, match=message):
            configs.from_dict({**keys, "numerics": {"rules": rules, **keys.get("numerics", {})}})


def test_a_run_shorter_than_its_warm_up_ends_within_it():  # T-3
    config = options.override(Config(), ["--run.steps", "2"], prog="fp8ref")
    assert [config.optimizer.learning_rate_at(s, 2) for s in (0, 1)] == pytest.approx([2e-4, 4e-4])


@pytest.mark.parametrize(
    ("parallel", "mesh", "of_batch", "of_shards"),
    [
        ({"data": 3, "fsdp": 2}, "data x fsdp x tensor = 3 x 2 x 1", "data x fsdp = 6", "fsdp = 2"),
        (
            {"context": 2, "tensor": 3},
            "data x fsdp x context x tensor = 1 x 1 x 2 x 3",
            "data x fsdp = 1",
            "fsdp x context = 2",
        ),
        (
            {"fsdp": 2, "expert": 3},
            "data x fsdp x expert x tensor = 1 x 2 x 3 x 1",
            "data x fsdp x expert = 6",
            "fsdp x expert = 6",
        ),
    ],
)
def test_messages_name_the_axes_that_a_mesh_has(parallel, mesh, of_batch, of_shards):  # P-10
    keys = ParallelConfig(**parallel)
    assert (keys.mesh, keys.batch_keys, keys.shard_keys) == (mesh, of_batch, of_shards)
    assert keys.devices == math.prod(parallel.values())


def test_replace_leaves_the_original_alone():
    base = Config()
    assert base.replace(run={"steps": 9}, data={"seed": 2}).run.steps == 9
    assert base == Config()


def test_replace_refuses_an_unknown_key():
    with pytest.raises(TypeError, match="step"):
        Config().replace(run={"step": 9})


@pytest.mark.parametrize(
    "section", [Config(), DataConfig(), NumericsConfig(), OptimizerConfig(), RunConfig()]
)
def test_configs_are_frozen(section):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(section, dataclasses.fields(section)[0].name, None)


def test_decisions_apply_recipe_and_filters_to_the_linears_of_the_model():
    config = Config().replace(
        model={"num_hidden_layers": 1}, numerics={"filter_fqns": ("lm_head", "mlp")}
    )
    assert {d.path for d in config.decisions() if d.fp8} == {
        f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"
    }


def test_a_file_keeps_small_linears_in_high_precision(tmp_path):
    sizes = (
        "hidden_size = 2048\nintermediate_size = 4096\nnum_attention_heads = 16\n"
        "num_key_value_heads = 4\nvocab_size = 2048"
    )
    config = configs.load(
        write(tmp_path, f'[numerics]\nfilter_fqns = ["auto_filter_small_kn"]\n[model]\n{sizes}\n')
    )
    kept = {d.path.split(".")[-1]: d.reason for d in config.decisions() if not d.fp8}
    assert kept.keys() == {"k_proj", "v_proj", "lm_head"}
    assert "N <= 1024 and K <= 4096" in kept["k_proj"]


def test_a_tied_model_without_filters_converts_every_linear():
    tied = Config().replace(model={"tie_word_embeddings": True}, numerics={"filter_fqns": ()})
    assert [d.fp8 for d in tied.decisions()] == [True] * 14


def test_learning_rate_warms_up_linearly_from_the_first_step():  # T-3
    schedule = OptimizerConfig(learning_rate=8.0, min_learning_rate=0.0, warmup_steps=4)
    assert [schedule.learning_rate_at(step, 100) for step in range(5)] == [2.0, 4.0, 6.0, 8.0, 8.0]


def test_learning_rate_decays_by_a_half_cosine_to_its_floor():  # T-3
    """cos at 0, pi/3, pi/2 and 2 pi/3 is 1, 1/2, 0 and -1/2."""
    schedule = OptimizerConfig(learning_rate=5.0, min_learning_rate=1.0, warmup_steps=2)
    rates = [schedule.learning_rate_at(step, 8) for step in (2, 4, 5, 6, 8)]
    assert rates == pytest.approx([5.0, 4.0, 3.0, 2.0, 1.0], rel=1e-14)


@pytest.mark.parametrize(
    ("decay", "half"),
    [
        ("cosine", 0.55e-3),
        ("linear", 0.55e-3),
        ("sqrt", 1e-4 + 9e-4 * (1 - math.sqrt(0.5))),
        ("none", 1e-3),
    ],
)
def test_learning_rate_may_stay_at_its_peak_before_it_decays(decay, half):  # T-3
    """Warm-up, stable, decay: steps 5 to 150 at the peak."""
    keys = {} if decay == "none" else {"decay_steps": 50}
    o = OptimizerConfig(
        learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=5, decay=decay, **keys
    )
    assert [o.learning_rate_at(step, 200) for step in (4, 5, 100, 150)] == [1e-3] * 4
    assert o.learning_rate_at(175, 200) == pytest.approx(half, rel=1e-12)
    if decay == "linear":
        assert o.learning_rate_at(199, 200) == pytest.approx(0.000118, rel=1e-12)


def test_a_decay_longer_than_the_run_begins_after_the_warm_up():  # T-3
    whole, longer = (OptimizerConfig(warmup_steps=5, decay_steps=n) for n in (None, 500))
    assert [whole.learning_rate_at(s, 100) for s in range(100)] == [
        longer.learning_rate_at(s, 100) for s in range(100)
    ]


def test_no_decay_has_no_steps():
    with pytest.raises(
        ValueError, match=r"optimizer\.decay 'none' has no steps; got optimizer\.decay_steps 5"
    ):
        OptimizerConfig(decay="none", decay_steps=5)


def test_learning_rate_without_warm_up_starts_at_the_peak():  # T-3
    assert OptimizerConfig(learning_rate=0.5, warmup_steps=0).learning_rate_at(0, 10) == 0.5


def test_learning_rate_may_warm_up_to_the_end():  # T-3
    schedule = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    assert [schedule.learning_rate_at(step, 4) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_learning_rate_never_rises_after_warm_up():  # T-3
    schedule = OptimizerConfig(learning_rate=1.0, min_learning_rate=0.25, warmup_steps=3)
    rates = [schedule.learning_rate_at(step, 50) for step in range(3, 50)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > 0.25


def test_a_batch_lies_in_contiguous_parts():  # T-7
    data = DataConfig(batch_size=6, microbatches=3)
    rows = np.arange(6)[:, None] * np.ones(4, int)
    assert [part[:, 0].tolist() for part in data.parts(rows)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match=r"data.microbatches = 3 equal parts; got 4 sequences"):
        data.parts(rows[:4])
