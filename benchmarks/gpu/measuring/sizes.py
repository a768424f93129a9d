"""How large what is measured is."""

import dataclasses
import tomllib
from dataclasses import dataclass

from fp8ref import configs
from fp8ref.spec.llama import LlamaConfig
from measuring import timing

LLAMA_8B, LLAMA_70B = "llama-8b", "llama-70b"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """tokens: of one sequence. large: a block of a wider model. square: M, N and K of the GEMMs
    that tell ceilings. copied: bytes of a buffer. exact: shapes of tensors whose bits are compared;
    kernel_columns: of those of as many rows as tokens by which kernels are timed.
    """

    blocks: LlamaConfig
    large: LlamaConfig
    tokens: int
    exact: tuple[tuple[int, int], ...]
    kernel_columns: tuple[int, ...]
    small: LlamaConfig
    small_tokens: int
    square: int
    copied: int
    launches: int
    row_seconds: float
    rounds: int


def full() -> Sizes:
    """Four blocks of Llama 3 8B on 8,192 tokens, as asked; the small model has the same parts, an
    eighth as wide.
    """
    known, large = (
        LlamaConfig(**tomllib.loads(configs.find(name).read_text(encoding="utf-8"))["model"])
        for name in (LLAMA_8B, LLAMA_70B)
    )
    small = dataclasses.replace(
        known, hidden_size=512, intermediate_size=1792, num_attention_heads=8, num_key_value_heads=4
    )
    return Sizes(
        blocks=dataclasses.replace(known, num_hidden_layers=4),
        large=dataclasses.replace(large, num_hidden_layers=1),
        tokens=8192,
        exact=((256, 256), (255, 257)),
        kernel_columns=(4096, 14336, 1024),
        small=dataclasses.replace(small, num_hidden_layers=4),
        small_tokens=2048,
        square=8192,
        copied=2**31,
        launches=200,
        row_seconds=0.05,
        rounds=timing.ROUNDS,
    )


def dry() -> Sizes:
    """Sizes too small to say anything."""
    tiny = LlamaConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Sizes(
        blocks=tiny,
        large=dataclasses.replace(tiny, num_hidden_layers=1),
        tokens=128,
        exact=((256, 256), (1, 257)),
        kernel_columns=(128,),
        small=dataclasses.replace(tiny, hidden_size=32, intermediate_size=48),
        small_tokens=16,
        square=32,
        copied=2**12,
        launches=4,
        row_seconds=1e-4,
        rounds=3,
    )
