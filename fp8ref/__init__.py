"""The executable specification of FP8 training, and two production backends held to it bit for bit.

``fp8ref.sim`` (NumPy) defines what every cast, scale and GEMM means; ``fp8ref.jax`` and ``fp8ref.torch`` train with it;
``fp8ref.check`` holds them together. Importing ``fp8ref`` imports no framework. The specification is docs/SEMANTICS.md.
"""

__version__ = "0.1.0"
