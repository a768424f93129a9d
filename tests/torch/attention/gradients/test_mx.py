"""Parts of the backward pass with MX blocks (spec A-16).

The whole is in parity/test_attention_torch.py.
"""

import numpy as np
import torch

from fp8ref.sim.attention.gradients import mx as sim
from fp8ref.spec.attention.variants import VARIANTS
from fp8ref.torch.attention.gradients import mx as attention_gradients_mx


def test_ds_is_quantized_along_keys_and_along_queries(rng):  # A-16, step 5
    ds = (rng.normal(size=(70, 150)) * 2.0 ** rng.integers(-12, 3, (70, 150))).astype(np.float32)
    keys, queries = sim._both(ds, VARIANTS["mxfp8"].fmt, "mx_rceil")
    along_keys = keys.values[0, 0] * np.repeat(keys.scale_inv[0, 0], 32, axis=1)[:, :150]
    along_queries = queries.values[0, 0] * np.repeat(queries.scale_inv[0, 0], 32, axis=0)[:70]
    stacked = torch.from_numpy(ds)[None, None, :, None]  # [B, Hkv, rows, G, keys]
    for blocks, right in (
        (attention_gradients_mx.ALONG_KEYS, along_keys),
        (attention_gradients_mx.ALONG_QUERIES, along_queries),
    ):
        found = attention_gradients_mx._dequantized(
            stacked, blocks, VARIANTS["mxfp8"].fmt, "mx_rceil"
        )
        np.testing.assert_array_equal(found[0, 0, :, 0].numpy(), right)
    assert (along_keys != along_queries).any()
