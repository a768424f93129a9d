"""A study of torchtitan's own Llama, from the checkout that FP8REF_TORCHTITAN names: recorded,
judged, through depth. Passed with b5bcd76.
"""

import os
import sys

import pytest
import torch

from fp8ref import study

CHECKOUT = os.environ.get("FP8REF_TORCHTITAN")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="FP8REF_TORCHTITAN names no checkout of torchtitan"),
    pytest.mark.filterwarnings("ignore"),  # torchtitan's own
]


class OnCPU(torch.nn.Module):
    """The inner attention of tokens [T, heads, D]. torchtitan's own kernels need a GPU."""

    def forward(self, q, k, v, *, scale=None, **_):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, scale=scale
        )
        return out[0].transpose(0, 1)


def model() -> torch.nn.Module:
    """Two blocks of the debug model, with an attention that runs on a CPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    made = config.build()
    for layer in made.layers.values():
        layer.attention.inner_attention = OnCPU()
    torch.manual_seed(0)
    with torch.no_grad():
        made.init_states()
    return made.bfloat16()


def test_its_linears_and_attention_are_studied(tmp_path):
    sys.path.insert(0, str(CHECKOUT))
    try:
        made = model()
    except ModuleNotFoundError as error:
        pytest.skip(f"torchtitan's Llama imports {error.name}, which is not installed")
    tokens = torch.randint(0, 2048, (65,), generator=torch.Generator().manual_seed(1))
    with study.record(made, tokens=64) as recording:
        torch.nn.functional.cross_entropy(made(tokens[:-1]).float(), tokens[1:]).backward()
    assert recording.uncalled == []
    roles = {name.rpartition("/")[2] for name in recording.operands}
    assert roles == {"input", "weight", "grad_output"}
    assert len(recording.attention) == 2
    assert all(one.causal and one.do is not None for one in recording.attention.values())
    judged = study.judge(recording, ["tensorwise", "rowwise"])
    assert len(judged.rows) == 2 * 6 * len(recording.layers)
    attended = study.judge_attention(recording, ["cudnn", "bf16"])
    assert all(0 < row.error < 0.2 for row in attended.rows)
    depth = study.depth(
        made, lambda m: m(tokens[:-1]).float(), ["rowwise"], filter_fqns=["lm_head"]
    )
    assert depth.outcomes["rowwise"].in_fp8 == 2 * 5
    assert 0 < depth.outcomes["rowwise"].output < 0.2
    study.write_page(tmp_path / "study.html", judged, depth, attention=attended)
