"""The line that the console shows of a run's linears in FP8, against PyTorch's report of the
trainer's model.
"""

import numpy as np
import pytest
import torch

from fp8ref.train.config.config import Config
from fp8ref.train.run import coverage


@pytest.mark.parametrize("tied", [False, True])
def test_shares_are_those_of_the_report(tied):
    from fp8ref.torch.model.report import report
    from fp8ref.train.torch.trainer import Trainer

    config = Config().replace(
        numerics={"recipe": "rowwise", "filter_fqns": ["layers.0"]},
        model={"tie_word_embeddings": tied},
    )
    model = Trainer(config)
    found = coverage.of(config, model.decisions)
    tokens = torch.zeros(1, config.data.sequence_length, dtype=torch.long)
    with model._step.computing():
        made = report(model.model, (tokens,))
    np.testing.assert_allclose(
        [found["parameters"], found["multiplications"]],
        [made.parameters, made.multiplications],
        rtol=1e-12,
    )
    assert found["linears"] == sum(row.recipe is not None for row in made.rows)


def test_a_line():
    line = coverage.of(Config(), Config().decisions())["summary"]
    assert line.startswith("14 of 15 linears in FP8 (")
    assert line.endswith("Not in FP8: lm_head (named by filter_fqns 'lm_head').")
    mxfp4 = Config().replace(numerics={"recipe": "mxfp4"})
    assert coverage.of(mxfp4, mxfp4.decisions())["summary"].startswith(
        "14 of 15 linears in FP8 (mxfp4 in emulated FP4), "
    )
    bf16 = Config().replace(numerics={"recipe": "bf16"})
    assert coverage.of(bf16, bf16.decisions())["summary"].startswith(
        "0 of 15 linears in FP8, 0.0% of the parameters"
    )


def test_attention_by_a_variant_in_fp8_is_counted():
    config = Config().replace(numerics={"attention": "cudnn"})
    found, without = (coverage.of(one, one.decisions()) for one in (config, Config()))
    assert found["summary"].startswith(
        "14 of 15 linears in FP8 (tensorwise), and attention (cudnn), 85.6% of the parameters and "
    )
    assert found["attention"] == "cudnn"
    model, length = config.model, config.data.sequence_length
    # both products, for a token
    attended = 2 * length * model.hidden_size * model.num_hidden_layers
    linears = sum(d.shape[0] * d.shape[1] for d in config.decisions())
    np.testing.assert_allclose(
        found["multiplications"] - without["multiplications"],
        attended / (linears + attended),
        rtol=1e-12,
    )
    wide = Config().replace(numerics={"attention": "bf16"})
    assert "attention" not in coverage.of(wide, wide.decisions())["summary"]
