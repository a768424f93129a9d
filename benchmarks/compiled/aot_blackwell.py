"""The training step by MX and NVFP4 products of hardware, compiled ahead of time for a B200: how many
of its GEMMs cuDNN multiplies in blocks, and what casting to them costs in bytes."""

import collections
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import aot_blocks
from fp8ref.jax import proof
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import DataConfig
from fp8ref.train.jax.trainer import Trainer

MODEL = dataclasses.replace(aot_blocks.MODEL, num_hidden_layers=2)
LENGTH, SEQUENCES = 1024, 4
CASES = [
    ("bf16", "auto"),
    ("rowwise", "auto"),
    *((recipe, "scaled_matmul") for recipe in ("mxfp8", "mxfp8_32x32", "nvfp4")),
    *((recipe, "emulated") for recipe in ("mxfp8", "nvfp4")),
]
BLOCKS = "__cudnn$blockScaledDot"
HEADER = """
## A step on a B200

The model of the first table, for one B200 (benchmarks/compiled/b200_target.txtpb), by `numerics.products`. `scaled_matmul` is
`jax.nn.scaled_matmul` (G-26). "in blocks" are cuDNN's products of scaled blocks; XLA dequantizes what it does not give to cuDNN.
Bytes are what kernels other than GEMMs read and write, so also those of casts, of rotations and of random numbers.

| recipe | products | GEMMs in blocks | other FP8 GEMMs | other GEMMs | GB in kernels outside GEMMs | temporary, MiB |
|---|---|---|---|---|---|---|"""


def of_step(recipe: str, products: str, target: str, tools: SimpleNamespace) -> dict:
    """GEMMs, bytes and temporary memory of a step; target: an H200's, whose place a B200 takes."""
    target = (Path(__file__).parent / "b200_target.txtpb").read_text()
    config = Config(
        model=MODEL, data=DataConfig(sequence_length=LENGTH, batch_size=SEQUENCES)
    ).replace(numerics={"recipe": recipe, "products": products})
    tokens = np.zeros((SEQUENCES, LENGTH + 1), np.int32)
    compiled = Trainer(config, devices=tools.h200s(1, target)).lowered(tokens).compile()
    text = compiled.as_text()
    dots = proof.gemms(proof.read_compiled(text))
    moved = tools.outside_gemms(text)
    return {
        "recipe": recipe,
        "products": products,
        "kernels": dict(collections.Counter(dot.kernel for dot in dots)),
        "in_blocks": text.count(f'custom_call_target="{BLOCKS}"'),
        "fp8": sum(dot.fp8 and dot.kernel != BLOCKS for dot in dots),
        "others": sum(not dot.fp8 and dot.kernel != BLOCKS for dot in dots),
        "gb": moved["gb"],
        "outside": moved["kernels"],
        "temporary_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20),
    }


def markdown(rows: list[dict]) -> str:
    """The table of the part."""
    lines = [
        f"| {row['recipe']} | {row['products']} | {row['in_blocks'] or '-'} | "
        f"{row['fp8'] or '-'} | {row['others'] or '-'} | {row['gb']} in {row['outside']} | "
        f"{row['temporary_mib']:,} |"
        for row in rows
    ]
    return "\n".join([HEADER, *lines]) + "\n"
