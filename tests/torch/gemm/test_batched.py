"""Batches of products: one operator in graphs, and the same sums whatever the operands are kept in
(spec A-18).
"""

import torch

from fp8ref.formats import E4M3FN
from fp8ref.torch.gemm import batched as batched_gemm
from fp8ref.torch.quantize import cast


def codes(*shape, seed=0):
    """Codes of small integers, whose sums of products are exact."""
    return cast.to_fp8(
        torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float(), E4M3FN
    )


def test_codes_and_their_numbers_have_equal_products():
    a, b = codes(3, 24, 32), codes(3, 16, 32, seed=1)
    right = torch.bmm(a.float(), b.float().transpose(1, 2))
    assert torch.equal(batched_gemm.products(a, b, fast=False), right)
    assert torch.equal(batched_gemm.products(a.float(), b.float(), fast=False), right)
    out = torch.empty_like(right)
    assert batched_gemm.products(a.float(), b.float(), fast=False, out=out) is out
    assert torch.equal(out, right)


def test_a_factor_is_that_of_each_matrix_or_of_all():
    a, b = codes(3, 16, 32), codes(3, 16, 32, seed=1)
    plain = batched_gemm.products(a, b, fast=True)
    factors = torch.tensor([0.5, 2.0, 4.0])
    assert torch.equal(
        batched_gemm.products(a, b, fast=True, factor=factors), plain * factors[:, None, None]
    )
    assert torch.equal(batched_gemm.products(a, b, fast=True, factor=factors[0]), plain * 0.5)


def test_codes_along_another_axis_are_copied():
    a, b = codes(2, 32, 16), codes(2, 32, 48, seed=1)
    found = batched_gemm.products(a.transpose(1, 2), b.transpose(1, 2), fast=False)
    assert torch.equal(found, torch.bmm(a.float().transpose(1, 2), b.float()))


def test_a_graph_has_one_operator_for_all_matrices():
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def function(a, b):
        return batched_gemm.products(a, b, fast=False)

    a, b = codes(5, 16, 32), codes(5, 16, 32, seed=1)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(function, fullgraph=True, backend=keep)(a, b), function(a, b))
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("scaled_mms" in name for name in called) == 1
    assert not any("_scaled_mm." in name for name in called)
