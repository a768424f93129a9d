"""What is read off programs as XLA compiled them for an H200: lines of ahead-of-time compiles (make
aot), as they were or shortened.
"""

from pathlib import Path

import pytest

from fp8ref.jax import proof
from fp8ref.jax.proof import hlo

CUBLASLT, TRITON, COLLECTIVES = (
    (Path(__file__).parent / "recorded" / f"{name}.hlo").read_text()
    for name in ("cublaslt", "triton", "collectives")
)

Q_PROJ, DOWN_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def planned(*dots):
    """A program of dots: name, GEMM, a's format, M, N, K, precision."""
    return proof.Program(
        tuple(
            hlo.Operation(
                "dot_general",
                ((a, (m, k)), ("f8e4m3fn", (n, k))),
                ("f32", (m, n)),
                f"jvp({layer}/{which})/dot_general",
                precision,
            )
            for layer, which, a, m, n, k, precision in dots
        ),
        "stablehlo",
    )


def test_the_librarys_kernels():
    program = proof.read_compiled(CUBLASLT)
    assert program.source == "optimized hlo"
    first, second, attention = proof.gemms(program)
    assert (first.layer, first.which, first.a, first.b, first.out, first.accumulate) == (
        Q_PROJ,
        "output",
        "f8e4m3fn",
        "f8e4m3fn",
        "f32",
        "fast",
    )
    assert (first.shape, first.multiplications, first.kernel) == (
        (4096, 6144),
        4096 * 6144 * 4096,
        "__cublas$lt$matmul$f8",
    )
    assert (second.layer, second.which, second.a, second.accumulate) == (
        DOWN_PROJ,
        "grad_input",
        "f8e5m2",
        "slow",
    )
    assert (attention.layer, attention.fp8) == (None, False)
    assert proof.kernels(program) == {
        "__cublas$lt$matmul$f8: f8e4m3fn x f8e4m3fn": 1,
        "__cublas$lt$matmul$f8: f8e5m2 x f8e4m3fn": 1,
        "__cublas$lt$matmul: bf16 x bf16": 1,
    }


def test_tritons_kernels():
    (dot,) = proof.gemms(proof.read_compiled(TRITON))
    assert (dot.layer, dot.fp8, dot.accumulate, dot.kernel) == (
        Q_PROJ,
        True,
        "slow",
        "__triton_nested_gemm_fusion",
    )
    assert dot.multiplications == 4096 * 6144 * 4096


def test_collectives_combined_or_not():
    program = proof.read_compiled(COLLECTIVES)
    found = [(c.layer, c.kind, c.dtype, c.shape) for c in proof.collectives(program)]
    assert found == [
        (None, "all_gather", "f32", (1024, 4096)),
        (None, "all_gather", "f8e4m3fn", (1024, 4096)),
        ("model.layers.0.mlp.up_proj", "all_gather", "f8e4m3fn", (14336, 4096)),
        ("model.layers.0.self_attn.v_proj", "all_reduce", "s32", ()),
        ("model.layers.1.mlp.up_proj", "reduce_scatter", "f32", (1, 1792, 4096)),
    ]
    assert proof.gathers(program) == {"f32": 1, "f8e4m3fn": 2}


QKV = [
    (f"model.layers.0.self_attn.{name}_proj", "output", "f8e4m3fn", 4096, n, 4096, "DEFAULT")
    for name, n in zip("qkv", (4096, 1024, 1024), strict=True)
]
DOWN = (DOWN_PROJ, "grad_input", "f8e5m2", 4096, 14336, 4096, "HIGHEST")


def test_merged_dots_are_not_lost():
    assert proof.lost(proof.read_compiled(CUBLASLT), planned(*QKV, DOWN)) == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            CUBLASLT.replace("f8e5m2[4096,4096]", "bf16[4096,4096]").replace(
                "f8e4m3fn[14336,4096]", "bf16[14336,4096]"
            ),
            [
                f"{DOWN_PROJ}/grad_input: f8e5m2 x f8e4m3fn, slow, is compiled to bf16 x bf16, "
                "slow, by __cublas$lt$matmul$f8"
            ],
        ),
        (
            # one of the small ones is not in it
            CUBLASLT.replace("4096,6144", "4096,5120").replace("6144,4096", "5120,4096"),
            [
                f"model.layers.0.self_attn.{n}_proj/output: f8e4m3fn x f8e4m3fn, fast, is "
                "compiled to no kernel of its name"
                for n in "kv"
            ],
        ),
        (
            CUBLASLT.replace("HIGHEST", "DEFAULT"),
            [
                f"{DOWN_PROJ}/grad_input: f8e5m2 x f8e4m3fn, slow, is compiled to f8e5m2 x "
                "f8e4m3fn, fast, by __cublas$lt$matmul$f8"
            ],
        ),
    ],
)
def test_what_is_compiled_to_anything_wider_is_named(text, lines):
    assert proof.lost(proof.read_compiled(text), planned(*QKV, DOWN)) == lines


def test_only_a_scope_within_a_gemm_says_that_its_operands_are_turned():
    """A module may be called so."""
    made = {
        name: hlo.Operation("dot_general", (), ("f32", ()), name, "")
        for name in (
            "jit(f)/turned/fc/grad_weight/dot_general",
            "jit(f)/fc/grad_weight/turned/dot_general",
            "jit(f)/turned/dot_general",
        )
    }
    assert [op.turned for op in made.values()] == [False, True, False]
