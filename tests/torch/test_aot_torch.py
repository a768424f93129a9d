"""What inductor generates for an H200 that is not there:
what benchmarks/compiled/aot_torch.py counts, and that nothing stands in CUDA graphs' way.

A process of its own for each test: torch takes a faked device for present.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import floor
from fp8ref.spec.states.layouts import LAYOUTS, Scalars

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMPILED = BENCHMARKS / "compiled"
KEPT = BENCHMARKS / "results" / "aot_torch.json"
SHAPES = ((1, 8192), (4, 2048))
SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
COUNTED = """
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.linear(x * 2 + 1)


class Writing(Scaled):
    def forward(self, x, other):
        other.add_(1)
        return self.linear(x)


with fake_h200.tensors():
    x = torch.empty(128, 64, dtype=torch.bfloat16, requires_grad=True)
    found = [aot_torch.generate(Scaled(), x), aot_torch.generate(Writing(), x, torch.empty(8))]
print(json.dumps([[[(k.kind, k.bytes, k.written) for k in g.kernels] + [g.launches, g.refused] for g in graphs] for graphs in found]))
"""
BLOCKS = """
config, rows = LlamaConfig(**json.loads(sys.argv[1])), []
for recipe, who in aot_torch.LINEARS:
    if recipe in ("bf16", "tensorwise", "rowwise", "delayed") and "own casts" not in who:
        graphs = aot_torch.block(recipe, who, (2, 64), config)
        launches = [graph.launches for graph in graphs]
        aot_torch.machine_code = lambda _: None  # that takes a minute
        rows.append(aot_torch.row((2, 64), recipe, who, graphs) | {"launches": launches, "written": [len(g.sources) for g in graphs]})
print(json.dumps(rows))
"""


KERNEL = """
import triton
import triton.language as tl


@triton.jit
def stored(ptr, at, x):
    tl.store(ptr + at, x.to(tl.float8e4nv))


@triton.jit
def cast_and_add(x_ptr, scale_ptr, q_ptr, t_ptr, sum_ptr, count, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + at, mask=at < count).to(tl.float32)
    stored(q_ptr, at, x * tl.load(scale_ptr))
    stored(t_ptr, at, x * tl.load(scale_ptr))
    tl.store(sum_ptr + at, tl.load(sum_ptr + at) + x)
"""
LAUNCHED = """
sys.path.insert(0, sys.argv[1])
import kernel
from torch.library import triton_op, wrap_triton


@triton_op("planted::cast_and_add", mutates_args={"total"})
def cast_and_add(x: torch.Tensor, scale: torch.Tensor, total: torch.Tensor) -> list[torch.Tensor]:
    out = [torch.empty(x.numel(), dtype=torch.float8_e4m3fn) for _ in range(2)]
    wrap_triton(kernel.cast_and_add)[(2,)](x, scale, *out, total, x.numel(), SIZE=4096)
    return out


def cast(x, scale, total):
    return cast_and_add(x * 2, scale, total)


with fake_h200.tensors():
    x = torch.empty(128, 64, dtype=torch.bfloat16)
    (graph,) = aot_torch.generate(cast, x, torch.empty(()), torch.empty(8192), backward=False)
print(json.dumps([[[k.name, k.kind, k.bytes] for k in graph.kernels], graph.sectors, graph.launches,
                  aot_torch.machine_code(graph.sources)]))
