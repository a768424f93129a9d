import copy
import warnings

import numpy as np
import pytest
import torch
from helpers.training.histories import CONFIGS, ROLES, recipe_of
from torch import nn
from torch.distributed import checkpoint

from fp8ref.formats import BFLOAT16, E4M3FN, E5M2
from fp8ref.recipe import CastSpec, GemmSpec, Recipe
from fp8ref.selection.rules import Rule
from fp8ref.sim import delayed as sim
from fp8ref.sim import linear as sim_linear
from fp8ref.spec.delayed import DELAYED
from fp8ref.torch import delayed
from fp8ref.torch.experts import layer as grouped_linear
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.linear.torchao_linear import Float8Linear
from fp8ref.torch.model import convert


def assert_equal(ours: delayed.DelayedState | delayed.RoleState, theirs: sim.DelayedState):
    for key, value in zip(delayed.DelayedState._fields, theirs, strict=True):
        np.testing.assert_array_equal(getattr(ours, key).numpy(), value, err_msg=key)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
def test_states_equal_the_simulators(config, fmt, rng):  # H-1 to H-6
    """8 layers, 40 steps: amaxes over 60 binades, zeros, tiny and subnormal ones, non-finite ones,
    and layers not used.
    """
    layers = 8
    state, expected = delayed.init(config, (layers,)), sim.init(config, (layers,))
    for _ in range(40):
        amax = np.select(
            [rng.random(layers) < p for p in (0.1, 0.1, 0.1)],
            [np.float32(0), np.float32(1e-37), np.float32(3e-41)],
            (2.0 ** rng.uniform(-30, 30, layers)).astype(np.float32),
        ).astype(np.float32)
        use = sim.observe(amax, non_finite=rng.random(layers) < 0.2, seen=rng.random(layers) < 0.8)
        flags = [
            np.where(use.seen & ~use.non_finite, use.amax, 0),
            use.non_finite & use.seen,
            use.seen,
        ]
        state = delayed.advance(
            state, torch.from_numpy(np.stack(flags, -1).astype(np.float32)), config, fmt
        )
        expected = sim.update(expected, use, config=config, fmt=fmt)
        assert_equal(state, expected)


def powers_of_two(model, expected):
    """Their scales rounded down to powers of two, in both: sums of small integers are then exact in
    any order.
    """
    for role, state in model.states.items():
        state.scale.copy_(2.0 ** state.scale.log2().floor())
        expected[role] = expected[role]._replace(stored=state.scale.numpy().copy())


def test_fifty_training_steps_equal_the_simulator(rng):  # H-1 to H-4, L-2, L-3, L-6
    config = DELAYED["delayed"]
    recipe = recipe_of(config)
    model = Linear(64, 32, recipe, bias=False, dtype=torch.bfloat16)
    expected = {role: sim.init(config) for role in ROLES}
    for step in range(50):
        shapes, sizes = (
            ((2, 24, 64), (32, 64), (2, 24, 32)),
            2.0 ** np.array([0, -6, -10]) * 2.0 ** rng.integers(-3, 4),
        )
        x, w, g = (
            rng.integers(-7, 8, shape).astype(np.float32) * np.float32(s)
            for shape, s in zip(shapes, sizes, strict=True)
        )
        powers_of_two(model, expected)
        scales = {role: sim.scales(expected[role], config, fmt) for role, fmt in ROLES.items()}
        model.weight.data = torch.from_numpy(w).bfloat16()
        given = torch.from_numpy(x).bfloat16().requires_grad_()
        y = model(given)
        y.backward(torch.from_numpy(g).bfloat16())
        np.testing.assert_array_equal(
            y.detach().float(),
            sim_linear.forward(x, w, recipe, scales=scales, out_dtype=BFLOAT16),
            str(step),
        )
        dx, dw = sim_linear.backward(g, x, w, recipe, scales=scales, out_dtype=BFLOAT16)
        np.testing.assert_array_equal(given.grad.float(), dx)
        np.testing.assert_array_equal(model.weight.grad.float(), dw)
        model.weight.grad = None
        delayed.update(model)
        for (role, fmt), tensor in zip(ROLES.items(), (x, w, g), strict=True):
            expected[role] = sim.update(
                expected[role], sim.observe(np.abs(tensor).max()), config=config, fmt=fmt
            )
            assert_equal(model.states[role], expected[role])


