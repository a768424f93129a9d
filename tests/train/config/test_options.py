"""Keys as options: every spelling of every kind of key, and the errors."""

import re

import pytest

from fp8ref.shared.arguments import Parser
from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import config as configs
from fp8ref.train.config import options
from fp8ref.train.config.config import Config


def override(config: Config, *words: str) -> Config:
    return options.override(config, words, prog="fp8ref train")


# What tyro accepted, which read options before argparse did.
ACCEPTED = {
    "run.steps": [
        (["--run.steps", "20"], 20),
        (["--run.steps=20"], 20),
        (["--run.steps", "1_000"], 1000),
        (["--run.steps", "+3"], 3),
        (["--run.steps", " 3"], 3),
        (["--run.steps", "03"], 3),
        (["--run.steps", "3", "--run.steps", "4"], 4),
    ],
    "run.eval_every": [
        (["--run.eval_every", "3"], 3),
        (["--run.eval-every", "3"], 3),
        (["--run.eval-every=3"], 3),
    ],
    "model.num_hidden_layers": [
        (["--model.num-hidden-layers", "3"], 3),
        (["--model.num_hidden-layers=3"], 3),
    ],
    "optimizer.learning_rate": [
        (["--optimizer.learning_rate", "2e-3"], 2e-3),
        (["--optimizer.learning_rate=.5"], 0.5),
        (["--optimizer.learning-rate", "3"], 3.0),
        (["--optimizer.learning_rate", "1_0.5"], 10.5),
    ],
    "model.attention_softcap": [(["--model.attention_softcap", "None"], None)],
    "optimizer.max_norm": [(["--optimizer.max_norm", "inf"], float("inf"))],
    "data.source": [
        (["--data.source", "text"], "text"),
        (["--data.source", "a b"], "a b"),
        (["--data.source", "a=b"], "a=b"),
        (["--data.source=-x"], "-x"),
        (["--data.source", "-1"], "-1"),
        (["--data.source", "None"], "None"),
    ],
    "run.out": [
        (["--run.out", "there"], "there"),
        (["--run.out", "None"], None),
        (["--run.out=None"], None),
        (["--run.out", "none"], "none"),
    ],
    "log.wandb": [(["--log.wandb", "- x"], "- x")],
    "statistics.every": [(["--statistics.every", "0"], 0), (["--statistics.every", "None"], None)],
    "numerics.recipe": [
        (["--numerics.recipe", "rowwise"], "rowwise"),
        (["--recipe", "bf16"], "bf16"),
        (["--recipe=bf16"], "bf16"),
        (["--recipe", "bf16", "--numerics.recipe", "rowwise"], "rowwise"),
        (["--numerics.recipe", "rowwise", "--recipe", "bf16"], "bf16"),
    ],
    "parallel.compile": [
        (["--parallel.compile", "block"], "block"),
        (["--parallel.compile=model"], "model"),
    ],
    "parallel.tensor_reduce_dtype": [
        (["--parallel.tensor_reduce_dtype", "float32"], "float32"),
        (["--parallel.tensor-reduce-dtype=None"], None),
    ],
    "model.tie_word_embeddings": [
        (["--model.tie_word_embeddings"], True),
        (["--model.tie-word-embeddings"], True),
        (["--model.no_tie_word_embeddings"], False),
        (["--model.no-tie-word-embeddings"], False),
        (["--model.no-tie_word_embeddings", "--model.tie_word_embeddings"], True),
    ],
    "numerics.filter_fqns": [
        (["--numerics.filter_fqns"], ()),
        (["--numerics.filter_fqns", "mlp", "lm_head"], ("mlp", "lm_head")),
        (["--numerics.filter_fqns=mlp"], ("mlp",)),
        (["--numerics.filter-fqns", "a,b"], ("a,b",)),
        (["--numerics.filter_fqns", "None"], ("None",)),
        (["--numerics.filter_fqns", "a", "--numerics.filter_fqns", "b"], ("b",)),
    ],
    "data.mixture": [
        (["--data.mixture", "books", "3", "code", "1"], (("books", 3.0), ("code", 1.0))),
        (["--data.mixture", "None"], None),
    ],
    "data.evaluation": [
        (["--data.evaluation", "books", "3"], (("books", "3"),)),
        (["--data.evaluation"], ()),
    ],
    "numerics.schedule": [
        (["--numerics.schedule", "0", "tensorwise", "5", "bf16"], ((0, "tensorwise"), (5, "bf16"))),
        (
            ["--numerics.schedule", "0", "tensorwise", "learning_rate < 3e-4", "bf16"],
            ((0, "tensorwise"), ("learning_rate < 3e-4", "bf16")),
        ),
        (["--numerics.schedule", "None"], None),
    ],
}
"""{key: (words, value)}."""


