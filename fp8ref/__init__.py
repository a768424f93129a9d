"""The executable specification of FP8 training, and two production backends held to it bit for bit.

The specification is docs/spec, whose numbered clauses, such as S-5, everything here cites. Where to
begin:

    formats, policy, recipe
            what users name: E4M3FN and E5M2; POLICIES and RECIPES by name.
    spec    every other choice, as frozen data: granularity, delayed, epilogue, gradient_reduction;
            attention.variants and states.layouts by name.
    selection
            which linears of a model a recipe converts: linears.select; rules.Rule changes single
            casts.
    sim     the specification in NumPy: cast.encode and decode, scaling.quantize and dequantize,
            gemm.matmul and mma, linear.forward and backward, attention.forward, delayed.step,
            stats.statistics. The same names in jax and torch mean the same.
    jax     linear.apply, contraction.einsum, flax.convert and its hooks for layers,
            sharding.Placement on a mesh, proof.read.
    torch   convert, linear.Linear, parallel.parallelize, delayed.update, proof.trace_eager.
    conformance
            is this code right? identify_cast and identify_quantizer, gemm.identify_gemm,
            identify_attention, strategies, parameters and require for tests of any library, vectors
            for any language.
    crosscheck
            do our backends agree with the specification? one_device.crosscheck, sharded.jax_mesh,
            sharded.torch_ranks, divergence, rerun.
    train   config.load, loop.train, data, checkpoints, report: one training loop, a backend each in
            jax and torch.
    estimate
            report.of, dry_run.show: what a config would take on a GPU, from shapes and published
            rates.
    study   what would FP8 do to a model of yours? recording.Recording of its operands,
            cast_error.judge, depth_error.compare, page.write.
    configs the configurations that commands take by name, such as tiny.
    plots   figures as functions: arrays in, matplotlib's Axes out.
    shared  what every room uses: errors, the console, results, lookups by name.
    cli     the ``fp8ref`` command, ``python -m fp8ref``.

``import fp8ref`` imports none of them, and no framework; a room whose framework is missing says
which extra to install.

>>> import numpy as np
>>> from fp8ref.formats import E4M3FN
>>> from fp8ref.sim import scaling
>>> x = np.float32([[0.5, -3.0], [1.0, 7.0]])
>>> q = scaling.quantize(x, E4M3FN, granularity="rowwise", axis=-1)
>>> print(q.codes)
[[105 254]
 [104 126]]
>>> print(q.scale)
[[149.33333]
 [ 64.     ]]
>>> print(scaling.dequantize(q))
[[ 0.48214287 -3.        ]
 [ 1.          7.        ]]
"""

__version__ = "0.1.0"
