"""The GPU benchmarks' arithmetic by hand-made numbers, and their scripts run dry: no figure here is
a GPU's.
"""

import contextlib
import functools
import importlib
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import command
from fp8ref.estimate import gpu_rates
from fp8ref.recipe import RECIPES
from measuring import results, rounding, timing
from measuring.results import RefusedError, Results
from measuring.timing import Budget, Rounds, Wall
from reporting import breakdown, estimates, ledger, report, targets
from reporting.breakdown import Event
from reporting.ledger import Ceilings

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ENVIRONMENT = {
    "dry": True,
    "device": "cpu",
    "driver": None,
    "versions": {"torch": "1"},
    "flags": {},
}


class Scripted:
    """A clock by which the n-th row of a variant takes seconds[variant][n] for each call."""

    def __init__(self, seconds):
        self.rows, self.log = {name: iter(values) for name, values in seconds.items()}, []

    def seconds(self, call, calls, *, ahead=0.0):
        name = call(0)
        self.log.append((name, calls, ahead))
        return next(self.rows[name]) * calls, 0.01 * calls


def test_variants_take_turns_and_the_first_changes():
    # two rows each warm up, the second of which says how many calls a row of 1 second has
    clock = Scripted({"a": [9, 0.5, 2, 4, 8], "b": [9, 0.1, 1, 1, 2]})
    found = timing.interleaved(
        {n: lambda i, n=n: n for n in "ab"}, clock, row_seconds=1, most=5, queued=True, rounds=3
    )
    assert found == Rounds(seconds={"a": [2, 4, 8], "b": [1, 1, 2]}, errors={})
    assert [(name, calls) for name, calls, _ in clock.log[4:]] == [
        ("a", 2),
        ("b", 5),
        ("b", 5),
        ("a", 2),
        ("a", 2),
        ("b", 5),
    ]
    assert clock.log[4:6] == [("a", 2, timing.AHEAD * 0.02), ("b", 5, timing.AHEAD * 5 * 0.02 / 2)]


def test_the_devices_wait_is_bounded_and_only_of_what_is_queued():
    for queued, ahead in ((True, timing.LONGEST_AHEAD), (False, 0.0)):
        clock = Scripted({"a": [1e-3] * 9})
        timing.interleaved(
            {"a": lambda i: "a"}, clock, row_seconds=1, most=100, queued=queued, rounds=1
        )
        assert clock.log[-1] == ("a", 100, ahead)


def test_a_variant_that_fails_does_not_end_the_others():
    def fails(i):
        raise RuntimeError("no kernel\nfor this")

    found = timing.interleaved(
        {"a": lambda i: None, "b": fails}, Wall(), row_seconds=1e-6, most=1, queued=False, rounds=2
    )
    assert (found.errors, list(found.seconds)) == ({"b": "RuntimeError: no kernel"}, ["a"])
    rows = timing.rows(found, "a")
    assert [row["name"] for row in rows] == ["a", "b"]
    assert rows[1] == {"name": "b", "error": "RuntimeError: no kernel"}


def test_without_time_no_more_rounds_begin_than_have_quartiles():
    clock = Scripted({"a": [1.0] * 99})
    found = timing.interleaved(
        {"a": lambda i: "a"},
        clock,
        row_seconds=1,
        most=1,
        queued=False,
        rounds=50,
        budget=Budget(-1.0),
    )
    assert len(found.seconds["a"]) == timing.FEWEST


def test_a_ratio_is_the_median_of_neighbors():
    slow, fast, _ = timing.rows(
        Rounds(seconds={"bf16": [1, 2, 3], "fp8": [0.5, 0.5, 2]}, errors={"x": "e"}), "bf16"
    )
    assert (slow["seconds"], slow["speedup"]) == (2, 1)
    # of 2, 4 and 1.5
    assert (fast["seconds"], fast["speedup"], fast["speedup_quartiles"]) == (0.5, 2, [1.75, 3])


@pytest.mark.parametrize(("bytes_", "sets"), [(1, 8), (100e6, 3), (1e9, 2)])
def test_inputs_are_rotated_beyond_a_cache(bytes_, sets):
    assert timing.sets(bytes_) == sets


