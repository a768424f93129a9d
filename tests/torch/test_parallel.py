import functools
import re

import numpy as np
import pytest
import torch
from ranks import run
from torch import distributed, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh

from fp8ref.recipe import OPERANDS
from fp8ref.run.config import Config, ConfigError
from fp8ref.torch import layer, linear
from fp8ref.torch.parallel import parallelize
from fp8ref.torch.reduction import OrderedReduceScatter
from fp8ref.torch.train import Trainer

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
    sections = {"model": MODEL | {"tie_word_embeddings": tied}, "data": {"batch_size": 8, "sequence_length": 32}}
    return Config().replace(**sections, numerics={"recipe": recipe}, parallel=parallel)


def batches():
    return np.random.default_rng(0).integers(0, 256, (STEPS + 1, 8, 33))


def trained(recipe, **keys):
    """Metrics of every step, a validation loss, weights and states of histories; of a step that is proven first (B-8)."""
    trainer = Trainer(config_of(recipe, **keys))
    *tokens, held_out = batches()
    trainer.prove(tokens[0])
    metrics = [trainer.step(t) for t in tokens]
    states = {name: value.numpy().copy() for name, value in trainer.model.state_dict().items() if ".states." in name}
    return metrics, trainer.evaluate(held_out), trainer.weights() | states


def trained_in_turn(*cases):
    return [trained(recipe, **keys) for recipe, keys in cases]


def same(a, b):
    return a[:2] == b[:2] and a[2].keys() == b[2].keys() and all(np.array_equal(a[2][k], b[2][k]) for k in a[2])


@functools.cache
def on_two(recipe):
    """The plain run, and each variant of it, on every one of two ranks."""
    scope = {"amax_scope": "local"} if recipe == "rowwise" else {}
    cases = [(recipe, {"fsdp": 2, **scope}), *((recipe, {"fsdp": 2, **scope, **keys}) for keys in VARIANTS.values())]
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
    cases = [("tensorwise", {"data": 2}), ("tensorwise", {"fsdp": 2, "tied": True}), ("tensorwise", {"data": 2, "tied": True})]
    for plain, (copies, tied, tied_copies) in zip((r[0] for r in on_two("tensorwise")), run(2, trained_in_turn, *cases), strict=True):
        assert same(plain, copies)
        assert same(tied, tied_copies)


@pytest.mark.slow
def test_data_fsdp_and_tensor_together():
    """Two by two, the same but for how weights are held; across tensor ranks, all agree."""
    keys = {"tensor": 2, "amax_scope": "local"}
    cases = [{"fsdp": 2}, {"fsdp": 2, "gather": "compute"}, {"data": 2}, {"fsdp": 2, "sequence": True}]
    cases += [{"fsdp": 2, "sequence": True, "checkpointing": "full"}]
    ranks = run(4, trained_in_turn, *(("tensorwise", keys | case) for case in cases))
    for fsdp, compute, data, sequence, again in ranks:
        assert same(fsdp, compute)
        assert same(fsdp, data)
        assert same(sequence, again)
        assert same(fsdp, ranks[0][0])


def reduced():
    """Per rank: sum and average, over 3, of parts that no two orders add alike."""
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    mine = torch.tensor([1.0, -(2.0**30), 2.0**30])[rank].expand(ranks * 2).contiguous()
    found = []
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        out = torch.empty(2)
        OrderedReduceScatter()(out, mine, distributed.group.WORLD, op)
        found.append(out)
    return found


def test_gradients_are_added_in_rank_order():  # P-13
    for total, average in run(3, reduced):
        assert total.tolist() == [0.0, 0.0]  # (1 - 2^30) + 2^30; any other order gives 1
        assert average.tolist() == [0.0, 0.0]


def operands_of_all(recipe, poison):
    """Codes and scales of every operand of one linear, of this rank's half of a batch, scaled by amaxes of both halves."""
    made = linear.convert(nn.Sequential(nn.Linear(64, 32, bias=False)), recipe, amax_group=distributed.group.WORLD)
    return operands(made, *halves(made, poison)[distributed.get_rank()])


def halves(model, poison=False):
    torch.manual_seed(0)
    model[0].weight.data.normal_()
    x, g = torch.randn(32, 64), torch.randn(32, 32)
    if poison:
        x[20, 3] = torch.nan
    return [(x[rows], g[rows]) for rows in (slice(0, 16), slice(16, 32))]


