"""Holds the backends, and anybody's casts, quantisers and GEMMs, to the simulator, bit for bit where bits are defined.

``crosscheck.crosscheck`` compares a config's real operands, GEMMs and losses, ``certify.certify`` casts and scales over all inputs;
``conformance`` says what a cast or quantiser is, ``probe`` a GEMM, ``vectors`` judges programs in any language; ``divergence`` finds where two
trainings part, ``replay`` where a step that failed began.
"""