SHAPE = M, N, K = 2, 3, 5  # input 10 elements, weight 15, grad_output 6


def test_a_slow_rowwise_gemm_reads_and_writes_its_result_once_more():
    """Output of 6 elements is fast; grad_input of 10 and grad_weight of 15, bfloat16, are not."""
    assert "rescale" not in {
        one.part for one in ledger.kernels(RECIPES["tensorwise"], SHAPE, "xla")
    }
    for how in ("inductor", "xla"):
        made = ledger.kernels(RECIPES["rowwise"], SHAPE, how)
        assert [one.bytes for one in made if one.part == "rescale"] == [40, 60]


def gemms(**seconds):
    names = {
        ledger.gemm_name(which, spec)
        for recipe in ("bf16", "tensorwise", "rowwise")
        for which, spec in RECIPES[recipe].gemms.items()
    }
    return {name: seconds["bf16" if name.endswith("bf16") else "fp8"] for name in names}


def test_the_floor_of_a_linear():
    """In XLA an amax of each operand reads 2 bytes an element, 62, a cast reads 2 and writes 1 in
    two layouts, 124; three scales.
    """
    of_gemms = gemms(bf16=2.0, fp8=1.0)
    found = ledger.entry(
        RECIPES["tensorwise"], SHAPE, "xla", of_gemms, Ceilings(bandwidth=31.0, gap=1.0), 20.0
    )
    assert {
        key: value for key, value in found.items() if key not in ("amax", "cast", "launches")
    } == {
        "recipe": "tensorwise",
        "gemm": 3.0,
        "layout": 0.0,
        "rescale": 0.0,
        # scales 3 gaps; amaxes of 20, 30 and 12 bytes, no less than a gap each; casts of 40, 60 and
        # 24 bytes
        "floor": pytest.approx(3 + 3 + 3 + 40 / 31 + 60 / 31 + 1),
        "measured": 20.0,
        "floor_over_measured": pytest.approx((9 + 1 + 100 / 31) / 20),
    }
    assert (found["amax"], found["cast"]) == (2, 4)
    assert found["launches"] == pytest.approx(found["floor"] - 9)
    with pytest.raises(KeyError):
        ledger.entry(RECIPES["delayed"], SHAPE, "xla", {}, Ceilings(bandwidth=1.0, gap=0.0), None)


def test_the_floor_of_a_step_casts_what_linears_share_once():
    linears, ceilings = {"q_proj": SHAPE, "k_proj": SHAPE}, Ceilings(bandwidth=1.0, gap=0.0)
    of_gemms = dict.fromkeys(linears, gemms(bf16=2.0, fp8=1.0))
    found = ledger.step_floor(
        RECIPES["tensorwise"], linears, "xla", of_gemms, ceilings, layers=2, bf16_step=1000.0
    )
    assert found == 1000.0 + 2 * (2 * (3.0 - 6.0) + 6 * 31 + 6 * 21)
    twice = ledger.step_floor(
        RECIPES["delayed"], linears, "xla", of_gemms, ceilings, layers=1, bf16_step=0.0
    )
    assert twice == 2 * (3.0 - 6.0) + 2 * 6 * 31  # scales of their own


KERNELS = {
    "nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT": "gemm fp8",
    "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n": "gemm fp8",
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "gemm other",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>": "attention",
    "triton_red_fused_abs_amax_1": "cast/amax (triton)",
    "triton_poi_fused__scaled_mm__to_copy_clamp_mul_3": "cast/amax (triton)",
    "triton_poi_fused_mul_silu_4": "other (triton)",
    "triton_poi_fused_sigmoid_backward_absorb": "other (triton)",
    "gemm_fusion_dot_12": "gemm (XLA's Triton)",
    "__triton_gemm_impl_7": "gemm (XLA's Triton)",
    "Memcpy DtoD (Device -> Device)": "copy/transposes",
    "aten::mm": "gemm other",
    "aten::_scaled_mm": "gemm fp8",
    "_cast_by_amax": "cast (fp8ref)",
    "_amax": "cast (fp8ref)",
    "_amax_list": "cast (fp8ref)",
    "_cast_list": "cast (fp8ref)",
    "_step_and_cast": "optimizer",
    "something": "other",
}