"""


OPERATORS = """
@torch.library.custom_op("fp8ref::planted_cast", mutates_args=())
def cast(x: torch.Tensor, scale: torch.Tensor, e5m2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(7, dtype=torch.float32)


@cast.register_fake
def _(x, scale, e5m2):
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(7, dtype=torch.float32)


@torch.library.custom_op("fp8ref::planted_merge", mutates_args=("seen",))
def merge(seen: torch.Tensor, parts: torch.Tensor) -> None:
    pass


def step(x, scale, seen):
    codes, parts = cast(x * 2, scale, True)
    merge(seen, parts)
    return codes


with fake_h200.tensors():
    x = torch.empty(128, 64, dtype=torch.bfloat16)
    (graph,) = aot_torch.generate(step, x, torch.empty(()), torch.empty(3), backward=False)
print(json.dumps([[[k.name, k.kind, k.bytes] for k in graph.kernels], graph.sectors]))
"""
STEPS = """
found = {}
for layout in ("sqrt_e4m3", "te"):
    graphs = aot_torch.optimizer_step(layout, 1 << 16)
    found[layout] = [[k.bytes for k in g.kernels if k.bytes > 1 << 16] for g in graphs]
print(json.dumps(found))
"""


def answer(program: str, *arguments: str):
    """What a program in which aot_torch is imported prints last, as JSON."""
    head = (
        "import json, sys\nimport aot_torch, fake_h200, torch\nfrom torch import nn\nfrom "
        "fp8ref.spec.llama import LlamaConfig\n"
    )
    path = f"import sys\nsys.path.insert(0, {str(COMPILED)!r})\n"
    command = [sys.executable, "-W", "ignore", "-c", f"{path}{head}{program}", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.slow
def test_kernels_and_bytes_are_those_of_a_case_counted_by_hand():
    """A kernel before a GEMM, and one after the GEMM of its gradient: each reads and writes [128,
    64] in bfloat16.
    """
    (forward, backward), writing = answer(COUNTED)
    moved = 2 * 128 * 64 * 2
    *kernels, launches, refused = forward
    assert [kernel for kernel in kernels if kernel[0] == "other"] == [["other", moved, ""]]
    assert [kernel[2] for kernel in kernels if kernel[0] == "gemm"] == ["bfloat16"]
    assert (launches, refused) == (1, None)
    *kernels, launches, refused = backward
    assert [kernel for kernel in kernels if kernel[0] == "other"] == [["other", moved, ""]]
    assert [kernel[2] for kernel in kernels if kernel[0] == "gemm"] == ["bfloat16"] * 2
    assert (launches, refused) == (1, None)
    assert "mutated inputs" in writing[0][-1]  # inductor's rules for CUDA graphs do refuse


@pytest.mark.slow
def test_a_kernel_that_inductor_did_not_write_counts_by_its_arguments(tmp_path):
    """It reads x, a scale and a sum, and writes two tensors of codes and the sum."""
    pytest.importorskip("triton")
    (tmp_path / "kernel.py").write_text(KERNEL)
    kernels, sectors, launches, compiled = answer(LAUNCHED, str(tmp_path))
    size = 128 * 64
    ours = 2 * size + 4 + 4 * size + 2 * size + 4 * size
    twice, (name, kind, moved) = kernels
    assert (name, kind, moved) == ("cast_and_add", "ours", ours)
    assert twice[1:] == ["other", 4 * size]
    assert sectors == 4 * size + -(-ours // 32) * 32
    assert (launches, compiled) == (1, 2)


@pytest.mark.slow
def test_an_operator_of_fp8ref_counts_by_its_tensors():
    """A cast reads x and a scale, and writes codes and 7 numbers; another one reads these, and
    reads and writes 3.
    """
    (_, cast, merge), sectors = answer(OPERATORS)
    size = 128 * 64
    assert cast == ["fp8ref.planted_cast.default", "ours", 2 * size + 4 + size + 4 * 7]
    assert merge == ["fp8ref.planted_merge.default", "ours", 4 * 7 + 2 * 4 * 3]
    assert sectors == 4 * size + sum(-(-n // 32) * 32 for n in (cast[2], merge[2]))


def rows_of(rows: list[dict], shape: tuple[int, int]) -> dict[tuple[str, str], dict]:
    return {(row["recipe"], row["who"]): row for row in rows if tuple(row["shape"]) == shape}


def assert_beside_torchao(rows: dict[tuple[str, str], dict]) -> None:
    """What convert makes multiplies as torchao's linears do, and keeps as much for the backward
    pass.
    """
    for recipe in {recipe for recipe, who in rows if who == "torchao"}:
        theirs, ours, own = (
            rows[recipe, who] for who in ("torchao", "fp8ref, Float8Linear", "fp8ref, Linear")
        )
        assert ours["gemms"] == own["gemms"] == theirs["gemms"], recipe
        assert ours["kept"] == theirs["kept"], recipe
        assert own["kept"] <= 1.001 * theirs["kept"], recipe  # some scales


@pytest.mark.slow
def test_a_small_block_multiplies_as_torchao_does_and_all_may_be_cuda_graphs():  # P-12
    rows = answer(BLOCKS, json.dumps(SIZES))
    for row in rows:
        assert row["cuda_graph_refused"] == [None, None], row
        # all that are no GEMM and no attention are Triton's, one launch each
        assert row["kernels"] == [sum(n) for n in zip(row["launches"], row["ours"], strict=True)]
        # observations: buffers, whose addresses stay
        assert (sum(row["mutated"]) > 0) == (row["recipe"] == "delayed")
        product = "mm" if row["recipe"] == "bf16" else "_scaled_mm"
        assert row["gemms"][f"{product} bfloat16"] >= 14
    assert_beside_torchao(rows_of(rows, (2, 64)))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kept_table(shape):
    rows = json.loads(KEPT.read_text())["rows"]
    assert_beside_torchao(rows_of(rows, shape))
    for row in rows:
        assert row["cuda_graph_refused"] == [None, None]
        assert sum(row["gemms"].values()) == 21
        assert row["machine_code"] is None or row["machine_code"] > 0  # None: without Triton
        assert all(name.endswith(" bfloat16") for name in row["gemms"])


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_move_little_more_than_they_must(shape):
    """GB by sectors, at most; the fewest are those of benchmarks/compiled/floor.py."""
    rows = rows_of(json.loads(KEPT.read_text())["rows"], shape)
    moved = {key: sum(row["sectors"]) / 1e9 for key, row in rows.items()}
    limits = {"tensorwise": 7.2, "tensorwise_pow2": 6.2, "rowwise_native": 7.4}
    for recipe, most in (limits | {"delayed": 5.2, "blockwise": 5.4}).items():
        assert floor.least(recipe) / 1e9 <= moved[recipe, "fp8ref, kernels"] <= most, recipe
        assert rows[recipe, "fp8ref, kernels"]["ours"] != [0, 0]
    for recipe in ("tensorwise", "delayed", "blockwise"):
        assert moved[recipe, "fp8ref, kernels"] <= 0.75 * moved[recipe, "fp8ref, Linear"], recipe


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_of_fp8refs_scatters_and_torchaos_does(shape):
    """A cast that transposes within a reduction writes a sector for each code.

    Apart, it reads once more what it casts.
    """
    rows = rows_of(json.loads(KEPT.read_text())["rows"], shape)
    for (recipe, who), row in rows.items():
        expected = recipe in ("tensorwise", "rowwise") if who.startswith("torchao") else False
        # a block along tokens is cast within the reduction that finds its amax
        plain = (recipe, who) == ("blockwise", "fp8ref, Linear")
        assert any(row["scattered"]) == (expected or plain), (recipe, who)
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        theirs, ours, own = (
            sum(rows[recipe, who]["sectors"])
            for who in ("torchao", "fp8ref, Float8Linear", "fp8ref, Linear")
        )
        assert own <= ours <= theirs, recipe


@pytest.mark.slow
def test_the_kept_table_is_of_the_kept_results():
    printed = subprocess.run(
        [sys.executable, COMPILED / "aot_torch.py", "--show"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert printed == KEPT.with_suffix(".md").read_text()


@pytest.mark.slow
def test_an_optimizer_step_moves_what_it_must():
    """In blocks, one kernel; with a scale of the whole tensor, one that reads for the amaxes and
    one for the rest. They compute moments anew.
    """
    found, size = answer(STEPS), 1 << 16
    numbers = 4 * len(Scalars._fields)
    assert found["sqrt_e4m3"] == [[LAYOUTS["sqrt_e4m3"].step_bytes(size) * size + numbers]]
    (amaxes,), (rest,) = found["te"]
    # and partial amaxes, scales
    assert LAYOUTS["te"].step_bytes(size) * size == pytest.approx(amaxes + rest, rel=2e-3)
