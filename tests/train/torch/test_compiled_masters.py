"""Masters in float16, and weights in FP8, under torch.compile (O-14, O-16, M-2)."""

import math

import numpy as np
import pytest
import torch._inductor.config as inductor_config
from helpers.models.compiling import parallelize_by
from helpers.processes.ranks import run
from helpers.states.state_layouts import differing
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.train.data import loader
from fp8ref.train.torch.llama import model as llama_model
from fp8ref.train.torch.trainer import Trainer

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}
TABLE = "model.embed_tokens.weight"
pytestmark = [
    # Dynamo asks a widened table, no leaf, for its gradient, and hides what torch says of that
    # where warnings are no errors.
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    # inductor's own, once imported
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


def configured(small, compile: str, recipe="tensorwise", layout="msamp_o2", tied=False, **parallel):
    return small.replace(
        model=MODEL | {"tie_word_embeddings": tied},
        data={"microbatches": 2},
        numerics={"recipe": recipe},
        optimizer={"kind": "adamw_states", "layout": layout, "max_norm": math.inf},
        parallel={"compile": compile, **parallel},
    )


def compared(config, tokens, backend="aot_eager"):
    """What differs from the same run without a compiler, of passes and steps; and elements of the
    table's gradient that no bfloat16 has.

    ``aot_eager`` traces forward and backward pass to graphs, and runs their operations one by one:
    inductor's own kernels round elsewhere (B-9).
    """
    llama_model.parallelize = parallelize_by(backend)
    compiled, eager = Trainer(config), Trainer(config.replace(parallel={"compile": "none"}))
    mine, theirs = compiled.gradients(tokens), eager.gradients(tokens)
    unlike = [
        name
        for name, g in theirs.items()
        if mine[name].dtype != np.float32 or differing(mine[name], g)
    ]
    wide = np.count_nonzero(mine[TABLE].view(np.uint32) & 0xFFFF)
    for _ in range(2):
        unlike += ["loss and norm"] * (compiled.step(tokens) != eager.step(tokens))
    unlike += ["evaluate"] * (compiled.evaluate(tokens) != eager.evaluate(tokens))
    after = eager.weights()
    unlike += [
        f"{name} after steps" for name, w in compiled.weights().items() if differing(w, after[name])
    ]
    of_trainer = compiled._step.copies
    in_fp8 = (
        sorted(name for name, p in compiled._params.items() if isinstance(p, Float8TrainingTensor))
        if of_trainer
        else []
    )
    return unlike, int(wide), len(in_fp8)


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("compile", "recipe", "layout", "tied"),
    [
        ("model", "tensorwise", "msamp_o2", False),
        ("model", "tensorwise", "sqrt_e4m3_f16", True),
        ("model", "rowwise", "msamp_o2", False),
        ("block", "tensorwise", "msamp_o2", False),
    ],
)
# O-14, O-16, M-2, T-7
def test_graphs_have_the_bits_of_eager_passes(compile, recipe, layout, tied, small, monkeypatch):
    """Of the whole model too: gradients of the table are float32, and parameters with gradients are
    traced again.
    """
    monkeypatch.setattr(llama_model, "parallelize", llama_model.parallelize)  # put back afterwards
    config = configured(small, compile, recipe, layout, tied)
    unlike, wide, in_fp8 = compared(config, loader.open_batches(config).step(0))
    assert unlike == []
    assert wide > 0
    # the linears of a layer; lm_head stays in bfloat16
    assert in_fp8 == (7 if recipe == "tensorwise" else 0)


def of_wide_masters(config, tokens):
    """What differs between the gradients of a run and of one whose float32 masters have the same
    numbers.
    """
    llama_model.parallelize = parallelize_by("aot_eager")
    narrow = Trainer(config)
    wide = Trainer(
        config.replace(
            optimizer={
                "layout": narrow.config.optimizer.layout.removesuffix("_o2").removesuffix("_f16")
            }
        ),
        narrow.weights(),
    )
    mine, theirs = narrow.gradients(tokens), wide.gradients(tokens)
    assert len(narrow._step.copies.gathers) == 7
    return [
        name
        for name, g in theirs.items()
        if mine[name].dtype != np.float32 or differing(mine[name], g)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compile", "layout"),
    [("model", "msamp_o2"), ("model", "sqrt_e4m3_f16"), ("block", "msamp_o2")],
)
def test_graphs_of_ranks(compile, layout, small):  # O-16, P-19
    """Ranks gather the codes that a step made, also of a model that is gathered whole; its table
    has gradients in bfloat16 under both.
    """
    config = configured(small, compile, layout=layout, fsdp=2)
    assert run(2, of_wide_masters, config, loader.open_batches(config).step(0), timeout=400) == [
        [],
        [],
    ]


@pytest.mark.slow
@inductor_config.patch(
    "cpp.simdlen",
    1,
    # torch 2.13's vector code for a CPU makes NaN of gradients of whole models in FP8, under adamw
    # too
)
def test_inductors_own_kernels(small):  # O-14, B-9
    """A compiled run stays within 2^-9 of eager losses, as a run on another mesh does
    (test_processes).
    """
    config = configured(small, "model")
    tokens = loader.open_batches(config).step(0)
    compiled, eager = Trainer(config), Trainer(config.replace(parallel={"compile": "none"}))
    losses = [[trainer.step(tokens)["loss"] for _ in range(3)] for trainer in (compiled, eager)]
    assert losses[0] == pytest.approx(losses[1], rel=2.0**-9)
    assert np.count_nonzero(compiled.gradients(tokens)[TABLE].view(np.uint32) & 0xFFFF) > 0
