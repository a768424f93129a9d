"""A study of Flax's own gemma, from the checkout of google/flax that FP8REF_GEMMA names, as
docs/how-to/study.md has it. Passed with 18f8f311.
"""

import os
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp8ref import study

CHECKOUT = os.environ.get("FP8REF_GEMMA")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="FP8REF_GEMMA names no checkout of google/flax"),
    pytest.mark.filterwarnings("ignore"),  # gemma's own
]

SIZES = {
    "num_layers": 2,
    "num_embed": 256,
    "embed_dim": 64,
    "hidden_dim": 128,
    "num_heads": 4,
    "head_dim": 16,
    "num_kv_heads": 1,
}


def gemma():
    """Two layers, one of them with a sliding window."""
    sys.path.insert(0, str(Path(str(CHECKOUT)) / "examples" / "gemma"))
    try:
        import transformer
        import transformer_cfg
    except ModuleNotFoundError as error:
        pytest.skip(f"gemma imports {error.name}, which is not installed")
    config = transformer_cfg.TransformerConfig(
        **SIZES,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(
            transformer_cfg.AttentionType.GLOBAL,
            transformer_cfg.AttentionType.LOCAL_SLIDING,
        ),
        use_qk_norm=True,
        sliding_window_size=32,
    )
    return transformer.Transformer(config, rngs=nnx.Rngs(0))


def test_its_projections_are_recorded_judged_and_run_under_recipes(tmp_path):
    model = gemma()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, 64)))
    positions, mask = jnp.arange(64)[None], jnp.tril(jnp.ones((1, 64, 64), bool))

    def loss(logits):
        return (logits.astype(jnp.float32) ** 2).mean()

    with study.record(model) as recording:
        nnx.value_and_grad(lambda model: loss(model(tokens, positions, None, mask)[0]))(model)
    assert recording.uncalled == []
    assert {name.rpartition("/")[2] for name in recording.operands} == {
        "input",
        "weight",
        "grad_output",
    }
    assert len(recording.layers) == 2 * 6
    judged = study.judge(recording, ["tensorwise", "rowwise"])
    assert len(judged.rows) == 2 * 6 * len(recording.layers)
    depth = study.depth(
        model, lambda model: model(tokens, positions, None, mask)[0], ["tensorwise", "rowwise"]
    )
    for one in depth.outcomes.values():
        assert one.in_fp8 == 2 * 6
        assert 0 < one.output < 0.1
    study.write_page(tmp_path / "study.html", judged, depth)
    with pytest.raises(ValueError, match="got none"):  # its attention is of einsums
        study.judge_attention(recording)
