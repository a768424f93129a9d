"""Which casts inductor may put into a reduction's kernel, and that it changes no bit."""

import types

import pytest
import sympy
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.dependencies import MemoryDep
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from fp8ref.torch.gemm import fusion
from fp8ref.torch.model import convert

M, N = 64, 32
ROW, COLUMN = sympy.symbols("d0 d1", integer=True, nonnegative=True)
DTYPES = {
    "x": torch.bfloat16,
    "codes": torch.float8_e4m3fn,
    "wide": torch.bfloat16,
    "mask": torch.bool,
    "scale": torch.float32,
}


@pytest.fixture
def inductor():
    """Inductor's choices as they are by themselves, and again after the test."""
    with config.patch(inductor_choices_class=None), V.set_choices_handler(InductorChoices()):
        yield


def access(name, index):
    return MemoryDep(name, index, (ROW, COLUMN), (sympy.Integer(M), sympy.Integer(N)))


def node(reads, writes, device="cuda", reduction=False):
    """A node of a schedule, as far as ``fusion`` looks at it."""
    made = types.SimpleNamespace(
        read_writes=types.SimpleNamespace(reads=reads, writes=writes),
        is_reduction=lambda: reduction,
        get_device=lambda: torch.device(device),
        get_nodes=lambda: [made],
    )
    return made


BY_ROWS, BY_COLUMNS = N * ROW + COLUMN, ROW + M * COLUMN


@pytest.mark.parametrize(
    ("stored", "index", "device", "expected"),
    [
        ("codes", BY_COLUMNS, "cuda", True),
        ("codes", BY_ROWS, "cuda", False),
        ("wide", BY_COLUMNS, "cuda", False),  # two bytes an element: left to inductor
        ("mask", BY_COLUMNS, "cuda", False),
        ("codes", BY_COLUMNS, "cpu", False),
    ],
)
def test_codes_that_are_stored_along_another_axis_than_x_is_loaded_along_transpose(
    stored, index, device, expected
):
    loads = [access("x", BY_ROWS), access("scale", ROW), access("scale", sympy.Integer(0))]
    cast = node(loads, [access(stored, index)], device)
    reduction = node([access("x", BY_ROWS)], [], device, reduction=True)
    with V.set_graph_handler(types.SimpleNamespace(get_dtype=DTYPES.__getitem__)):
        assert fusion.transposes(cast) is expected
        assert not fusion.transposes(reduction)
        if expected:
            assert not fusion.Choices.can_fuse(None, cast, reduction, 1 << 20)
            assert not fusion.Choices.can_fuse(None, reduction, cast, 1 << 20)


def test_scales_of_either_axis_have_no_direction():
    """A cast that keeps its layout, walked through by columns, loads a scale of each column."""
    cast = node([access("x", BY_COLUMNS), access("scale", COLUMN)], [access("codes", BY_COLUMNS)])
    with V.set_graph_handler(types.SimpleNamespace(get_dtype=DTYPES.__getitem__)):
        assert not fusion.transposes(cast)


def test_a_cast_whose_loops_were_joined_transposes_too():
    """As the loops of a split reduction walk through a tensor: two rows at a time."""
    stored = FloorDiv(COLUMN, N) + 2 * ROW + M * ModularIndexing(COLUMN, 1, N)
    sizes = sympy.Integer(M // 2), sympy.Integer(2 * N)
    reads, writes = (
        [MemoryDep("x", 2 * N * ROW + COLUMN, (ROW, COLUMN), sizes)],
        [MemoryDep("codes", stored, (ROW, COLUMN), sizes)],
    )
    with V.set_graph_handler(types.SimpleNamespace(get_dtype=DTYPES.__getitem__)):
        assert fusion.transposes(node(reads, writes))
        assert not fusion.transposes(
            node(reads, [MemoryDep("codes", 2 * N * ROW + COLUMN, (ROW, COLUMN), sizes)])
        )


@pytest.mark.usefixtures("inductor")
@pytest.mark.parametrize(("accelerator", "expected"), [("cuda", fusion.Choices), (None, None)])
def test_convert_sets_the_choices_off_a_cpu(accelerator, expected, monkeypatch):
    """A model on the meta device will lie on the accelerator, if there is one."""
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available: accelerator and torch.device(accelerator),
    )
    convert.convert(nn.Sequential(nn.Linear(32, 32, device="meta")), "tensorwise")
    assert config.inductor_choices_class is expected
    assert type(V.choices) is (expected or InductorChoices)


@pytest.mark.usefixtures("inductor")
def test_choices_of_the_users_stay():
    class Theirs(InductorChoices):
        pass

    with config.patch(inductor_choices_class=Theirs):
        fusion.install()
        assert config.inductor_choices_class is Theirs
    with V.set_choices_handler(Theirs()):
        fusion.install()
        assert config.inductor_choices_class is None
        assert type(V.choices) is Theirs


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_which_casts_are_fused_changes_no_bit(recipe):  # P-18
    """Under emulated casts kernels round where eager PyTorch does; amaxes are exact in any
    order.
    """

    def steps(compiled):
        torch.manual_seed(0)
        with torch.device("cuda"), config.patch(emulate_precision_casts=True):
            model = convert.convert(
                nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).bfloat16(),
                recipe,
            )
            x = torch.randn(128, 256, dtype=torch.bfloat16, requires_grad=True)
            (torch.compile(model, fullgraph=True) if compiled else model)(
                x
            ).float().square().mean().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    eager, compiled = steps(False), steps(True)
    assert isinstance(config.inductor_choices_class(), fusion.Choices)
    # a bias's gradient is a sum over rows, whose order is the kernel's
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True) if a.ndim == 2)
