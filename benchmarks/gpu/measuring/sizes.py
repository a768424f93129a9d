"""How large what is measured is."""

import dataclasses
import tomllib
from dataclasses import dataclass

from fp8ref import configs
from fp8ref.spec.llama import LlamaConfig
from measuring import timing

LLAMA_8B = "llama-8b"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """tokens: of one sequence. square: M, N and K of the GEMMs that tell ceilings. copied: bytes of
    a buffer.
    """

    blocks: LlamaConfig
    tokens: int
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
    known = LlamaConfig(
        **tomllib.loads(configs.find(LLAMA_8B).read_text(encoding="utf-8"))["model"]
    )
    small = dataclasses.replace(
        known, hidden_size=512, intermediate_size=1792, num_attention_heads=8, num_key_value_heads=4
    )
    return Sizes(
        blocks=dataclasses.replace(known, num_hidden_layers=4),
        tokens=8192,
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
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return Sizes(
        blocks=tiny,
        tokens=32,
        small=dataclasses.replace(tiny, intermediate_size=32),
        small_tokens=16,
        square=32,
        copied=2**12,
        launches=4,
        row_seconds=1e-4,
        rounds=3,
    )
