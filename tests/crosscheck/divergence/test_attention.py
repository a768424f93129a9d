import numpy as np
import pytest
import torch
from torch.nn import functional

from fp8ref import llama
from fp8ref.crosscheck.divergence.attention import attended
from fp8ref.llama import LlamaConfig
from fp8ref.train.torch.llama import _rotate

CONFIG = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)


def projections(gain: float, length: int = 24):
    rng = np.random.default_rng(3)
    shapes = {"q": 64, "k": 32, "v": 32}
    return {name: torch.from_numpy(gain * rng.standard_normal((2, length, n))).bfloat16() for name, n in shapes.items()}


def in_torch(given, *, causal: bool = True, rotate: bool = True) -> np.ndarray:
    q, k, v = (x.view(*x.shape[:2], -1, CONFIG.head_dim).transpose(1, 2) for x in given.values())
    cos, sin = (torch.from_numpy(t) for t in llama.rotary_tables(CONFIG, q.shape[2]))
    q, k = (_rotate(x, cos, sin) if rotate else x for x in (q, k))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return y.transpose(1, 2).flatten(2).float().numpy()


def found(given):
    return attended(*(x.float().numpy() for x in given.values()), CONFIG)


@pytest.mark.parametrize("gain", [0.01, 0.3, 1.0])
def test_torchs_attention_lies_within_the_bound(gain):  # B-11
    given = projections(gain)
    simulated = found(given)
    out = in_torch(given)
    assert simulated.used(out) <= 1
    # torch rounds before it normalises; a float32 sum takes few elements to the other side of a tie
    assert (out == simulated.after).mean() > 0.95
    assert (out == simulated.before).mean() < 0.9
    assert max(simulated.used(simulated.before), simulated.used(simulated.after)) <= 1


@pytest.mark.parametrize("fault", [{"causal": False}, {"rotate": False}])
def test_another_attention_does_not(fault):
    """At scores of order one tenth; where they are large, the roundings of queries and keys leave all that and more open."""
    given = projections(0.3)
    assert found(given).used(in_torch(given, **fault)) > 1