def test_kernels_of_fp8ref_are_known_by_name():
    """Those of a matrix with strides that return nothing, as what is launched does."""
    triton = pytest.importorskip("triton")
    import pkgutil

    from fp8ref import kernels

    launched = {}
    for module in pkgutil.iter_modules(kernels.__path__, "fp8ref.kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            jitted = isinstance(value, triton.JITFunction) and name.startswith("_")
            if jitted and "stride_m" in value.arg_names and "return" not in value.src:
                launched[name] = breakdown.kind(name)
    assert {"_cast", "_cast_lines", "_amax", "_lines", "_squares"} <= set(launched)
    assert set(launched.values()) == {"cast (fp8ref)"}


@pytest.mark.parametrize(("name", "kind"), KERNELS.items())
def test_kinds_of_kernels(name, kind):
    assert breakdown.kind(name) == kind


def test_a_step_by_kind():
    inner, outer = Event("aten::mm", 1.0, 3.0), Event("aten::linear", 0.0, 4.0)
    found = breakdown.seconds(
        [outer, inner, Event("something", 6.0, 8.0), Event("aten::mm", 7.0, 9.0)], steps=2
    )
    assert found == dict.fromkeys(breakdown.NAMES, 0.0) | {
        "gemm other": 2.0,
        "other": 2.0,
        "idle": 1.0,
    }
    on_two_streams = [Event("aten::mm", 0.0, 4.0, "1"), Event("something", 1.0, 3.0, "2")]
    assert breakdown.seconds(on_two_streams, steps=1) == dict.fromkeys(breakdown.NAMES, 0.0) | {
        "gemm other": 4.0,
        "other": 2.0,
    }
    with pytest.raises(ValueError, match="no kernel"):
        breakdown.seconds([], steps=1)


def test_the_longest_kernels():
    found = breakdown.longest(
        [Event("a", 0, 1), Event("b", 1, 4), Event("a", 4, 5)], steps=2, count=1
    )
    assert found == [{"name": "b", "kind": "other", "seconds": 1.5, "calls": 0.5}]


def test_a_trace_is_read(tmp_path):
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 2e6, "dur": 1e6, "tid": 7}
    events = [kernel, kernel | {"cat": "cpu_op"}, {"ph": "M", "name": "process"}]
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    assert breakdown.read(tmp_path / "t.json", ["kernel"]) == [Event("k", 2.0, 3.0, "7")]


def test_what_is_asked_is_met_missed_or_not_measured():
    rows = [
        {"name": "a", "rounds": [3.0, 3.0]},
        {"name": "b", "rounds": [2.0, 2.0]},
        {"name": "c", "error": "e"},
    ]
    sections = {"s": {"rows": rows}}

    def verdict(name, over, at_least, dry=False, noise=None):
        target = targets.Target(section="s", name=name, over=over, at_least=at_least)
        return targets.judge(target, sections, dry=dry, noise=noise)["verdict"]

    assert verdict("b", "a", 1.5) == "met"
    assert verdict("b", "a", 1.51) == verdict("b", "a", 1.51, noise=0.005) == "missed"
    assert verdict("b", "a", 1.51, noise=0.02) == "missed, by less than the noise"
    assert verdict("c", "a", 1.0) == verdict("a", "d", 1.0) == "not measured"
    assert verdict("b", "a", 1.5, dry=True) == "dry"


def test_noise_is_of_two_that_are_the_same():
    sections = {
        name: {"rows": [{"name": "bf16 again", "speedup": s}]}
        for name, s in {"blocks:a": 0.98, "blocks:b": 1.01, "small": 2}.items()
    }
    assert targets.noise(sections, "blocks:") == pytest.approx(0.02)
    assert targets.noise({}, "blocks:") is None


def test_another_function_is_not_timed():
    assert rounding.check([0.0, 0.2], rounding.LINEAR) == [0.0, 0.2]
    for wrong in ([0.1, 0.21], [math.nan]):
        with pytest.raises(ValueError, match="not timed"):
            rounding.check(wrong, rounding.LINEAR)


