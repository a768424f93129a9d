"""A model whose every count can be made by hand, for the tests of dry runs.

Hidden 64, inner 128, 4 heads of 16 and 2 for keys and values (32 features), 2 layers, 256 tokens in
the vocabulary. A layer: q and o 4096, k and v 2048, gate, up and down 8192 each: 36864. Embedding
and lm_head 16384 each, 5 norms of 64. 8 sequences of 32 tokens. Plain operations cast.
"""

import json
from pathlib import Path

from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import DataConfig, NumericsConfig

COMPILED = json.loads((Path(__file__).parents[3] / "benchmarks/results/aot.json").read_text())
"""What XLA compiles for H200s, of which ``compiled`` makes configs."""

LAYER, TABLE, NORMS = 36864, 16384, 320
CONFIG = Config(
    model=LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    data=DataConfig(source="nowhere", sequence_length=32, batch_size=8),
    numerics=NumericsConfig(kernels="plain"),
)
MESH = {"fsdp": 2, "tensor": 2, "sequence": True, "amax_scope": "local"}


def config(recipe="tensorwise", parts=1, optimizer="adamw", **parallel) -> Config:
    return CONFIG.replace(
        numerics={"recipe": recipe},
        data={"microbatches": parts},
        optimizer={"kind": optimizer},
        parallel=parallel,
    )


def compiled(row: dict) -> Config:
    """The config that a row of the recorded compile is of, in which XLA casts."""
    model = COMPILED["model"] | row.get("model", {})
    length, sequences = model.pop("sequence_length"), model.pop("sequences_per_device")
    made = Config(model=LlamaConfig(**model)).replace(
        numerics={"recipe": row["recipe"], "kernels": "plain"}, parallel=row["mesh"]
    )
    return made.replace(
        data={"sequence_length": length, "batch_size": sequences * made.parallel.devices}
    )
