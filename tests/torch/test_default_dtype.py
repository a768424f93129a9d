"""torch.set_default_dtype and torch.set_default_device are the caller's: they change no bit of
fp8ref.
"""

import ast
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import fp8ref.torch
from fp8ref.formats import E4M3FN
from fp8ref.spec.attention import variants as variants
from fp8ref.torch import delayed
from fp8ref.torch.attention import attention
from fp8ref.torch.experts import grouped
from fp8ref.torch.model import convert
from fp8ref.torch.observe import statistics as stats
from fp8ref.torch.quantize import scaling
from fp8ref.torch.states import states

MADE = ("zeros", "ones", "empty", "full", "tensor", "as_tensor")


@pytest.fixture(
    params=[(torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")], ids=str
)
def defaults(request):
    """Sets a default dtype and a default device when called; the earlier ones return after the
    test.
    """
    before = torch.get_default_dtype()

    def use():
        torch.set_default_dtype(request.param[0])
        torch.set_default_device(request.param[1])

    yield use
    torch.set_default_dtype(before)
    torch.set_default_device(None)


def inputs(*shapes) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        for shape in shapes
    ]


def a_step(layout: str) -> list[torch.Tensor]:
    p, g = inputs((8, 128), (8, 128))
    p = nn.Parameter(p)
    optimizer = states.AdamW([p], layout=layout)
    for _ in range(3):
        p.grad = g
        optimizer.step()
    return [p.detach(), *optimizer.state[p].values()]


def a_linear(recipe: str) -> list[torch.Tensor]:
    w, x = inputs((128, 128), (128, 128))
    model = nn.Sequential(nn.Linear(128, 128, dtype=torch.float32, device="cpu"))
    with torch.no_grad():
        model[0].weight.copy_(w)
        model[0].bias.zero_()
    convert.convert(model, recipe)
    y = model(x.requires_grad_())
    y.square().sum().backward()
    return [y, x.grad, model[0].weight.grad, *model.state_dict().values()]


def an_attention(variant) -> list[torch.Tensor]:
    differentiated = variants.by_name(variant).backward is not None
    q, k, v = (x.requires_grad_(differentiated) for x in inputs(*[(1, 2, 40, 32)] * 3))
    out = attention.apply(q, k, v, variant=variant)
    if differentiated:
        out.sum().backward()
    return [out, *(x.grad for x in (q, k, v) if x.grad is not None)]


def grouped_rows() -> list[torch.Tensor]:
    x, w = inputs((96, 128), (3, 128, 128))
    ends = torch.tensor([32, 32, 96], dtype=torch.int32, device="cpu")
    return [grouped.apply(x, w, ends, recipe="rowwise")]


def observations() -> list[torch.Tensor]:
    (x,) = inputs((4, 64))
    q = scaling.quantize(x, E4M3FN)
    with mock.patch.object(scaling, "all_reduce_max", lambda x, group: x):
        merged = scaling.merge_amax(scaling.amax(x), "of one rank")
    return [delayed.observe(x), merged, stats.measure(x, q)]


CASES = {
    **{
        f"step/{name}": (a_step, name)
        for name in ("float32", "sqrt_e4m3", "msamp", "coat", "msamp_o2")
    },
    **{
        f"linear/{name}": (a_linear, name)
        for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise", "mxfp8")
    },
    **{f"attention/{name}": (an_attention, name) for name in variants.VARIANTS},
    "grouped": (grouped_rows,),
    "observations": (observations,),
}


@pytest.mark.parametrize("case", CASES)
def test_defaults_of_torch_change_nothing(case, defaults):
    function, *arguments = CASES[case]
    wanted = function(*arguments)
    defaults()
    found = function(*arguments)
    assert len(found) == len(wanted) > 0
    for x, y in zip(found, wanted, strict=True):
        assert (x.dtype, x.device, x.shape) == (y.dtype, y.device, y.shape)
        assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def test_a_step_counter_counts_past_256_under_bfloat16(defaults):
    """bfloat16 has no 257; and a state of another dtype is refused at load."""
    defaults()
    p = nn.Parameter(torch.ones(4, dtype=torch.float32, device="cpu"))
    optimizer = states.AdamW([p], layout="float32")
    p.grad = torch.ones_like(p)
    for _ in range(258):
        optimizer.step()
    assert optimizer.state[p]["step"] == 258
    states.AdamW([p], layout="float32").load_state_dict(optimizer.state_dict())


def test_every_tensor_that_is_made_has_a_dtype_and_a_device():
    bare = []
    for file in sorted(Path(fp8ref.torch.__file__).parent.rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if name not in {f"torch.{made}" for made in MADE}:
                continue
            text = ast.unparse(call)
            keys = {key.arg for key in call.keywords}
            # of integers, or of a tensor
            takes_it = name in ("torch.tensor", "torch.as_tensor") or "numel()" in text
            if not keys >= ({"device"} if takes_it else {"device", "dtype"}):
                bare.append(f"{file.name}:{call.lineno} {text}")
    assert bare == []
