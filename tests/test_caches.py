"""Caches end: what is remembered for each of many keys is forgotten again, and what is kept forever
has few keys.
"""

import ast
import functools
import gc
import weakref
from pathlib import Path

import pytest

import fp8ref

ROOT = Path(fp8ref.__file__).parent

FINITE = {
    "sim/kernels/gemm.py: finisher": "two orders, two roundings",
    "torch/states/update.py: _compiled": "functions of that module, types of devices",
    "torch/experts/gemm.py: _has_kernel": "devices",
    "torch/gemm/gemm.py: _kept_unit": "devices",
    "torch/model/convert.py: _with_methods": "classes of the program: a second one for the same class would be another class",
    "torch/experts/models.py: _made": "classes of the program",
    "torch/model/switch.py: _unit": "classes of the program",
    "crosscheck/device_gemm.py: capability": "backends",
    "front/quantized.py: _say_rounded": "dtypes",
    "jax/kernels/choice.py: explain": "choices, devices",
    "torch/kernels/choice.py: _explained": "choices, devices",
    "torch/kernels/choice.py: checked": "devices",
    "torch/blocks/fuse.py: _fused_class": "classes of the program",
    "torch/linear/spec.py: _run_kernels": "choices, devices, process groups",
}
"""{function kept forever by its arguments: why there are few of them}."""


def _is_unbounded(decorator: ast.expr) -> bool:
    text = ast.unparse(decorator)
    return text in ("functools.cache", "cache") or "maxsize=None" in text


def test_what_is_kept_forever_has_few_keys():
    unbounded = set()
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(map(_is_unbounded, node.decorator_list)):
                arguments = node.args
                if arguments.args or arguments.kwonlyargs or arguments.vararg or arguments.kwarg:
                    unbounded.add(f"{path.relative_to(ROOT).as_posix()}: {node.name}")
    assert unbounded == FINITE.keys()


def test_the_check_sees_a_cache_without_a_bound():
    found = [
        ast.parse(f"@{text}\ndef f(x): ...").body[0].decorator_list[0]
        for text in (
            "functools.cache",
            "cache",
            "functools.lru_cache(maxsize=None)",
            "functools.lru_cache(maxsize=4)",
            "functools.lru_cache",
        )
    ]
    assert [_is_unbounded(one) for one in found] == [True, True, True, False, False]


def _attention(i: int):
    from fp8ref.spec.attention.call import Call
    from fp8ref.torch.attention import function as attention_function

    call = Call(variant="bf16", scale=0.1 + i / 1000)
    return attention_function.function(call, attention_function.values(call), None, ((), ()))


def _attention_kernel(i: int):
    from fp8ref.torch.attention import RankCall
    from fp8ref.torch.attention import kernel as attention_kernel

    return attention_kernel._function(RankCall(variant="fa3", scale=0.1 + i / 1000))


def _linear(i: int):
    import dataclasses

    from fp8ref.recipe import RECIPES
    from fp8ref.torch.linear import linear
    from fp8ref.torch.linear.spec import Spec

    return linear._bind(
        Spec(dataclasses.replace(RECIPES["rowwise"], name=f"recipe{i}"), None, "plain")
    )


def _threads(i: int):
    from fp8ref.sim import threads

    return threads._pool(i + 1)


@pytest.mark.parametrize(
    "make", [_attention, _attention_kernel, _linear, _threads], ids=lambda make: make.__name__
)
def test_many_keys_are_forgotten(make):
    """A class of autograd.Function, or a pool of threads, for each softmax scale, recipe or number
    of threads.
    """
    first = weakref.ref(make(0))
    kept = [weakref.ref(make(i)) for i in range(1, 600)]
    gc.collect()
    assert first() is None
    assert sum(one() is not None for one in kept) <= 256


def test_kernels_that_are_forgotten_have_no_count():
    from fp8ref.sim.kernels import compiled

    class Kernel:
        overloads: tuple = ()

    for _ in range(100):
        compiled.worth(Kernel(), 1, 1 << 20)
    gc.collect()
    assert not any(isinstance(kernel, Kernel) for kernel in compiled._done)


def test_the_caches_of_numbers_are_bounded():
    from fp8ref.jax.quantize import scales
    from fp8ref.sim.quantize import cast

    for function in (cast._table, scales._steps):
        assert isinstance(function, functools._lru_cache_wrapper)
        assert function.cache_parameters()["maxsize"] is not None