def test_bits_of_a_kernel_that_casts_otherwise_are_counted():
    """A run that flips a bit of one transposed code, and one that writes another NaN."""
    pytest.importorskip("triton")
    from measuring import kernel_cases

    def run(launch, inputs, outputs):
        case = next(case for case in wanted if case[0].launch == launch)
        written = [np.array(x) for x in case[1]]
        if case[0].name.startswith("cast"):
            written[1][3, 0] ^= 1
        if case[0].name.startswith("blocks"):
            nans = np.isnan(written[2])
            written[2] = np.where(nans, -np.float32(np.nan), written[2])
        return written

    shape = 4, 128
    wanted = [case for fmt in kernel_cases.FORMATS for case in kernel_cases.exact(shape, fmt)]
    rows = kernel_cases.bits(run, [shape])
    assert [row["differ"] for row in rows] == [1, 0, 0, 0] * 2
    assert results.failed({"bits": rows}) == [
        f"cast {fmt}, 4 x 128: 1 codes or scales differ from the simulator's"
        for fmt in kernel_cases.FORMATS
    ]


def test_kernels_that_no_time_is_left_for_are_named():
    pytest.importorskip("triton")
    from measuring import kernel_cases

    bench = types.SimpleNamespace(budget=Budget(kernel_cases.NEEDED - 1.0), dry=False)
    found = kernel_cases.timed(bench, [(128, 128)], None)  # no case is built
    assert {row["error"] for row in found["kernels"]} == {"no time was left"}
    assert results.failed(found)[0] == "cast e4m3fn, 128 x 128: no time was left"


@pytest.mark.parametrize("part", ["kernels", "profile", "bench-torch", "bench-jax"])
def test_make_gpu_resumes_figures_of_its_own(part):
    """benchmarks/results has those of another machine, with which Results mixes none."""
    asked = subprocess.run(
        ["make", "-n", f"gpu-{part}"], cwd=BENCHMARKS.parent, capture_output=True, text=True
    ).stdout
    written = re.findall(r"gpu_(torch|jax)\.py .*?--resume --json build/gpu/gpu_\1\.json", asked)
    assert written == [part.removeprefix("bench-")] * (part[:5] == "bench") or written == [
        "torch",
        "jax",
    ]
    assert len(written) == asked.count("--resume")


def test_what_failed_counts_before_time_that_ran_out(tmp_path):
    """Exit codes of torch's benchmark and of JAX's, and of the part."""
    for codes, expected in (((1, 3), 1), ((3, 1), 1), ((3, 0), 3), ((0, 3), 3), ((0, 0), 0)):
        python = tmp_path / "python"
        torch, jax = codes
        python.write_text(f'#!/bin/sh\ncase "$1" in *jax.py) exit {jax};; *) exit {torch};; esac\n')
        python.chmod(0o755)
        options = [f"GPU_PYTHON={python}", f"GPU_SITE={tmp_path}", f"GPU_RESULTS={tmp_path}"]
        ended = subprocess.run(
            ["make", "gpu-profile", *options], cwd=BENCHMARKS.parent, capture_output=True, text=True
        )
        assert ended.returncode == (2 if expected else 0)  # make's own, of a part that failed
        assert (f"Error {expected}" in ended.stderr) == bool(expected), ended.stderr


def test_bytes_of_a_kernel_are_those_of_its_inputs_and_outputs():
    pytest.importorskip("triton")
    from measuring import kernel_cases

    cast, amax, *_ = kernel_cases.cases((256, 128))
    # 2 bytes read, 1 written in each order, a scale, an amax of each of four tiles
    assert cast.bytes == 256 * 128 * 4 + 4 + 4 * 4
    assert amax.bytes == 256 * 128 * 2 + 4 * 4
    (row,) = kernel_cases.rates(amax, [{"name": "a", "seconds": 0.5}])
    assert row["bytes_per_second"] == 2 * amax.bytes