@pytest.mark.parametrize(
    ("key", "words", "value"),
    [(key, words, value) for key, cases in ACCEPTED.items() for words, value in cases],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_option_changes_its_key_and_no_other(key, words, value):
    section, _, name = key.partition(".")
    base = Config().replace(run={"steps": 11, "out": "here"})
    changed = override(base, *words)
    assert changed == base.replace(**{section: {name: value}})
    assert type(getattr(getattr(changed, section), name)) is type(value)


def test_each_kind_of_key_has_a_case():
    def kind(key):
        return str(key.hint).split("[")[0], key.optional, key.width

    known = options.config_keys()
    assert {kind(known[key]) for key in ACCEPTED} | {kind(known["numerics.rules"])} >= {
        kind(key) for key in known.values() if key.dotted != "numerics.attention_operands"
    }


@pytest.mark.parametrize(
    "dotted", [key for key in options.config_keys() if key not in configs.TABLES]
)
def test_every_key_is_an_option_in_every_spelling(dotted):
    key = options.config_keys()[dotted]
    value = getattr(getattr(Config(), dotted.partition(".")[0]), dotted.partition(".")[2])
    if key.hint is bool:
        words = [[] if value else None]
    elif isinstance(value, tuple):
        words = [[]]
    else:
        words = [[str(value)]]
    for spelled in {dotted, dotted.replace("_", "-")}:
        for following in words:
            no = spelled.replace(".", ".no-")
            given = [f"--{no}"] if following is None else [f"--{spelled}", *following]
            assert override(Config(), *given) == Config(), given


def test_no_options_change_nothing():
    changed = Config().replace(run={"steps": 3}, numerics={"fp8_fqns": ("lm_head",)})
    assert override(changed) == changed


def test_a_table_is_no_option():
    with pytest.raises(ConfigError, match=r"numerics\.rules are tables of a config file"):
        override(Config(), "--numerics.rules", "x")


@pytest.mark.parametrize(
    ("option", "nearest"),
    [
        ("--run.stepz", "--run.steps"),
        ("--stepz=3", "--run.steps"),
        ("--model.hidden", "--model.hidden_size"),
        ("--recipee", "--recipe"),
        ("--batch_size", "--data.batch_size"),
        ("--learning-rate", "--optimizer.learning_rate"),
    ],
)
def test_an_unknown_option_names_the_nearest_with_its_dashes(capsys, option, nearest):
    with pytest.raises(SystemExit):
        override(Config(), option, "3")
    name = option.partition("=")[0]
    assert re.match(
        rf"fp8ref train: unknown option '{name}'\. Did you mean .*{nearest}.*\?$",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize(
    "words", [["--parallel.compile", "traced"], ["--parallel.compile=traced"], None]
)
def test_collectives_in_the_graph_are_the_librarys_and_the_error_names_them(words):  # P-18
    with pytest.raises(
        ConfigError,
        match=r"got 'traced'.*Use 'model'.*or fp8ref\.torch\.distributed\.compiled_fsdp\.shard",
    ):
        override(Config(), *words) if words else configs.from_dict(
            {"parallel": {"compile": "traced"}}
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--run.steps", "x"], "--run.steps takes an integer; got 'x'."),
        (["--run.steps", "3.5"], "--run.steps takes an integer; got '3.5'."),
        (["--optimizer.eps", "small"], "--optimizer.eps takes a number; got 'small'."),
        (
            ["--parallel.compile", "blok"],
            "--parallel.compile takes one of none, block, model; got 'blok'. Did you mean 'block'?",
        ),
        (["--parallel.tensor_reduce_dtype", "x"], "takes one of float32, bfloat16, None; got 'x'."),
        (["--data.mixture", "a", "b"], "--data.mixture takes pairs of values; got 'a b'."),
        (["--data.evaluation", "a", "b", "c"], "takes pairs of values; got 'a b c'."),
        (["--data.evaluation", "a"], "--data.evaluation takes pairs of values; got 'a'."),
        (["--run.steps", "0"], "run.steps is at least 1; got 0"),
        (["--recipe", "fp9"], "rowwise_with_gw_hp"),
    ],
    ids=" ".join,
)
def test_a_value_that_cannot_be_used_is_an_error_of_its_key(words, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        override(Config(), *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stray"], "unknown argument 'stray'."),
        (["--run.steps"], "--run.steps takes a value; got none."),
        (["--run.steps", "--run.seed", "3"], "--run.steps takes a value; got none."),
        (["--parallel.scan", "True"], "unknown argument 'True'."),
        (["--parallel.scan=True"], "takes no value; got 'True'."),
    ],
    ids=" ".join,
)
def test_words_that_are_no_options_exit_with_2(capsys, words, said):
    with pytest.raises(SystemExit) as stopped:
        override(Config(), *words)
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith("fp8ref train: ")
    assert said in shown
    assert shown.count("\n") == 1


def test_all_keys_are_shown_with_the_values_of_a_config():
    config = Config().replace(
        run={"steps": 12345, "out": "a%(x)s"}, numerics={"filter_fqns": ("mlp",)}
    )
    parser = Parser(prog="fp8ref")
    options.add(parser, config)
    shown = parser.format_help()
    assert [key for key in options.config_keys() if f"--{key}" not in shown] == list(configs.TABLES)
    assert "(value: 12345)" in shown
    assert "(value: a%(x)s)" in shown
    assert "(value: ('mlp',))" in re.sub(r"\s+", " ", shown)


def test_the_short_help_has_common_keys_alone_and_their_first_sentences():
    parser = Parser(prog="fp8ref")
    options.add(parser)
    shown = parser.format_help()
    assert {key for key in options.config_keys() if f"--{key} " in shown} == set(options.COMMON)
    assert "Training text: stdlib, a path or a pattern\n" in shown
