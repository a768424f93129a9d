"""A small model of linears, and what a pass through it gives, for the tests of PyTorch's
linears.
"""

import torch
from torch import nn


def model(k=64, n=32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(k, n, bias=False), nn.ReLU(), nn.Linear(n, 48, bias=False)
    ).bfloat16()


def run(module, x, g):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(g)
    return [y.detach(), x.grad, *[p.grad for p in module.parameters()]]
