"""torch's context parallelism around a parallelized model: ranks hold parts of each sequence, and
train as one process does.

torch's ring attention replaces kernels of GPUs. Here it is given the CPU's kernel, so that its own
loop over ranks runs.
"""

import functools

import pytest
import torch
from helpers.processes.ranks import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from fp8ref.spec import llama
from fp8ref.torch import delayed
from fp8ref.torch.model import parallel
from fp8ref.torch.observe.gemms import observe_gemms
from fp8ref.train.torch.llama.llama import Llama

RECIPES = ("tensorwise", "rowwise", "delayed", "blockwise")
CONFIG = llama.LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
B, T, STEPS = 2, 128, 2
FIRST = "model.layers.0.self_attn.q_proj"

# Attention sums in another order, an error of 2^-22, which moves few codes. Under `rowwise` each
# rank's part of a weight's gradient is rounded to bfloat16 (2^-9). Under `blockwise` blocks along
# the tokens are others: a code errs by 2^-4 of its value, and a sum over 128 of them by less.
CLOSE = {"tensorwise": 2.0**-10, "rowwise": 2.0**-8, "delayed": 2.0**-10, "blockwise": 2.0**-4}
ORDER = 2.0**-22
SCALE = 4096  # of the loss: at scale 1 E5M2 holds the gradients


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