class AnyBench:
    """Compiles nothing."""

    def __init__(self):
        self.wholes = []

    def compiled(self, function, *, whole=True, cuda_graphs=False):
        self.wholes.append(whole)
        return function


@pytest.mark.parametrize("entry", ["autocast", "fp8_autocast"])
def test_transformer_engines_linears_have_the_same_weights_and_run_under_its_recipe(
    monkeypatch, entry
):
    """By modules with its names, old and new."""
    from torch import nn

    from on_torch import variants

    class Linear(nn.Linear):
        def __init__(self, inputs, outputs, *, bias, params_dtype, device):
            super().__init__(inputs, outputs, bias=bias, dtype=params_dtype, device=device)

    @contextlib.contextmanager
    def autocast(recipe=None, fp8_recipe=None):
        under.append((recipe or fp8_recipe).name)
        yield
        under.pop()

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common")
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[1]].Linear, under = Linear, []
    setattr(modules[names[1]], entry, autocast)
    modules[names[0]].pytorch = modules[names[1]]
    modules[names[2]].recipe = types.SimpleNamespace(
        DelayedScaling=lambda: types.SimpleNamespace(name="delayed")
    )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    (variant, _), bench = variants.BY_NVIDIA, AnyBench()
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    weight = model[0].weight
    made = variants.convert(model, variant)
    assert isinstance(made[0], Linear)
    assert made[0].weight is weight
    run = variants.compiled(bench, lambda x: (x, list(under)), variant)
    assert run(1) == (1, ["delayed"])
    assert variants.compiled(bench, lambda: list(under), "bf16")() == []
    assert bench.wholes == [False, True]


def test_gemms_that_tell_ceilings_write_bfloat16_on_a_gpu():
    """As they are lowered for one: a float32 result would be rounded by a second kernel."""
    import jax
    import jax.numpy as jnp

    from on_jax import ceilings

    one, shape = jax.ShapeDtypeStruct((), jnp.float32), (64, 64)
    fp8 = functools.partial(ceilings.multiplied, accumulate="fast")
    rows = [jax.ShapeDtypeStruct(size, jnp.float32) for size in ((64, 1), (1, 64))]
    for function, dtype, scales in (
        (ceilings.multiplied_hp, jnp.bfloat16, []),
        (fp8, jnp.float8_e4m3fn, [one, one]),
        (fp8, jnp.float8_e4m3fn, rows),
    ):
        operand = jax.ShapeDtypeStruct(shape, dtype)
        traced = jax.jit(function).trace(operand, operand, *scales)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        written = re.findall(r"stablehlo\.dot_general.*-> tensor<64x64x(\w+)>", text)
        assert written == ["bf16"], text


def test_what_a_program_computes_twice_is_not_timed():
    """XLA computes once what two calls of a chain have in common."""
    from on_jax import ceilings

    with pytest.raises(AssertionError):
        ceilings.rotated(AnyBench(), lambda a: a, [(1.0,)], chained=2)


def test_linears_of_one_input_read_one_state_as_in_the_trainer():
    import jax.numpy as jnp

    from on_jax.variants import Variant

    variant = Variant("fp8ref delayed")
    state = variant.initial(["attn.q_proj", "attn.k_proj", "attn.o_proj"])
    read = {}

    def function(params, x, run):
        read.update(run.state)
        return x

    x = jnp.ones((2, 2))
    variant.gradients(function, x, x, x, state)
    first, second, other = (read[name]["input"] for name in state)
    assert second is first is state["attn.q_proj"]["input"]
    assert other is state["attn.o_proj"]["input"]


def test_what_was_reached_is_what_estimates_take(tmp_path):
    rates = {
        "bf16_flops": 7.5e14,
        "fp8_flops": 1.4e15,
        "fp8_rowwise_flops": 1.3e15,
        "attention_flops": 5e14,
        "bandwidth": 4.2e12,
    }
    measured = ENVIRONMENT | {
        "dry": False,
        "device": "NVIDIA H200",
        "driver": "1",
        "ceilings": rates | {"launch_in_graph_seconds": 2e-6},
    }
    path = estimates.write(measured, tmp_path)
    assert path == tmp_path / "ceilings_h200.json"
    read = gpu_rates.of("h200", path)
    assert (read.bf16, read.fp8, read.fp8_rowwise, read.attention, read.bandwidth, read.launch) == (
        7.5e14,
        1.4e15,
        1.3e15,
        5e14,
        4.2e12,
        2e-6,
    )
    assert read.measured
    assert "benchmarks/gpu/gpu_torch.py on NVIDIA H200, driver 1: torch 1" in read.source
    others = (
        "NVIDIA A100",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    )
    for unlike in ({"dry": True}, {"ceilings": rates}, *({"device": device} for device in others)):
        assert estimates.write(measured | unlike, tmp_path / "none") is None


