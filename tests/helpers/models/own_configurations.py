"""Sections ``architecture`` of models of a user's."""

import json

from fp8ref.train.config import user_model
from fp8ref.train.config.sections import ArchitectureConfig

for _module in ("helpers.models.own_torch_models", "helpers.models.own_nnx_models"):
    user_model.trust(_module)

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


def of(name: str) -> ArchitectureConfig:
    return ArchitectureConfig(kind="torch", source=f"helpers.models.own_torch_models:{name}")


def nnx(name: str, module: str = "helpers.models.own_nnx_models") -> ArchitectureConfig:
    return ArchitectureConfig(kind="nnx", source=f"{module}:{name}")


def transformers(folder, **keys) -> ArchitectureConfig:
    (folder / "config.json").write_text(json.dumps(QWEN3 | keys))
    return ArchitectureConfig(kind="transformers", source=str(folder))