def run(model, x, g):
    model(x).backward(g)


def test_uses_and_microbatches_merge_by_maximum():  # H-4, H-11
    layer = Linear(16, 16, "delayed", bias=False)
    model = nn.Sequential(layer, layer)
    small, large = torch.full((4, 16), 0.5), torch.full((4, 16), 3.0)
    for x in (small, large, small):
        run(layer, x, x)
    assert layer.states["input"].seen.tolist() == [3, 0, 1]
    assert layer.states["grad_output"].seen.tolist() == [3, 0, 1]
    run(model, large, large)  # both uses, one of them on the other's output
    assert layer.states["input"].seen[0] == max(3, layer(large).detach().abs().max())
    before = layer.states["input"].scale.clone()
    delayed.update(model)  # named once, however often it is registered
    assert layer.states["input"].step == 1
    assert layer.states["input"].scale != before
    assert not layer.states["input"].seen.any()


def test_evaluation_observes_nothing():
    model, x = Linear(16, 16, "delayed"), torch.ones(4, 16)
    delayed.calibrate(model, [x])
    with torch.no_grad():
        model(x)
    model.eval()
    run(model, x, x)
    assert not any(state.seen.any() for _, state in delayed.states(model))


def test_what_is_not_finite_is_flagged_and_keeps_the_state():  # H-5
    model = Linear(16, 16, "delayed", bias=False)
    for bad in (torch.inf, torch.nan):
        x = torch.ones(4, 16)
        x[1, 2] = bad
        run(model, x, torch.ones(4, 16))
        assert model.states["input"].seen.tolist() == [0, 1, 1]
        delayed.update(model)
        assert model.states["input"].step == 0
        assert model.states["weight"].step > 0


def test_a_step_not_taken_is_forgotten():
    model = Linear(16, 16, "delayed")
    run(model, torch.ones(4, 16), torch.ones(4, 16))
    delayed.forget(model)
    delayed.update(model)
    assert all(state.step == 0 for _, state in delayed.states(model))


def test_states_keep_their_dtypes_and_are_saved():
    model = Linear(16, 16, "delayed")
    run(model, torch.full((4, 16), 3.0), torch.ones(4, 16))
    delayed.update(model)
    scale = model.states["input"].scale.clone()
    assert scale != scale.bfloat16().float()
    model.bfloat16()
    assert torch.equal(model.states["input"].scale, scale)
    saved = model.state_dict()
    assert {key for key in saved if "input" in key} == {
        f"states.input.{key}" for key in ("scale", "amax_history", "step")
    }
    again = Linear(16, 16, "delayed", dtype=torch.bfloat16)
    again.load_state_dict(saved)
    x = torch.randn(4, 16).bfloat16()
    assert torch.equal(again(x), model(x))


def test_states_made_without_memory_start_where_they_get_some():  # H-2
    with torch.device("meta"):
        model = convert.convert(nn.Sequential(nn.Linear(16, 16)), "delayed")
    assert all(state.scale.is_meta for _, state in delayed.states(model))
    model.to_empty(device="cpu")
    for _, state in delayed.states(model):
        assert state.scale == 1
        assert state.step == 0
        assert not state.amax_history.any()
        assert not state.seen.any()