def test_results_are_kept_by_section(tmp_path):
    path = tmp_path / "new" / "r.json"
    first = Results(path, ENVIRONMENT, resume=True)
    first.put("good", {"rows": [{"name": "a", "speedup": 1.0}]})
    first.put("bad", {"rows": [{"name": "a", "error": "e"}]})
    first.write("# table\n")
    assert path.with_suffix(".md").read_text() == "# table\n"
    again = Results(path, ENVIRONMENT, resume=True)
    assert [again.finished(name) for name in ("good", "bad", "missing")] == [True, False, False]
    assert not Results(path, ENVIRONMENT, overwrite=True).finished("good")
    with pytest.raises(RefusedError, match="is there already"):
        Results(path, ENVIRONMENT)
    with pytest.raises(RefusedError, match=r"has device 'cpu', here 'NVIDIA H200'"):
        Results(path, ENVIRONMENT | {"device": "NVIDIA H200"}, resume=True)
    path.write_text("[]")
    with pytest.raises(RefusedError, match="is not a file that this script wrote"):
        Results(path, ENVIRONMENT, resume=True)


def test_a_dry_run_is_not_kept_among_results():
    with pytest.raises(RefusedError, match="Name another file by --json"):
        Results(results.KEPT / "gpu_torch.json", ENVIRONMENT)


class Bench:
    """What ``command`` asks of one; not dry, so that the budget counts."""

    dry, clock, casts = False, Wall(), "plain operations (a driver is missing)"

    def __init__(self, seconds):
        self.budget = Budget(seconds)

    def free(self):
        pass


def test_sections_run_while_there_is_time_and_failures_are_told(tmp_path, capsys):
    def fails(bench):
        raise RuntimeError("out of memory")

    sections = {"a:x": lambda bench: {"rows": []}, "a:y": fails, "b": lambda bench: {"rows": []}}
    asked = command.Suite(
        sections=sections, needed={"a": 10, "b": 1000}, targets=(), of_floor=(), how="xla"
    )
    described = ENVIRONMENT | {"dry": False, "device": "some GPU"}
    kept = Results(tmp_path / "r.json", described)
    assert command.execute(Bench(100), asked, kept, None) == 1
    assert kept.tried("a:y")
    assert not kept.tried("b")
    printed = capsys.readouterr()
    assert "no time was left for b: run again with --resume" in printed.out
    assert printed.err == "a:y: a:y: RuntimeError: out of memory\n"
    again = Results(tmp_path / "r.json", described, resume=True)
    assert command.execute(Bench(-1), asked, again, ["a"]) == 1
    assert "no time was left for a:y: run again" in capsys.readouterr().out
    sections["a:y"] = sections["b"]
    # b is still to be measured
    assert command.execute(Bench(100), asked, again, None) == results.LEFT
    assert command.execute(Bench(5000), asked, again, None) == 0
    assert list(json.loads((tmp_path / "r.json").read_text())["sections"]) == ["a:x", "a:y", "b"]
    # a row of fp8ref whose kernels did not run is told from one whose did
    said = "fp8ref's variants cast by plain operations (a driver is missing).\n"
    assert said in (tmp_path / "r.md").read_text()


