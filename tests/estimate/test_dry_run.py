import io
import re

import pytest
from helpers.models import sizes
from rich.console import Console

from fp8ref.estimate import dry_run, memory
from fp8ref.train.config import config as configs
from fp8ref.train.config import device_shapes


def shown(config, backend="torch") -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    dry_run.show(config, backend, console)
    return console.file.getvalue()


def row(text: str, *cells: str) -> bool:
    """Whether a line of a table begins with these cells."""
    return re.search(r"│ *" + r" *│ *".join(map(re.escape, cells)) + r" *│", text) is not None


# The public figures: 8.03, 70.6 and 405 (405.9 with both embeddings) billion, Llama 3.2 1B 1.24
# (its embedding, tied, once).
@pytest.mark.parametrize(
    ("name", "billions"),
    [("1b", 1.24), ("8b", 8.03), ("70b", 70.6), ("405b", 405.9), ("125m", 0.12)],
)
def test_parameters_are_as_published(name, billions):
    count = device_shapes.kinds(configs.load(f"llama-{name}"))["all"]
    assert count / 1e9 == pytest.approx(billions, abs=0.05 if billions > 10 else 0.005)


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("name", ["125m", "1b", "8b", "70b", "405b"])
def test_every_config_is_accepted_by_both_backends(name, backend):
    config = configs.load(f"llama-{name}")
    for key in ("hidden_size", "intermediate_size", "vocab_size"):
        assert getattr(config.model, key) % 128 == 0
    text = shown(config, backend)
    assert "parameters: all" in text
    assert row(text, "gate_proj", f"[{config.model.intermediate_size}, {config.model.hidden_size}]")


def test_what_is_printed():
    text = shown(sizes.config(parts=2, **sizes.MESH))
    assert row(text, "parameters: all", "106,816")
    assert row(text, "devices", "4", "data 1 x fsdp 2 x tensor 2, sequences cut over tensor")
    assert row(text, "tokens a step", "256", "8 sequences of 32, in 2 parts")
    assert row(text, "tokens a device and part", "64")
    assert row(text, "tokens a run", "51,200")  # of 200 steps
    assert row(text, "k_proj", "[32, 64]", "2", "yes", "every linear not filtered")
    assert row(text, "lm_head", "[256, 64]", "1", "no", "named by filter_fqns 'lm_head'")
    # two layers, two parts, k and v: 8 products
    assert row(
        text,
        "output",
        "64",
        "16",
        "64",
        "8",
        "k_proj, v_proj",
        "e4m3fn tensorwise x e4m3fn tensorwise, fast",
    )
    assert row(text, "grad_weight", "256", "64", "64", "2", "lm_head", "bf16")
    # cut over 2: a layer's 18432 and lm_head's 16384 weights
    assert (
        f"{100 * 2 * 18432 / (2 * 18432 + 16384):.1f} % of their "
        f"{2 * 3 * 2 * 64 * (2 * 18432 + 16384):.3g} FLOPs in FP8" in text
    )
    assert "weights, gathered over fsdp" in text
    assert "not measurements" in text


def test_linears_that_would_be_slower_are_told():
    """Of 256 tokens and 64 features, casts take longer than any GEMM."""
    text = shown(sizes.config())
    assert row(text, "q_proj")
    assert "SLOWER in FP8 on H100 SXM, H200 SXM, B200: name it in filter_fqns" in text
    assert "SLOWER" not in shown(sizes.config("bf16"))


def test_a_head_that_is_tied_multiplies_too():
    text = shown(sizes.CONFIG.replace(model={"tie_word_embeddings": True}))
    assert row(text, "lm_head", "[256, 64]", "1", "no", "tied to the embedding (R-2)")
    assert row(text, "output", "256", "256", "64", "1", "lm_head", "bf16")


def test_a_device_that_lacks_the_memory_is_told():
    assert "fits H100 SXM" in shown(sizes.CONFIG)
    assert "DOES NOT FIT H100 SXM" in shown(sizes.CONFIG.replace(data={"batch_size": 1 << 20}))


def test_one_device_receives_nothing():
    assert row(shown(sizes.CONFIG), "nothing: one device", "0", "0", "0")


def test_a_schedule_shows_its_phases_and_the_tables_of_each_recipe():  # T-9
    phases = (
        (0, "bf16"),
        (40, "tensorwise"),
        ("learning_rate < 3e-4", "delayed"),
        ("sqnr < 9", "bf16"),
        (9000, "rowwise"),
    )
    config = configs.load("tiny").replace(
        numerics={"recipe": "bf16", "schedule": phases}, statistics={"every": 5}, run={"steps": 200}
    )
    assert 40 < config.starts[2] < 200
    text = shown(config)
    assert row(text, "phase: bf16", "0", "from step 0")
    assert row(text, "phase: tensorwise", "40", "from step 40")
    assert row(text, "phase: delayed", "learning_rate < 3e-4", f"from step {config.starts[2]}")
    assert row(text, "phase: bf16", "sqnr < 9", "when it is measured")
    assert row(text, "phase: rowwise", "9000", "not in this run")
    for recipe in ("bf16", "tensorwise", "delayed", "rowwise"):
        assert text.count(f"Linears under recipe {recipe!r}") == 1


def test_the_memory_of_a_schedule_is_the_most_of_its_recipes():  # T-9
    """FSDP gathers rowwise weights in the compute dtype, so rowwise takes more than tensorwise
    where a layer needs the most; histories are kept under both."""
    config = configs.load("llama-1b").replace(
        model={"vocab_size": 1024},
        data={"sequence_length": 64, "batch_size": 8},
        numerics={"schedule": ((0, "tensorwise"), (40, "rowwise"), (80, "delayed"))},
    )
    totals = {
        recipe: memory.most(memory.lines(config, "torch", recipe))[1] for recipe in config.recipes
    }
    assert memory.largest(config, "torch") == max(totals, key=totals.get) == "rowwise"
    assert totals["rowwise"] > totals["tensorwise"]
    alone = memory.most(memory.lines(config.under("rowwise"), "torch"))[1]
    states = memory.lines(config.under("delayed"), "torch")["FP8 states"][0]
    assert memory.most(memory.lines(config, "torch"))[1] == totals["rowwise"] == alone + states