def test_states_are_float32_whatever_the_default_dtype_and_device_are():  # H-2
    """As torchtitan builds models: under a default dtype, on the meta device."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = convert.convert(nn.Linear(16, 16, bias=False), "delayed")
        model.to_empty(device="cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    for _, state in delayed.states(model):
        assert_equal(state, sim.init(state.config))
        assert (state.scale.dtype, state.amax_history.dtype, state.seen.dtype) == (
            torch.float32,
        ) * 3
        assert not state.seen.any()


def test_an_update_keeps_the_addresses_of_states():  # P-12
    """Which CUDA graphs write to and read from."""
    model = convert.convert(nn.Sequential(nn.Linear(16, 16)), "delayed")
    before = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
    for ending in (delayed.update, delayed.forget, delayed.update):
        model(torch.ones(16, 16)).sum().backward()
        ending(model)
    delayed.forget_unless(model, torch.tensor(True))
    assert {name: buffer.data_ptr() for name, buffer in model.named_buffers()} == before
    assert len(before) == 3 * 4


def test_a_model_that_inference_mode_converts_is_trained():  # H-4
    model = nn.Sequential(nn.Linear(16, 16))
    with torch.inference_mode():
        model = convert.convert(model, "delayed")
    run(model, torch.ones(4, 16), torch.ones(4, 16))
    delayed.update(model)
    assert all(state.step == 1 for _, state in delayed.states(model))


@pytest.mark.parametrize("function", [delayed.update, delayed.forget, delayed.states])
def test_states_are_of_a_module(function):
    with pytest.raises(
        ValueError, match=r"^a model is an nn\.Module; got a list\. Give the module itself"
    ):
        function([Linear(16, 16, "delayed")])


def test_states_that_are_assigned_bring_their_device():
    with torch.device("meta"):
        model = convert.convert(nn.Sequential(nn.Linear(16, 16)), "delayed")
    saved = convert.convert(nn.Sequential(nn.Linear(16, 16)), "delayed").state_dict()
    model.load_state_dict(saved, assign=True)
    run(model, torch.ones(4, 16), torch.ones(4, 16))
    delayed.update(model)
    assert model[0].states["input"].amax_history[0] == 1


def test_loading_forgets_what_was_observed():  # H-4
    model = Linear(16, 16, "delayed")
    run(model, torch.ones(4, 16), torch.ones(4, 16))
    delayed.update(model)
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    run(model, torch.full((4, 16), 1e6), torch.ones(4, 16))
    model.load_state_dict(saved)
    run(model, torch.full((4, 16), 2.0), torch.ones(4, 16))
    delayed.update(model)
    assert model.states["input"].amax_history[0] == 2


def small(scale=2.0**-10):
    """Linears whose weights scale 1 casts to zeros or subnormals."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=scale)
    return model


def relative_error(y, expected):
    return ((y - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("call", [lambda x: x, lambda x: (x,), lambda x: {"input": x}])
@pytest.mark.parametrize("compiled", [False, True])
def test_calibration_sets_the_scales_of_an_evaluation(call, compiled):  # TransformerEngine#982
    """Input and weight have the scales of amaxes in high precision, grad_output its first one.

    Training mode and observations stay.
    """
    plain, x = small(), torch.randn(24, 32)
    model = convert.convert(copy.deepcopy(plain), "delayed")
    model[0].train()
    delayed.calibrate(
        torch.compile(model, backend="aot_eager") if compiled else model, [call(x[:8]), call(x[8:])]
    )
    assert (model[0].training, model[2].training) == (True, False)
    model.eval()
    for linear, inputs in ((model[0], x), (model[2], plain[:2](x))):
        for role, tensor in (("input", inputs.detach()), ("weight", linear.weight.detach())):
            state, amax = linear.states[role], tensor.abs().max()
            # two passes of other numbers of rows, whose sums differ in order: 64 roundings of 2^-24
            torch.testing.assert_close(
                state.scale,
                (E4M3FN.max / amax.detach().double()).float(),
                rtol=64 * 2.0**-24,
                atol=0,
            )
            assert state.step == 1
        assert (linear.states["grad_output"].scale, linear.states["grad_output"].step) == (1, 0)
    # two casts of e4m3, each within 2^-4 of its number, in each of two linears
    assert relative_error(model(x), plain(x)) < 4 * 2.0**-4


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "mxfp8"])
def test_calibration_runs_linears_without_states_in_high_precision(recipe):
    """Of torchao too: what comes behind them observes what no cast has changed."""
    plain, x = small(), torch.randn(24, 32)
    model = convert.convert(
        copy.deepcopy(plain), "delayed", rules=(Rule(layers=("0",), recipe=recipe),)
    )
    assert isinstance(model[0], Float8Linear) == (recipe != "mxfp8")
    delayed.calibrate(model, [x])
    # the same product, bit for bit
    assert model[2].states["input"].amax_history[0] == plain[:2](x).abs().max()


