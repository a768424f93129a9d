"""Sections of a config that are refused together.

What single features refuse is tested with them, in ``tests/parity``.
"""

import pytest

from fp8ref.shared.errors import ConfigError
from fp8ref.spec import kernels
from fp8ref.train.config import checks as config_checks
from fp8ref.train.config.config import Config

REFUSED = [
    ({"parallel": {"cuda_graphs": True}}, "are of parallel.compile, on one device"),
    (
        {"parallel": {"cuda_graphs": True, "compile": "block"}},
        "rounds float32 masters to new ones; got optimizer.kind 'adamw'",
    ),
    (
        {"parallel": {"cuda_graphs": True, "compile": "block", "fsdp": 2}},
        "got compile 'block' and 2 devices",
    ),
    ({"parallel": {"accumulate_dtype": "bfloat16"}}, "of data.microbatches, of which there is 1"),
    ({"parallel": {"attention": "tiles"}}, "is of numerics.attention, which is left out"),
    ({"parallel": {"expert": 2}}, "parallel.expert is for a model with experts; got 2"),
    (
        {"parallel": {"attention": "chunked"}, "numerics": {"attention": "cudnn"}},
        "none of them; got 'chunked'",
    ),
    (
        {
            "parallel": {"compile": "block"},
            "numerics": {"attention": "cudnn", "attention_arithmetic": "stated"},
        },
        "for minutes or hours; got parallel.compile 'block'",
    ),
    (
        {
            "numerics": {"schedule": ((0, "tensorwise"), ("sqnr < 18", "bf16"))},
            "statistics": {"every": 0},
        },
        "statistics.every records; got 0",
    ),
    (
        {
            "numerics": {"schedule": ((0, "tensorwise"), ("update_error > 0.1", "bf16"))},
            "statistics": {"every": 1},
        },
        "got kind 'adamw'. Name",
    ),
]


@pytest.mark.parametrize(("keys", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_sections_that_no_backend_trains_together_are_refused(keys, said):
    with pytest.raises(ValueError, match=said):
        Config().replace(**keys)


def test_a_length_that_ranks_cannot_cut_is_an_error_message():  # P-10
    config = Config().replace(
        data={"sequence_length": 15}, parallel={"tensor": 2, "sequence": True}
    )
    assert config_checks.uncut_sequences(config) == [
        "under parallel.sequence data.sequence_length is divisible by tensor = 2; got 15."
    ]
    assert config_checks.uncut_sequences(config.replace(data={"sequence_length": 16})) == []


@pytest.mark.parametrize("attention", ["tiles", "chunked"])
def test_single_casts_of_attention_have_no_tiles(attention):  # E-9
    with pytest.raises(
        ValueError,
        match=f"numerics.attention(_operands are of one device|.* is none of them).*{attention}",
    ):
        Config().replace(
            numerics={"attention": "cudnn", "attention_operands": ("p",)},
            parallel={"attention": attention},
        )


def test_triton_kernels_without_triton_are_refused_where_a_run_begins(monkeypatch):
    """Elsewhere, as for a report, the config of such a run is read."""
    monkeypatch.setattr(kernels, "installed", lambda: False)
    config = Config().replace(numerics={"kernels": "triton"})
    for backend in ("jax", "torch"):
        with pytest.raises(ConfigError, match=r"numerics.kernels: .* pip install 'fp8ref\[kernels"):
            config_checks.check_backend(config, backend)
        config_checks.check_backend(config.replace(numerics={"kernels": "auto"}), backend)


def test_kernels_are_one_of_three():
    with pytest.raises(
        ValueError, match=r"numerics\.kernels is one of auto, plain, triton; got 'x'"
    ):
        Config().replace(numerics={"kernels": "x"})


@pytest.mark.parametrize("key", [{"context": 2}, {"fsdp": 2, "amax_scope": "local"}])
def test_ranks_that_do_not_know_their_tokens_places_round_nothing_stochastically(key):
    """In PyTorch; JAX has the whole batch (S-24)."""
    config = Config().replace(numerics={"recipe": "nvfp4", "attention": "bf16"}, parallel=key)
    (said,) = config_checks.undrawn(config, "torch")
    assert f"got parallel.{list(key)[-1]}" in said
    with pytest.raises(ConfigError, match="'nvfp4' rounds by the places of tokens"):
        config_checks.check_backend(config, "torch")
    assert config_checks.undrawn(config, "jax") == []
    assert config_checks.undrawn(config.replace(numerics={"recipe": "rowwise"}), "torch") == []