def ring_on_a_cpu():
    """Have torch's ring attention take the CPU's kernel, as it takes those of GPUs."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def wrapped(tensors, mesh):
        return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in tensors)

    def forward(op, args, kwargs):
        q, k, v, dropout, causal = (*args, 0.0, False)[:5] if len(args) < 5 else args[:5]
        causal = kwargs.get("is_causal", causal)
        mesh = q.device_mesh
        found = ring._templated_ring_attention(
            mesh.get_group(),
            2,
            kernel,
            local(q),
            local(k),
            local(v),
            is_causal=causal,
            dropout_p=dropout,
            scale=kwargs.get("scale"),
        )
        return wrapped(found[:2], mesh)

    def backward(op, args, kwargs):
        grad, q, k, v, out, logsumexp, dropout, causal = args
        found = ring._templated_ring_attention_backward(
            q.device_mesh.get_group(),
            2,
            backward_kernel.default,
            local(grad).contiguous(),
            "grad_out",
            *map(local, (q, k, v, out, logsumexp)),
            is_causal=causal,
            dropout_p=dropout,
            scale=kwargs.get("scale"),
        )
        return wrapped(found[:3], q.device_mesh)

    ring.custom_ops.update({kernel.default: forward, backward_kernel.default: backward})


def built(recipe, mesh):
    torch.manual_seed(0)
    model = Llama(CONFIG)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05) if p.ndim > 1 else torch.nn.init.ones_(p)
    model.rotary = torch.stack(
        [torch.from_numpy(table) for table in llama.rotary_tables(CONFIG, T)]
    )
    return parallel.parallelize(
        model,
        recipe,
        mesh=mesh,
        blocks=model.model.layers,
        filter_fqns=["lm_head"],
        parallelism=parallel.Parallelism(amax_scope="global", param_dtype=torch.float32),
    )


def trained(recipe, mesh=None, context=None):
    """Losses, gradients of the first step, states, and codes of the first linear's input with their
    positions.
    """
    from torch.distributed.tensor.experimental import context_parallel

    model, losses, gradients, codes = built(recipe, mesh), [], [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / SCALE)

    def keep(name, gemm, a, b, out):
        if (name, gemm) == (FIRST, "output"):
            codes.append(a.codes.clone())

    for index in range(STEPS):
        text = torch.randint(
            0, CONFIG.vocab_size, (B, T + 1), generator=torch.Generator().manual_seed(index)
        )
        tokens, targets, positions = (
            text[:, :-1].clone(),
            text[:, 1:].clone(),
            torch.arange(T)[None].repeat(B, 1),
        )

        def passes(tokens=tokens, targets=targets):
            with observe_gemms(model, keep):
                loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                (SCALE * loss).backward()
            losses.append(loss.detach())

        if context is None:
            passes()
        else:
            buffers = {tokens: 1, targets: 1, positions: 1, model.rotary: 1}
            with context_parallel(
                context, buffers=list(buffers), buffer_seq_dims=list(buffers.values())
            ):
                passes()
                positions = positions.clone()
        if index == 0:
            gradients = [
                (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
                for p in model.parameters()
            ]
            first = positions[0], codes[0]
        optimizer.step()
        optimizer.zero_grad()
        delayed.update(model)
    return (
        torch.stack(losses),
        torch.cat([g.flatten() for g in gradients]),
        dict(delayed.states(model)),
        first,
    )


def parts(recipe):
    """Of a rank: losses; the relative error of all gradients; whether codes and states are those of
    one process; its states.
    """
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("batch", "context"))
    ring_on_a_cpu()
    losses, gradients, states, (positions, codes) = trained(
        recipe, mesh._flatten("fsdp"), mesh["context"]
    )
    expected, alone, states_alone, (_, codes_alone) = trained(recipe)
    same = torch.equal(codes.view(B, -1, codes.shape[-1]), codes_alone.view(B, T, -1)[:, positions])
    of_first = {
        name: state
        for name, state in states.items()
        if name.startswith(FIRST) and not name.endswith("grad_output")
    }
    # [1]: what the first step showed; the second has other weights
    same_states = all(
        torch.equal(state.amax_history[1], states_alone[name].amax_history[1])
        for name, state in of_first.items()
    )
    values = {name: [value.tolist() for value in state.buffers()] for name, state in states.items()}
    error = distance(gradients, alone)
    return (
        losses.tolist(),
        expected.tolist(),
        error,
        same and same_states and len(positions) == T // 2,
        values,
    )


def distance(gradients, expected):
    return ((gradients - expected).norm() / expected.norm()).item()


def spread(recipe, monkeypatch):
    """How far gradients of one process move by ``ORDER`` in what its attention gives, and by
    attention within each half of the tokens.

    A code that moves changes its token's codes in what follows, and one that is an amax a whole
    tensor's. How often depends on the processor, whose kernels have orders of their own.
    """
    attend = functional.scaled_dot_product_attention
    expected, moved = trained(recipe)[1], []
    for seed in range(4):
        signs = torch.Generator().manual_seed(seed)

        def in_another_order(*args, signs=signs, **options):
            y = attend(*args, **options)
            return y * (1 + ORDER * (2 * torch.randint(0, 2, y.shape, generator=signs) - 1))

        monkeypatch.setattr(functional, "scaled_dot_product_attention", in_another_order)
        moved.append(distance(trained(recipe)[1], expected))

    def within_halves(q, k, v, **options):
        halves = zip(*(x.chunk(2, dim=2) for x in (q, k, v)), strict=True)
        return torch.cat([attend(*half, **options) for half in halves], dim=2)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", within_halves)
    wrong = distance(trained(recipe)[1], expected)
    monkeypatch.undo()
    return max(moved), wrong


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_that_share_sequences_train_as_one_process(recipe, monkeypatch):  # P-26
    (first, expected, error, same, states), (second, _, _, same_there, states_there) = run(
        2, parts, recipe, timeout=400
    )
    assert same
    assert same_there
    assert states == states_there
    assert bool(states) == (recipe == "delayed")
    moved, wrong = spread(recipe, monkeypatch)
    bound = max(CLOSE[recipe], 2 * moved)
    assert error < bound < wrong
    for step, whole in enumerate(expected):
        # of the first step by the forward pass alone; the second loss is lower by about 0.01, to
        # within the gradients' error
        assert abs((first[step] + second[step]) / 2 - whole) < 2.0**-10 * whole
    assert first != second  # of other tokens


def refused():
    mesh = functools.partial(init_device_mesh, "cpu", (1, 2))
    found = []
    for names in (("data", "context"), ("fsdp", "cp")):
        with pytest.raises(
            ValueError,
            match=rf"context-parallel ranks .*got a dim named {names[1]}\. Flatten it "
            r".*context_parallel \(P-26\)",
        ):
            built("delayed", mesh(mesh_dim_names=names))
        found.append(names)
    tokens = torch.zeros(B, 8, dtype=torch.long)
    from torch.distributed.tensor.experimental import context_parallel

    with (
        context_parallel(
            mesh(mesh_dim_names=("data", "cp"))["cp"], buffers=[tokens], buffer_seq_dims=[1]
        ),
        # torch's own: nothing runs without its ring
        pytest.raises(NotImplementedError, match="flash_attention_for_cpu"),
    ):
        built("tensorwise", None)(tokens)
    return len(found)


@pytest.mark.slow
def test_a_mesh_dim_of_context_is_refused_by_name():  # P-26
    assert run(2, refused, timeout=400) == [2, 2]
