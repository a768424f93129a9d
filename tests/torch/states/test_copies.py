"""Weights that a model keeps in FP8, made from the masters of its optimizer (spec O-16)."""

import contextlib
import io

import pytest
import torch
from helpers.models.sharded_models import RANKS, batch, sharded
from helpers.processes.ranks import run
from helpers.states.state_layouts import MASTERED, differing
from torch import nn
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.formats import E4M3FN
from fp8ref.sim.states import states as sim
from fp8ref.spec.states.layouts import LAYOUTS, WITH_MASTERS
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.model import convert
from fp8ref.torch.quantize import scaling
from fp8ref.torch.states import copies, states


def model(*, own: bool) -> nn.Sequential:
    """A model in bfloat16, of fp8ref's own linears or torchao's."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32, bias=False)).bfloat16()
    if not own:
        return convert.convert(made, "tensorwise")
    for i in (0, 2):
        made[i] = Linear.of(made[i], "tensorwise")
    return made


def trained(layout, *, own: bool, kept: bool, steps: int = 3, compiled: bool = False):
    """(losses, masters by parameter, the model, its optimizer, its copies)."""
    made = model(own=own)
    optimizer = states.AdamW(made.parameters(), lr=1e-2, layout=layout, weight_decay=0.1)
    found, losses = copies.keep(made, optimizer) if kept else None, []
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    forward = torch.compile(made, fullgraph=True) if compiled else made
    for _ in range(steps):
        optimizer.zero_grad()
        loss = forward(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    masters = [
        (optimizer.state[p]["master_codes"].clone(), optimizer.state[p]["master_scale_inv"].clone())
        for p in made.parameters()
    ]
    return losses, masters, made, optimizer, found


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", WITH_MASTERS)
def test_training_has_the_bits_of_a_cast_in_each_linear(name, own):  # O-16, L-3
    layout = WITH_MASTERS[name]
    losses, masters, made, optimizer, _ = trained(layout, own=own, kept=True)
    expected = trained(layout, own=own, kept=False)
    assert losses == expected[0]
    assert len(set(losses)) == 3
    for mine, theirs in zip(masters, expected[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    for i, bits in ((0, 8), (2, 8)):
        w = made[i].weight
        assert isinstance(w, Float8TrainingTensor)
        assert (w.dtype, w._data.element_size() * 8, w.grad.dtype, type(w.grad)) == (
            torch.bfloat16,
            bits,
            torch.bfloat16,
            torch.Tensor,
        )
        state = optimizer.state[w]
        amax = state["master_amax"].numpy() if "master_amax" in state else None
        master = sim.MomentState(
            state["master_codes"].float().numpy(), state["master_scale_inv"].numpy(), amax
        )
        wanted = sim.copy(master, layout, "tensorwise")
        assert (
            differing(w._data.view(torch.uint8).numpy(), wanted.codes)
            == differing(w._scale.numpy(), wanted.scale)
            == 0
        )
    assert type(made[0].bias.data) is torch.Tensor


@pytest.mark.parametrize(
    ("name", "own"),
    [("sqrt_e4m3", True), ("stochastic_bfloat16", True), ("stochastic_bfloat16", False)],
)
def test_a_weight_that_is_its_own_master_moves_into_the_state(name, own):  # O-14, O-16
    """In float32, and in bfloat16 rounded stochastically; then saved, and loaded into an optimizer
    of such weights.
    """
    layout, dtype = (
        (LAYOUTS | MASTERED)[name],
        torch.float32 if name == "sqrt_e4m3" else torch.bfloat16,
    )
    seed = 7 if layout.stochastic else 0

    def begun(*, kept: bool):
        made = model(own=own).to(dtype)
        optimizer = states.AdamW(
            made.parameters(), lr=1e-2, layout=layout, weight_decay=0.1, seed=seed
        )
        return made, optimizer, copies.keep(made, optimizer) if kept else None

    def steps(made, optimizer, count: int) -> list[float]:
        x, losses = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(dtype), []
        for _ in range(count):
            optimizer.zero_grad()
            loss = made(x).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def masters(made, optimizer) -> list[torch.Tensor]:
        return [
            optimizer.state[p]["master_codes"]
            if isinstance(p, Float8TrainingTensor)
            else p.detach()
            for p in made.parameters()
        ]

    (made, optimizer, _), (plain, other, _) = begun(kept=True), begun(kept=False)
    losses = steps(made, optimizer, 3)
    assert losses == steps(plain, other, 3)
    assert len(set(losses)) == 3
    assert all(
        torch.equal(a, b) and a.dtype == dtype
        for a, b in zip(masters(made, optimizer), masters(plain, other), strict=True)
    )
    for i in (0, 2):
        wanted = scaling.quantize(plain[i].weight.detach(), E4M3FN)
        assert torch.equal(made[i].weight._data.view(torch.uint8), wanted.codes.view(torch.uint8))
    again, into, found = begun(kept=True)
    again.load_state_dict(made.state_dict())
    into.load_state_dict(optimizer.state_dict())
    found.refresh()
    assert steps(again, into, 2) == steps(plain, other, 2)
    with pytest.raises(ValueError, match=r"has master_codes = .*; got nothing"):
        into.load_state_dict(other.state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning:torch")
def test_a_compiled_model_takes_codes_too():  # O-16
    kept, cast = (trained("msamp_o2", own=True, kept=kept, compiled=True) for kept in (True, False))
    assert kept[0] == cast[0]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(kept[1], cast[1], strict=True))


def test_a_saved_model_loads_into_one_of_codes_and_one_without():  # O-16
    """Without codes a weight reads as code x scale_inv, in its dtype."""
    made = trained("msamp_o2", own=True, kept=True)[2]
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    saved, codes = (
        torch.load(file, weights_only=True),
        made[2].weight._data.view(torch.uint8).clone(),
    )
    other, plain = trained("msamp_o2", own=True, kept=True, steps=1)[2], model(own=True)
    assert not torch.equal(other[2].weight._data.view(torch.uint8), codes)
    other.load_state_dict(saved)
    plain.load_state_dict(saved)
    assert torch.equal(other[2].weight._data.view(torch.uint8), codes)
    assert torch.equal(other[2].weight._scale, made[2].weight._scale)
    wide = model(own=True)
    other.load_state_dict(wide.state_dict())
    assert torch.equal(
        other[0].weight._data, scaling.quantize(wide[0].weight.detach(), E4M3FN).codes
    )
    assert type(plain[2].weight.data) is torch.Tensor
    read = made[2].weight._data.float() / made[2].weight._scale
    assert torch.equal(plain[2].weight, read.bfloat16())


def test_loaded_states_make_the_codes_anew():  # O-16
    _, masters, _, optimizer, _ = trained("msamp_o2", own=True, kept=True)
    _, _, other, into, found = trained("msamp_o2", own=True, kept=True, steps=1)
    before = other[2].weight._data.view(torch.uint8).clone()
    into.load_state_dict(optimizer.state_dict())
    assert torch.equal(into.state[other[2].weight]["master_codes"], masters[2][0])
    codes = other[2].weight._data.view(torch.uint8).clone()
    assert not torch.equal(before, codes)
    found.refresh()
    assert torch.equal(codes, other[2].weight._data.view(torch.uint8))


@pytest.mark.parametrize("own", [True, False])
def test_passes_that_cast_again_have_the_same_bits(own):  # O-16
    """Their gradients arrive in the parameters in FP8, in the dtype that these ask for."""
    made = model(own=own)
    for p in made.parameters():
        p.grad_dtype = torch.float32
    kept = copies.keep(made, states.AdamW(made.parameters(), layout="msamp_o2"))
    x, found = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16(), []
    for cast in (False, True):
        made.zero_grad()
        with kept.uncast() if cast else contextlib.nullcontext():
            assert isinstance(made[0].weight, Float8TrainingTensor) is not cast
            for _ in range(2):
                made(x).float().square().mean().backward()
        found.append([p.grad.clone() for p in made.parameters()])
    assert isinstance(made[0].weight, Float8TrainingTensor)
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(*found, strict=True))


def shards_without_gather() -> str:
    made = sharded(fp8=False)
    try:
        copies.keep(made, states.AdamW(made.parameters(), layout="msamp_o2"))
    except ValueError as error:
        return str(error)
    return "kept"


@pytest.mark.slow
def test_shards_that_are_gathered_otherwise_are_refused():  # O-16
    assert all(
        "is sharded, without an FP8 gather. Call fsdp.gather_in_fp8" in said
        for said in run(2, shards_without_gather)
    )


def test_what_does_not_fit_is_refused_by_name():  # O-16
    made = model(own=True)
    with pytest.raises(
        ValueError,
        match=r"masters that .* keeps in its state; got AdamW. Use it; for float16 masters layout 'msamp_o2'",
    ):
        copies.keep(made, torch.optim.AdamW(made.parameters()))
    with pytest.raises(ValueError, match=r"0.weight is not in the optimizer"):
        copies.keep(made, states.AdamW(made[2].parameters(), layout="msamp_o2"))
    optimizer = states.AdamW(made.parameters(), layout="msamp_o2")
    made[2].tied = nn.Module()
    made[2].tied.weight = made[2].weight
    with pytest.raises(ValueError, match=r"2.weight and 2.tied.weight are one parameter"):
        copies.keep(made, optimizer)
    plain = nn.Sequential(nn.Linear(32, 32)).bfloat16()
    plain[0] = Linear.of(plain[0], "rowwise")
    with pytest.raises(
        ValueError, match=r"cast a weight once for both GEMMs.* and the model has none"
    ):
        copies.keep(plain, states.AdamW(plain.parameters(), layout="msamp_o2"))


def test_weights_that_are_kept_already_are_refused():  # O-16
    losses, _, made, optimizer, kept = trained("msamp_o2", own=True, kept=True)
    codes = made[0].weight._data.clone()
    for other in (optimizer, states.AdamW(made[2].parameters(), layout="msamp_o2")):
        with pytest.raises(
            ValueError,
            match=r"kept in FP8 once; 0.weight is already. Use what copies.keep returned",
        ):
            copies.keep(made, other)
    kept.refresh()
    assert torch.equal(made[0].weight._data.view(torch.uint8), codes.view(torch.uint8))
    assert losses == trained("msamp_o2", own=True, kept=False)[0]


def on_ranks(kept: bool, layout: str) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses, masters of the linears, and casts of shards while a forward pass gathers."""
    made = sharded()
    optimizer = states.AdamW(made.parameters(), lr=1e-2, layout=layout)
    if kept:
        copies.keep(made, optimizer)
        with pytest.raises(ValueError, match=r"\.weight is already"):
            copies.keep(made, optimizer)
    gathers = [linear.fp8_gather for linear in made.modules() if hasattr(linear, "fp8_gather")]
    casts, losses = 0, []
    for step in range(3):
        for g in gathers:
            original = type(g).cast

            def counted(g=g, original=original):
                nonlocal casts
                casts += 1
                return original(g)

            g.cast = counted
        optimizer.zero_grad()
        loss = made(batch(step)).float().square().mean()
        loss.backward()
        for g in gathers:
            del g.cast
        optimizer.step()
        losses.append(loss.item())
    return (
        losses,
        [
            optimizer.state[p].get("master_codes", p.detach()).full_tensor()
            for p in made.parameters()
        ],
        casts,
    )


def on_ranks_loaded(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of a model that keeps codes, after its weights were loaded, and of one that keeps
    none.
    """
    outputs = []
    for kept in (True, False):
        made = sharded()
        if kept:
            copies.keep(made, states.AdamW(made.parameters(), lr=1e-2, layout=layout))
        made.load_state_dict({name: 8 * x for name, x in made.state_dict().items()})
        outputs.append(made(batch(0)).detach())
    return outputs[0], outputs[1]


def test_gathered_codes_are_those_of_weights_loaded_since():  # O-16, P-11
    assert all(torch.equal(mine, wanted) for mine, wanted in run(2, on_ranks_loaded, "sqrt_e4m3"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["msamp_o2", "sqrt_e4m3"])
def test_fsdp2_gathers_the_codes_that_a_step_made(layout):  # O-16, P-6, O-11
    """From masters in the state, and from float32 shards."""
    kept, cast = (run(RANKS, on_ranks, kept, layout) for kept in (True, False))
    for mine, theirs in zip(kept, cast, strict=True):
        assert mine[0] == theirs[0]
        assert all(torch.equal(a, b) for a, b in zip(mine[1], theirs[1], strict=True))
        assert mine[2] == 0
        assert theirs[2] > 0
