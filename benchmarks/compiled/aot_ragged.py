"""What becomes of grouped GEMMs with FP8 operands on an H200, by `lax.ragged_dot` and by tokamax.

Usage: python benchmarks/compiled/aot_ragged.py [--show]

Compiled ahead of time, on a machine without a GPU, as aot.py does. Counted are calls of libraries,
and the tensor cores' instructions in the PTX of Triton's kernels: what they multiply, whatever
dtype the operands have in memory. tokamax 0.0.12 is not in .venv-aot: install it beside, with

    pip install --no-deps --target DIR tokamax==0.0.12 qwix==0.1.8 einshape immutabledict jaxtyping
    wadler-lindig typeguard==2.13.3 tensorboardx

and name DIR in PYTHONPATH. Sizes are those of one weight of Qwen3-30B-A3B's experts (aot.py).
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FILE = HERE.parent / "results" / "aot_ragged.json"
EXPERTS, ROWS, INPUTS, OUTPUTS = 128, 32768, 2048, 1536
CASES = {
    "lax.ragged_dot, GEMMs by the library": "all rows by all weights",
    "lax.ragged_dot, GEMMs by Triton": "all rows by all weights",
    "tokamax, one scale a weight": "each row once",
    "tokamax, a scale a column": "each row once",
    "fp8ref.jax.experts.grouped, rowwise, GEMMs by the library": "each row once, in blocks",
}
"""{what is compiled: how often a row is multiplied}.

The last is the output of ``grouped.apply``.
"""
CORES = re.compile(r"(?:wgmma\.mma_async|mma\.sync)[\w.]*")
EXPLANATION = """\
| output GEMM, operands in `e4m3fn` | calls and tensor cores' instructions | rows are multiplied |
|---|---|---|"""


def compiled(case: str, target: str) -> str:
    """The program of a case, as text."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    import fp8ref.jax as fj

    [h200] = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=target
    ).devices
    placed, f8 = SingleDeviceSharding(h200), jnp.float8_e4m3fn

    def array(*shape: int, dtype=f8) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

    x, w, sizes = (ROWS, INPUTS), (EXPERTS, INPUTS, OUTPUTS), array(EXPERTS, dtype=jnp.int32)
    triton = case.endswith("Triton")
    if case.startswith("lax"):
        function, given = (
            lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32),
            (array(*x), array(*w)),
        )
    elif case.startswith("tokamax"):
        import qwix
        from absl import flags
        from tokamax import config
        from tokamax._src.ops.ragged_dot.pallas_triton import PallasTritonRaggedDot

        # else tokamax parses this script's arguments when it first reads a flag
        flags.FLAGS([__file__])

        def function(x, of_x, w, of_w, sizes):
            with config.cross_compile(True):
                a, b = qwix.QArray(x, of_x, None, f8), qwix.QArray(w, of_w, None, f8)
                return PallasTritonRaggedDot()(
                    a, b, group_sizes=sizes, preferred_element_type=jnp.bfloat16
                )

        of_w = (EXPERTS, 1, OUTPUTS if case.endswith("column") else 1)
        given = (
            array(*x),
            array(ROWS, 1, dtype=jnp.float32),
            array(*w),
            array(*of_w, dtype=jnp.float32),
        )
    else:
        function = lambda x, w, sizes: fj.grouped.apply(x, w, sizes, recipe="rowwise")[0]  # noqa: E731
        given = array(*x, dtype=jnp.bfloat16), array(*w, dtype=jnp.bfloat16)
    return (
        jax.jit(function)
        .lower(*given, sizes)
        .compile(compiler_options={"xla_gpu_enable_triton_gemm": triton})
        .as_text()
    )


def measured(case: str) -> dict[str, int]:
    """Calls of libraries and tensor cores' instructions of a case, compiled in a process of its
    own.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
            "XLA_FLAGS": dump,
        }
        text = subprocess.run(
            [sys.executable, __file__, "--case", case],
            check=True,
            env=environment,
            stdout=subprocess.PIPE,
            encoding="utf-8",
        ).stdout
        found = collections.Counter(re.findall(r'custom_call_target="(__cublas[^"]*)"', text))
        for file in Path(folder).glob("*.ptx"):
            found.update(CORES.findall(file.read_text(encoding="utf-8")))
    return dict(found)


def markdown(rows: dict[str, dict[str, int]]) -> str:
    """The table."""
    lines = [EXPLANATION]
    for case, found in rows.items():
        lines.append(
            f"| {case} | {', '.join(f'`{what}` {count}' for what, count in found.items())} | "
            f"{CASES[case]} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--show",
        action="store_true",
        help="compile nothing: only print the table of the results that are there",
    )
    parser.add_argument("--case", choices=CASES, help="compile one, and print its program")
    arguments = parser.parse_args()
    if arguments.case:
        print(compiled(arguments.case, (HERE / "h200_target.txtpb").read_text()))
        return
    if not arguments.show:
        FILE.write_text(json.dumps({case: measured(case) for case in CASES}, indent=1) + "\n")
    print(markdown(json.loads(FILE.read_text())), end="")


if __name__ == "__main__":
    main()
