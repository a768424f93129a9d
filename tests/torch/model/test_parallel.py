import collections
import functools

import numpy as np
import pytest
import torch
from helpers.processes.ranks import run
from helpers.training import microbatches
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from fp8ref.shared.errors import ConfigError
from fp8ref.spec import llama
from fp8ref.spec.llama import InitialWeight
from fp8ref.torch import delayed
from fp8ref.torch.model.parallel import Parallelism, parallelize
from fp8ref.train.config.config import Config
from fp8ref.train.torch.trainer import Trainer

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STEPS = 3
VARIANTS = {
    "compute gather": {"gather": "compute"},
    "a reduction a weight": {"precompute_scales": False},
    "in order": {"reduction": "ordered"},
    "full checkpointing": {"checkpointing": "full"},
    "selective checkpointing": {"checkpointing": "selective"},
}


def config_of(recipe="tensorwise", *, tied=False, **parallel):
    sections = {
        "model": MODEL | {"tie_word_embeddings": tied},
        "data": {"batch_size": 8, "sequence_length": 32},
    }
    return Config().replace(**sections, numerics={"recipe": recipe}, parallel=parallel)


def batches():
    return np.random.default_rng(0).integers(0, 256, (STEPS + 1, 8, 33))


def trained(recipe, **keys):
    """Metrics of every step, a validation loss, weights and states of histories; of a step that is
    proven first (B-8).
    """
    trainer = Trainer(config_of(recipe, **keys))
    *tokens, held_out = batches()
    trainer.prove(tokens[0])
    metrics = [trainer.step(t) for t in tokens]
    states = {
        name: value.numpy().copy()
        for name, value in trainer.model.state_dict().items()
        if ".states." in name
    }
    return metrics, trainer.evaluate(held_out), trainer.weights() | states


def trained_in_turn(*cases):
    return [trained(recipe, **keys) for recipe, keys in cases]


def same(a, b):
    return (
        a[:2] == b[:2]
        and a[2].keys() == b[2].keys()
        and all(np.array_equal(a[2][k], b[2][k]) for k in a[2])
    )


@functools.cache
def on_two(recipe):
    """The plain run, and each variant of it, on every one of two ranks."""
    scope = {"amax_scope": "local"} if recipe == "rowwise" else {}
    cases = [
        (recipe, {"fsdp": 2, **scope}),
        *((recipe, {"fsdp": 2, **scope, **keys}) for keys in VARIANTS.values()),
    ]
    return run(2, trained_in_turn, *cases)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_how_weights_move_and_what_is_run_again_changes_no_bit(recipe, variant):  # P-11, P-13
    index = 1 + list(VARIANTS).index(variant)
    for plain, *variants in on_two(recipe):
        assert same(plain, variants[index - 1])


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise"])
def test_ranks_agree(recipe):
    first, second = on_two(recipe)
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    assert first[0][0][-1]["loss"] < first[0][0][0]["loss"]


def test_copies_of_the_weights_and_tied_ones_train_as_parts_do():  # P-10
    cases = [
        ("tensorwise", {"data": 2}),
        ("tensorwise", {"fsdp": 2, "tied": True}),
        ("tensorwise", {"data": 2, "tied": True}),
    ]
    for plain, (copies, tied, tied_copies) in zip(
        (r[0] for r in on_two("tensorwise")), run(2, trained_in_turn, *cases), strict=True
    ):
        assert same(plain, copies)
        assert same(tied, tied_copies)


@pytest.mark.slow
def test_data_fsdp_and_tensor_together():
    """Two by two, the same but for how weights are held; across tensor ranks, all agree."""
    keys = {"tensor": 2, "amax_scope": "local"}
    cases = [
        {"fsdp": 2},
        {"fsdp": 2, "gather": "compute"},
        {"data": 2},
        {"fsdp": 2, "sequence": True},
    ]
    cases += [{"fsdp": 2, "sequence": True, "checkpointing": "full"}]
    ranks = run(4, trained_in_turn, *(("tensorwise", keys | case) for case in cases))
    for fsdp, compute, data, sequence, again in ranks:
        assert same(fsdp, compute)
        assert same(fsdp, data)
        assert same(sequence, again)
        assert same(fsdp, ranks[0][0])


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64, bias=False)),
        nn.LayerNorm(64),
        nn.Linear(64, 32),
    )


def losses(model):
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        x = torch.randn(
            32, 64, generator=torch.Generator().manual_seed(10 * step + distributed.get_rank())
        ).bfloat16()
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        delayed.update(model)
        found.append(loss.item())
    return found


