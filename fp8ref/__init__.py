"""FP8 training, specified exactly: quantize tensors, train in FP8, and check that FP8 is right.

>>> import fp8ref as f8
>>> import numpy as np
>>> x = np.random.default_rng(0).standard_normal((256, 512), dtype=np.float32)
>>> x[7] *= 1e5  # one row of outliers
>>> q = f8.quantize(x, "e4m3fn", "rowwise")
>>> print(q.dequantize()[0, :3], "from", x[0, :3])
[ 1.125  -1.375  -0.4375] from [ 1.117622  -1.3871249 -0.4265716]
>>> f8.compare(x, ["tensorwise", "rowwise", "mxfp8"])
recipe      format  scales              bits  SQNR, dB  became zero  clipped  worst row, dB
tensorwise  e4m3fn       1  tensorwise  8.00      31.5       54.48%    0.00%            6.3
rowwise     e4m3fn     256  rowwise     8.06      31.9        0.00%    0.00%           30.5
mxfp8       e4m3fn   4,096  mx_1x32     8.25      31.9        0.00%    0.00%           30.5
tensorwise makes 54.5% of the elements zero, rowwise under 0.1%.

``f8.sweep`` does the same for tensors of named distributions, formats, scales and sums of a GEMM.
``f8.formats``, ``f8.recipes`` and ``f8.policies`` list what there is. All of this needs NumPy;
arrays of PyTorch and JAX are quantized where they are. The rooms, which are imported by name:

    torch   convert(model, recipe); linear.Linear, parallel.parallelize, delayed.update.
    jax     flax.convert; linear.apply, contraction.einsum, sharding.Placement, proof.read.
    train   one training loop for both: config.load, loop.train, data, checkpoints, report.
    study   what would FP8 do to your model? recording.Recording, cast_error.judge, page.write.
    conformance
            is this code right? identify_cast, gemm.identify_gemm, strategies and require for tests.
    checkpoints
            what an FP8 checkpoint holds, and by which rule: audit.audit, rule.by_name.
    crosscheck
            do the backends agree with the specification? one_device.crosscheck, sharded.jax_mesh.
    findings
            which claims about FP8 training hold? registry.CLAIMS, measuring.measure.
    estimate
            what a run would take on a GPU: report.of, dry_run.show.
    sim     the specification in NumPy, under the names of jax and torch: quantize.scaling,
            gemm.gemm, linear.forward, attention.attention, delayed.step.
    kernels Triton kernels, which torch and jax launch: casts.cast, swiglu.cast; jit.interpret.
    plots   figures as functions: arrays in, matplotlib's Axes out.
    formats, policy, recipe
            what users name: E4M3FN and E5M2; POLICIES and RECIPES.
    spec    every other choice, as frozen data: attention.variants, states.layouts.
    selection
            which linears of a model a recipe converts: linears.select; rules.Rule changes casts.
    front   the names above: quantized.quantize, comparison.compare, sweeps.sweep.
    configs the configurations that commands take by name, such as tiny.
    shared  what every room uses: errors, the console, tables, lookups by name.
    cli     the ``fp8ref`` command, ``python -m fp8ref``.

The specification is docs/spec, whose numbered clauses, such as S-5, everything here cites. A room
whose framework is missing says which extra to install.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8ref import formats as formats
    from fp8ref.front import Distribution as Distribution
    from fp8ref.front import Quantized as Quantized
    from fp8ref.front import compare as compare
    from fp8ref.front import dequantize as dequantize
    from fp8ref.front import policies as policies
    from fp8ref.front import quantize as quantize
    from fp8ref.front import recipes as recipes
    from fp8ref.front import sweep as sweep

__all__ = [
    "Distribution",
    "Quantized",
    "compare",
    "dequantize",
    "formats",
    "policies",
    "quantize",
    "recipes",
    "sweep",
]
__version__ = "0.1.0"

if not TYPE_CHECKING:  # so that type checkers see the names above, and refuse others

    def __getattr__(name: str):
        """The public names, imported when one is first used (PEP 562)."""
        if name == "formats":
            import fp8ref.formats

            return fp8ref.formats
        if name in __all__:
            import fp8ref.front

            return globals().setdefault(name, getattr(fp8ref.front, name))
        raise AttributeError(f"module 'fp8ref' has no attribute {name!r}")


def __dir__() -> list[str]:
    names = {*globals(), *__all__} - {"TYPE_CHECKING"}
    return sorted(name for name in names if not name.startswith("_") or name == "__version__")
