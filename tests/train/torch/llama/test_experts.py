"""Routing and the sum of experts in PyTorch's model."""

import torch

from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.torch.llama import experts

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 4,
}


def _mixture(**keys):
    torch.manual_seed(0)
    made = experts.MixtureMLP(LlamaConfig(**SIZES, **{"num_experts_per_tok": 2, **keys}), None)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return made


def test_the_router_takes_the_largest_probabilities_and_of_equal_ones_the_first():  # M-8
    router = experts.Router(LlamaConfig(**SIZES, num_experts_per_tok=2))
    with torch.no_grad():
        router.weight.zero_()
        router.weight[3, 0] = 1
    x = torch.zeros(2, 32)
    x[1, 0] = 1
    chosen, weights, probabilities = router(x)
    assert chosen.tolist() == [[0, 1], [3, 0]]
    assert weights[0].tolist() == [0.5, 0.5]
    e = torch.tensor(1.0).exp()
    torch.testing.assert_close(weights[1], torch.stack([e, torch.tensor(1.0)]) / (e + 1))
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2))


def test_each_token_is_the_weighted_sum_of_its_experts():  # M-8
    for normalizes in (True, False):
        mixture = _mixture(norm_topk_prob=normalizes)
        x = torch.randn(2, 5, 32)
        y = mixture(x)
        chosen, weights, _ = mixture.gate(x.reshape(-1, 32))
        assert torch.allclose(weights.sum(-1), torch.ones(10)) == normalizes
        for token, (those, of_those) in enumerate(zip(chosen, weights, strict=True)):
            row = x.reshape(-1, 32)[token]
            expected = torch.zeros(32)
            for e, weight in zip(those, of_those, strict=True):
                gate, up, down = (
                    p.weight[e]
                    for p in (
                        mixture.experts.gate_proj,
                        mixture.experts.up_proj,
                        mixture.experts.down_proj,
                    )
                )
                expected += weight * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
            torch.testing.assert_close(y.reshape(-1, 32)[token], expected)


def test_perfect_balance_costs_k_and_one_expert_for_all_costs_e():  # M-8
    uniform = experts.Balance(torch.full((4,), 8.0), torch.full((4,), 4.0))  # 16 tokens, k = 2
    torch.testing.assert_close(experts.balancing_loss([uniform, uniform], 2), torch.tensor(2.0))
    one = experts.Balance(torch.tensor([16.0, 0, 0, 0]), torch.tensor([16.0, 0, 0, 0]))  # k = 1
    torch.testing.assert_close(experts.balancing_loss([one], 1), torch.tensor(4.0))