def test_what_failed_is_tried_again_after_what_was_never_tried(tmp_path, capsys):
    order = []

    def section(name, fails):
        def run(bench):
            order.append(name)
            return {"rows": [{"name": "row", "error": "e"}] if fails else []}

        return run

    sections = {"a": section("a", True), "b": section("b", False), "c": section("c", False)}
    asked = command.Suite(
        sections=sections, needed=dict.fromkeys(sections, 10), targets=(), of_floor=(), how="xla"
    )
    kept = Results(tmp_path / "r.json", ENVIRONMENT | {"dry": False, "device": "some GPU"})
    command.execute(Bench(100), asked, kept, ["a"])
    command.execute(Bench(100), asked, kept, None)
    assert order == ["a", "b", "c", "a"]
    assert capsys.readouterr().err == "a: row: e\n" * 2


def test_a_section_that_fails_more_than_before_leaves_what_there_was(tmp_path):
    kept, row = Results(tmp_path / "r.json", ENVIRONMENT), {"name": "a", "speedup": 1.0}
    kept.put("s", {"rows": [row, {"name": "b", "error": "e"}]})
    kept.put("s", {"rows": [{"name": "s", "error": "e"}, {"name": "b", "error": "e"}]})
    assert kept.data["sections"]["s"]["rows"][0] == row
    kept.put("s", {"rows": [row]})
    assert kept.finished("s")


@pytest.mark.parametrize("name", ["r.md", "folder.json"])
def test_results_go_to_a_file_of_json(tmp_path, name):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(RefusedError, match=r"results go to a file NAME\.json"):
        Results(tmp_path / name, ENVIRONMENT, resume=True)


def test_results_that_cannot_be_written_are_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError, match=r"which fails: .*\. Name another file by --json"):
        Results(tmp_path / "file" / "r.json", ENVIRONMENT)


def test_of_a_call_that_makes_several():
    found = timing.each(Rounds(seconds={"a": [8.0, 4.0]}, errors={"b": "e"}), 8)
    assert (found.seconds, found.errors) == ({"a": [1.0, 0.5]}, {"b": "e"})


SCRIPTS = ("torch", "jax")


def script(backend, *arguments):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    called = [sys.executable, BENCHMARKS / "gpu" / f"gpu_{backend}.py", *arguments]
    return subprocess.run(called, capture_output=True, text=True, check=False, env=environment)


REFUSED = """
import runpy, sys
script, *paths = sys.argv[1:]
for arguments in (["--json", *paths], ["--dry", "--section", "ceilings"]):
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        print("exit", ended.code, file=sys.stderr)
"""


@pytest.fixture(scope="module", params=SCRIPTS)
def refused(request, tmp_path_factory):
    """(what a process printed that runs a script without a GPU, and then dry; its standard error;
    the folder of the first file; what is kept before).
    """
    folder, before = tmp_path_factory.mktemp("gpu"), sorted(results.KEPT.iterdir())
    path = BENCHMARKS / "gpu" / f"gpu_{request.param}.py"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    called = [sys.executable, "-c", REFUSED, path, folder / "r.json"]
    done = subprocess.run(
        called,
        capture_output=True,
        text=True,
        check=True,
        env=environment | {"PYTHONPATH": os.pathsep.join([str(path.parent), *sys.path])},
    )
    return done.stdout, done.stderr.partition("exit 2\n"), folder, before


def test_without_a_gpu_a_script_refuses(refused):
    printed, (first, ended, _), folder, _ = refused
    assert (printed, ended, list(folder.iterdir())) == ("", "exit 2\n", [])
    assert "this benchmark measures a GPU" in first


def test_a_dry_run_does_not_write_where_results_are_kept(refused):
    printed, (_, _, second), _, before = refused
    assert (printed, sorted(results.KEPT.iterdir())) == ("", before)
    assert second.endswith("exit 2\n")
    assert "Name another file by --json" in second


def check(section):
    """Every row has finite, positive ratios, but for the profile, which has times alone."""
    for key in ("rows", "gemms", "copy", "launches", "kernels"):
        for row in section.get(key, []):
            for value in (
                [row["seconds"]]
                if "kinds" in row
                else [row["seconds"], row["speedup"], *row["speedup_quartiles"]]
            ):
                assert math.isfinite(value)
                assert value > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", SCRIPTS)