def test_calibration_runs_grouped_linears_without_states_in_high_precision():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = grouped_linear.GroupedLinear(2, 32, 32), nn.Linear(32, 16)
            nn.init.normal_(self.up.weight)

        def forward(self, x):
            return self.down(self.up(x, torch.tensor([3, 8], dtype=torch.int32)))

    model, x = Both(), torch.randn(8, 32)
    hidden = model.up(x, torch.tensor([3, 8], dtype=torch.int32))
    convert.convert(model, "delayed", rules=(Rule(layers=("up",), recipe="rowwise"),))
    assert model.up.in_fp8
    assert not len(model.up.states)
    delayed.calibrate(model, [x])
    assert model.down.states["input"].amax_history[0] == hidden.abs().max()


def test_calibration_of_a_grouped_linear():
    module = grouped_linear.GroupedLinear(2, 32, 16)
    nn.init.normal_(module.weight, std=2.0**-10)
    x, ends = torch.randn(8, 32), torch.tensor([3, 8], dtype=torch.int32)
    expected = module(x, ends)
    convert.convert(nn.ModuleDict({"up": module}), "delayed")
    delayed.calibrate(module, [(x, ends)])
    assert module.states["weight"].amax_history[0] == module.weight.abs().max()
    module.eval()
    assert relative_error(module(x, ends), expected) < 2 * 2.0**-4  # two casts


def test_calibration_of_nothing_is_refused():
    model = convert.convert(small(), "delayed")
    with pytest.raises(ValueError, match=r"at least one batch.*got none"):
        delayed.calibrate(model, [])
    with pytest.raises(ValueError, match=r"the model has none\. Convert it"):
        delayed.calibrate(small(), [torch.ones(1, 32)])
    with pytest.raises(ValueError, match="one K"):
        delayed.calibrate(model, [torch.ones(4, 32), torch.ones(4, 16)])
    assert not any(state.seen.any() or state.step for _, state in delayed.states(model))
    assert not delayed.calibrating()


