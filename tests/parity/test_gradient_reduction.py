"""Both trainers exchange gradients in FP8 as the simulator does, of each device's own gradients
(spec P-21, P-25).
"""

import numpy as np
import pytest
from helpers.processes.ranks import run
from helpers.training import gradient_cases as cases
from torch import distributed

from fp8ref.formats import BFLOAT16
from fp8ref.shared.errors import ConfigError
from fp8ref.sim.distributed import gradient_reduction
from fp8ref.sim.quantize import cast
from fp8ref.spec import llama
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train import loop
from fp8ref.train.config import device_shapes
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import DataConfig

RANKS = 4
CONFIG = Config(
    model=LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
    data=DataConfig(sequence_length=16, batch_size=2 * RANKS),
)
TOKENS = np.random.default_rng(0).integers(0, 256, (2 * RANKS, 17))
LINEARS = [f"{name}.weight" for name in llama.linear_shapes(CONFIG.model)]
# under local scope a device alone has the same operands
FP8 = {"reduce_dtype": "float8_e4m3fn", "amax_scope": "local"}


def alone(backend):
    """The gradients of the mean loss of each rank's rows, by one device."""
    trainer = loop.trainer(backend, CONFIG.replace(data={"batch_size": 2}))
    return [trainer.gradients(rows) for rows in np.split(TOKENS, RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"fsdp": RANKS}, {"data": 2, "fsdp": 2}], ids=str)
def test_jax_exchanges_what_the_simulator_does(parallel):  # P-25
    found = loop.trainer("jax", CONFIG.replace(parallel=parallel | FP8)).gradients(TOKENS)
    parts = alone("jax")
    for name in LINEARS:
        # the loss is the mean of all devices', and a gradient has the dtype of the weight that the
        # linear takes
        total = gradient_reduction.reduce([part[name] / RANKS for part in parts], mean=False).value
        assert cases.equal(found[name], cast.round_to(total, BFLOAT16)), name


def under_fsdp():
    return loop.trainer(
        "torch", CONFIG.replace(parallel={"fsdp": distributed.get_world_size()} | FP8)
    ).gradients(TOKENS)


def test_torch_exchanges_what_the_simulator_does():  # P-25
    found, parts = run(RANKS, under_fsdp), alone("torch")
    for name in LINEARS:
        expected = gradient_reduction.reduce([part[name] for part in parts]).value
        assert all(cases.equal(of_rank[name], expected) for of_rank in found), name


@pytest.mark.parametrize(
    ("backend", "parallel", "message"),
    [
        ("torch", {"data": 2, "fsdp": 2}, "in PyTorch sums over fsdp alone.*got parallel.data 2"),
        ("torch", {}, "of which there is one device. Leave it out"),
        ("jax", {"tensor": 2}, "of which there is one device. Leave it out"),
    ],
)
# P-25
def test_gradients_that_a_backend_cannot_exchange_in_fp8_are_refused(backend, parallel, message):
    config = CONFIG.replace(parallel=parallel | FP8)
    with pytest.raises(ConfigError, match=message):
        loop.trainer(backend, config)
    with pytest.raises(ConfigError, match=message):
        device_shapes.check(config, backend)


@pytest.mark.parametrize(
    "keys",
    [
        {"through": "jit", "amax_scope": "global"},
        {"reduce": "accumulators", "amax_scope": "global"},
    ],
    ids=str,
)
def test_sums_that_xla_inserts_are_refused_in_fp8(keys):  # P-25
    with pytest.raises(
        ValueError,
        match=r"'float8_e4m3fn' casts rounded gradients.*Use through 'shard_map' and reduce "
        r"'rounded'",
    ):
        CONFIG.replace(parallel={"fsdp": 2} | FP8 | keys)