def canonical(codes):
    """NaNs without their signs (C-5), of e4m3fn; e5m2 has no other code that looks like them."""
    return torch.where(codes & 0x7F == 0x7F, 0x7F, codes)


def operands(model, x, g):
    found = {}
    observer = lambda which, a, b, _: found.update(  # noqa: E731
        {(which, role): (canonical(q.codes.view(torch.uint8)), q.scale) for role, q in zip(OPERANDS[which], (a, b), strict=True)}
    )
    layer.observers.append(observer)
    model(x.requires_grad_()).backward(g)
    layer.observers.remove(observer)
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("poison", [False, True])
def test_under_scope_global_codes_are_those_of_one_process(recipe, poison):  # P-2, P-4, P-5
    whole = nn.Sequential(layer.Linear(64, 32, recipe, bias=False))
    parts = halves(whole, poison)
    expected = operands(whole, *(torch.cat(pair) for pair in zip(*parts, strict=True)))
    first, second = run(2, operands_of_all, recipe, poison)
    for key, (codes, scale) in expected.items():
        shared = key[1] == "weight"
        assert torch.equal(first[key][0] if shared else torch.cat([first[key][0], second[key][0]]), codes)
        by_row = scale.ndim == 2 and scale.shape[0] > 1 and not shared
        for rank, found in enumerate((first, second)):
            mine = scale[16 * rank :][:16] if by_row else scale
            assert torch.equal(found[key][1].nan_to_num(-1.0), mine.nan_to_num(-1.0))


def refusals():
    found = {}

    def refused(name, function):
        try:
            function()
        except ValueError as error:
            found[name] = str(error)

    def model():
        return nn.Sequential(nn.Sequential(nn.Linear(64, 32)), nn.Linear(32, 32))

    def mesh(*names, shape=(3,)):
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    made = model()
    optimizer = torch.optim.SGD(made.parameters())
    refused("optimizer", lambda: parallelize(made, "tensorwise", mesh=mesh("fsdp")))
    optimizer.param_groups.clear()
    refused("dims", lambda: parallelize(model(), "tensorwise", mesh=mesh("dp")))
    refused("data alone", lambda: parallelize(model(), "tensorwise", mesh=mesh("data")))
    refused("blocks", lambda: parallelize(model(), "tensorwise", mesh=mesh("fsdp"), blocks=[nn.Linear(2, 2)]))
    refused("local", lambda: parallelize(model(), "delayed", mesh=mesh("fsdp")))
    by_data = mesh("data", "fsdp", shape=(3, 1))
    refused("order", lambda: parallelize(model(), "tensorwise", mesh=by_data, ordered_reduction=True))
    refused("processes", lambda: Trainer(config_of(fsdp=2)))
    refused("batch", lambda: Trainer(config_of(fsdp=3)))
    refused("scope", lambda: Trainer(config_of(tensor=3)))
    return found


@pytest.fixture(scope="module")
def refused():
    return run(3, refusals)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("optimizer", r"built after parallelize.*a SGD already holds 0\.0\.weight. Build it afterwards"),
        ("dims", r"dims named data, fsdp, tensor.*got \('dp',\)"),
        ("data alone", r"data only with fsdp; got \('data',\)"),
        ("blocks", "modules within the model"),
        ("local", "'delayed' keeps one state for all ranks.*Use 'global'"),
        ("order", "at most 2 along data; got 3"),
        ("processes", "1 x 2 x 1 = 2 processes; there are 3.*torchrun --nproc-per-node 2"),
        ("batch", "batch_size is divisible by data x fsdp = 3 processes; got 8"),
    ],
)
def test_what_is_done_in_another_order_or_does_not_fit_is_refused_by_name(refused, case, message):  # P-12
    for rank in refused:
        assert re.search(message, rank[case])


def test_a_process_alone_is_told_how_to_start_more():
    with pytest.raises(ConfigError, match=r"there are 1\. Start as many: torchrun --nproc-per-node 4"):
        Trainer(config_of(data=2, fsdp=2))


def test_checkpointing_on_one_device_changes_no_bit():
    plain = trained("delayed")
    for how in ("full", "selective"):
        assert same(plain, trained("delayed", checkpointing=how))
