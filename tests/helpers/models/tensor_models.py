"""Models for tensor parallelism, their outputs and gradients, and the FP8 GEMMs of a rank."""

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.recipe import OPERANDS
from fp8ref.spec import llama
from fp8ref.torch.model import convert
from fp8ref.train.torch.llama.llama import Llama

CONFIG = llama.LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def mesh():
    return init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tensor",))


def build(recipe="tensorwise", dtype=torch.bfloat16, config=CONFIG, **options):
    weights = {
        name: value * (4 if value.ndim > 1 else 1)
        for name, value in llama.initial_weights(config, seed=0).items()
    }
    return convert.convert(loaded(config, weights).to(dtype), recipe, **options)


def loaded(config, weights):
    model = Llama(config)
    model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    return model


def some_tokens(batch=2, length=16):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(0))


def some_gradient(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def signs(*shape, seed):
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def exact(bias):
    """Two linears of -1, 0 and 1, whose sums are exact in any order where inputs and gradients are
    so too.
    """
    model = nn.Sequential(nn.Linear(64, 64, bias=bias), nn.Linear(64, 32, bias=bias)).bfloat16()
    with torch.no_grad():
        # a permutation with signs: its outputs are of -1, 0, 1 as its inputs are, and no sum of its
        # grad_input has two terms
        order, flips = (
            torch.randperm(64, generator=torch.Generator().manual_seed(2)),
            1 - 2 * (torch.arange(64) % 2),
        )
        model[0].weight.copy_(torch.eye(64)[order] * flips)
        model[1].weight.copy_(signs(32, 64, seed=3))
        if bias:
            model[0].bias.zero_()
            model[1].bias.copy_(signs(32, seed=4))
    return model


def passed_exactly(model):
    x = signs(32, 64, seed=5).requires_grad_()
    y = model(x)
    y.backward(signs(32, 32, seed=6))
    # a clone waits for what is reduced
    return [t.clone() for t in (y.detach(), x.grad, *(whole(p.grad) for p in model.parameters()))]


class Watch(TorchDispatchMode):
    """FP8 GEMMs by (linear, gemm): codes and scales of both operands and the result, of this rank;
    gathers as (dtype, elements).
    """

    def __init__(self, model):
        super().__init__()
        # the config is an object of each linear's own, which its weight and its grad_output carry
        self.names = {
            id(m.linear_mm_config): name
            for name, m in model.named_modules()
            if isinstance(m, Float8Linear)
        }
        self.gemms, self.gathers = {}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types or (func is GATHER and Float8TrainingTensor in types):
            return NotImplemented  # once more, of what is inside
        out = func(*args, **(kwargs or {}))
        if func is GATHER:
            self.gathers.append((args[0].dtype, args[0].numel()))
        if func is torch.ops.aten.mm.default and isinstance(args[0], Float8TrainingTensor):
            gemm = next(
                g
                for g, roles in OPERANDS.items()
                if roles == tuple(a._gemm_input_role.value for a in args)
            )
            owner = args[gemm != "grad_weight"]  # the weight, or grad_output
            a, b = ((x._data.view(torch.uint8).clone(), x._scale.clone()) for x in args)
            self.gemms[self.names[id(owner._linear_mm_config)], gemm] = (*a, *b, out.clone())
        return out
