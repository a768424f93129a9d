"""What moves between ranks that gloo connects: codes, as bytes."""

import pytest
import torch
from helpers.models.tensor_models import GATHER, Watch, build, mesh, some_tokens
from helpers.processes.ranks import run
from torch import distributed, nn
from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
)

from fp8ref.torch.distributed import tensor_parallel


def part(dtype, *, last_first=False, device="cpu"):
    """2 x 256 codes, twice every one that there is, and a scale that is no power of two."""
    codes = torch.arange(255, -1, -1) if last_first else torch.arange(256)
    codes = codes.to(device, torch.uint8).expand(2, 256).contiguous().view(dtype)
    return Float8TrainingTensor(
        codes,
        torch.tensor(0.3, device=device),
        torch.bfloat16,
        LinearMMConfig(),
        GemmInputRole.INPUT,
    )


def moved(dtype):
    tensor_parallel.gather_fp8_as_bytes()
    mine = part(dtype, last_first=distributed.get_rank() == 1)
    with Watch(nn.Identity()) as watch:
        whole = torch.ops._c10d_functional.wait_tensor(
            GATHER(mine, 2, distributed.group.WORLD.group_name)
        )
    return (
        whole._data.view(torch.uint8),
        whole._data.dtype,
        whole._scale.item(),
        whole._orig_dtype,
        watch.gathers,
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_codes_move_as_bytes_and_no_bit_of_them_changes(dtype):  # P-15
    rows = torch.arange(256).to(torch.uint8)
    expected = torch.stack([rows, rows, rows.flip(0), rows.flip(0)])
    for codes, *described, gathers in run(2, moved, dtype):
        assert torch.equal(codes, expected)
        assert described == [dtype, torch.tensor(0.3).item(), torch.bfloat16]
        assert gathers == [(torch.uint8, 512)]


def elsewhere():
    """What the operator is given on another device; and whether a second call changes what is
    done.
    """
    theirs = FLOAT8_OPS_TABLE[GATHER]
    tensor_parallel.gather_fp8_as_bytes()
    ours = FLOAT8_OPS_TABLE[GATHER]
    tensor_parallel.gather_fp8_as_bytes()
    given = []

    def op(codes, *rest):
        given.append((codes.dtype, *rest))
        return codes

    for device in ("meta", "cpu"):
        ours(op, (part(torch.float8_e5m2, device=device), 2, "group"))
    return given, ours is not theirs, FLOAT8_OPS_TABLE[GATHER] is ours


def test_other_devices_gathers_are_left_alone():
    assert run(1, elsewhere) == [
        ([(torch.float8_e5m2, 2, "group"), (torch.uint8, 2, "group")], True, True)
    ]


def gathered(recipe, filter_fqns):
    model = tensor_parallel.parallelize(
        build(recipe, filter_fqns=filter_fqns), mesh(), sequence=True
    )
    with Watch(model) as watch:
        y = model(some_tokens())
        forward = list(watch.gathers)
        y.sum().backward()
    return forward, watch.gathers[len(forward) :]


def test_under_sequence_parallelism_what_is_gathered_is_a_byte_an_element():  # P-15
    n = 2 * 8 * 64  # a rank's part of [B, T, hidden]
    codes, hp = (torch.uint8, n), (torch.bfloat16, n)  # uint8 on gloo
    for forward, backward in run(2, gathered, "tensorwise", ()):
        # of q, k and v together, of gate and up; the last norm's
        assert forward == [codes, codes] * 2 + [hp]
        # of grad_output of down and o; the embedding's
        assert backward == [codes, codes] * 2 + [hp]
    for forward, backward in run(2, gathered, "tensorwise", ("k_proj", "layers.1.mlp")):
        # k takes hp, so q and v cast what all three gathered
        assert forward == [hp, codes, hp, hp, hp]
        assert backward == [hp, codes, codes, codes, hp]
    for forward, backward in run(2, gathered, "rowwise", ()):
        assert forward == [hp] * 5
        assert backward == [hp] * 5