def test_weights_of_a_model_without_fp8_are_loaded():  # TransformerEngine#1860, torchtitan#651
    plain = small()
    model = convert.convert(small(1.0), "delayed")
    assert str(model.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert all(
        torch.equal(value, plain.state_dict()[key]) for key, value in convert.weights(model).items()
    )
    assert all(state.scale == 1 for _, state in delayed.states(model))
    with pytest.warns(
        UserWarning, match=r"^linear 0 scales by earlier steps .*calibrate\(model, batches\)"
    ):
        model.eval()(torch.ones(4, 32))


def test_states_without_memory_are_named_where_none_is_assigned():
    plain = small()
    with torch.device("meta"):
        model = convert.convert(small(), "delayed")
    with pytest.raises(
        RuntimeError,
        match=r"0\.states\.input\.scale is on the meta device.* Call "
        r"model\.to_empty\(device=\.\.\.\) first",
    ):
        model.load_state_dict(plain.state_dict(), assign=True)
    model.to_empty(device="cpu").load_state_dict(plain.state_dict())
    delayed.calibrate(model, [torch.ones(4, 32)])
    assert all(
        state.step == 1 for name, state in delayed.states(model) if not name.endswith("grad_output")
    )


def test_weights_are_loaded_from_a_distributed_checkpoint(tmp_path):
    plain = small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process without a process group
        checkpoint.save(plain.state_dict(), checkpoint_id=tmp_path)
        model = convert.convert(small(1.0), "delayed")
        checkpoint.load(convert.weights(model), checkpoint_id=tmp_path)
    assert all(
        torch.equal(value, plain.state_dict()[key]) for key, value in convert.weights(model).items()
    )


@pytest.mark.parametrize("lost", ["input.scale", "weight.", "grad_output.amax_history"])
def test_a_part_of_a_linears_states_is_refused(lost):
    model = convert.convert(small(), "delayed")
    part = {
        key: value
        for key, value in model.state_dict().items()
        if not key.startswith(f"2.states.{lost}")
    }
    with pytest.raises(
        RuntimeError,
        match=r"all states of a linear .* or none; 2\.states\..* is missing.*calibrate",
    ):
        model.load_state_dict(part)
    with pytest.raises(RuntimeError, match="or none"):  # torch does not hand strict=False on
        model.load_state_dict(part, strict=False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scale", -1.0, "scale is finite and positive; got -1.0"),
        ("scale", 0.0, "scale is finite and positive; got 0.0"),
        ("scale", torch.nan, "scale is finite and positive; got nan"),
        ("scale", torch.inf, "scale is finite and positive; got inf"),
        ("amax_history", -2.0, "amax_history is finite and at least 0; got -2.0"),
        ("step", -1, "step is finite and at least 0; got -1"),
    ],
)
def test_values_that_no_update_makes_are_refused(key, value, message):
    model = Linear(16, 16, "delayed")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saved[f"states.input.{key}"].fill_(value)
    with pytest.raises(RuntimeError, match=rf"states\.input\.{message}\. Load another checkpoint"):
        model.load_state_dict(saved)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_configs_go_by_name_too():  # H-2
    for mine, theirs in zip(delayed.init("delayed"), delayed.init(DELAYED["delayed"]), strict=True):
        assert torch.equal(mine, theirs)
    seen = delayed.observe(torch.full((4,), 2.0))
    for mine, theirs in zip(
        *(
            delayed.advance(delayed.init("delayed"), seen, c, E4M3FN)
            for c in ("delayed", DELAYED["delayed"])
        ),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match="one of delayed, te_delayed, flax; got 'late'"):
        delayed.init("late")
    with pytest.raises(ValueError, match=r"'te_delayed'.*fp8ref\.sim"):
        delayed.init("te_delayed")
    with pytest.raises(ValueError, match=r"fmt is a Format.*got 'e4m3fn'"):
        delayed.advance(delayed.init("delayed"), seen, "delayed", "e4m3fn")


def test_histories_that_this_backend_does_not_keep_are_refused():
    for name in ("te_delayed", "flax"):
        with pytest.raises(ValueError, match=f"'{name}'.*fp8ref.sim"):
            delayed.casts(recipe_of(DELAYED[name]))
    a, b = (
        CastSpec(fmt=fmt, policy=c.policy, delayed=c)
        for fmt, c in ((E4M3FN, CONFIGS[0]), (E5M2, CONFIGS[0]))
    )
    two = Recipe(
        name="two",
        output=GemmSpec(a=a, b=a, accumulate="slow"),
        grad_weight=GemmSpec(a=b, b=b, accumulate="slow"),
    )
    with pytest.raises(ValueError, match="'two' has one input state"):
        delayed.casts(two)


@pytest.mark.parametrize("key", ["0.states.weight.bogus", "0.states.bogus.scale"])
def test_an_unknown_key_beside_the_states_is_refused(key):
    model = convert.convert(torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False)), "delayed")
    with pytest.raises(RuntimeError, match=f"Unexpected key.*{key}"):
        model.load_state_dict(model.state_dict() | {key: torch.ones(())})