def test_one_section_dry_and_what_resume_skips(backend, tmp_path):
    path = tmp_path / "r.json"
    done = script(backend, "--dry", "--section", "ceilings", "--json", path)
    assert done.returncode == 0, done.stderr
    data = json.loads(path.read_text())
    assert (data["dry"], data["device"], list(data["sections"])) == (True, "cpu", ["ceilings"])
    check(data["sections"]["ceilings"])
    assert data["sections"]["ceilings"]["casts"] == "plain operations (on a CPU)"
    rates = {key: value for key, value in data["ceilings"].items() if isinstance(value, float)}
    assert {"bf16_flops", "fp8_flops", "bandwidth", "launch_seconds"} <= set(rates)
    assert all(math.isfinite(value) and value > 0 for value in rates.values())
    assert data["ceilings"]["dry"]
    assert (
        path.with_suffix(".md")
        .read_text()
        .startswith("# A dry run on a cpu: no figure here is a GPU's\n")
    )
    again = script(backend, "--dry", "--section", "ceilings", "--json", path, "--resume")
    assert again.returncode == 0, again.stderr
    assert "ceilings:" not in again.stdout
    assert json.loads(path.read_text()) == data


@pytest.mark.slow
@pytest.mark.parametrize("backend", sorted(SCRIPTS))
def test_every_section_dry(backend, tmp_path):
    path = tmp_path / "r.json"
    done = script(backend, "--dry", "--json", path)
    assert done.returncode == 0, done.stderr + done.stdout
    data = json.loads(path.read_text())
    assert data["dry"]
    for section in data["sections"].values():
        check(section)
    linears = {name for name in data["sections"] if name.startswith("linear:")}
    assert linears == {"linear:q_o", "linear:k_v", "linear:gate_up", "linear:down"}
    assert len(data["ledger"]) == (1 + len(report.OURS)) * len(linears)
    assert {t["verdict"] for t in data["targets"]} == {"dry"}
    assert all(t["value"] > 0 for t in data["targets"])
    bits = data["sections"]["bits"]["bits"]
    assert len(bits) == 16
    assert all(row["differ"] == 0 for row in bits)
    kernels = data["sections"]["kernels"]["kernels"]
    assert len(kernels) == 2 * 8
    assert all(row["bytes_per_second"] > 0 for row in kernels)
    shapes = {name: data["sections"][f"shape:{name}"] for name in ("4x2048", "70b")}
    assert [(of["sequences"], of["layers"]) for of in shapes.values()] == [(4, 2), (1, 1)]
    rows = {row["name"]: row["kinds"] for row in data["sections"]["profile"]["rows"]}
    assert list(rows)[:2] == ["bf16", "fp8ref tensorwise"]
    if backend == "torch":  # of a CPU, XLA's names tell no FP8
        assert rows["bf16"]["gemm fp8"] == 0 < rows["fp8ref tensorwise"]["gemm fp8"]


@pytest.mark.gpu
def test_cuda_events_are_a_clock():
    import torch

    from on_torch.clock import Events

    x = torch.randn(64, 64, device="cuda")
    for ahead in (0.0, 1e-3):
        seconds, host = Events().seconds(lambda i: x @ x, 3, ahead=ahead)
        assert seconds > 0
        assert host > 0


@pytest.mark.parametrize(
    ("name", "asked"), [("fp8ref delayed", "auto"), ("fp8ref delayed, plain", "plain")]
)
def test_fp8refs_variants_in_jax_are_cast_as_in_the_trainer(monkeypatch, name, asked):
    from fp8ref.jax.kernels import TritonKernels, choice
    from fp8ref.spec.kernels import Kernels
    from on_jax.variants import Variant

    kernels, seen = TritonKernels(capability=90), []
    monkeypatch.setattr(choice, "explain", lambda asked, device: Kernels(asked == "auto", asked))
    monkeypatch.setattr(choice, "kernels", lambda ran, device: kernels if ran.triton else None)
    variant = Variant(name)
    variant.gradients(lambda params, x, run: seen.append(run.kernels) or x, 1.0, 1.0, 1.0, {})
    assert variant.recipe.name == "delayed"
    assert seen[0] is (kernels if asked == "auto" else None)
