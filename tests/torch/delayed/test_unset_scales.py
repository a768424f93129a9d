"""An evaluation by scales that no update has set is warned of, once a model; what is right stays
silent.
"""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8ref.torch import delayed
from fp8ref.torch.attention import delayed as attention_delayed
from fp8ref.torch.experts.layer import GroupedLinear
from fp8ref.torch.linear.linear import Linear
from fp8ref.torch.model import convert

X = torch.ones(8, 16)


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def in_fp8():
    return convert.convert(made(), "delayed")


def trained():
    """A model after one step of training."""
    model = in_fp8()
    model(X).sum().backward()
    delayed.update(model)
    return model


def filled():
    """A model whose states were loaded in place, as torch.distributed.checkpoint does: no code of
    fp8ref ran.
    """
    model = in_fp8()
    for (_, state), (_, other) in zip(
        delayed.states(model), delayed.states(trained()), strict=True
    ):
        for key in delayed.DelayedState._fields:
            getattr(state, key).copy_(getattr(other, key))
    return model


def compiled(model, x):
    return torch.compile(model.eval(), backend="eager", fullgraph=True)(x)


def said(evaluate, model, x=X):
    """The linears that an evaluation warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluate(model, x)
    return [
        str(w.message).partition(" scales by earlier steps")[0]
        for w in caught
        if "no update has set" in str(w.message)
    ]


EVALUATIONS = {
    "eval mode": lambda model, x: model.eval()(x),
    "without gradients": lambda model, x: torch.no_grad()(model)(x),
    "inference mode": lambda model, x: torch.inference_mode()(model)(x),
    "compiled": compiled,
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_an_evaluation_before_any_update_is_warned_of(name):  # H-12; TransformerEngine#982
    """Once each model, by the name of its first linear; never after an update, or with a state that
    was loaded or filled in place.
    """
    torch._dynamo.reset()
    evaluate = EVALUATIONS[name]
    for model in (
        in_fp8(),
        convert.convert(nn.Sequential(made(), made()), "delayed"),
        in_fp8(),
        copy.deepcopy(in_fp8()),
    ):
        first = "linear 0" if len(model) == 3 else "linear 0.0"
        assert [said(evaluate, model), said(evaluate, model)] == [[first], []]
    loaded = in_fp8()
    loaded.load_state_dict(trained().state_dict())
    for model in (
        trained(),
        loaded,
        filled(),
        copy.deepcopy(trained()),
        pickle.loads(pickle.dumps(filled())),
    ):
        assert said(evaluate, model) == []


@pytest.mark.parametrize("name", ["eval mode", "without gradients", "compiled"])
def test_a_training_pass_alone_sets_no_scale(name):  # H-12
    """A pass that observes is not an update: an evaluation after it casts by scale 1 too."""
    torch._dynamo.reset()
    model = in_fp8()
    model(X).sum().backward()
    assert said(EVALUATIONS[name], model) == ["linear 0"]


@pytest.mark.parametrize("name", ["eval mode", "compiled"])
@pytest.mark.parametrize("update", ["update", "skipped", "calibrate"])
def test_a_linear_that_was_not_used_is_warned_of(name, update):  # H-12
    """An update sets scales of what was observed alone."""
    torch._dynamo.reset()
    model = in_fp8()
    if update == "calibrate":
        delayed.calibrate(model[0], [X])
    else:
        model[0](X).sum().backward()
        if update == "skipped":
            model[2](torch.ones(8, 32)).sum().backward()
            delayed.forget_unless(model[2], torch.tensor(False))
        delayed.update(model)
    assert said(EVALUATIONS[name], model) == ["linear 2"]


def test_no_rows_set_no_scale():  # H-12, L-9
    """An empty batch, as of an expert without tokens: it casts nothing, so it neither warns nor
    observes.
    """
    model = in_fp8()
    assert said(EVALUATIONS["eval mode"], model, X[:0]) == []
    model.train()
    model[2](model[0](X)[:0]).sum().backward()
    delayed.update(model)
    assert said(EVALUATIONS["eval mode"], model) == ["linear 2"]


def test_an_error_filter_raises_in_each_evaluation():
    torch._dynamo.reset()
    for evaluate in EVALUATIONS.values():
        model = in_fp8()
        for _ in range(2):
            with pytest.raises(Exception, match="linear 0 scales by earlier steps"):
                evaluate(model, X)


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_warned_of(strict):
    """What it writes keeps the scales that the model has."""

    def export(model, x):
        with torch.no_grad():
            torch.export.export(model.eval(), (x,), strict=strict)

    assert said(export, in_fp8()) == ["linear 0"]
    assert said(export, trained()) == []
    assert said(export, in_fp8().to("meta"), X.to("meta")) == []


def test_checkpoints_in_the_first_step_are_silent():  # H-12: the suite makes every warning an error
    model = convert.convert(nn.Sequential(made(), made()), "delayed")
    for _ in range(2):  # microbatches
        for reentrant in (True, False):
            h = checkpoint(model[0], X.clone().requires_grad_(), use_reentrant=reentrant)
            checkpoint(model[1], h, use_reentrant=reentrant).square().mean().backward()
    compiled_model = torch.compile(in_fp8(), backend="aot_eager")
    checkpoint(compiled_model, X.clone().requires_grad_(), use_reentrant=True).sum().backward()


def test_trained_models_share_a_compiled_evaluation():
    """Whatever trained them, eager or compiled; one that nobody trained is traced anew."""
    torch._dynamo.reset()
    models = [trained(), trained()]
    compiled_model = in_fp8()
    optimizer = torch.optim.SGD(compiled_model.parameters())
    torch.compile(compiled_model, backend="aot_eager")(X).sum().backward()
    optimizer.step()
    delayed.update(compiled_model)
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    for model in (*models, compiled_model):
        torch.compile(model.eval(), backend=counted, fullgraph=True)(X)
    assert len(graphs) == 1
    for _ in range(2):
        assert (
            said(
                lambda model, x: torch.compile(model.eval(), backend=counted, fullgraph=True)(x),
                models[0],
            )
            == []
        )


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.states = attention_delayed.states("cudnn", "cpu")

    def forward(self, x):
        return attention_delayed.apply(x, x, x, states=self.states, variant="cudnn")


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = GroupedLinear(2, 16, 32)
        nn.init.ones_(self.up.weight)

    def forward(self, x):
        return self.up(x, torch.tensor([4, 8], dtype=torch.int32))


@pytest.mark.parametrize("name", ["eval mode", "compiled"])
@pytest.mark.parametrize(
    ("build", "x", "names"),
    [
        (Attention, torch.ones(1, 1, 16, 16), {"attention", "a linear in FP8"}),
        (lambda: convert.convert(Grouped(), "delayed"), X, {"up"}),
        (
            lambda: nn.Sequential(Linear(16, 16, "delayed"), Linear(16, 16, "delayed")),
            X,
            {"a linear in FP8"},
        ),
    ],
)
def test_every_kind_of_state_is_looked_at(name, build, x, names):  # H-12, A-19, X-9
    torch._dynamo.reset()
    model = build()
    first = said(EVALUATIONS[name], model, x)
    assert set(first) <= names
    assert first
    assert said(EVALUATIONS[name], model, x) == []
    delayed.calibrate(model, [x])
    torch._dynamo.reset()
    assert said(EVALUATIONS[name], model, x) == []