def without_memory():
    """Losses of a model that was built on the meta device, cut, and only then given memory and
    weights, next to those of one that was not.
    """
    mesh, found = (
        init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("fsdp",)),
        {},
    )
    for recipe, scope in (("tensorwise", "local"), ("delayed", "global")):
        plain = blocks()
        weights = {name: value.clone() for name, value in plain.state_dict().items()}
        with torch.device("meta"):
            made = blocks()
        for model in (plain, made):
            parallelize(
                model,
                recipe,
                mesh=mesh,
                blocks=[model[0]],
                parallelism=Parallelism(amax_scope=scope),
            )
        made.to_empty(device="cpu")
        set_model_state_dict(
            made, weights, options=StateDictOptions(full_state_dict=True, strict=False)
        )
        found[recipe] = losses(made), losses(plain)
    return found


def test_a_model_is_cut_before_it_has_memory():  # P-12, H-2
    for rank in run(3, without_memory):
        assert all(made == plain for made, plain in rank.values())


class Calls(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self):
        super().__init__()
        self.of = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.of[func.name()] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_a_step():
    """Of two shards: on a mesh of one dim, and of one with a single copy."""
    found = []
    for dims in ({"fsdp": 2}, {"data": 1, "fsdp": 2}):
        mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
        torch.manual_seed(0)
        model = blocks()
        parallelize(
            model,
            "tensorwise",
            mesh=mesh,
            blocks=[model[0]],
            parallelism=Parallelism(amax_scope="global"),
        )
        with Calls() as calls:
            model(torch.ones(32, 64).bfloat16()).float().sum().backward()
        found.append((dict(calls.of), [p.grad.to_local().tolist() for p in model.parameters()]))
    return found


def test_a_single_copy_is_not_averaged_with_itself():
    """FSDP2 would all-reduce gradients of each block within one rank, by a mean, which it says NCCL
    may get wrong there.
    """
    for shards, copies in run(2, collectives_of_a_step):
        assert shards == copies
        assert shards[0]["c10d::_reduce_scatter_base_"] == 2  # of the block, and of the model's own


def test_a_process_alone_is_told_how_to_start_more():
    with pytest.raises(
        ConfigError, match=r"there are 1\. Start as many: torchrun --nproc-per-node 4"
    ):
        Trainer(config_of(data=2, fsdp=2))


def test_checkpointing_on_one_device_changes_no_bit():
    plain = trained("delayed")
    for how in ("full", "selective"):
        assert same(plain, trained("delayed", checkpointing=how))


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "delayed"])
def test_what_is_dropped_is_dropped_again_where_a_block_runs_again(recipe):
    found = []
    for how in ("none", "selective", "full"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)))
        parallelize(model, recipe, blocks=[model[0]], parallelism=Parallelism(checkpointing=how))
        model(torch.randn(32, 64)).square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True))


def trained_in_parts(recipe):
    config = microbatches.config_of(config_of(), recipe, fsdp=2)
    whole = Trainer(microbatches.without_parts(config))
    microbatches.check_bits(Trainer(config), whole, whole.gradients)
    assert Trainer(config).prove(microbatches.tokens_of(config))["missing"] == []
    return Trainer(config).gradients(microbatches.tokens_of(config))


def test_shards_accumulate_the_parts_of_a_batch_in_float32():  # T-7
    first, second = run(2, trained_in_parts, "delayed")
    assert all(np.array_equal(first[name], second[name]) for name in first)


def reading(recipe, keys, monkeypatched=InitialWeight.__getitem__):
    """(name, elements) of every piece of initial weights that this rank reads; its shards' sizes;
    all weights.
    """
    read = []

    def piece(weight, index):
        found = monkeypatched(weight, index)
        read.append((weight.place, found.size))
        return found

    InitialWeight.__getitem__ = piece
    try:
        trainer = Trainer(config_of(recipe, **keys))
    finally:
        InitialWeight.__getitem__ = monkeypatched
    shards = [
        (place, p.to_local().numel()) for place, p in enumerate(in_order(trainer)) if p.ndim == 2
    ]
    return read, shards, trainer.weights()


def in_order(trainer):
    return [trainer._params[name] for name in llama.parameter_shapes(trainer.config.model)]


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        ("delayed", {"fsdp": 4}),
        ("tensorwise", {"data": 2, "fsdp": 2}),
        ("tensorwise", {"fsdp": 2, "tensor": 2, "amax_scope": "local"}),
    ],
)
def test_each_rank_reads_its_shards_of_the_initial_weights(recipe, keys):  # M-6, P-11
    whole = llama.initial_weights(config_of().model, seed=0)
    for read, shards, weights in run(4, reading, recipe, keys):
        assert sorted(read) == shards
        assert all(np.array_equal(weights[name], value) for name, value in whole.items())
